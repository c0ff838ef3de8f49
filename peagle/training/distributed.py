"""Data parallelism under torchrun: each process takes its share of a step's conversations, gradients are summed.

Owns the group and the two things done with it. A run of one process needs neither. Refuses to know what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """This process among those of the run."""

    rank: int = 0
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        """True for the one that writes files and talks."""
        return self.rank == 0

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all gradients; a parameter without one counts as zero."""
        if self.num_processes == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def sum_counts(self, counts: list[float]) -> list[float]:
        """Sum of some numbers over all processes."""
        if self.num_processes == 1:
            return counts
        tensor = torch.tensor(counts, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(tensor)
        return [float(count) for count in tensor]

    def wait(self) -> None:
        """Until every process is here."""
        if self.num_processes > 1:
            dist.barrier()

    def leave(self) -> None:
        """The others go on, or end, without this process."""
        if self.num_processes > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_process_group() -> ProcessGroup:
    """The group that torchrun describes in the environment; alone without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ProcessGroup()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return ProcessGroup(rank=dist.get_rank(), num_processes=dist.get_world_size())
