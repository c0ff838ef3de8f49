from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduler.row_choice import choose_rows

CHAINS = st.lists(st.lists(st.floats(0.0, 1.0), max_size=4).map(lambda c: sorted(c, reverse=True)), max_size=3)


@given(CHAINS, st.integers(0, 4), st.floats(0.01, 1.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_no_other_choice_promises_more(
    chains: list[list[float]], num_other_rows: int, row_s: float, fixed_s: float, drafting_s: float
) -> None:
    def rows_s(num_rows: int) -> float:
        return fixed_s + row_s * num_rows

    def rate(counts: tuple[int, ...]) -> float:
        tokens = len(chains) + sum(sum(chain[:count]) for chain, count in zip(chains, counts, strict=True))
        return tokens / max(rows_s(len(chains) + num_other_rows + sum(counts)) + drafting_s, 1e-9)

    chosen = choose_rows(chains, num_other_rows=num_other_rows, rows_s=rows_s, drafting_s=drafting_s)
    best = max(rate(counts) for counts in itertools.product(*(range(len(chain) + 1) for chain in chains)))
    assert rate(tuple(chosen.counts)) == pytest.approx(best)
    assert chosen.tokens / chosen.seconds == pytest.approx(best)
