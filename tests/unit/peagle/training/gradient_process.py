"""One process of a data-parallel step; torchrun starts it. The first writes the sum of the gradients to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from peagle.training.config import LossOptions
from peagle.training.distributed import ProcessGroup, join_process_group
from peagle.training.peagle_step import PEagleStep
from tests.builders.head import tiny_head
from tests.unit.peagle.training.conversation import random_conversation, take_gradients, target_to_draft

NUM_CONVERSATIONS = 5


def summed_gradients(group: ProcessGroup) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Gradients and counts of this process's share of five conversations, then of all."""
    head = tiny_head().requires_grad_(True)
    step = PEagleStep(head, target_to_draft(), depth=3, options=LossOptions(), compute_dtype=torch.float64)
    loss, num_tokens = 0.0, 0.0
    for place in range(NUM_CONVERSATIONS):
        if place % group.num_processes == group.rank:
            one = random_conversation(12 + place, seed=place)
            report = step.backward(one.example, one.features, np.random.default_rng(place), scale=0.2)
            loss, num_tokens = loss + report.loss, num_tokens + report.num_response_tokens
    group.sum_gradients(head.parameters())
    counts = group.sum_counts([loss, num_tokens])
    return take_gradients(head), counts


if __name__ == "__main__":
    own_group = join_process_group()
    gradients, sums = summed_gradients(own_group)
    if own_group.is_first:
        assert own_group.num_processes == 2
        torch.save({"gradients": gradients, "counts": sums}, Path(sys.argv[1]))
    own_group.wait()
    own_group.leave()
