"""A trained head as files that servers load: in bfloat16, and without the tables that it has from its target.

Owns what goes into the files, and the check that nothing is left out that was trained. Refuses to know the layouts
(`peagle.drafter.export` writes them) and the trainer.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from peagle.drafter.export import save_flat, save_speculators
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import SharedWeights, load_head
from peagle.errors import ConfigError, ModelLoadError
from peagle.models.loader import read_model_config

_DTYPE = torch.bfloat16


class SharedTable(Enum):
    """A table that a head may have from its target; the value is its name in a head's file."""

    EMBEDDINGS = "embed_tokens.weight"
    LM_HEAD = "lm_head.weight"


class Layout(Enum):
    """How the files are laid out."""

    FLAT = "flat"
    SPECULATORS = "speculators"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """What to write.

    Attributes:
        checkpoint: a run's directory, of which the newest checkpoint is taken, or one checkpoint.
        target: checkpoint of the target that it was trained for.
        leave_out: tables that servers take from the target instead. It makes the file much smaller; the mask token's
            embedding is then the target's row too.
        layout: of the files.
    """

    checkpoint: Path
    target: Path
    output: Path
    leave_out: frozenset[SharedTable] = frozenset()
    layout: Layout = Layout.FLAT

    def __post_init__(self) -> None:
        if self.output.resolve() == self.checkpoint.resolve():
            raise ConfigError("the output must be another directory than the checkpoint's, which stays as it is")
        if not (self.target / "config.json").is_file():
            raise ConfigError(f"no target at {self.target}: config.json is missing")


def publish(config: PublishConfig) -> Path:
    """Write the head; returns the directory.

    Raises:
        ConfigError: a table was trained, so that leaving it out would change every draft.
        ModelLoadError: the head or the target cannot be read, or they do not belong together.
    """
    target = read_model_config(config.target)
    shape = TargetShape(
        num_layers=target.num_hidden_layers, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )
    tables = read_target_tables(config.target)
    head = load_head(find_head(config.checkpoint), target=shape, shared=tables)
    for table in sorted(config.leave_out, key=lambda one: one.value):
        _check_untrained(head, table, tables)
    return _write(head, config, shape=shape, tables=tables)


def find_head(checkpoint: Path) -> Path:
    """The directory with the head's files: `checkpoint`, or its newest `step-N`.

    Raises:
        ConfigError: there is no head in either.
    """
    steps = sorted(path.parent for path in checkpoint.glob("step-*/config.json"))
    found = [checkpoint] if (checkpoint / "config.json").is_file() else steps
    if not found:
        raise ConfigError(f"no checkpoint in {checkpoint}: give the output directory of a run that has written one")
    return found[-1]


def _write(head: DraftHead, config: PublishConfig, *, shape: TargetShape, tables: SharedWeights) -> Path:
    """The files appear in the output only once they have been read back and are the same head."""
    output = config.output
    rounded = copy.deepcopy(head).to(_DTYPE)
    names = {table.value for table in config.leave_out}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as name:
        if config.layout is Layout.SPECULATORS:
            directory = save_speculators(rounded, name, verifier=config.target.name, leave_out=names)
        else:
            directory = save_flat(rounded, name, leave_out=names)
        _check_same(load_head(directory, target=shape, shared=tables, dtype=_DTYPE), rounded)
        output.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.replace(output / path.name)
    return output


def read_target_tables(directory: Path) -> SharedWeights:
    """The embedding table and the lm_head of a target's checkpoint, without loading the rest of it."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # it is no mapping
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    found[name] = file.get_tensor(name)
    embeddings = found.get("model.embed_tokens.weight")
    return SharedWeights(embed_tokens=embeddings, lm_head=found.get("lm_head.weight", embeddings))  # or they are tied


def _check_untrained(head: DraftHead, table: SharedTable, tables: SharedWeights) -> None:
    is_embeddings = table is SharedTable.EMBEDDINGS
    own = (head.embed_tokens if is_embeddings else head.lm_head).weight.detach().cpu()
    of_target = tables.embed_tokens if is_embeddings else tables.lm_head
    if of_target is None or own.shape[1] != of_target.shape[1]:
        raise ConfigError(
            f"{table.value} cannot be left out: the head's has the shape {list(own.shape)}, the target's "
            f"{None if of_target is None else list(of_target.shape)}"
        )
    if not is_embeddings:  # the rows of the draft vocabulary
        of_target = of_target[head.to_target_ids(torch.arange(len(own), device=head.device)).cpu()]
    if not torch.equal(own.to(_DTYPE), of_target.to(_DTYPE)):
        raise ConfigError(
            f"{table.value} cannot be left out: it was trained and differs from the target's; keep it in, or train "
            "with this table frozen"
        )


def _check_same(again: DraftHead, written: DraftHead) -> None:
    expected = written.state_dict()
    different = [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, expected[name].cpu())]
    config = written.config
    if config.num_speculative_tokens is None:  # a layout may have to name some number
        config = replace(config, num_speculative_tokens=again.config.num_speculative_tokens)
    if again.config != config or different:
        raise ModelLoadError(f"the written head does not read back as it was: {', '.join(different) or 'config.json'}")
