from __future__ import annotations

from peagle.verifier.layout import padded_drafts, padded_rows


def test_ragged_drafts() -> None:
    assert padded_drafts([[5, 6], [], [7]]).tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert padded_drafts([[], []]).shape == (2, 0)
    assert padded_drafts([]).shape == (0, 0)


def test_packed_rows() -> None:
    assert padded_rows([2, 0, 1]).tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]]
    assert padded_rows([0, 0]).tolist() == [[0], [1]]
    assert padded_rows([]).shape == (0, 1)
