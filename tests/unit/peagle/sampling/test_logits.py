from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logits import target_probs
from peagle.sampling.reference import reference_probs
from peagle.sampling_params import SamplingParams

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0]) | st.floats(0.01, 2.0),
    top_k=st.integers(0, 24),
    top_p=st.sampled_from([1.0, 0.5, 0.9, 1e-12]) | st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]) | st.floats(0.0, 1.0),
)
# Few distinct values, so that ties and round probabilities are common, or any.
values = st.sampled_from([0.0, 1.0, -1.0, 0.5, -np.inf]) | st.floats(-30, 30, width=32)
rows = st.builds(SamplingRow, params=params, seed=st.integers(0, 3), position=st.integers(0, 3))


def assert_equal_to_reference(logits: torch.Tensor, batch: list[SamplingRow]) -> None:
    probs = target_probs(logits, SamplingMetadata.build(batch))
    for i, row in enumerate(batch):
        assert probs[i].tolist() == reference_probs(logits[i], row)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_small_vocabulary_equals_the_reference(data: st.DataObject) -> None:
    batch = data.draw(st.lists(rows, min_size=1, max_size=4))
    vocab_size = data.draw(st.integers(1, 20))
    array = data.draw(hnp.arrays(np.float32, (len(batch), vocab_size), elements=values))
    array[:, 0] = np.maximum(array[:, 0], -5.0)  # some token must be possible
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    assert_equal_to_reference(torch.from_numpy(array).to(dtype), batch)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("levels", [None, 3])
@pytest.mark.parametrize("vocab_size", [257, 6000])
def test_every_width_equals_the_reference(
    spread: float, levels: int | None, vocab_size: int, generator: torch.Generator
) -> None:
    settings_of_rows = [(0, 0.5), (0, 0.999), (5, 1.0), (40, 0.9), (256, 1.0), (0, 1.0), (4500, 0.7), (10**6, 0.3)]
    for some, min_p in (
        (settings_of_rows[:5], 0.0),
        (settings_of_rows[2:5], 0.0),
        (settings_of_rows, 0.0),
        (settings_of_rows, 0.02),
    ):
        kinds = [SamplingParams(top_k=k, top_p=p, min_p=min_p) for k, p in some]
        batch = [SamplingRow(params=params, seed=0, position=0) for params in kinds]
        logits = torch.randn(len(batch), vocab_size, generator=generator) * spread
        if levels is not None:
            logits = (logits * levels).round() / levels  # many ties, also across the cut
        assert_equal_to_reference(logits, batch)


def test_ties_stay_by_lowest_id() -> None:
    batch = [SamplingRow(params=SamplingParams(top_k=2), seed=0, position=0)]
    batch.append(SamplingRow(params=SamplingParams(top_p=0.5), seed=0, position=0))
    probs = target_probs(torch.zeros(2, 4), SamplingMetadata.build(batch))
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]


def test_half_precision_is_widened(generator: torch.Generator) -> None:
    batch = [SamplingRow(params=SamplingParams(top_k=3, temperature=0.7), seed=0, position=0)]
    logits = torch.randn(1, 50, generator=generator).bfloat16()
    assert target_probs(logits, SamplingMetadata.build(batch))[0].tolist() == reference_probs(
        logits[0].float(), batch[0]
    )
