"""How many of a head's drafts a target accepts, by K and position, on prompts that nobody trained on.

The target answers greedily (or recorded greedy answers are taken), every draft of an answer is made in one pass, and
the decode is walked for each K; `evaluate_reference` decodes for real, and the tests hold the two together. Owns the
order of this and the report. Refuses to time anything: speed is `peagle bench`'s business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from peagle.config import Device, Dtype, ModelConfig
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import SharedWeights, load_head
from peagle.errors import ConfigError
from peagle.models.loader import choose_device, choose_precision, read_model_config
from peagle.text.tokenizer import Tokenizer
from peagle.training.acceptance import AcceptanceCounts, add_counts, walk
from peagle.training.answer_drafts import draft_answer, draft_answer_in_turn
from peagle.training.config import Method
from peagle.training.evaluation_data import AnswerSource, EvaluationData, read_evaluation_data
from peagle.training.target_answers import Exchange, answer_greedily, load_transformers_model, trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """What to measure, and on what.

    Attributes:
        num_speculative_tokens: the largest K; every smaller one is measured too.
        max_new_tokens: where answers are cut off.
        held_out: share of the file's lines that is taken, from its end; the part that training leaves out.
        limit: at most so many prompts.
        batch_size: prompts that the target answers at once.
        method: how the head drafts; see `HeadOptions.method`.
    """

    target: Path
    head: Path
    data: Path
    answers: AnswerSource = AnswerSource.TARGET
    num_speculative_tokens: int = 7
    max_new_tokens: int = 256
    held_out: float = 1.0
    limit: int | None = None
    batch_size: int = 8
    method: Method = "peagle"
    device: Device = "auto"
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "max_new_tokens", "batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0.0 < self.held_out <= 1.0:
            raise ConfigError(f"held_out must be more than 0 and at most 1, got {self.held_out}")
        if self.method not in get_args(Method):
            raise ConfigError(f"method must be one of {', '.join(get_args(Method))}; got {self.method!r}")
        self.model_config()  # checks device and dtype
        for name in ("target", "head"):
            if not (getattr(self, name) / "config.json").is_file():
                raise ConfigError(f"no {name} at {getattr(self, name)}: config.json is missing")

    def model_config(self) -> ModelConfig:
        """The target, as serving would be told about it."""
        return ModelConfig(model=str(self.target), device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport:
    """What was measured.

    Attributes:
        by_num_speculative_tokens: counts for K = 1, 2, ...
        num_skipped: prompts too long for the target, and records without a greedy answer.
        target_agreement: share of answer tokens that the target itself would choose. 1 for its own answers, up to
            arithmetic; far less says that recorded answers are another model's, or in another template.
    """

    by_num_speculative_tokens: tuple[AcceptanceCounts, ...]
    num_answers: int
    num_answer_tokens: int
    num_skipped: int
    target_agreement: float

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "num_answers": self.num_answers,
            "num_answer_tokens": self.num_answer_tokens,
            "num_skipped": self.num_skipped,
            "target_agreement": self.target_agreement,
            "by_num_speculative_tokens": [counts.as_json() for counts in self.by_num_speculative_tokens],
        }

    def table(self) -> str:
        """Lines for the terminal: acceptance length, then the conditional rate of each position, for each K."""
        lines = [f"{self.num_answers} answers, {self.num_answer_tokens} tokens, {self.num_skipped} skipped"]
        for counts in self.by_num_speculative_tokens:
            rates = " ".join(f"{rate:.3f}" for rate in counts.conditional_rates)
            length = f"K={counts.num_speculative_tokens}  acceptance length {counts.acceptance_length:.3f}"
            lines.append(f"{length}  by position {rates}")
        return "\n".join(lines)


def evaluate(config: EvaluateConfig) -> EvaluateReport:
    """Load everything and measure.

    Raises:
        ConfigError, ModelLoadError: it can't be done; the message says what to change.
    """
    model_config = config.model_config()
    device = choose_device(model_config)
    target_config = read_model_config(config.target)
    tokenizer = Tokenizer.from_directory(config.target)
    data = read_evaluation_data(
        config.data,
        tokenizer,
        answers=config.answers,
        held_out=config.held_out,
        limit=config.limit,
        max_num_prompt_tokens=target_config.max_position_embeddings - config.max_new_tokens,
    )
    dtype = choose_precision(model_config, target_config.dtype, device).compute_dtype
    model = load_transformers_model(config.target, dtype=dtype, device=device)
    head = load_head(
        config.head,
        target=TargetShape(
            num_layers=target_config.num_hidden_layers,
            hidden_size=target_config.hidden_size,
            vocab_size=target_config.vocab_size,
        ),
        shared=SharedWeights(
            embed_tokens=model.get_input_embeddings().weight, lm_head=model.get_output_embeddings().weight
        ),
        dtype=dtype,
        device=device,
    )
    exchanges = _exchanges(model, data, tokenizer, config)
    bar = tqdm(exchanges, total=data.num_entries, unit="answer", file=sys.stderr)
    return measure(
        model,
        head,
        bar,
        num_speculative_tokens=config.num_speculative_tokens,
        num_skipped=data.num_skipped,
        method="peagle" if head.config.is_parallel else "eagle3",
    )


def measure(
    model: Any,
    head: DraftHead,
    exchanges: Iterable[Exchange],
    *,
    num_speculative_tokens: int,
    num_skipped: int = 0,
    method: Method = "peagle",
) -> EvaluateReport:
    """Walk known greedy answers with every K up to `num_speculative_tokens`.

    Raises:
        ConfigError: no answer has a token beyond its first, so there is nothing to draft.
    """
    draft = {"peagle": draft_answer, "eagle3": draft_answer_in_turn}[method]
    walked: list[list[AcceptanceCounts]] = []  # for each answer, for K = 1, 2, ...
    num_answer_tokens = num_agreed = 0
    for exchange in exchanges:
        prompt, answer = exchange.prompt_token_ids, exchange.answer_token_ids
        token_ids = torch.tensor([*prompt, *answer], device=model.device)
        seen = trace(model, token_ids, head.config.aux_layer_ids)
        num_answer_tokens += len(answer)
        num_agreed += int((seen.next_token_ids[len(prompt) - 1 : -1] == token_ids[len(prompt) :]).sum())
        if len(answer) < 2:
            continue
        drafts = draft(
            head,
            token_ids,
            seen.features,
            num_prompt_tokens=len(prompt),
            num_speculative_tokens=num_speculative_tokens,
        ).tolist()
        walked.append([walk(answer, drafts, num_speculative_tokens=k) for k in range(1, num_speculative_tokens + 1)])
    if not walked:
        raise ConfigError("no answer is longer than one token, so there is nothing to draft; evaluate on other prompts")
    return EvaluateReport(
        by_num_speculative_tokens=tuple(
            add_counts((counts[k - 1] for counts in walked), num_speculative_tokens=k)
            for k in range(1, num_speculative_tokens + 1)
        ),
        num_answers=len(walked),
        num_answer_tokens=num_answer_tokens,
        num_skipped=num_skipped,
        target_agreement=num_agreed / num_answer_tokens,
    )


def _exchanges(model: Any, data: EvaluationData, tokenizer: Tokenizer, config: EvaluateConfig) -> Iterator[Exchange]:
    yield from data.recorded
    by_length = sorted(data.prompts, key=len)  # little padding
    for batch in _batches(by_length, config.batch_size):
        yield from answer_greedily(
            model, batch, max_new_tokens=config.max_new_tokens, end_token_ids=tokenizer.eos_token_ids
        )


def _batches(prompts: Sequence[tuple[int, ...]], size: int) -> Iterator[Sequence[tuple[int, ...]]]:
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]
