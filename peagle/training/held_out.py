"""Acceptance on held-out conversations while a run goes on, from the features that are cached anyway.

Owns the measurement of a head in training. `evaluate` measures a finished one, with the target at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from peagle.drafter.head import DraftHead
from peagle.training.acceptance import AcceptanceCounts, add_counts, walk
from peagle.training.answer_drafts import DraftAnswer
from peagle.training.dataset import Example
from peagle.training.features import FeatureCache


def measure_acceptance(
    head: DraftHead, examples: Sequence[Example], cache: FeatureCache, *, draft_answer: DraftAnswer, depth: int
) -> AcceptanceCounts:
    """Decode the greedy answers again, `depth` drafts a round; answers of one token are passed over."""
    counts = []
    for example in examples:
        num_prompt_tokens = int(np.flatnonzero(example.is_supervised)[0])
        answer = example.token_ids[num_prompt_tokens:].tolist()
        if len(answer) < 2:
            continue
        drafts = draft_answer(
            head,
            torch.from_numpy(example.token_ids).to(head.device),
            cache.get(example).features.to(head.device),
            num_prompt_tokens=num_prompt_tokens,
            num_speculative_tokens=depth,
        )
        counts.append(walk(answer, drafts.tolist(), num_speculative_tokens=depth))
    return add_counts(counts, num_speculative_tokens=depth)
