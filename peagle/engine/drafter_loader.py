"""From the speculative configuration to a drafter.

Owns the order that speculation imposes on loading: the head's taps are needed before the target is loaded, its weights
after, its pool once the cache is sized. Refuses to know the head's layout (`drafter`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.choice import DraftChoice, LikeliestChain
from peagle.drafter.drawn_choice import DrawnChain
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig, TargetShape, read_head_config
from peagle.drafter.interface import Drafter
from peagle.drafter.loader import SharedWeights, load_head
from peagle.drafter.null import NullDrafter
from peagle.drafter.peagle import PEagleDrafter, kv_geometry
from peagle.drafter.tree_choice import TreeChoice
from peagle.errors import ConfigError, ModelLoadError
from peagle.kv_cache.storage import KVStorage
from peagle.layers.linear import pack_linears
from peagle.models.loader import Precision
from peagle.runner.graphed_drafter import GraphedDrafter
from peagle.runner.input_batch import PaddingPolicy
from peagle.spec_config import SpecConfig, TreeSpec

_DEFAULT_NUM_SPECULATIVE_TOKENS = 4
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlan:
    """What is known of the drafter before anything large is loaded. Without a head: the null drafter, K = 0."""

    num_speculative_tokens: int
    directory: Path | None = None
    head_config: HeadConfig | None = None
    target_shape: TargetShape | None = None
    tree: TreeSpec | None = None
    draws_drafts: bool = False

    @property
    def num_depths(self) -> int:
        """How deep drafts go."""
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose entering residual stream the head reads."""
        return () if self.head_config is None else self.head_config.aux_layer_ids

    def load_head(self, target_directory: Path, precision: Precision) -> DraftHead | None:
        """Load the head's weights; None without one."""
        if self.directory is None or self.target_shape is None:
            return None
        head = load_head(
            self.directory,
            target=self.target_shape,
            shared=_shared_tables(self.directory, target_directory),
            dtype=precision.compute_dtype,
            device=precision.device,
        )
        if precision.packed:
            pack_linears(head)
        return head


def plan_drafter(spec: SpecConfig, model_config: Any) -> DrafterPlan:
    """Read the head's configuration.

    Raises:
        ModelLoadError: there is no head there, or it does not fit the target.
    """
    _refuse_unserved(spec)
    if spec.model is None:
        return DrafterPlan(num_speculative_tokens=0)
    directory = Path(spec.model).expanduser()
    if not directory.is_dir():
        raise ModelLoadError(f"speculative_config.model must be the directory of a draft head; {directory} is none")
    shape = TargetShape(
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
    )
    config = read_head_config(directory / "config.json", shape)
    if not config.is_parallel:
        raise ModelLoadError(
            "the draft head names no mask token, so it drafts one token after the other (EAGLE-3), which is not served "
            "yet; use a P-EAGLE head"
        )
    tree = spec.parallel_drafting_spec
    own = config.num_speculative_tokens or _DEFAULT_NUM_SPECULATIVE_TOKENS
    return DrafterPlan(
        num_speculative_tokens=spec.num_speculative_tokens or own if tree is None else tree.num_nodes,
        tree=tree,
        draws_drafts=spec.draft_sample_method == "probabilistic",
        directory=directory,
        head_config=config,
        target_shape=shape,
    )


def _refuse_unserved(spec: SpecConfig) -> None:
    unserved = {
        "parallel_drafting false": spec.parallel_drafting is False,
        "method eagle3 without parallel_drafting true": spec.method == "eagle3" and spec.parallel_drafting is None,
    }
    for name, is_asked_for in unserved.items():
        if is_asked_for:
            raise ConfigError(f"speculative_config: {name} is not served yet")


def _choice(plan: DrafterPlan, head: DraftHead) -> DraftChoice:
    if plan.tree is not None:
        return TreeChoice(head, plan.tree)
    return DrawnChain(head) if plan.draws_drafts else LikeliestChain(head)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSizes:
    """Sizes that are known once the cache is planned."""

    num_blocks: int
    block_size: int
    max_model_len: int
    padding: PaddingPolicy
    capture: bool


def drafter_block_bytes(head: DraftHead | None, block_size: int) -> int:
    """Bytes of one block of the head's pool; 0 without a head."""
    if head is None:
        return 0
    return kv_geometry(head, block_size=block_size).block_bytes(head.config.num_hidden_layers)


def build_drafter(plan: DrafterPlan, head: DraftHead | None, sizes: DrafterSizes) -> Drafter:
    """The drafter with its pool allocated."""
    if head is None:
        return NullDrafter()
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=sizes.num_blocks,
        geometry=kv_geometry(head, block_size=sizes.block_size),
    )
    drafter = PEagleDrafter(
        head=head,
        attention=SdpaAttention(),
        num_speculative_tokens=plan.num_depths,
        storage=storage,
        max_model_len=sizes.max_model_len,
        choice=_choice(plan, head),
    )
    return GraphedDrafter(drafter, padding=sizes.padding, capture=sizes.capture)


def _shared_tables(head_directory: Path, target_directory: Path) -> SharedWeights | None:
    """The target's tables, read only if the head leaves one out."""
    names = {name.removeprefix("model.") for path in head_directory.glob("*.safetensors") for name in _names(path)}
    if {"embed_tokens.weight", "lm_head.weight"} <= names:
        return None
    embedding = _read_tensor(target_directory, _EMBEDDING)
    lm_head = _read_tensor(target_directory, _LM_HEAD)
    return SharedWeights(embed_tokens=embedding, lm_head=embedding if lm_head is None else lm_head)


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _read_tensor(directory: Path, name: str) -> Tensor | None:
    for path in sorted(directory.glob("*.safetensors")):
        if name in _names(path):
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
