"""Acceptance of a head in training: that of its drafts, walked along the greedy answers."""

from __future__ import annotations

import torch

from peagle.drafter.reference import reference_drafts
from peagle.training.acceptance import add_counts, walk
from peagle.training.answer_drafts import draft_answer
from peagle.training.features import FeatureCache, FeatureExtractor
from peagle.training.held_out import measure_acceptance
from tests.builders.head import tiny_head
from tests.builders.model import build_model
from tests.unit.peagle.training.conversation import random_conversation


def test_it_is_the_acceptance_of_the_reference_drafts() -> None:
    extractor = FeatureExtractor(build_model("llama"), aux_layer_ids=(1, 2, 3), num_soft_targets=4)
    cache, head = FeatureCache(extractor, directory=None, limit=0), tiny_head(dtype=torch.float32)
    examples = [random_conversation(12 + seed, seed=seed, num_prompt_tokens=4).example for seed in range(3)]
    short = random_conversation(5, num_prompt_tokens=4).example  # one token: no draft follows
    for example in examples:  # so that some drafts are right
        features = cache.get(example).features.float()
        drafts = reference_drafts(head, example.token_ids[:6].tolist(), features[:5], 3).logits.argmax(-1)
        example.token_ids[6] = int(drafts[0])
    expected = []
    for example in examples:
        features, tokens = cache.get(example).features.float(), example.token_ids.tolist()
        drafted = [
            reference_drafts(head, tokens[:end], features[: end - 1], 3).logits.argmax(-1).tolist()
            for end in range(5, len(tokens))
        ]
        expected.append(walk(tokens[4:], drafted, num_speculative_tokens=3))
    found = measure_acceptance(head, [*examples, short], cache, draft_answer=draft_answer, depth=3)
    assert found == add_counts(expected, num_speculative_tokens=3)
    assert found.num_rounds == sum(one.num_rounds for one in expected) > 0
