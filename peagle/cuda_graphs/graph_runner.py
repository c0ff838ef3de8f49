"""Runs a callable at fixed shapes: captured and replayed on CUDA, eagerly on the same buffers elsewhere.

Wraps any function of named tensors and a shape. Owns buffers, capture and replay. Refuses to know models: bucket
choice and padding are the caller's and are the same in both modes, so that a machine without a GPU tests all of the
logic but the capture itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from peagle.cuda_graphs.buffers import StaticBuffers, Values
from peagle.stats import GraphStats

Shape = TypeVar("Shape", bound=Hashable)
Outputs = dict[str, Tensor]
StepFunction = Callable[[Shape, Mapping[str, Tensor]], Outputs]


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    outputs: Outputs


class GraphRunner(Generic[Shape]):
    """Executes `function` at a shape, on inputs copied to fixed buffers.

    Args:
        function: from a shape and its input views to named outputs; must not synchronise with the host.
        buffers: the inputs' memory.
        capture: capture on first use of a shape, then replay. False: run eagerly.
    """

    def __init__(self, function: StepFunction[Shape], buffers: StaticBuffers, *, capture: bool) -> None:
        self._function = function
        self._buffers = buffers
        self._capture = capture
        self._graphs: dict[Shape, _CapturedGraph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self.stats = GraphStats()

    def run(self, shape: Shape, values: Mapping[str, Values]) -> Outputs:
        """Run one step. Outputs of a captured shape are overwritten by the next run of it.

        Args:
            shape: which fixed shape the values have been padded to.
            values: inputs, by name of the buffer.
        """
        views = self._buffers.fill(values)
        if not self._capture:
            self.stats.eager += 1
            return self._function(shape, views)
        captured = self._graphs.get(shape)
        if captured is None:
            self.stats.misses += 1
            captured = self._graphs[shape] = self._capture_graph(shape, views)
        else:
            self.stats.hits += 1
        captured.graph.replay()
        return captured.outputs

    def _capture_graph(self, shape: Shape, views: Mapping[str, Tensor]) -> _CapturedGraph:
        # Libraries allocate workspaces on first use, which must not happen inside a capture.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function(shape, views)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._function(shape, views)
        self._pool = graph.pool()
        return _CapturedGraph(graph, outputs)
