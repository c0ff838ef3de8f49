"""State of a training run on disk, from which it goes on as if it had never stopped.

Everything random is drawn from (seed, step), so weights, optimiser and counters are all there is to keep. A checkpoint
is a directory that appears whole, by a rename. Owns writing, finding, reading and the check that it belongs to the
run. Refuses to know how a step is made.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from peagle.errors import ConfigError

_PREFIX = "step-"
_STATE = "training.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    num_conversations: int = 0  # over all epochs; place in the data
    num_tokens: int = 0  # response tokens, over all epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What must be equal for a checkpoint to be continued."""

    target: str  # fingerprint
    method: str
    data: str  # fingerprint of the conversations, in order
    head: str  # description of the head's configuration


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: of the run; checkpoints are its directories `step-N`.
        identity: of the run.
        keep: newest checkpoints that are kept.
    """

    def __init__(self, directory: Path, identity: RunIdentity, *, keep: int) -> None:
        self._directory = directory
        self._identity = identity
        self._keep = keep

    def save(self, head: DraftHead, optimiser: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint; the head in it can be served (bfloat16 comes with `peagle train export`).

        Raises:
            ConfigError: the disk is full, or not writable.
        """
        final = self._directory / f"{_PREFIX}{progress.step:08d}"
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            save_flat(head, partial)
            state = {
                "identity": asdict(self._identity),
                "progress": asdict(progress),
                "trained": {name: p.detach().cpu() for name, p in head.named_parameters() if p.requires_grad},
                "optimiser": optimiser.state_dict(),
            }
            torch.save(state, partial / _STATE)
            shutil.rmtree(final, ignore_errors=True)
            partial.replace(final)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(
                f"cannot write a checkpoint to {self._directory}: {error}; free some space and start again, the run "
                "goes on from the last one"
            ) from error
        for old in self._found()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def restore(self, head: DraftHead, optimiser: torch.optim.Optimizer) -> Progress:
        """Go back to the newest checkpoint; the beginning if there is none.

        Raises:
            ConfigError: it belongs to another target, data or head, or cannot be read.
        """
        found = self._found()
        if not found:
            return Progress()
        path = found[-1] / _STATE
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cannot read {path}: {error}; remove {found[-1].name} to go on from the one before"
            ) from error
        self._check(state["identity"], found[-1])
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, tensor in state["trained"].items():
                parameters[name].copy_(tensor)
        optimiser.load_state_dict(state["optimiser"])
        return Progress(**state["progress"])

    def _check(self, theirs: dict[str, str], path: Path) -> None:
        for name, value in asdict(self._identity).items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{path} was made with another {name} ({theirs.get(name)}, now {value}); use another output "
                    "directory, or the same settings"
                )

    def _found(self) -> list[Path]:
        return sorted(path for path in self._directory.glob(f"{_PREFIX}*") if (path / _STATE).is_file())
