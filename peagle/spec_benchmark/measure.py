"""Drives an engine in a closed loop and counts.

Owns the loop and the numbers of one round. Refuses to know files and terminals. Times are of the whole engine, host
work included, without HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.engine import LLMEngine
from peagle.outputs import RequestInput
from peagle.sampling_params import SamplingParams
from peagle.stats import SpecDecodeStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one pass over the prompts showed.

    Attributes:
        num_tokens: generated.
        seconds: from the first request to the last token.
        num_steps: of the engine.
        num_drafts, num_draft_tokens, num_accepted_tokens: verified proposals, their drafts, and those accepted.
        accepted_per_position: accepted drafts by position.
        answers: token ids by prompt, to be compared with plain decoding.
    """

    num_tokens: int
    seconds: float
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.num_tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verified proposal, the target's own included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def run_round(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, *, concurrency: int, name: str
) -> Round:
    """Answer every prompt, at most `concurrency` at once; request ids begin with `name`."""
    before = engine.stats()
    answers: dict[str, list[int]] = {}
    waiting = [(f"{name}-{index}", prompt) for index, prompt in enumerate(prompts)][::-1]
    num_open = 0
    started = time.perf_counter()
    while waiting or num_open:
        while waiting and num_open < concurrency:
            request_id, prompt = waiting.pop()
            engine.add_request(RequestInput(request_id=request_id, prompt_token_ids=prompt, params=params))
            answers[request_id] = []
            num_open += 1
        for output in engine.step():
            answers[output.request_id].extend(output.token_ids)
            num_open -= output.is_finished
    seconds = time.perf_counter() - started
    after = engine.stats()
    spec = _difference(after.spec_decode, before.spec_decode)
    return Round(
        num_tokens=sum(map(len, answers.values())),
        seconds=seconds,
        num_steps=after.num_steps - before.num_steps,
        num_drafts=spec.num_drafts,
        num_draft_tokens=spec.num_draft_tokens,
        num_accepted_tokens=spec.num_accepted_tokens,
        accepted_per_position=tuple(spec.num_accepted_tokens_per_pos),
        answers=tuple(tuple(answers[f"{name}-{index}"]) for index in range(len(prompts))),
    )


def _difference(after: SpecDecodeStats, before: SpecDecodeStats) -> SpecDecodeStats:
    return SpecDecodeStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_accepted_tokens_per_pos=[
            new - old
            for new, old in zip(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, strict=True)
        ],
    )
