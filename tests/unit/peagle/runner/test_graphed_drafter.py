"""Drafting at fixed shapes against the drafter itself, step by step, up to the end of the context."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.head import DraftHead
from peagle.drafter.peagle import PEagleDrafter, kv_geometry
from peagle.drafter.tree_choice import TreeChoice
from peagle.kv_cache.storage import KVStorage
from peagle.runner.graphed_drafter import GraphedDrafter
from peagle.spec_config import TreeSpec
from tests.builders.draft_history import HistoryStep
from tests.builders.graphed_drafts import (
    MAX_LEN,
    check_caches,
    check_decoding,
    check_step,
    make_histories,
    make_sizes,
)
from tests.builders.head import tiny_head
from tests.builders.runner import PADDINGS, RunnerSizes, make_plain_drafter


@pytest.mark.parametrize("policy", PADDINGS)
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
def test_decoding_steps_up_to_the_end_of_the_context(policy: str, num_speculative_tokens: int) -> None:
    sizes = make_sizes(num_speculative_tokens)
    head = tiny_head()
    plain, inner = make_plain_drafter(head, sizes), make_plain_drafter(head, sizes)
    graphed = GraphedDrafter(inner, padding=PADDINGS[policy](sizes), capture=False)
    check_decoding(plain, inner, graphed, sizes, seed=num_speculative_tokens)


def make_tree_drafter(head: DraftHead, sizes: RunnerSizes, tree: TreeSpec) -> PEagleDrafter:
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=sizes.num_blocks,
        geometry=kv_geometry(head, block_size=sizes.block_size),
    )
    return PEagleDrafter(
        head=head,
        attention=SdpaAttention(),
        num_speculative_tokens=tree.depth,
        storage=storage,
        max_model_len=sizes.max_model_len,
        choice=TreeChoice(head, tree),
    )


@pytest.mark.parametrize("policy", PADDINGS)
@pytest.mark.parametrize("tree", [TreeSpec(num_branches=3, depth=1), TreeSpec(num_branches=2, depth=3)])
def test_trees_up_to_the_end_of_the_context(policy: str, tree: TreeSpec) -> None:
    sizes = make_sizes(tree.num_nodes)
    head = tiny_head()
    plain, inner = make_tree_drafter(head, sizes, tree), make_tree_drafter(head, sizes, tree)
    graphed = GraphedDrafter(inner, padding=PADDINGS[policy](sizes), capture=False)
    assert (graphed.num_speculative_tokens, graphed.num_mask_slots) == (tree.num_nodes, tree.depth - 1)
    histories = make_histories(5, sizes, head, seed=tree.depth)
    rng = random.Random(tree.depth)
    torch.manual_seed(0)
    check_step(
        plain, graphed, [history.step(num_rows=MAX_LEN, num_drafts=0, max_next_drafts=0) for history in histories]
    )
    while alive := [history for history in histories if history.num_tokens < MAX_LEN]:
        steps = []
        for history in rng.sample(alive, rng.randint(1, len(alive))):
            room = MAX_LEN - history.num_tokens - 1
            steps.append(
                history.step(
                    num_rows=1,
                    num_drafts=rng.randint(0, max(0, min(tree.num_nodes, room))),
                    max_next_drafts=rng.choice([0, 1, tree.num_nodes, tree.num_nodes]),
                    max_depth=tree.depth,
                )
            )
        check_step(plain, graphed, steps)
    check_caches(plain.storage, inner.storage, histories)


@pytest.mark.parametrize("policy", PADDINGS)
def test_chains_of_others_may_be_deeper_than_the_tree(policy: str) -> None:
    """Another drafter's chain is named as a tree beside trees, and all of it may be accepted."""
    sizes, tree = make_sizes(6), TreeSpec(num_branches=3, depth=2)
    head = tiny_head()
    plain, inner = make_tree_drafter(head, sizes, tree), make_tree_drafter(head, sizes, tree)
    graphed = GraphedDrafter(inner, padding=PADDINGS[policy](sizes), capture=False)
    histories = make_histories(2, sizes, head, seed=8)
    for history in histories:
        history.token_ids = history.token_ids[:1]
    torch.manual_seed(0)
    for _ in range(4):
        chains = [history.step(num_rows=1, num_drafts=5, max_next_drafts=6) for history in histories]
        parents = list(range(-1, 4))
        named = [replace(step, scheduled=replace(step.scheduled, draft_parents=parents)) for step in chains]
        assert check_step(plain, graphed, named) == 2
    check_caches(plain.storage, inner.storage, histories)
    assert all(history.start > 4 for history in histories)


@pytest.mark.parametrize("policy", PADDINGS)
def test_steps_with_chunks_take_the_other_way(policy: str) -> None:
    sizes = make_sizes(4)
    head = tiny_head()
    plain, inner = make_plain_drafter(head, sizes), make_plain_drafter(head, sizes)
    graphed = GraphedDrafter(inner, padding=PADDINGS[policy](sizes), capture=False)
    decoding, prefilling = make_histories(2, sizes, head, seed=0)
    decoding.token_ids, prefilling.token_ids = [4, 5], list(range(30))
    torch.manual_seed(0)
    for num_rows in (2, 7, 30):
        steps = [history.step(num_rows=num_rows, num_drafts=1, max_next_drafts=4) for history in (decoding, prefilling)]
        assert check_step(plain, graphed, steps) == (2 if num_rows == 30 else 1)
    check_caches(plain.storage, inner.storage, [decoding, prefilling])


@pytest.mark.parametrize("policy", PADDINGS)
def test_nobody_drafts(policy: str) -> None:
    sizes = make_sizes(3)
    head = tiny_head()
    plain, inner = make_plain_drafter(head, sizes), make_plain_drafter(head, sizes)
    graphed = GraphedDrafter(inner, padding=PADDINGS[policy](sizes), capture=False)
    histories = make_histories(2, sizes, head, seed=1)
    for history in histories:
        history.token_ids = history.token_ids[:1]
    steps = [history.step(num_rows=1, num_drafts=2, max_next_drafts=0) for history in histories]
    assert check_step(plain, graphed, steps) == 0
    failed = [HistoryStep(scheduled=step.scheduled, emitted=[], rows=step.rows) for step in steps]
    assert check_step(plain, graphed, failed) == 0
    check_caches(plain.storage, inner.storage, histories)


def test_it_looks_like_the_drafter_it_wraps() -> None:
    sizes = make_sizes(4)
    inner = make_plain_drafter(tiny_head(), sizes)
    graphed = GraphedDrafter(inner, padding=PADDINGS["fixed"](sizes), capture=False)
    for name in ("num_speculative_tokens", "num_mask_slots", "num_layers", "aux_layer_ids"):
        assert getattr(graphed, name) == getattr(inner, name)
