from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.outputs import ScheduledSequence, SequenceOutput
from peagle.sampling_params import SamplingParams
from peagle.scheduler.commit import check_output, cut_at_end
from peagle.sequence import FinishReason
from tests.builders.scheduler import make_sequence


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "params", "kept", "reason"),
    [
        ([5, 6], 8, SamplingParams(), [5, 6], None),
        ([5, 9, 6], 8, SamplingParams(), [5, 9], FinishReason.STOP),
        ([5, 9, 6], 8, SamplingParams(ignore_eos=True), [5, 9, 6], None),
        ([5, 7, 6], 8, SamplingParams(stop_token_ids=frozenset({7}), ignore_eos=True), [5, 7], FinishReason.STOP),
        ([5, 6, 9], 2, SamplingParams(), [5, 6], FinishReason.LENGTH),
        ([5, 9, 6], 2, SamplingParams(), [5, 9], FinishReason.STOP),
        ([9], 1, SamplingParams(ignore_eos=True), [9], FinishReason.LENGTH),
    ],
)
def test_cut(
    tokens: list[int], max_tokens: int, params: SamplingParams, kept: list[int], reason: FinishReason | None
) -> None:
    seq = make_sequence(max_tokens=max_tokens, params=params, eos_token_ids=[9])
    cut = cut_at_end(seq, tokens)
    assert (list(cut.token_ids), cut.finish_reason) == (kept, reason)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 4))
def test_cutting_a_run_equals_committing_token_by_token(tokens: list[int], max_tokens: int, width: int) -> None:
    def commit(width: int) -> tuple[list[int], FinishReason | None]:
        seq = make_sequence(max_tokens=max_tokens, eos_token_ids=[9])
        for start in range(0, len(tokens), width):
            cut = cut_at_end(seq, tokens[start : start + width])
            seq.token_ids.extend(cut.token_ids)
            if cut.finish_reason:
                return seq.output_token_ids, cut.finish_reason
        return seq.output_token_ids, None

    assert commit(width) == commit(1)


def scheduled(*, is_sampling: bool) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=1,
        start=4,
        token_ids=[1, 2, 3],
        num_draft_tokens=2 if is_sampling else 0,
        is_sampling=is_sampling,
        next_token_id=None if is_sampling else 4,
        max_next_drafts=2,
        block_table=[0],
        drafter_block_table=[0],
        params=SamplingParams(),
        seed=0,
    )


@pytest.mark.parametrize(
    ("is_sampling", "output"),
    [
        (True, SequenceOutput(seq_id=2, token_ids=[2, 5], num_accepted_tokens=1)),
        (True, SequenceOutput(seq_id=1, token_ids=[2, 5], num_accepted_tokens=2)),
        (True, SequenceOutput(seq_id=1, token_ids=[3, 5], num_accepted_tokens=1)),
        (True, SequenceOutput(seq_id=1, token_ids=[2, 3, 4, 5], num_accepted_tokens=3)),
        (False, SequenceOutput(seq_id=1, token_ids=[2], num_accepted_tokens=0)),
        (False, SequenceOutput(seq_id=1, token_ids=[], num_accepted_tokens=0, draft_token_ids=[1])),
    ],
)
def test_an_output_that_does_not_answer_its_rows_is_caught(is_sampling: bool, output: SequenceOutput) -> None:
    with pytest.raises(AssertionError):
        check_output(scheduled(is_sampling=is_sampling), output)


def test_an_output_that_answers_its_rows_passes() -> None:
    check_output(scheduled(is_sampling=True), SequenceOutput(seq_id=1, token_ids=[2, 5], num_accepted_tokens=1))
    check_output(scheduled(is_sampling=False), SequenceOutput(seq_id=1, token_ids=[], num_accepted_tokens=0))
