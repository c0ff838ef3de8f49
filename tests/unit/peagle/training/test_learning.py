"""Sixty steps on a tiny target, by each method: held-out drafts are accepted more often than before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.training.config import LossOptions, Method
from peagle.training.dataset import Example
from peagle.training.features import FeatureCache, FeatureExtractor
from peagle.training.held_out import measure_acceptance
from peagle.training.methods import training_method
from tests.builders.head import tiny_head
from tests.builders.trained_head import AUX_LAYER_IDS, PROMPT_LEN, VOCAB_SIZE, build_target, write_continuations
from tests.unit.peagle.training.conversation import random_conversation, target_to_draft

NUM_STEPS, BATCH, DEPTH = 60, 8, 3


def examples_of(token_ids: Tensor) -> list[Example]:
    is_supervised = np.arange(token_ids.shape[1]) >= PROMPT_LEN
    return [Example(token_ids=row.numpy(), is_supervised=is_supervised, is_greedy=True) for row in token_ids]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_sixty_steps_raise_held_out_acceptance(method: Method) -> None:
    target = build_target()
    cache = FeatureCache(
        FeatureExtractor(target, aux_layer_ids=AUX_LAYER_IDS, num_soft_targets=16), directory=None, limit=0
    )
    train = examples_of(write_continuations(target, num_seqs=96, seed=0).token_ids)
    held_out = examples_of(write_continuations(target, num_seqs=16, seed=1).token_ids)
    head = tiny_head(
        dtype=torch.float32, num_hidden_layers=1, vocab_size=VOCAB_SIZE, draft_vocab_size=VOCAB_SIZE, mask_token_id=31
    ).requires_grad_(True)
    way = training_method(method)
    step = way.make_step(
        head, torch.arange(VOCAB_SIZE), depth=DEPTH, options=LossOptions(), compute_dtype=torch.float32
    )
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    features = [cache.get(example) for example in train]

    def acceptance(of: DraftHead) -> list[float]:
        counts = measure_acceptance(of, held_out, cache, draft_answer=way.draft_answer, depth=DEPTH)
        return [counts.acceptance_length, *counts.conditional_rates]

    before = acceptance(head)
    for number in range(NUM_STEPS):
        optimiser.zero_grad()
        for place in range(number * BATCH, (number + 1) * BATCH):
            index = place % len(train)
            step.backward(train[index], features[index], np.random.default_rng(place), scale=1.0 / BATCH)
        optimiser.step()
    after = acceptance(head)
    assert before[0] < 1.2
    assert after[0] > 1.35
    assert after[1] > before[1] + 0.2


def test_an_eagle3_head_needs_no_mask() -> None:
    head = tiny_head(dtype=torch.float32, mask_token_id=None).requires_grad_(True)
    one = random_conversation(20)
    way = training_method("eagle3")
    step = way.make_step(head, target_to_draft(), depth=3, options=LossOptions(), compute_dtype=torch.float32)
    step.backward(one.example, one.features, np.random.default_rng(0), scale=1.0)
    assert not way.has_mask
    assert all(parameter.grad is not None for parameter in head.parameters())
