"""The target without serving: a plain `transformers` model that answers greedily and shows its layers.

Owns loading it, greedy answers in small batches, and the features and choices at every token of a known answer.
Refuses to know heads, and the paged serving path.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from peagle.errors import ModelLoadError
from peagle.models.loader import has_experts, read_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A prompt and its answer, as tokens."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetTrace:
    """What the target makes of a known sequence of S tokens."""

    features: Tensor  # [S, n_aux * H_t]
    next_token_ids: Tensor  # [S] int64, its likeliest token after each


def load_transformers_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a served model family for inference.

    Raises:
        ModelLoadError: no readable checkpoint of a served family is there.
    """
    config = read_model_config(directory)
    extra = {"experts_implementation": "eager"} if has_experts(config) else {}
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, **extra)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load the weights in {directory}: {error}") from error
    return model.eval().requires_grad_(False).to(device)


@torch.no_grad()
def answer_greedily(
    model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, end_token_ids: Collection[int]
) -> list[Exchange]:
    """Answer one batch of prompts, each token the likeliest. An answer's last token is an end token, or cut off.

    Nothing is padded: all begin with as many tokens as the shortest prompt has, and a longer one goes on with its own
    next token while others are answering already. So prompts of a batch had better be of about the same length.
    """
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    no_token = -1
    given = torch.tensor([[*prompt, *[no_token] * (longest - len(prompt))] for prompt in prompts], device=model.device)
    num_prompt_tokens = (given != no_token).sum(-1)  # [B]
    ends = torch.tensor(sorted(end_token_ids), device=model.device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    columns = list(given[:, :shortest].unbind(1))
    cache, fed = None, given[:, :shortest]
    while not bool(is_done.all()):
        output = model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
        cache, token_ids = output.cache, output.logits[:, -1].argmax(-1)  # [B]
        place = len(columns)
        if place < longest:
            token_ids = torch.where(given[:, place] == no_token, token_ids, given[:, place])
        columns.append(token_ids)
        is_done |= (place >= num_prompt_tokens) & torch.isin(token_ids, ends)
        is_done |= place + 1 >= num_prompt_tokens + max_new_tokens
        fed = token_ids[:, None]
    exchanges = []
    for prompt, row in zip(prompts, torch.stack(columns, 1).tolist(), strict=True):
        answer = row[len(prompt) : len(prompt) + max_new_tokens]
        exchanges.append(
            Exchange(prompt_token_ids=tuple(prompt), answer_token_ids=tuple(_until_end(answer, end_token_ids)))
        )
    return exchanges


@torch.no_grad()
def trace(model: Any, token_ids: Tensor, aux_layer_ids: Sequence[int]) -> TargetTrace:
    """Features and choices at every token of one sequence [S]; layers as in `HeadConfig.aux_layer_ids`."""
    output = model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
    return TargetTrace(
        features=torch.cat([output.hidden_states[layer][0] for layer in aux_layer_ids], -1),
        next_token_ids=output.logits[0].argmax(-1),
    )


def _until_end(token_ids: list[int], end_token_ids: Collection[int]) -> list[int]:
    for place, token_id in enumerate(token_ids):
        if token_id in end_token_ids:
            return token_ids[: place + 1]
    return token_ids
