from __future__ import annotations

import pytest
import torch

from peagle.sampling.argmax import first_argmax


@pytest.mark.parametrize("width", [1, 5, 128, 129, 256, 1024])
@pytest.mark.parametrize("levels", [2, 1000])
def test_lowest_index_of_the_largest(width: int, levels: int) -> None:
    rows = torch.randint(levels, (50, width), generator=torch.Generator().manual_seed(width)).float()
    expected = [row.index(max(row)) for row in rows.tolist()]
    assert first_argmax(rows).tolist() == expected


def test_nan_is_found() -> None:
    rows = torch.zeros(2, 512)
    rows[0, 300] = float("nan")
    rows[1, 400] = 1.0
    assert first_argmax(rows).tolist() == [300, 400]


def test_transposed_rows() -> None:
    rows = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)).T
    assert first_argmax(rows).tolist() == rows.argmax(-1).tolist()
