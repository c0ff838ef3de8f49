"""The processes that hold one model together, as torchrun started them.

Every process ("rank") holds its part of the weights and of the KV cache, and runs every step; rank 0 alone schedules
and answers. Owns the group, the numbers all must agree on, and the way of a step from rank 0 to the others. Refuses to
know what a step is and how a model is split (`models.loader`).
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from peagle.errors import ConfigError

# Ranks wait for the next step as long as nobody asks for anything.
_FOREVER = timedelta(days=3650)


class LeaderGoneError(Exception):
    """Rank 0 has ended, or can't be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """This process among those of the model. Steps travel beside the device's own collectives, over gloo.

    Attributes:
        rank: of this process; 0 leads.
        size: number of processes; 1 without torchrun.
        local_rank: which of this machine's devices is this process's.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _messages: Any = None  # dist.ProcessGroup

    @property
    def is_leader(self) -> bool:
        """True for the one that schedules."""
        return self.rank == 0

    def smallest(self, number: int) -> int:
        """The smallest of every rank's numbers."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._messages)
        return int(tensor)

    def send(self, message: object) -> None:
        """From rank 0 to all others."""
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._messages)
        dist.broadcast(data, src=0, group=self._messages)

    def receive(self) -> Any:
        """What rank 0 sends next; waits for it. Only our own processes write to this connection.

        Raises:
            LeaderGoneError: nothing will come any more.
        """
        try:
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, src=0, group=self._messages)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._messages)
        except RuntimeError as error:
            raise LeaderGoneError(str(error)) from error
        return pickle.loads(data.numpy().tobytes())

    def leave(self) -> None:
        """End this process's part in it. Without this, gloo's threads may abort a process that ends."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(size: int, *, device_type: str) -> RankGroup:
    """The group of `size` processes that torchrun describes in the environment; alone for 1.

    Args:
        size: as configured.
        device_type: "cpu" (gloo) or "cuda" (NCCL, one device for each process of a machine).

    Raises:
        ConfigError: the process was not started so, or transformers cannot split a model here.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != size:
        command = f"torchrun --nproc-per-node {size} --no-python peagle serve --tensor-parallel-size {size} ..."
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the number of processes that hold this model is {started}: "
            f"start it with `{command}`"
        )
    if size == 1:
        return RankGroup()
    _check_accelerate()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=_FOREVER)
    return RankGroup(
        rank=dist.get_rank(),
        size=size,
        local_rank=local_rank,
        _messages=dist.new_group(backend="gloo", timeout=_FOREVER),
    )


def _check_accelerate() -> None:
    try:
        import accelerate  # noqa: F401  # transformers splits a model while it loads only where this is installed
    except ImportError:
        raise ConfigError(
            "tensor_parallel_size above 1 needs the package accelerate: pip install 'peagle[tensor-parallel]'"
        ) from None
