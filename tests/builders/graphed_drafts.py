"""Drafting at fixed shapes against the drafter itself: the steps, and what must be equal."""

from __future__ import annotations

import random

import torch

from peagle.drafter.eagle3 import Eagle3Drafter
from peagle.drafter.head import DraftHead
from peagle.drafter.interface import NO_TOKEN, Drafter, DraftProposal
from peagle.drafter.peagle import PEagleDrafter
from peagle.kv_cache.storage import KVStorage
from tests.builders.draft_history import DraftHistory, HistoryStep, draft_batch
from tests.builders.runner import RunnerSizes

PlainDrafter = PEagleDrafter | Eagle3Drafter

MAX_LEN = 40


def make_sizes(num_speculative_tokens: int) -> RunnerSizes:
    return RunnerSizes(num_speculative_tokens=num_speculative_tokens, max_num_seqs=5, max_model_len=MAX_LEN)


def make_histories(num_seqs: int, sizes: RunnerSizes, head: DraftHead, *, seed: int) -> list[DraftHistory]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    blocks = rng.sample(range(sizes.num_blocks), sizes.num_blocks)
    return [
        DraftHistory(
            token_ids=[rng.randrange(100) for _ in range(rng.choice([1, 3, 12, 30]))],
            features=torch.randn(MAX_LEN, head.config.feature_size, generator=generator, dtype=head.dtype),
            block_table=[blocks.pop() for _ in range(sizes.max_num_blocks)],
            seq_id=seq_id,
            rng=random.Random(seed),
        )
        for seq_id in range(num_seqs)
    ]


def random_step(history: DraftHistory, rng: random.Random, num_speculative_tokens: int) -> HistoryStep:
    """A decode, or now and then one in whose place the target failed."""
    room = MAX_LEN - history.num_tokens - 1  # a step yields one token beyond its accepted drafts
    num_drafts = rng.randint(0, max(0, min(num_speculative_tokens, room)))
    max_next_drafts = rng.choice([0, 1, num_speculative_tokens, num_speculative_tokens])
    before = history.start, list(history.token_ids)
    step = history.step(num_rows=1, num_drafts=num_drafts, max_next_drafts=max_next_drafts)
    if rng.random() < 0.1:
        history.start, history.token_ids = before
        return HistoryStep(scheduled=step.scheduled, emitted=[], rows=step.rows * float("nan"))
    return step


def check_step(plain: Drafter, graphed: Drafter, steps: list[HistoryStep], *, gap: int = 0) -> int:
    """Both propose the same; returns for how many sequences."""
    batch = draft_batch(steps, gap=gap)
    wanted, got = plain.propose(batch), graphed.propose(batch)
    assert got.indices == wanted.indices
    assert drafted(got) == drafted(wanted)
    assert got.parents == wanted.parents
    return len(got.indices)


def drafted(proposal: DraftProposal) -> list[list[int]]:
    """Drafts without the places of those that nobody asked for: a fixed shape has more of them."""
    return [[token_id for token_id in row if token_id != NO_TOKEN] for row in proposal.draft_token_ids.tolist()]


def check_caches(plain: KVStorage, graphed: KVStorage, histories: list[DraftHistory]) -> None:
    """The committed slots of both pools are equal."""
    for history in histories:
        for one, other in zip(plain.layers, graphed.layers, strict=True):
            for mine, theirs in ((one.key, other.key), (one.value, other.value)):
                slots = [tensor[history.block_table].flatten(0, 1)[: history.start] for tensor in (mine, theirs)]
                assert (slots[0] - slots[1]).abs().max() < 1e-12


def check_decoding(
    plain: PlainDrafter, inner: PlainDrafter, graphed: Drafter, sizes: RunnerSizes, *, seed: int
) -> None:
    """Decoding steps up to the end of the context, of which some fail.

    Args:
        plain: what is right.
        inner: what `graphed` wraps.
        graphed: what is tested.
        sizes: of both.
        seed: of the steps.
    """
    num_speculative_tokens = sizes.num_speculative_tokens
    histories = make_histories(5, sizes, plain.head, seed=seed)
    rng = random.Random(seed)
    torch.manual_seed(0)
    prefill = [history.step(num_rows=MAX_LEN, num_drafts=0, max_next_drafts=0) for history in histories]
    check_step(plain, graphed, prefill)
    num_drafting = set()
    while alive := [history for history in histories if history.num_tokens < MAX_LEN]:
        chosen = rng.sample(alive, rng.randint(1, len(alive)))
        steps = [random_step(history, rng, num_speculative_tokens) for history in chosen]
        widest = max(len(step.rows) for step in steps)
        gap = rng.randint(0, num_speculative_tokens + 1 - widest)  # the target's grid is never wider than K + 1
        num_drafting.add((check_step(plain, graphed, steps, gap=gap), len(steps)))
    check_caches(plain.storage, inner.storage, histories)
    assert any(0 < num < num_seqs for num, num_seqs in num_drafting), "some of a batch must not have drafted"
