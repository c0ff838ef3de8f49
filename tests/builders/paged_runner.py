"""A model runner in integers: a deterministic stand-in for the device, with real paged KV.

Each KV slot holds a number that depends on everything a real slot depends on: all earlier slots *read through the block
table*, the row's token and, for the drafter, the target's feature at the same position. A block that is read before it
is written, overwritten while shared, or matched for the wrong prefix therefore changes the tokens that come out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from zlib import crc32

from peagle.outputs import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceOutput

GARBAGE = -1


def mix(values: Iterable[int]) -> int:
    """A number that depends on all of `values` and their order."""
    return crc32(array("q", values).tobytes())


class PagedRunner:
    """Runs `SchedulerOutput`s.

    Args:
        block_size: slots in a block.
        num_speculative_tokens: K.
        vocab_size: tokens are drawn from [0, vocab_size).
        percent_right: how often a draft is the token that the target will say.
        max_model_len: no slot at or past it may be written.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_speculative_tokens: int = 3,
        vocab_size: int = 50,
        percent_right: int = 60,
        max_model_len: int = 64,
    ) -> None:
        self.block_size = block_size
        self.num_speculative_tokens = num_speculative_tokens
        self.vocab_size = vocab_size
        self.percent_right = percent_right
        self.max_model_len = max_model_len
        self.target_kv: dict[tuple[int, int], int] = {}  # (block, offset) -> content
        self.drafter_kv: dict[tuple[int, int], int] = {}

    def next_token(self, seed: int, history: SequenceOf[int]) -> int:
        """What the target says after the rows whose contents are `history`."""
        return mix([seed, *history]) % self.vocab_size

    def generate(self, prompt: SequenceOf[int], *, seed: int, num_tokens: int) -> list[int]:
        """The slow reference: plain decoding of one sequence, alone, without blocks."""
        history: list[int] = []
        tokens = list(prompt)
        for token_id in tokens:
            history.append(mix([*history, token_id]))
        for _ in range(num_tokens):
            tokens.append(self.next_token(seed, history))
            history.append(mix([*history, tokens[-1]]))
        return tokens[len(prompt) :]

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        return ModelRunnerOutput(outputs=tuple(self._run_sequence(s) for s in scheduler_output.scheduled))

    def _run_sequence(self, scheduled: ScheduledSequence) -> SequenceOutput:
        history = self._read(self.target_kv, scheduled.block_table, scheduled.start)
        for token_id in scheduled.token_ids:
            history.append(mix([*history, token_id]))
        for position in range(scheduled.start, len(history)):
            self._write(self.target_kv, scheduled.block_table, position, history[position])
        if not scheduled.is_sampling:
            assert scheduled.next_token_id is not None
            self._run_drafter(scheduled, [*scheduled.token_ids[1:], scheduled.next_token_id], history)
            return SequenceOutput(seq_id=scheduled.seq_id, token_ids=(), num_accepted_tokens=0)
        known_end = scheduled.start + scheduled.num_known_tokens
        drafts = scheduled.token_ids[scheduled.num_known_tokens :]
        new = [self.next_token(scheduled.seed, history[:known_end])]
        while len(new) <= len(drafts) and drafts[len(new) - 1] == new[-1]:
            new.append(self.next_token(scheduled.seed, history[: known_end + len(new)]))
        known = scheduled.token_ids[: scheduled.num_known_tokens]
        self._run_drafter(scheduled, [*known[1:], *new], history)
        return SequenceOutput(
            seq_id=scheduled.seq_id,
            token_ids=new,
            num_accepted_tokens=len(new) - 1,
            draft_token_ids=self._propose(scheduled, history[: known_end + len(new) - 1], new[-1]),
        )

    def _run_drafter(self, scheduled: ScheduledSequence, shifted: list[int], features: list[int]) -> None:
        """Write the drafter's KV of valid rows, then garbage in the mask slots."""
        if self.num_speculative_tokens == 0:
            return
        table = scheduled.drafter_block_table
        history = self._read(self.drafter_kv, table, scheduled.start)
        for token_id in shifted:
            position = len(history)
            history.append(mix([*history, features[position], token_id]))
            self._write(self.drafter_kv, table, position, history[-1])
        num_mask_slots = self.num_speculative_tokens - 1 if scheduled.max_next_drafts > 0 else 0
        for position in range(len(history), min(len(history) + num_mask_slots, self.max_model_len)):
            self._write(self.drafter_kv, table, position, GARBAGE)

    def _propose(self, scheduled: ScheduledSequence, history: list[int], token_id: int) -> list[int]:
        drafts: list[int] = []
        history = [*history, mix([*history, token_id])]
        while len(drafts) < scheduled.max_next_drafts:
            right = self.next_token(scheduled.seed, history)
            is_right = mix([7, *history]) % 100 < self.percent_right
            drafts.append(right if is_right else (right + 1) % self.vocab_size)
            history.append(mix([*history, drafts[-1]]))
        return drafts

    def _read(self, kv: dict[tuple[int, int], int], table: SequenceOf[int], end: int) -> list[int]:
        """Contents of positions [0, end); a slot that was never written, or holds garbage, fails the test."""
        contents = [kv[table[p // self.block_size], p % self.block_size] for p in range(end)]
        assert GARBAGE not in contents
        return contents

    def _write(self, kv: dict[tuple[int, int], int], table: SequenceOf[int], position: int, content: int) -> None:
        kv[table[position // self.block_size], position % self.block_size] = content

    def expected_drafter_kv(self, token_ids: SequenceOf[int], num_slots: int) -> list[int]:
        """The slow reference of the drafter's first `num_slots` slots: one pass over the whole sequence."""
        features: list[int] = []
        history: list[int] = []
        for position in range(num_slots):
            features.append(mix([*features, token_ids[position]]))
            history.append(mix([*history, features[position], token_ids[position + 1]]))
        return history
