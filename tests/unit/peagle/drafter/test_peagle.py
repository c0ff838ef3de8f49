"""Golden tests: whatever happened before, drafts and keys are those of a naive pass over the committed tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from peagle.attention.backend import AttentionBackend
from peagle.attention.reference import ReferenceAttention
from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.head import DraftHead
from peagle.drafter.inputs import DraftShape
from peagle.drafter.peagle import PEagleDrafter, kv_geometry
from peagle.drafter.reference import reference_drafts
from peagle.kv_cache.storage import KVStorage
from tests.builders.draft_history import DraftHistory, HistoryStep, draft_batch
from tests.builders.head import tiny_head

BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAX_LEN = 64
TOLERANCE = 1e-9


def make_drafter(
    head: DraftHead, num_speculative_tokens: int = 4, attention: AttentionBackend | None = None
) -> PEagleDrafter:
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=NUM_BLOCKS,
        geometry=kv_geometry(head, block_size=BLOCK_SIZE),
    )
    return PEagleDrafter(
        head=head,
        attention=attention or SdpaAttention(),
        num_speculative_tokens=num_speculative_tokens,
        storage=storage,
        max_model_len=MAX_LEN,
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


def cached(drafter: PEagleDrafter, history: DraftHistory, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the committed slots, each [start, num_kv_heads, head_dim]."""
    cache = drafter.storage.layers[layer]
    keys, values = (tensor[history.block_table].flatten(0, 1)[: history.start] for tensor in (cache.key, cache.value))
    return keys, values


def check_cache(drafter: PEagleDrafter, history: DraftHistory) -> None:
    committed = history.token_ids[: history.start + 1]
    expected = reference_drafts(drafter.head, committed, history.features[: history.start], 1)
    for layer in range(drafter.num_layers):
        keys, values = cached(drafter, history, layer)
        assert (keys - expected.keys[layer]).abs().max() < TOLERANCE
        assert (values - expected.values[layer]).abs().max() < TOLERANCE


def check_step(drafter: PEagleDrafter, histories: list[DraftHistory], steps: list[HistoryStep], gap: int) -> None:
    """Propose, then compare drafts, their logits and the cache with the reference."""
    batch = draft_batch(steps, gap=gap)
    proposal = drafter.propose(batch)
    inputs = drafter.lay_out(batch)
    logits = drafter.draft_logits(batch.features, drafter.to_tensors(inputs))
    logits = logits.view(*inputs.logits_rows.shape, -1) if inputs.drafting else logits
    for i, index in enumerate(proposal.indices):
        history, num_drafts = histories[index], inputs.num_drafts[i]
        expected = reference_drafts(drafter.head, history.token_ids, history.features[: history.start], num_drafts)
        assert (logits[i, :num_drafts] - expected.logits).abs().max() < TOLERANCE
        draft_ids = drafter.head.to_target_ids(expected.logits.argmax(-1)).tolist()
        width = max(inputs.num_drafts)
        assert proposal.draft_token_ids[i].tolist() == draft_ids + [-1] * (width - num_drafts)
    asked = [i for i, step in enumerate(steps) if step.scheduled.max_next_drafts > 0]
    assert list(proposal.indices) == asked
    for history in histories:
        check_cache(drafter, history)


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_random_histories(num_speculative_tokens: int, num_layers: int) -> None:
    # acceptance, rejection, chunks, preemption, a changing number of drafts, permuted blocks, padded target rows
    head = tiny_head(num_hidden_layers=num_layers)
    drafter = make_drafter(head, num_speculative_tokens)
    histories = make_histories(3, seed=num_layers, head=head)
    rng = random.Random(num_speculative_tokens)
    torch.manual_seed(0)
    for _ in range(14):
        chosen = rng.sample(histories, rng.randint(1, 3))
        chosen = [history for history in chosen if history.num_tokens < MAX_LEN - 10]
        if not chosen:
            break
        for history in chosen:
            if rng.random() < 0.1:
                history.preempt(rng.sample(history.block_table, len(history.block_table)))
        steps = [random_step(history, rng, num_speculative_tokens) for history in chosen]
        check_step(drafter, chosen, steps, gap=rng.randint(0, 2))


def test_features_come_from_the_rows_of_an_accepted_path() -> None:
    """Trees beside chains: slots follow the path, wherever its rows are."""
    head = tiny_head()
    drafter = make_drafter(head)
    histories = make_histories(3, seed=11, head=head)
    rng = random.Random(11)
    torch.manual_seed(0)
    num_scattered = 0
    for _ in range(8):
        steps = [
            history.step(
                num_rows=30,
                num_drafts=rng.randint(0, 9 if is_tree else 4),
                max_next_drafts=4,
                max_depth=4 if is_tree else None,
            )
            for history, is_tree in zip(histories, (True, True, False), strict=True)
        ]
        num_scattered += sum(step.accepted_rows not in (None, [], [1], [1, 2]) for step in steps)
        check_step(drafter, histories, steps, gap=rng.randint(0, 2))
    assert num_scattered > 3


def test_backends_agree() -> None:
    head = tiny_head(draft_vocab_size=60)
    head.draft_to_target_offsets.copy_(torch.arange(60) * 3)
    results = []
    for attention in (SdpaAttention(), ReferenceAttention()):
        drafter = make_drafter(head, attention=attention)
        histories = make_histories(3, seed=8, head=head)
        torch.manual_seed(0)
        for rows in (8, 30, 1):
            steps = [history.step(num_rows=rows, num_drafts=3, max_next_drafts=4) for history in histories]
            proposal = drafter.propose(draft_batch(steps))
        results.append(proposal.draft_token_ids)
    assert torch.equal(*results)
    assert (results[0] % 4 == 0).all()  # draft id i is target id 4i


def test_chunks_leave_the_same_cache_as_one_pass() -> None:
    head = tiny_head()
    whole, chunked = make_histories(2, seed=3, head=head)
    whole.token_ids = list(range(1, 24))
    chunked.token_ids, chunked.features, chunked.rng = list(whole.token_ids), whole.features, random.Random(0)
    whole.rng = random.Random(0)
    drafter = make_drafter(head)
    drafter.propose(draft_batch([whole.step(num_rows=40, num_drafts=0, max_next_drafts=4)]))
    for num_rows in (1, 7, 4, 2, 30):
        step = chunked.step(num_rows=num_rows, num_drafts=0, max_next_drafts=4)
        proposal = drafter.propose(draft_batch([step]))
        assert bool(proposal.indices) == step.scheduled.is_sampling
    for layer in range(drafter.num_layers):
        for one, other in zip(cached(drafter, whole, layer), cached(drafter, chunked, layer), strict=True):
            assert (one - other).abs().max() < TOLERANCE


def test_shared_prefix_blocks() -> None:
    head = tiny_head()
    owner, guest = make_histories(2, seed=4, head=head)
    owner.token_ids = list(range(30))
    guest.token_ids = [*range(25), 77, 78, 79]
    guest.features = guest.features.clone()
    guest.features[:25] = owner.features[:25]
    drafter = make_drafter(head)
    drafter.propose(draft_batch([owner.step(num_rows=40, num_drafts=0, max_next_drafts=0)]))
    # 24 slots are whole blocks, and the token after the last of them is the same for both
    guest.block_table[:6] = owner.block_table[:6]
    guest.start = 24
    step = guest.step(num_rows=40, num_drafts=0, max_next_drafts=4)
    check_step(drafter, [guest], [step], gap=0)
    check_cache(drafter, owner)


def test_fixed_shape_gives_the_same_drafts() -> None:
    head = tiny_head()
    ragged, fixed = make_drafter(head), make_drafter(head)
    histories = make_histories(3, seed=5, head=head)
    torch.manual_seed(0)
    prefill = draft_batch([history.step(num_rows=40, num_drafts=0, max_next_drafts=0) for history in histories])
    ragged.propose(prefill)
    fixed.propose(prefill)
    for _ in range(4):
        steps = [history.step(num_rows=1, num_drafts=4, max_next_drafts=4) for history in histories]
        batch = draft_batch(steps, gap=1)
        inputs = fixed.lay_out(batch, DraftShape(num_seqs=5, width=8, num_blocks=MAX_LEN // BLOCK_SIZE))
        grid = inputs.grids[0]
        picked = fixed.draft_grid(
            batch.features,
            token_ids=torch.from_numpy(inputs.token_ids),
            feature_rows=torch.from_numpy(inputs.feature_rows),
            positions=torch.from_numpy(grid.positions),
            slot_mapping=torch.from_numpy(inputs.slot_mapping),
            block_tables=torch.from_numpy(grid.block_tables),
            logits_rows=torch.from_numpy(inputs.logits_rows),
        )
        assert picked["token_ids"].shape == picked["confidences"].shape == (5, 4)
        expected = ragged.propose(batch)
        proposal = fixed.to_proposal(batch, inputs, picked)
        assert proposal.indices == expected.indices
        assert torch.equal(proposal.draft_token_ids, expected.draft_token_ids)
        assert proposal.confidences is not None
        assert expected.confidences is not None
        assert torch.allclose(proposal.confidences, expected.confidences)
    for history in histories:
        check_cache(fixed, history)


def test_broken_features_do_not_stay_in_the_cache() -> None:
    head = tiny_head()
    drafter = make_drafter(head)
    broken, healthy = make_histories(2, seed=6, head=head)
    broken.features[3] = float("nan")
    broken.token_ids = list(range(20))
    steps = [history.step(num_rows=10, num_drafts=0, max_next_drafts=4) for history in (broken, healthy)]
    drafter.propose(draft_batch(steps))
    assert all(cache.key.isfinite().all() and cache.value.isfinite().all() for cache in drafter.storage.layers)


def test_nothing_to_do() -> None:
    drafter = make_drafter(tiny_head())
    history = make_histories(1, seed=1, head=drafter.head)[0]
    step = history.step(num_rows=40, num_drafts=0, max_next_drafts=4)
    failed = HistoryStep(scheduled=step.scheduled, emitted=[], rows=step.rows)
    proposal = drafter.propose(draft_batch([failed]))
    assert proposal.indices == ()
    assert proposal.draft_token_ids.shape == (0, 4)


def test_training_mask_sees_what_inference_sees() -> None:
    # One flat pass over all anchors and depths with the training rule = one draft pass for each anchor.
    head, depth = tiny_head(), 3
    history = make_histories(1, seed=7, head=head)[0]
    token_ids, num_anchors = list(range(20, 30)), 9
    anchors = torch.arange(num_anchors).repeat(depth)  # [T]
    depths = torch.arange(depth).repeat_interleave(num_anchors)
    is_first = depths == 0
    assert head.config.mask_token_id is not None
    slot_tokens = torch.where(is_first, torch.tensor(token_ids)[anchors + 1], head.config.mask_token_id)
    fused = torch.where(is_first[:, None], head.fuse(history.features[anchors]), head.fused_mask())
    sees_context = is_first[None] & (anchors[None] <= anchors[:, None])
    sees_chain = (anchors[None] == anchors[:, None]) & (depths[None] <= depths[:, None])
    is_hidden = ~(sees_context | sees_chain)

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * head.scaling
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, float("-inf")).softmax(-1), value)

    logits = head.logits(head(slot_tokens, fused, anchors + depths, attend)).view(depth, num_anchors, -1)
    for anchor in range(num_anchors):
        expected = reference_drafts(head, token_ids[: anchor + 2], history.features[: anchor + 1], depth)
        assert (logits[:, anchor] - expected.logits).abs().max() < TOLERANCE
