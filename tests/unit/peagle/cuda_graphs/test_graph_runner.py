"""The runner without capture: the same buffers, the same padding, everything but the graph. See also `tests/gpu`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from peagle.cuda_graphs.buckets import Buckets
from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers
from peagle.cuda_graphs.graph_runner import GraphRunner

SIZES = Buckets((1, 2, 4, 8))


class Recorder:
    """A step that sums pairs of rows, and remembers where its inputs lay."""

    def __init__(self) -> None:
        self.shapes: list[int] = []
        self.addresses: set[tuple[int, int]] = set()

    def __call__(self, shape: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert inputs["left"].shape == (shape, 2)
        self.shapes.append(shape)
        self.addresses.add((inputs["left"].data_ptr(), inputs["right"].data_ptr()))
        return {"sum": inputs["left"] + inputs["right"]}


def make_runner(step: Recorder) -> GraphRunner[int]:
    spec = BufferSpec((SIZES.sizes[-1], 2), torch.int64)
    buffers = StaticBuffers({"left": spec, "right": spec}, torch.device("cpu"))
    return GraphRunner(step, buffers, capture=False)


def test_steps_of_every_size_use_the_same_memory_and_padding_is_not_seen() -> None:
    step = Recorder()
    runner = make_runner(step)
    rng = np.random.default_rng(0)
    for num_rows in (3, 8, 1, 5, 2, 7):
        left, right = rng.integers(0, 100, (2, num_rows, 2))
        shape = SIZES.round_up(num_rows)
        padding = ((0, shape - num_rows), (0, 0))
        outputs = runner.run(shape, {"left": np.pad(left, padding), "right": torch.from_numpy(np.pad(right, padding))})
        assert outputs["sum"][:num_rows].tolist() == (left + right).tolist()
        assert not outputs["sum"][num_rows:].any(), "an earlier, larger step shines through"
    assert step.shapes == [4, 8, 1, 8, 2, 8]
    assert len(step.addresses) == 1


def test_nothing_is_captured() -> None:
    runner = make_runner(Recorder())
    for _ in range(2):
        runner.run(1, {"left": np.ones((1, 2), dtype=np.int64), "right": np.ones((1, 2), dtype=np.int64)})
    assert (runner.stats.hits, runner.stats.misses) == (0, 0)
