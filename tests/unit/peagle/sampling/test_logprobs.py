"""Log probabilities against torch's own, ranks and alternatives against a sort of everything."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logits import target_probs
from peagle.sampling.logprobs import processed_logits, token_logprobs
from peagle.sampling_params import SamplingParams

values = st.sampled_from([0.0, 1.0, -1.0, 0.5, -np.inf]) | st.floats(-30, 30, width=32)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_equals_a_sort_of_everything(data: st.DataObject) -> None:
    num_rows, vocab_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    array = data.draw(hnp.arrays(np.float64, (num_rows, vocab_size), elements=values))
    array[:, 0] = np.maximum(array[:, 0], -5.0)  # some token must be possible
    logits = torch.from_numpy(array)
    token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=num_rows, max_size=num_rows))
    num_top = data.draw(st.lists(st.integers(0, 20), min_size=num_rows, max_size=num_rows))
    expected = torch.log_softmax(logits, -1).tolist()
    found = token_logprobs(logits, token_ids, num_top)
    for row, (token_id, count, one) in enumerate(zip(token_ids, num_top, found, strict=True)):
        ranking = sorted(range(vocab_size), key=lambda i: (-array[row, i], i))
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(expected[row][token_id], abs=1e-9)
        assert one.rank == 1 + ranking.index(token_id)
        best = [i for i in ranking[:count] if array[row, i] > -np.inf]
        assert [i for i, _ in one.top] == best
        assert [value for _, value in one.top] == pytest.approx([expected[row][i] for i in best], abs=1e-9)


@pytest.mark.parametrize("levels", [None, 2])
def test_rows_do_not_depend_on_the_batch(levels: int | None) -> None:
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(0)) * 4
    if levels is not None:
        logits = (logits * levels).round() / levels  # many ties, also across the cut
    token_ids = list(range(12))
    together = token_logprobs(logits, token_ids, [20] * 12)
    for row in range(12):
        assert token_logprobs(logits[row : row + 1], [row], [20]) == [together[row]]
        by_hand = sorted(range(5000), key=lambda i: (-float(logits[row, i]), i))[:20]
        assert [i for i, _ in together[row].top] == by_hand


def test_processed_ones_are_those_of_what_is_drawn_from() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [SamplingParams(temperature=0.7, top_k=4), SamplingParams(temperature=1.5), SamplingParams(min_p=0.2)]
    metadata = SamplingMetadata.build([SamplingRow(params=p, seed=0, position=0) for p in kinds])
    logits = torch.randn(3, 300, generator=generator, dtype=torch.float64)
    probs = target_probs(logits, metadata)
    found = token_logprobs(processed_logits(logits, metadata), [5, 5, 5], [20] * 3)
    for row, one in enumerate(found):
        possible = probs[row] > 0
        assert len(one.top) == min(20, int(possible.sum()))
        for token_id, logprob in one.top:
            assert logprob == pytest.approx(math.log(float(probs[row, token_id])), abs=1e-12)
        if not possible[5]:
            assert one.logprob == -math.inf


def test_a_greedy_row_has_the_probabilities_of_temperature_1() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    metadata = SamplingMetadata.build([SamplingRow(params=SamplingParams(temperature=0.0), seed=0, position=0)])
    assert token_logprobs(processed_logits(logits, metadata), [1], [3])[0].logprob == pytest.approx(
        token_logprobs(logits, [1], [3])[0].logprob, abs=1e-6
    )


def test_nobody_asks() -> None:
    assert token_logprobs(torch.zeros(0, 5), [], []) == []
