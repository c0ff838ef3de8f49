from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.logits import target_probs
from peagle.sampling.race import winners
from peagle.sampling.reference import reference_sample
from peagle.sampling.sampler import sample
from peagle.sampling_params import SamplingParams

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([1.0, 0.5, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.3]),
)
rows = st.builds(SamplingRow, params=params, seed=st.integers(-5, 10**6), position=st.integers(0, 9))
values = st.sampled_from([0.0, 1.0, -np.inf, np.nan, np.inf]) | st.floats(-30, 30, width=32)

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.3, top_k=300, top_p=0.7, min_p=0.01),
    SamplingParams(min_p=0.05),
]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    batch = data.draw(st.lists(rows, min_size=1, max_size=5))
    array = data.draw(hnp.arrays(np.float32, (len(batch), data.draw(st.integers(1, 12))), elements=values))
    logits = torch.from_numpy(array)
    result = sample(logits, SamplingMetadata.build(batch))
    expected = [reference_sample(logits[i], row) for i, row in enumerate(batch)]
    assert result.is_valid.tolist() == [token_id is not None for token_id in expected]
    assert result.token_ids.tolist() == [token_id or 0 for token_id in expected]


def test_rows_do_not_depend_on_the_batch(generator: torch.Generator) -> None:
    batch = [SamplingRow(params=KINDS[i % len(KINDS)], seed=i, position=i) for i in range(40)]
    logits = torch.randn(40, 5000, generator=generator) * 4
    together = sample(logits, SamplingMetadata.build(batch)).token_ids.tolist()
    for i, row in enumerate(batch):
        assert sample(logits[i : i + 1], SamplingMetadata.build([row])).token_ids.tolist() == [together[i]]
    order = torch.randperm(40, generator=generator).tolist()
    mixed = sample(logits[order], SamplingMetadata.build([batch[i] for i in order])).token_ids.tolist()
    assert mixed == [together[i] for i in order]


def test_a_broken_row_harms_no_other(generator: torch.Generator) -> None:
    batch = [SamplingRow(params=p, seed=1, position=2) for p in KINDS for _ in range(4)]
    logits = torch.randn(len(batch), 700, generator=generator)
    healthy = sample(logits, SamplingMetadata.build(batch)).token_ids
    broken = logits.clone()
    broken[0::4] = float("nan")
    broken[1::4, 600] = float("inf")
    broken[2::4] = float("-inf")
    result = sample(broken, SamplingMetadata.build(batch))
    assert result.is_valid.tolist() == [False, False, False, True] * len(KINDS)
    assert torch.equal(result.token_ids[3::4], healthy[3::4])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_frequencies_follow_the_target(kind: SamplingParams, generator: torch.Generator) -> None:
    num_draws = 20_000
    logits = torch.randn(1, 24, generator=generator).expand(num_draws, -1)
    batch = [SamplingRow(params=kind, seed=i // 100, position=i % 100) for i in range(num_draws)]
    metadata = SamplingMetadata.build(batch)
    counts = torch.bincount(sample(logits, metadata).token_ids, minlength=24)
    expected = target_probs(logits[:1], SamplingMetadata.build(batch[:1]))[0] * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_never_a_token_without_probability() -> None:
    weights = torch.tensor([[0.0, 1e-300, 0.0, 1e-300, 0.0]], dtype=torch.float64).expand(500, -1)
    keys = torch.arange(500)[:, None]
    assert set(winners(weights, keys, None).tolist()) == {1, 3}


def test_a_rounding_error_seldom_changes_a_token(generator: torch.Generator) -> None:
    """The reason for the race: errors of 1e-5 in all logits of a flat distribution change few of 2,000 tokens."""
    batch = [SamplingRow(params=SamplingParams(), seed=i, position=i) for i in range(2000)]
    logits = torch.randn(2000, 2000, generator=generator)
    errors = torch.randn(2000, 2000, generator=generator) * 1e-5
    metadata = SamplingMetadata.build(batch)
    changed = sample(logits, metadata).token_ids != sample(logits + errors, metadata).token_ids
    assert int(changed.sum()) <= 2


def test_half_precision_and_no_change_of_the_input(generator: torch.Generator) -> None:
    logits = torch.randn(len(KINDS), 300, generator=generator).bfloat16()
    before = logits.clone()
    batch = [SamplingRow(params=p, seed=3, position=4) for p in KINDS]
    tokens = sample(logits, SamplingMetadata.build(batch)).token_ids
    assert torch.equal(logits, before)
    assert torch.equal(tokens, sample(logits.float(), SamplingMetadata.build(batch)).token_ids)


def test_empty_batch() -> None:
    assert sample(torch.zeros(0, 8), SamplingMetadata.build([])).token_ids.shape == (0,)
