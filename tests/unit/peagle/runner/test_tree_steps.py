"""Steps with trees on a real runner, driven without a scheduler: answers, and the keys and values that stay.

Each sequence is verified with random trees that hold the right answer somewhere among wrong tokens, beside sequences
with chains and others that are still prefilled. What is emitted must be what the unmodified model says, and the cache
must then hold what one pass over the whole text writes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peagle.outputs import ScheduledSequence, SchedulerOutput, SequenceOutput
from peagle.sampling_params import SamplingParams
from tests.builders.model import build_model, write_model
from tests.builders.runner import PADDINGS, RunnerSizes, TinyRunner, greedy_answer, make_prompts, make_runner

MAX_NODES = 9
SIZES = RunnerSizes(num_speculative_tokens=MAX_NODES, max_num_seqs=4, max_model_len=96, num_blocks=100)
WIDE = RunnerSizes(num_speculative_tokens=40, max_num_seqs=4, max_model_len=96, num_blocks=100)
PROMPTS = make_prompts((5, 30, 2, 12))
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    model = build_model("llama")
    return [greedy_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@dataclass(kw_only=True)
class Decode:
    """One sequence, its right answer, and how it is drafted for."""

    seq_id: int
    token_ids: list[int]
    text: list[int]  # the prompt and the right answer
    block_table: list[int]
    has_trees: bool
    rng: random.Random
    num_computed: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= len(self.text)

    def schedule(self, *, chunk: int, max_drafts: int) -> ScheduledSequence:
        """A chunk of the prompt, or the last token with drafts."""
        known = self.token_ids[self.num_computed : self.num_computed + chunk]
        end = self.num_computed + len(known)
        is_sampling = end == len(self.token_ids)
        drafts, parents = self._draft(max_drafts) if is_sampling and len(known) == 1 else ([], [])
        return ScheduledSequence(
            seq_id=self.seq_id,
            start=self.num_computed,
            token_ids=[*known, *drafts],
            num_draft_tokens=len(drafts),
            is_sampling=is_sampling,
            next_token_id=None if is_sampling else self.token_ids[end],
            max_next_drafts=0,
            block_table=self.block_table,
            drafter_block_table=(),
            params=SamplingParams(temperature=0.0),
            seed=0,
            draft_parents=parents if self.has_trees else None,
        )

    def _draft(self, max_drafts: int) -> tuple[list[int], list[int]]:
        """A chain of right tokens, of which the last may be wrong; in a tree wrong ones stand anywhere between."""
        right = self.text[len(self.token_ids) : len(self.token_ids) + self.rng.randint(0, 4)]
        if not self.has_trees:
            return [*right[:-1], *([right[-1] ^ self.rng.randint(0, 1)] if right else [])], []
        drafts: list[int] = []
        parents: list[int] = []
        tip = -1
        for _ in range(self.rng.randint(len(right), max_drafts) if max_drafts >= len(right) else max_drafts):
            if right and self.rng.random() < 0.5:
                drafts.append(right.pop(0))
                parents.append(tip)
                tip = len(drafts) - 1
            else:
                drafts.append(290 + len(drafts) % 10)  # no model says it, for none of the prompts' models heard it
                parents.append(self.rng.randint(-1, len(drafts) - 2))
        return drafts, parents

    def commit(self, scheduled: ScheduledSequence, output: SequenceOutput) -> None:
        assert output.error is None
        self.num_computed = scheduled.start + scheduled.num_known_tokens + output.num_accepted_tokens
        self.token_ids += output.token_ids


def make_decodes(answers: list[list[int]], sizes: RunnerSizes, *, seed: int) -> list[Decode]:
    rng = random.Random(seed)
    blocks = rng.sample(range(sizes.num_blocks), sizes.num_blocks)
    return [
        Decode(
            seq_id=seq_id,
            token_ids=list(prompt),
            text=[*prompt, *answers[seq_id]],
            block_table=[blocks.pop() for _ in range(sizes.max_num_blocks)],
            has_trees=seq_id != 2,
            rng=random.Random(seed + seq_id),
        )
        for seq_id, prompt in enumerate(PROMPTS)
    ]


def run_to_the_end(tiny: TinyRunner, decodes: list[Decode], *, max_drafts: int) -> set[int]:
    """Returns how many drafts were accepted in a step."""
    accepted = set()
    while alive := [one for one in decodes if not one.is_done]:
        scheduled = tuple(one.schedule(chunk=7, max_drafts=max_drafts) for one in alive)
        scheduled = tuple(sorted(scheduled, key=lambda one: not one.is_sampling))
        output = tiny.runner.execute(SchedulerOutput(scheduled=scheduled, num_scheduled_tokens=0))
        for one, found in zip(scheduled, output.outputs, strict=True):
            decodes[one.seq_id].commit(one, found)
            accepted.add(found.num_accepted_tokens)
    return accepted


def cached(tiny: TinyRunner, one: Decode) -> torch.Tensor:
    """Keys and values of the committed tokens, [2 * num_layers, num_computed, num_kv_heads, head_dim]."""
    tensors = [tensor for layer in tiny.storage.layers for tensor in (layer.key, layer.value)]
    return torch.stack([tensor[one.block_table].flatten(0, 1)[: one.num_computed] for tensor in tensors])


@pytest.mark.parametrize("policy", PADDINGS)
@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["narrow", "wide"])
def test_answers_and_cache_are_those_of_plain_decoding(
    policy: str, sizes: RunnerSizes, checkpoint: Path, answers: list[list[int]]
) -> None:
    tiny = make_runner(checkpoint, sizes, PADDINGS[policy](sizes))
    decodes = make_decodes(answers, sizes, seed=3)
    accepted = run_to_the_end(tiny, decodes, max_drafts=sizes.num_speculative_tokens)
    assert accepted == {0, 1, 2, 3, 4}
    for one in decodes:
        assert one.token_ids[: len(one.text)] == one.text
        clean = make_runner(checkpoint, sizes, PADDINGS[policy](sizes))
        whole = Decode(
            seq_id=one.seq_id,
            token_ids=one.token_ids[: one.num_computed],
            text=[],
            block_table=one.block_table,
            has_trees=False,
            rng=random.Random(0),
        )
        scheduled = whole.schedule(chunk=one.num_computed, max_drafts=0)
        clean.runner.execute(SchedulerOutput(scheduled=(scheduled,), num_scheduled_tokens=0))
        assert (cached(tiny, one) - cached(clean, one)).abs().max() < 1e-9
