"""Bias, penalties and masks against their definition, token by token; and that rows do not see one another."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.adjustments import adjusted
from peagle.sampling.batch import SamplingRow
from peagle.sampling.context import RowContext, SequenceContext
from peagle.sampling.reference import reference_adjusted
from peagle.sampling_params import SamplingParams

VOCAB_SIZE = 40
tokens = st.integers(0, VOCAB_SIZE - 1)
few = st.integers(0, 4)  # so that tokens and words repeat themselves
values = st.sampled_from([0.0, 1.0, -1.0, -np.inf, np.nan, np.inf]) | st.floats(-30, 30, width=32)


@st.composite
def rows(draw: st.DrawFn) -> SamplingRow:
    """A row that uses any of the parameters, or none."""
    if draw(st.integers(0, 4)) == 0:
        return SamplingRow(params=SamplingParams(), seed=0, position=0)
    params = SamplingParams(
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -1.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5, 1e-44, 10.0])),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.floats(-100, 100), max_size=4)).items()),
        allowed_token_ids=draw(st.none() | st.frozensets(few | tokens, min_size=1, max_size=6)),
        bad_words=tuple(draw(st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=4))),
        min_tokens=draw(st.integers(0, 5)),
    )
    known = draw(st.lists(few, min_size=1, max_size=8))
    sequence = SequenceContext(
        params=params,
        known_token_ids=known,
        num_prompt_tokens=draw(st.integers(1, len(known))),
        end_token_ids=draw(st.frozensets(few | st.just(VOCAB_SIZE + 3), max_size=3)),  # one is not in the vocabulary
    )
    mask = draw(st.none() | hnp.arrays(np.int32, 2))
    if mask is not None:
        mask[0] |= 1 << 3  # a grammar allows something
    context = RowContext(sequence=sequence, draft_token_ids=tuple(draw(st.lists(few, max_size=3))), allowed_mask=mask)
    return SamplingRow(params=params, seed=0, position=0, context=context)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_equals_the_reference_to_the_last_bit(data: st.DataObject) -> None:
    batch = data.draw(st.lists(rows(), min_size=1, max_size=4))
    array = data.draw(hnp.arrays(np.float32, (len(batch), VOCAB_SIZE), elements=values))
    logits = torch.from_numpy(array).to(data.draw(st.sampled_from([torch.float32, torch.float64])))
    before = logits.clone()
    result = adjusted(logits, batch)
    assert torch.equal(logits.nan_to_num(1e9), before.nan_to_num(1e9)), "the model's logits were changed"
    for index, row in enumerate(batch):
        expected = reference_adjusted(logits[index], row)
        assert result[index].nan_to_num(1e9).tolist() == expected.nan_to_num(1e9).tolist()


def context_of(params: SamplingParams, known: list[int], drafts: tuple[int, ...] = ()) -> RowContext:
    sequence = SequenceContext(params=params, known_token_ids=known, num_prompt_tokens=2, end_token_ids=frozenset({7}))
    return RowContext(sequence=sequence, draft_token_ids=drafts)


def row_of(context: RowContext) -> SamplingRow:
    return SamplingRow(params=context.sequence.params, seed=0, position=0, context=context)


def test_without_a_context_the_very_same_tensor_comes_back() -> None:
    logits = torch.zeros(2, 5)
    assert adjusted(logits, [SamplingRow(params=SamplingParams(), seed=0, position=0)] * 2) is logits


def test_drafts_count_as_the_output_that_they_would_be() -> None:
    """A row after three drafts sees what it would see with these tokens committed: the rule that makes K invisible."""
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        bad_words=((3, 4, 5),),
        min_tokens=4,
    )
    logits = torch.linspace(-2, 2, 10)[None]
    drafted = adjusted(logits, [row_of(context_of(params, [1, 2, 3], (3, 3, 4)))])
    committed = adjusted(logits, [row_of(context_of(params, [1, 2, 3, 3, 3, 4]))])
    assert torch.equal(drafted, committed)
    assert drafted[0, 5] == -torch.inf, "it would complete the bad word"
    assert drafted[0, 7] != -torch.inf, "four tokens are there, so it may end"


def test_penalties_by_hand() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    result = adjusted(logits, [row_of(context_of(params, [0, 1, 2, 2]))])
    # In the prompt alone: repetition. In the output twice: repetition, twice the frequency, once the presence.
    assert result.tolist() == [[2.0, -8.0, 2.0 - 0.5 - 0.5, 4.0]]


def test_a_bad_word_begins_in_the_answer() -> None:
    params = SamplingParams(bad_words=((1, 2),))
    logits = torch.zeros(1, 4)
    assert adjusted(logits, [row_of(context_of(params, [0, 1]))]).tolist() == [[0.0] * 4], "1 is of the prompt"
    assert adjusted(logits, [row_of(context_of(params, [0, 0, 1]))])[0, 2] == -torch.inf


def test_a_mask_that_would_leave_nothing_is_passed_over() -> None:
    """The stronger ones stand: of two allowed tokens one is bad and the other would end the answer too early."""
    params = SamplingParams(allowed_token_ids=frozenset({3, 7}), bad_words=((3,),), min_tokens=5)
    result = adjusted(torch.zeros(1, 9), [row_of(context_of(params, [0, 1]))])
    assert [i for i, value in enumerate(result[0].tolist()) if value == 0.0] == [7]
    both_bad = replace(params, bad_words=((3,), (7,)), min_tokens=0)
    result = adjusted(torch.zeros(1, 9), [row_of(context_of(both_bad, [0, 1]))])
    assert [i for i, value in enumerate(result[0].tolist()) if value == 0.0] == [3, 7]


def test_rows_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [
        SamplingParams(),
        SamplingParams(presence_penalty=1.1, repetition_penalty=1.7),
        SamplingParams(logit_bias=((5, 3.3),)),
        SamplingParams(allowed_token_ids=frozenset(range(100))),
        SamplingParams(frequency_penalty=0.3, bad_words=((1, 2), (4,)), min_tokens=9),
    ]
    batch = [
        row_of(context_of(kinds[i % 5], [1, 2, *range(i)]))
        if i % 5
        else SamplingRow(params=kinds[0], seed=0, position=0)
        for i in range(20)
    ]
    logits = torch.randn(20, 5000, generator=generator)
    together = adjusted(logits, batch)
    for i, row in enumerate(batch):
        assert torch.equal(adjusted(logits[i : i + 1], [row])[0], together[i])


def test_half_precision_is_widened() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    row = row_of(context_of(SamplingParams(repetition_penalty=1.3), [1, 2, 3]))
    result = adjusted(logits, [row, SamplingRow(params=SamplingParams(), seed=0, position=0)])
    assert torch.equal(
        result, adjusted(logits.float(), [row, SamplingRow(params=SamplingParams(), seed=0, position=0)])
    )
