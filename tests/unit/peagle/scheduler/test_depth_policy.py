from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.scheduler.depth_policy import AdaptiveDepth, DepthByBatchSize, DraftOffer, FixedDepth, StepReport
from peagle.spec_config import BatchSizeRange

CONFIDENCES = st.lists(st.floats(0.0, 1.0), max_size=4)


def offers(*confidences: list[float]) -> list[DraftOffer]:
    return [DraftOffer(seq_id=index, confidences=one) for index, one in enumerate(confidences)]


def trained(*, row_s: float, fixed_s: float, draft_s: float = 0.0, depth: int = 4) -> AdaptiveDepth:
    """A policy that knows what rows cost: `fixed_s + rows * row_s`."""
    policy = AdaptiveDepth(depth)
    for num_rows in (1, 2, 4, 8, 16, 32):
        policy.observe_step(
            StepReport(num_rows=num_rows, num_drafting=num_rows, verify_s=fixed_s + num_rows * row_s, draft_s=draft_s)
        )
    return policy


def test_a_fixed_depth_verifies_everything() -> None:
    policy = FixedDepth(3)
    assert policy.num_to_verify(offers([0.1] * 3, [], [0.9]), num_other_rows=7) == [3, 0, 1]
    assert policy.num_to_propose(50) == 3
    assert policy.uses_head(0, 99)
    assert policy.without_head([0], 99) == []


def test_the_table_goes_by_the_number_of_sequences() -> None:
    rows = [(1, 1, 5), (2, 4, 2), (5, 9, 0)]
    policy = DepthByBatchSize([BatchSizeRange(first=a, last=b, num_speculative_tokens=k) for a, b, k in rows])
    assert [policy.num_to_propose(count) for count in (1, 2, 4, 5, 9, 100)] == [5, 2, 2, 0, 0, 0]
    assert policy.num_to_verify(offers([0.5] * 5), num_other_rows=0) == [5]
    assert policy.num_to_verify(offers([0.5] * 5, [0.5]), num_other_rows=0) == [2, 1]


def test_everything_is_verified_while_costs_are_unknown() -> None:
    assert AdaptiveDepth(4).num_to_verify(offers([0.1, 0.1], [0.9]), num_other_rows=0) == [2, 1]


def test_free_rows_are_all_used_and_dear_rows_are_not() -> None:
    some = offers([0.9, 0.9, 0.9], [0.2, 0.2, 0.2])
    assert trained(row_s=0.0, fixed_s=1.0).num_to_verify(some, num_other_rows=0) == [3, 3]
    assert trained(row_s=1.0, fixed_s=0.0).num_to_verify(some, num_other_rows=0) == [0, 0]
    assert trained(row_s=0.1, fixed_s=0.5).num_to_verify(some, num_other_rows=0) == [3, 0]


@settings(max_examples=60)
@given(
    confidences=st.lists(CONFIDENCES, min_size=1, max_size=3),
    row_s=st.floats(0.001, 1.0),
    fixed_s=st.floats(0.001, 3.0),
    num_other_rows=st.integers(0, 5),
)
def test_the_choice_is_the_best_of_all(
    confidences: list[list[float]], row_s: float, fixed_s: float, num_other_rows: int
) -> None:
    policy = trained(row_s=row_s, fixed_s=fixed_s, draft_s=0.1)
    some = offers(*confidences)

    def rate(counts: tuple[int, ...]) -> float:
        survivals = [policy.survival.survivals(one.seq_id, one.confidences) for one in some]
        tokens = len(some) + sum(sum(chain[:count]) for chain, count in zip(survivals, counts, strict=True))
        num_rows = len(some) + num_other_rows + sum(counts)
        return tokens / (policy.verify_cost.seconds(num_rows) + policy.draft_cost.seconds(len(some)))

    best = max(rate(counts) for counts in itertools.product(*(range(len(one) + 1) for one in confidences)))
    chosen = tuple(policy.num_to_verify(some, num_other_rows=num_other_rows))
    assert rate(chosen) == pytest.approx(best)


def accept(policy: AdaptiveDepth, *, every: int) -> None:
    """Two hundred proposals of one draft, of which one in `every` is accepted."""
    for seq_id in range(1000, 1200):
        offer = DraftOffer(seq_id=seq_id, confidences=[0.5])
        policy.num_to_verify([offer], num_other_rows=0)
        policy.observe(offer, num_accepted=int(seq_id % every == 0))
        policy.forget(seq_id)


def test_a_head_that_earns_nothing_is_given_up_but_for_probes() -> None:
    policy = trained(row_s=0.1, fixed_s=1.0, draft_s=0.2)
    assert policy.uses_head(1, 0), "nothing is known that speaks against it"
    accept(policy, every=2000)
    gain = policy.gain(1)
    assert gain == pytest.approx(1.1 / 1.3, rel=0.05)
    probes = [seq_id for seq_id in range(1, 161) if policy.uses_head(seq_id, 0)]
    assert len(probes) / 160 * (1 - gain) == pytest.approx(0.01, rel=0.1), "a hundredth of the time"
    assert policy.without_head([1, probes[0]], 1) == [1], "a probe goes on"
    for _ in range(64):
        policy.num_to_verify([DraftOffer(seq_id=probes[0], confidences=[0.1])], num_other_rows=0)
    assert policy.without_head([probes[0]], 1) == probes[:1], "until it has shown enough"


def test_a_probe_verifies_at_least_one_draft_or_it_would_learn_nothing() -> None:
    policy = trained(row_s=1.0, fixed_s=1.0, draft_s=0.2)
    accept(policy, every=2000)
    probe = next(seq_id for seq_id in range(1, 1000) if policy.uses_head(seq_id, 0))
    some = [DraftOffer(seq_id=seq_id, confidences=[0.5, 0.5]) for seq_id in (0, probe)]
    assert policy.num_to_verify(some, num_other_rows=0) == [0, 1]


def test_probes_are_fewer_the_more_wait_for_them() -> None:
    policy = trained(row_s=0.1, fixed_s=1.0, draft_s=0.2)
    accept(policy, every=2000)
    alone = sum(policy.uses_head(seq_id, 0) for seq_id in range(1, 4001))
    beside_seven = sum(policy.uses_head(seq_id, 7) for seq_id in range(4001, 8001))
    assert alone > 4 * beside_seven > 0


def test_a_head_that_begins_to_pay_comes_back() -> None:
    policy = trained(row_s=0.1, fixed_s=1.0, draft_s=0.2)
    accept(policy, every=2000)
    for _ in range(5):
        accept(policy, every=1)
    assert policy.gain(1) > 1.3
    assert policy.uses_head(1, 0)
    assert policy.without_head([1], 1) == []


def test_a_head_may_pay_at_low_load_only() -> None:
    policy = trained(row_s=0.1, fixed_s=1.0, draft_s=0.05)
    accept(policy, every=2)
    assert policy.uses_head(1, 0)
    assert not policy.uses_head(1, 29)


def test_drafts_that_were_not_worth_verifying_count_against_the_head() -> None:
    policy = trained(row_s=0.2, fixed_s=1.0, draft_s=0.2)
    for seq_id in range(200):  # one proposal in four is good, and is all that is ever verified
        good = seq_id % 4 == 0
        offer = DraftOffer(seq_id=seq_id, confidences=[0.9 if good else 0.01] * 4)
        (count,) = policy.num_to_verify([offer], num_other_rows=0)
        assert count == (4 if good else 0)
        if count:
            policy.observe(offer, num_accepted=4)
    # One step in four yields nearly 5 tokens in 2.2, the others 1 in 1.4; without the head it is 1 in 1.2.
    assert policy.gain(1) == pytest.approx((4.9 + 3) / (2.2 + 3 * 1.4) * 1.2, rel=0.1)


def test_proposals_of_sequences_without_the_head_say_nothing_about_it() -> None:
    policy = trained(row_s=0.1, fixed_s=1.0, draft_s=0.2)
    for seq_id in range(200):
        policy.num_to_verify([DraftOffer(seq_id=seq_id, confidences=[0.01], uses_head=False)], num_other_rows=0)
    assert policy.gain(1) == float("inf")
