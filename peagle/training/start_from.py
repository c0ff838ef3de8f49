"""Another run's head as the beginning of this one, so that training goes on with more data.

Weights and draft vocabulary are taken over, the optimiser begins anew. Owns reading them and the check that they fit.
Refuses to change anything in the other run's directory.
"""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig
from peagle.errors import ConfigError
from peagle.training.checkpoint import checkpoints_in, read_draft_offsets, read_state
from peagle.training.vocabulary import DraftVocabulary

_FLAGS = {
    "num_hidden_layers": "--layers",
    "draft_vocab_size": "--draft-vocab-size",
    "aux_layer_ids": "--taps",
    "fc_norm_taps": "--norm-taps",
    "mask_token_id": "--mask-token-id",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beginning:
    """What is taken over."""

    path: Path
    target: str  # fingerprint
    method: str
    head: dict[str, Any]  # fields of `HeadConfig`
    trained: dict[str, Tensor]
    offsets: Tensor  # [V_d] int64, `d2t`

    @property
    def mask_token_id(self) -> int | None:
        """The token that its mask slots were trained with."""
        token_id: int | None = self.head["mask_token_id"]
        return token_id

    def check_fits(self, geometry: HeadConfig, *, target: str, method: str) -> None:
        """Compare with the head that this run would make.

        Raises:
            ConfigError: it is another one; names the first difference.
        """
        if self.target != target:
            raise ConfigError(f"{self.path} was trained for another target, so this run cannot start from it")
        if self.method != method:
            raise ConfigError(f"{self.path} is an {self.method} head, so this run needs --method {self.method}")
        for name, ours in asdict(geometry).items():
            theirs = self.head.get(name, ours)
            if theirs != ours:
                hint = f"; set {_FLAGS[name]} to the same" if name in _FLAGS else ""
                raise ConfigError(f"{self.path} has {name} {theirs}, this run's head would have {ours}{hint}")

    def vocabulary(self, counts: Tensor) -> DraftVocabulary:
        """Its draft vocabulary, measured by the tokens of this run's data, counted as by `count_tokens`."""
        chosen = self.offsets + torch.arange(len(self.offsets))  # [V_d]
        return DraftVocabulary(
            offsets=self.offsets,
            is_drafted=torch.zeros(len(counts), dtype=torch.bool).index_fill(0, chosen, True),
            num_tokens=int(counts.sum()),
            num_covered=int(counts[chosen].sum()),
        )

    def copy_to(self, head: DraftHead) -> None:
        """Give a head of this geometry and vocabulary the weights."""
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trained.items():
                parameters[name].copy_(tensor)


def read_beginning(directory: Path) -> Beginning:
    """Read a checkpoint, or the newest one of a run's directory.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    found = [directory, *reversed(checkpoints_in(directory))]
    path = next((one for one in found if (one / "training.pt").is_file()), None)
    if path is None:
        raise ConfigError(f"no checkpoint to start from in {directory}: give a run's --output, or one of its step-N")
    state = read_state(path)
    return Beginning(
        path=path,
        target=state["identity"]["target"],
        method=state["identity"]["method"],
        head=ast.literal_eval(state["identity"]["head"]),
        trained=state["trained"],
        offsets=read_draft_offsets(path),
    )
