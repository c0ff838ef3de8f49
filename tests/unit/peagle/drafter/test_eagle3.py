"""Golden tests: whatever happened before, drafts and keys are those of naive passes over the committed tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.reference import ReferenceAttention
from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.eagle3 import Eagle3Drafter
from peagle.drafter.eagle3_passes import Eagle3Passes
from peagle.drafter.head import DraftHead
from peagle.drafter.interface import DraftProposal
from peagle.drafter.peagle import kv_geometry
from peagle.drafter.reference import reference_drafts_in_turn
from peagle.drafter.turn_choice import DrawnTurn
from peagle.kv_cache.storage import KVStorage
from peagle.sampling_params import SamplingParams
from tests.builders.draft_history import DraftHistory, HistoryStep, draft_batch
from tests.builders.head import tiny_head

BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAX_LEN = 64
TOLERANCE = 1e-9


def tiny_eagle3(**overrides: Any) -> DraftHead:
    return tiny_head(mask_token_id=None, **overrides)


def make_drafter(
    head: DraftHead,
    num_speculative_tokens: int = 4,
    *,
    attention: AttentionBackend | None = None,
    max_model_len: int = MAX_LEN,
    draws: bool = False,
) -> Eagle3Drafter:
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=NUM_BLOCKS,
        geometry=kv_geometry(head, block_size=BLOCK_SIZE),
    )
    passes = Eagle3Passes(
        head=head, attention=attention or SdpaAttention(), storage=storage, max_model_len=max_model_len
    )
    return Eagle3Drafter(
        passes, num_speculative_tokens=num_speculative_tokens, choice=DrawnTurn(head) if draws else None
    )


def make_histories(num_seqs: int, *, seed: int, head: DraftHead) -> list[DraftHistory]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [
        DraftHistory(
            token_ids=[rng.randrange(100) for _ in range(rng.randint(1, 20))],
            features=torch.randn(MAX_LEN, head.config.feature_size, generator=generator).to(head.dtype),
            block_table=[blocks.pop() for _ in range(MAX_LEN // BLOCK_SIZE)],
            seq_id=seq_id,
            rng=random.Random(rng.random()),
        )
        for seq_id in range(num_seqs)
    ]


def random_step(history: DraftHistory, rng: random.Random, num_speculative_tokens: int) -> HistoryStep:
    return history.step(
        num_rows=rng.choice([1, 3, 10, 30]),
        num_drafts=rng.randint(0, num_speculative_tokens),
        max_next_drafts=rng.choice([0, 1, 2, num_speculative_tokens, num_speculative_tokens]),
    )


def cached(drafter: Eagle3Drafter, history: DraftHistory, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the committed slots, each [start, num_kv_heads, head_dim]."""
    cache = drafter.storage.layers[layer]
    keys, values = (tensor[history.block_table].flatten(0, 1)[: history.start] for tensor in (cache.key, cache.value))
    return keys, values


def check_cache(drafter: Eagle3Drafter, history: DraftHistory) -> None:
    committed = history.token_ids[: history.start + 1]
    expected = reference_drafts_in_turn(drafter.head, committed, history.features[: history.start], 1)
    for layer in range(drafter.num_layers):
        keys, values = cached(drafter, history, layer)
        assert (keys - expected.keys[layer]).abs().max() < TOLERANCE
        assert (values - expected.values[layer]).abs().max() < TOLERANCE


def check_drafts(drafter: Eagle3Drafter, history: DraftHistory, proposal: DraftProposal, row: int, num: int) -> None:
    """The first `num` drafts and their confidences are the reference's; the others were not asked for."""
    expected = reference_drafts_in_turn(drafter.head, history.token_ids, history.features[: history.start], num)
    draft_ids = drafter.head.to_target_ids(expected.logits.argmax(-1)).tolist()
    assert proposal.draft_token_ids[row].tolist() == draft_ids + [-1] * (drafter.num_speculative_tokens - num)
    assert proposal.confidences is not None
    best = expected.logits.softmax(-1).amax(-1)
    assert (proposal.confidences[row, :num] - best).abs().max() < TOLERANCE


def check_step(drafter: Eagle3Drafter, histories: list[DraftHistory], steps: list[HistoryStep], gap: int) -> None:
    proposal = drafter.propose(draft_batch(steps, gap=gap))
    asked = [step.scheduled.max_next_drafts for step in steps]
    assert list(proposal.indices) == [i for i, num in enumerate(asked) if num > 0]
    for row, index in enumerate(proposal.indices):
        num = min(asked[index], drafter.num_speculative_tokens)
        check_drafts(drafter, histories[index], proposal, row, num)
    for history in histories:
        check_cache(drafter, history)


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3, "norm_output": True},
        {"aux_layer_ids": (4,), "target_norm_eps": 1e-5},
        {"aux_layer_ids": (4,), "target_norm_eps": 1e-5, "merges_embedding": True, "fc_bias": True},
    ],
    ids=["eagle3", "eagle3.1", "last hidden", "eagle"],
)
def test_random_histories(num_speculative_tokens: int, overrides: dict[str, Any]) -> None:
    # acceptance, rejection, chunks, preemption, a changing number of drafts, permuted blocks, padded target rows
    head = tiny_eagle3(**overrides)
    drafter = make_drafter(head, num_speculative_tokens)
    histories = make_histories(3, seed=num_speculative_tokens, head=head)
    rng = random.Random(num_speculative_tokens)
    torch.manual_seed(0)
    for _ in range(12):
        chosen = rng.sample(histories, rng.randint(1, 3))
        chosen = [history for history in chosen if history.num_tokens < MAX_LEN - 10]
        if not chosen:
            break
        for history in chosen:
            if rng.random() < 0.1:
                history.preempt(rng.sample(history.block_table, len(history.block_table)))
        steps = [random_step(history, rng, num_speculative_tokens) for history in chosen]
        check_step(drafter, chosen, steps, gap=rng.randint(0, 2))


def test_a_reduced_vocabulary_feeds_target_ids_back() -> None:
    head = tiny_eagle3(draft_vocab_size=60)
    head.draft_to_target_offsets.copy_(torch.arange(60) * 3)
    results = []
    for attention in (SdpaAttention(), ReferenceAttention()):
        drafter = make_drafter(head, attention=attention)
        histories = make_histories(3, seed=8, head=head)
        torch.manual_seed(0)
        for rows in (8, 30, 1):
            steps = [history.step(num_rows=rows, num_drafts=3, max_next_drafts=4) for history in histories]
            proposal = drafter.propose(draft_batch(steps))
        for row, index in enumerate(proposal.indices):
            check_drafts(drafter, histories[index], proposal, row, 4)
        results.append(proposal.draft_token_ids)
    assert torch.equal(*results)
    assert (results[0] % 4 == 0).all()  # draft id i is target id 4i


def test_nothing_is_drafted_or_written_past_the_context() -> None:
    head = tiny_eagle3()
    [history] = make_histories(1, seed=2, head=head)
    history.token_ids = list(range(20))
    history.block_table = history.block_table[:6]  # 24 slots
    drafter = make_drafter(head, max_model_len=21)
    step = history.step(num_rows=40, num_drafts=0, max_next_drafts=4)
    proposal = drafter.propose(draft_batch([step]))
    # the newest slot is 19, and 20 is the last position there is
    check_drafts(drafter, history, proposal, 0, 2)
    keys = drafter.storage.layers[0].key[history.block_table].flatten(0, 1)
    assert keys[20].abs().sum() > 0
    assert keys[21:].abs().sum() == 0


def test_shared_prefix_blocks() -> None:
    head = tiny_eagle3()
    owner, guest = make_histories(2, seed=4, head=head)
    owner.token_ids = list(range(30))
    guest.token_ids = [*range(25), 77, 78, 79]
    guest.features = guest.features.clone()
    guest.features[:25] = owner.features[:25]
    drafter = make_drafter(head)
    drafter.propose(draft_batch([owner.step(num_rows=40, num_drafts=0, max_next_drafts=4)]))
    # 24 slots are whole blocks, and the token after the last of them is the same for both
    guest.block_table[:6] = owner.block_table[:6]
    guest.start = 24
    check_step(drafter, [guest], [guest.step(num_rows=40, num_drafts=0, max_next_drafts=4)], gap=0)
    check_cache(drafter, owner)


def test_broken_features_do_not_stay_in_the_cache() -> None:
    head = tiny_eagle3()
    drafter = make_drafter(head)
    broken, healthy = make_histories(2, seed=6, head=head)
    broken.features[3] = float("nan")
    broken.token_ids = list(range(20))
    steps = [history.step(num_rows=10, num_drafts=0, max_next_drafts=4) for history in (broken, healthy)]
    drafter.propose(draft_batch(steps))
    assert all(cache.key.isfinite().all() and cache.value.isfinite().all() for cache in drafter.storage.layers)


def test_nothing_to_do() -> None:
    drafter = make_drafter(tiny_eagle3())
    history = make_histories(1, seed=1, head=drafter.head)[0]
    step = history.step(num_rows=40, num_drafts=0, max_next_drafts=4)
    failed = HistoryStep(scheduled=step.scheduled, emitted=[], rows=step.rows)
    proposal = drafter.propose(draft_batch([failed]))
    assert proposal.indices == ()
    assert proposal.draft_token_ids.shape == (0, 4)


def test_drawn_drafts_come_with_what_they_were_drawn_from() -> None:
    """Each distribution is the head's after the drafts before, at the request's temperature."""
    head = tiny_eagle3(draft_vocab_size=60)
    head.draft_to_target_offsets.copy_(torch.arange(60) * 3)
    sampled, greedy = make_histories(2, seed=9, head=head)
    steps = [history.step(num_rows=40, num_drafts=0, max_next_drafts=4) for history in (sampled, greedy)]
    drawing = replace(steps[0].scheduled, params=SamplingParams(temperature=0.5), seed=3)
    certain = replace(steps[1].scheduled, params=SamplingParams(temperature=0.0))
    steps = [replace(steps[0], scheduled=drawing), replace(steps[1], scheduled=certain)]
    drafter = make_drafter(head, draws=True)
    proposal = drafter.propose(draft_batch(steps))
    assert proposal.draft_probs is not None
    assert proposal.draft_probs.shape == (2, 4, 300)
    assert proposal.draft_probs[1].abs().sum() == 0
    check_drafts(drafter, greedy, proposal, 1, 4)
    token_ids, features = list(sampled.token_ids), sampled.features[: sampled.start]
    slots, fused = token_ids[1:], head.fuse(features)
    for depth, draft in enumerate(proposal.draft_token_ids[0].tolist()):
        hidden = _last_hidden(head, slots, fused)
        expected = torch.zeros(300, dtype=torch.float64)
        expected[torch.arange(60) * 4] = (head.logits(hidden)[0] / 0.5).softmax(-1)
        assert (proposal.draft_probs[0, depth] - expected).abs().max() < TOLERANCE
        assert expected[draft] > 0
        slots, fused = [*slots, draft], torch.cat([fused, head.feed_back(hidden)])
    assert torch.equal(drafter.propose(draft_batch(steps)).draft_token_ids, proposal.draft_token_ids)


def _last_hidden(head: DraftHead, slots: list[int], fused: Tensor) -> Tensor:
    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * head.scaling
        is_hidden = torch.ones(len(slots), len(slots), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, float("-inf")).softmax(-1), value)

    hidden: Tensor = head(torch.tensor(slots), fused, torch.arange(len(slots)), attend)
    return hidden[-1:]
