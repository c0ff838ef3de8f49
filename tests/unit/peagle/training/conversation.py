"""Random conversations with what a random target makes of them, in float64 so that gradients can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.dataset import Example
from peagle.training.features import TargetFeatures, supervised_rows

VOCAB_SIZE = 300


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """Tokens and features."""

    example: Example
    features: TargetFeatures

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(self.example.token_ids)


def random_conversation(num_tokens: int, *, seed: int = 0, num_prompt_tokens: int | None = None) -> Conversation:
    """A prompt, an answer, another prompt of three tokens and another answer; or one answer behind a given prompt."""
    generator = torch.Generator().manual_seed(seed)
    is_supervised = np.arange(num_tokens) >= (num_tokens // 4 if num_prompt_tokens is None else num_prompt_tokens)
    if num_prompt_tokens is None:
        is_supervised[num_tokens // 2 : num_tokens // 2 + 3] = False
    token_ids = torch.randint(VOCAB_SIZE - 1, (num_tokens,), generator=generator)
    example = Example(token_ids=token_ids.numpy(), is_supervised=is_supervised, is_greedy=True)
    rows = supervised_rows(example)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator, dtype=torch.float64) * 3
    top = logits.log_softmax(-1).topk(8, -1)
    return Conversation(
        example=example,
        features=TargetFeatures(
            features=torch.randn(num_tokens, 96, generator=generator, dtype=torch.float64),
            rows=rows,
            top_ids=top.indices,
            top_log_probs=top.values,
        ),
    )


def target_to_draft(num_draft_tokens: int = VOCAB_SIZE) -> Tensor:
    """The first tokens can be drafted."""
    table = torch.arange(VOCAB_SIZE)
    return table.masked_fill(table >= num_draft_tokens, -1)


def take_gradients(head: DraftHead) -> dict[str, Tensor]:
    """Gradients of every parameter that has one; none are left."""
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=tolerance, rtol=0.0)
