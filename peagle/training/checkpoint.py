"""State of a training run on disk, from which it goes on as if it had never stopped.

Everything random is drawn from (seed, step), so weights, optimiser and counters are all there is to keep. A checkpoint
is a directory that appears whole, by a rename. Owns writing, finding, reading and the check that it belongs to the
run. Refuses to know how a step is made.
"""

from __future__ import annotations

import ast
import pickle
import shutil
import struct
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig
from peagle.errors import ConfigError
from peagle.training.provenance import write_provenance

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
    head: str  # description of the head's configuration, a dictionary of the fields of `HeadConfig`

    def first_difference(self, theirs: Mapping[str, str]) -> str | None:
        """Name of a part in which a checkpoint differs."""
        for name, value in asdict(self).items():
            is_same = _is_same_head if name == "head" else str.__eq__
            if not is_same(value, theirs.get(name, "")):
                return name
        return None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: of the run; checkpoints are its directories `step-N`.
        identity: of the run.
        keep: newest checkpoints that are kept.
        provenance: goes beside each.
    """

    def __init__(
        self, directory: Path, identity: RunIdentity, *, keep: int, provenance: Mapping[str, Any] | None = None
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._keep = keep
        self._provenance = dict(provenance or {})

    def require_space(self, head: DraftHead) -> None:
        """Find out now, not in an hour, that the checkpoints will not fit on the disk.

        Raises:
            ConfigError: they will not.
        """
        trained = sum(p.nbytes for p in head.parameters() if p.requires_grad)
        size = sum(tensor.nbytes for tensor in head.state_dict().values()) + 3 * trained  # AdamW has two more of each
        needed = size * (self._keep + 1 - min(len(checkpoints_in(self._directory)), self._keep))
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise ConfigError(
                f"{self._directory} has {free / 1e9:.1f} GB free, and {self._keep} checkpoints need "
                f"{needed / 1e9:.1f} GB; free some space or lower keep_checkpoints"
            )

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
            write_provenance(partial, {**self._provenance, "progress": asdict(progress)})
            state = {
                "identity": asdict(self._identity),
                "progress": asdict(progress),
                "trained": {name: p.detach().cpu() for name, p in head.named_parameters() if p.requires_grad},
                "optimiser": optimiser.state_dict(),
            }
            torch.save(state, partial / _STATE)
            shutil.rmtree(final, ignore_errors=True)
            partial.replace(final)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(
                f"cannot write a checkpoint to {self._directory}: {error}; free some space and start again, the run "
                "goes on from the last one"
            ) from error
        for old in checkpoints_in(self._directory)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def restore(self, head: DraftHead, optimiser: torch.optim.Optimizer) -> Progress:
        """Go back to the newest checkpoint; the beginning if there is none.

        Raises:
            ConfigError: it belongs to another target, data or head, or to a run that trains other weights, or cannot be
            read.
        """
        found = checkpoints_in(self._directory)
        if not found:
            return Progress()
        state = read_state(found[-1])
        self._check(state["identity"], found[-1])
        if not torch.equal(read_draft_offsets(found[-1]), head.draft_to_target_offsets.cpu()):
            raise ConfigError(
                f"{found[-1]} has another draft vocabulary: go on with the same --start-from, or use another output "
                "directory"
            )
        parameters = dict(head.named_parameters())
        changed = {name for name, parameter in parameters.items() if parameter.requires_grad} ^ state["trained"].keys()
        if changed:
            raise ConfigError(
                f"{found[-1]} was made by training other weights, which differ in {', '.join(sorted(changed))}: set "
                "train_embeddings and train_lm_head as they were, or use another output directory"
            )
        with torch.no_grad():
            for name, tensor in state["trained"].items():
                parameters[name].copy_(tensor)
        optimiser.load_state_dict(state["optimiser"])
        return Progress(**state["progress"])

    def _check(self, theirs: Mapping[str, str], path: Path) -> None:
        name = self._identity.first_difference(theirs)
        if name is not None:
            raise ConfigError(
                f"{path} was made with another {name} ({theirs.get(name)}, now {getattr(self._identity, name)}); use "
                "another output directory, or the same settings"
            )


def checkpoints_in(directory: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(path for path in directory.glob(f"{_PREFIX}*") if (path / _STATE).is_file())


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `CheckpointStore.save` wrote.

    Raises:
        ConfigError: it cannot be read.
    """
    path = checkpoint / _STATE
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError, struct.error, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; remove {checkpoint.name} to go on from the one before"
        ) from error
    return state


def read_draft_offsets(checkpoint: Path) -> Tensor:
    """The draft vocabulary of a checkpoint's head, `d2t`: [V_d] int64.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
            offsets: Tensor = file.get_tensor("d2t")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {checkpoint / 'model.safetensors'}: {error}") from error
    return offsets


def _is_same_head(ours: str, theirs: str) -> bool:
    """Fields that the configuration did not have yet count as their defaults."""
    defaults = {field.name: field.default for field in fields(HeadConfig) if field.default is not MISSING}
    try:
        mine, other = ({**defaults, **ast.literal_eval(text)} for text in (ours, theirs))
    except (ValueError, SyntaxError, TypeError):
        return ours == theirs
    return bool(mine == other)
