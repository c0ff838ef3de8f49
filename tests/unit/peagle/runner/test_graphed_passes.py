"""Drafting one token after the other, at fixed shapes and as it comes."""

from __future__ import annotations

import pytest
import torch

from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.eagle3 import Eagle3Drafter
from peagle.drafter.eagle3_passes import Eagle3Passes
from peagle.drafter.head import DraftHead
from peagle.drafter.peagle import kv_geometry
from peagle.drafter.turn_choice import DrawnTurn
from peagle.kv_cache.storage import KVStorage
from peagle.runner.graphed_passes import GraphedPasses
from tests.builders.draft_history import HistoryStep
from tests.builders.graphed_drafts import check_caches, check_decoding, check_step, make_histories, make_sizes
from tests.builders.head import tiny_head
from tests.builders.runner import PADDINGS, RunnerSizes


def make_passes(head: DraftHead, sizes: RunnerSizes) -> Eagle3Passes:
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=sizes.num_blocks,
        geometry=kv_geometry(head, block_size=sizes.block_size),
    )
    return Eagle3Passes(head=head, attention=SdpaAttention(), storage=storage, max_model_len=sizes.max_model_len)


def make_drafters(sizes: RunnerSizes, policy: str, *, draws: bool = False) -> tuple[Eagle3Drafter, Eagle3Drafter]:
    """One whose passes run as they come, and one at fixed shapes."""
    head, num_drafts = tiny_head(mask_token_id=None), sizes.num_speculative_tokens
    choice = DrawnTurn(head) if draws else None
    plain = Eagle3Drafter(make_passes(head, sizes), num_speculative_tokens=num_drafts, choice=choice)
    passes = make_passes(head, sizes)
    runs = GraphedPasses(passes, padding=PADDINGS[policy](sizes), num_speculative_tokens=num_drafts, capture=False)
    return plain, Eagle3Drafter(passes, num_speculative_tokens=num_drafts, choice=choice, runs=runs)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("policy", PADDINGS)
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
def test_decoding_steps_up_to_the_end_of_the_context(policy: str, num_speculative_tokens: int, draws: bool) -> None:
    sizes = make_sizes(num_speculative_tokens)
    plain, graphed = make_drafters(sizes, policy, draws=draws)
    check_decoding(plain, graphed, graphed, sizes, seed=num_speculative_tokens)


@pytest.mark.parametrize("policy", PADDINGS)
def test_the_first_pass_of_a_step_with_chunks_runs_as_it_comes(policy: str) -> None:
    sizes = make_sizes(4)
    plain, graphed = make_drafters(sizes, policy)
    decoding, prefilling = make_histories(2, sizes, plain.head, seed=0)
    decoding.token_ids, prefilling.token_ids = [4, 5], list(range(30))
    torch.manual_seed(0)
    for num_rows in (2, 7, 30):
        steps = [history.step(num_rows=num_rows, num_drafts=1, max_next_drafts=4) for history in (decoding, prefilling)]
        assert check_step(plain, graphed, steps) == (2 if num_rows == 30 else 1)
    check_caches(plain.storage, graphed.storage, [decoding, prefilling])


@pytest.mark.parametrize("policy", PADDINGS)
def test_longer_chains_of_others_run_as_they_come(policy: str) -> None:
    """Of a lookup, say, which the head takes in as soon as they are accepted."""
    sizes = make_sizes(2)
    plain, graphed = make_drafters(sizes, policy)
    histories = make_histories(2, sizes, plain.head, seed=3)
    for history in histories:
        history.token_ids = history.token_ids[:1]
    torch.manual_seed(0)
    for _ in range(4):
        steps = [history.step(num_rows=1, num_drafts=6, max_next_drafts=2) for history in histories]
        assert check_step(plain, graphed, steps) == 2
    check_caches(plain.storage, graphed.storage, histories)
    assert all(history.start > 4 for history in histories)


@pytest.mark.parametrize("policy", PADDINGS)
def test_nobody_drafts(policy: str) -> None:
    sizes = make_sizes(3)
    plain, graphed = make_drafters(sizes, policy)
    histories = make_histories(2, sizes, plain.head, seed=1)
    for history in histories:
        history.token_ids = history.token_ids[:1]
    steps = [history.step(num_rows=1, num_drafts=2, max_next_drafts=0) for history in histories]
    assert check_step(plain, graphed, steps) == 0
    failed = [HistoryStep(scheduled=step.scheduled, emitted=[], rows=step.rows) for step in steps]
    assert check_step(plain, graphed, failed) == 0
    check_caches(plain.storage, graphed.storage, histories)


def test_the_shapes_of_a_server_are_few() -> None:
    """Whatever the sequences are, their passes have the shapes of a few buckets, or a GPU would capture without end."""
    sizes = make_sizes(4)
    _, graphed = make_drafters(sizes, "fixed")
    passes = graphed._passes
    shapes = {passes.next_shape(num_seqs, num_blocks) for num_seqs in range(1, 6) for num_blocks in range(1, 11)}
    assert len(shapes) == 4 * 5
