"""Two processes make the gradients of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peagle.training.distributed import ProcessGroup, join_process_group
from tests.source_tree import ROOT
from tests.unit.peagle.training import gradient_process
from tests.unit.peagle.training.conversation import assert_same_gradients


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(gradient_process.__file__, str(tmp_path / "sum.pt")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
    )
    together = torch.load(tmp_path / "sum.pt", weights_only=True)
    gradients, counts = gradient_process.summed_gradients(ProcessGroup())
    assert_same_gradients(together["gradients"], gradients, tolerance=1e-12)
    assert together["counts"] == pytest.approx(counts, abs=1e-12)


def test_without_torchrun_a_process_is_alone() -> None:
    group = join_process_group()
    assert (group.rank, group.num_processes, group.is_first) == (0, 1, True)
    assert group.sum_counts([1.5, 2.0]) == [1.5, 2.0]
    group.wait()
    group.leave()
