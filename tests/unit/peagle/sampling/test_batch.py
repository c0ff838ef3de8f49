from __future__ import annotations

import torch

from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.noise import row_key
from peagle.sampling.race import as_int64
from peagle.sampling_params import SamplingParams


def rows_of(*params: SamplingParams) -> list[SamplingRow]:
    return [SamplingRow(params=p, seed=9, position=i) for i, p in enumerate(params)]


def test_entries_follow_the_rows() -> None:
    metadata = SamplingMetadata.build(
        rows_of(SamplingParams(temperature=0.5, top_k=3, top_p=0.25), SamplingParams(temperature=2.0))
    )
    assert metadata.num_rows == 2
    assert metadata.temperature.tolist() == [0.5, 2.0]
    assert metadata.top_k.tolist() == [3, 0]
    assert metadata.top_p.tolist() == [0.25, 1.0]
    assert metadata.keys.dtype == torch.int64
    assert metadata.keys.tolist() == [as_int64(row_key(9, 0)), as_int64(row_key(9, 1))]


def test_rows_are_sorted_by_work() -> None:
    metadata = SamplingMetadata.build(
        rows_of(
            SamplingParams(temperature=0.0, top_k=500, top_p=0.1),
            SamplingParams(),
            SamplingParams(top_k=7),
            SamplingParams(top_p=0.5, top_k=2),
        )
    )
    assert metadata.plain_rows == (1,)
    assert metadata.truncated_rows == (2, 3)
    assert metadata.max_top_k == 7
    assert metadata.any_top_k
    assert metadata.any_top_p
    assert not metadata.any_top_p_alone
    assert not metadata.all_greedy


def test_greedy_asks_for_nothing() -> None:
    metadata = SamplingMetadata.build(rows_of(SamplingParams(temperature=0.0, top_k=5, top_p=0.5)))
    assert metadata.all_greedy
    assert not metadata.any_top_k
    assert not metadata.any_top_p


def test_empty_batch() -> None:
    metadata = SamplingMetadata.build([])
    assert metadata.num_rows == 0
    assert metadata.all_greedy
