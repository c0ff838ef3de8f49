"""From the speculative configuration to a drafter.

Owns the order that speculation imposes on loading: the head's taps are needed before the target is loaded, its weights
after, its pool once the cache is sized. Refuses to know the head's layout (`drafter`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.attention.sdpa import SdpaAttention
from peagle.drafter.choice import DraftChoice, LikeliestChain
from peagle.drafter.drawn_choice import DrawnChain
from peagle.drafter.eagle3 import Eagle3Drafter
from peagle.drafter.eagle3_passes import Eagle3Passes
from peagle.drafter.fused_head import fuse_projections
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig, TargetShape
from peagle.drafter.interface import Drafter
from peagle.drafter.loader import SharedWeights, load_head, missing_tables, read_head_config
from peagle.drafter.null import NullDrafter
from peagle.drafter.peagle import PEagleDrafter, kv_geometry
from peagle.drafter.tree_choice import TreeChoice
from peagle.drafter.turn_choice import DrawnTurn, LikeliestTurn
from peagle.engine.checkpoint import resolve_head
from peagle.errors import ConfigError, ModelLoadError
from peagle.kv_cache.storage import KVStorage
from peagle.layers.linear import pack_linears
from peagle.models.loader import Precision
from peagle.runner.graphed_drafter import GraphedDrafter
from peagle.runner.graphed_passes import GraphedPasses
from peagle.runner.input_batch import PaddingPolicy
from peagle.spec_config import MAX_NUM_SPECULATIVE_TOKENS, SpecConfig, TreeSpec
from peagle.stats import GraphStats

logger = logging.getLogger(__name__)

_DEFAULT_NUM_SPECULATIVE_TOKENS = 4
_EMBEDDING, _LM_HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


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
        if self.directory is None or self.target_shape is None or self.head_config is None:
            return None
        head = load_head(
            self.directory,
            target=self.target_shape,
            shared=_shared_weights(self.directory, self.head_config, target_directory),
            dtype=precision.compute_dtype,
            device=precision.device,
        )
        fuse_projections(head)
        if precision.packed:
            pack_linears(head)
        return head


def plan_drafter(spec: SpecConfig, model_config: Any) -> DrafterPlan:
    """Read the head's configuration.

    Raises:
        ModelLoadError: there is no head there, or it does not fit the target.
        ConfigError: the head cannot draft in the way that is asked for.
    """
    if spec.model is None:
        return DrafterPlan(num_speculative_tokens=0)
    directory = resolve_head(spec.model, logger.info)
    shape = TargetShape(
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        final_norm_eps=_final_norm_eps(model_config),
    )
    config = read_head_config(directory, shape)
    _check_way(spec, config)
    tree = spec.parallel_drafting_spec
    return DrafterPlan(
        num_speculative_tokens=_num_speculative_tokens(spec, config) if tree is None else tree.num_nodes,
        tree=tree,
        draws_drafts=spec.draft_sample_method == "probabilistic",
        directory=directory,
        head_config=config,
        target_shape=shape,
    )


def _num_speculative_tokens(spec: SpecConfig, config: HeadConfig) -> int:
    if spec.num_speculative_tokens is not None:
        return spec.num_speculative_tokens
    chosen, source = config.num_speculative_tokens, "the draft head's config.json"
    if chosen is None:
        chosen, source = _DEFAULT_NUM_SPECULATIVE_TOKENS, "the default, as the draft head's config.json names none"
    if chosen > MAX_NUM_SPECULATIVE_TOKENS:
        raise ModelLoadError(
            f"the draft head's config.json asks for {chosen} drafts, and at most {MAX_NUM_SPECULATIVE_TOKENS} are "
            "verified in a step: set num_speculative_tokens"
        )
    logger.info("num_speculative_tokens: %d (%s)", chosen, source)
    return chosen


def _final_norm_eps(model_config: Any) -> float | None:
    """Epsilon of the target's final norm; None if it is no plain RMSNorm (Gemma's weights count from 1)."""
    if str(model_config.model_type).startswith("gemma"):
        return None
    eps: float | None = getattr(model_config, "rms_norm_eps", None)
    return eps


def _check_way(spec: SpecConfig, config: HeadConfig) -> None:
    """A head drafts in the way it was trained for; in the other it would draft badly and say nothing."""
    family = "eagle" if config.merges_embedding else "eagle3"
    if spec.method in ("eagle", "eagle3") and spec.method != family:
        raise ConfigError(
            f"speculative_config: the draft head is of method {family}, not of method {spec.method}: leave method out"
        )
    if config.is_parallel:
        if spec.parallel_drafting is False:
            raise ConfigError(
                "speculative_config: parallel_drafting is false, but the draft head was trained to draft in parallel "
                "(it has mask_hidden); one token after the other it would be right about the first draft only. Leave "
                "parallel_drafting out, or use an EAGLE-3 head"
            )
        return
    reason = "the draft head has no mask_hidden: it is a plain EAGLE head, which drafts one token after the other"
    needs_parallel = {
        "parallel_drafting true": spec.parallel_drafting is True,
        "method peagle": spec.method == "peagle",
        "parallel_drafting_spec": spec.parallel_drafting_spec is not None,
    }
    for name, is_asked_for in needs_parallel.items():
        if is_asked_for:
            raise ConfigError(
                f"speculative_config: {name} needs a head that drafts in parallel; {reason}. Leave it out, or use a "
                "P-EAGLE head"
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafter:
    """A drafter, and how its passes ran; None where nothing can be captured."""

    drafter: Drafter
    graph_stats: GraphStats | None = None


def build_drafter(plan: DrafterPlan, head: DraftHead | None, sizes: DrafterSizes) -> HeadDrafter:
    """The drafter with its pool allocated."""
    if head is None:
        return HeadDrafter(drafter=NullDrafter())
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=sizes.num_blocks,
        geometry=kv_geometry(head, block_size=sizes.block_size),
    )
    if not head.is_parallel:
        return _build_eagle3(plan, head, storage, sizes)
    drafter = PEagleDrafter(
        head=head,
        attention=SdpaAttention(),
        num_speculative_tokens=plan.num_depths,
        storage=storage,
        max_model_len=sizes.max_model_len,
        choice=_choice(plan, head),
    )
    if sizes.padding.fixed_width is None:  # shapes cost nothing, so nothing is padded to them
        return HeadDrafter(drafter=drafter)
    graphed = GraphedDrafter(drafter, padding=sizes.padding, capture=sizes.capture)
    return HeadDrafter(drafter=graphed, graph_stats=graphed.graph_stats)


def _build_eagle3(plan: DrafterPlan, head: DraftHead, storage: KVStorage, sizes: DrafterSizes) -> HeadDrafter:
    passes = Eagle3Passes(head=head, attention=SdpaAttention(), storage=storage, max_model_len=sizes.max_model_len)
    choice = DrawnTurn(head) if plan.draws_drafts else LikeliestTurn(head)
    if sizes.padding.fixed_width is None:
        return HeadDrafter(drafter=Eagle3Drafter(passes, num_speculative_tokens=plan.num_depths, choice=choice))
    graphed = GraphedPasses(
        passes, padding=sizes.padding, num_speculative_tokens=plan.num_depths, capture=sizes.capture
    )
    drafter = Eagle3Drafter(passes, num_speculative_tokens=plan.num_depths, choice=choice, runs=graphed)
    return HeadDrafter(drafter=drafter, graph_stats=graphed.graph_stats)


def _shared_weights(directory: Path, config: HeadConfig, target_directory: Path) -> SharedWeights | None:
    """The target's weights that the head leaves to it; None if there are none."""
    missing = missing_tables(directory)
    if not missing and not config.reads_last_hidden:
        return None
    embedding = _read_tensor(target_directory, _EMBEDDING)
    lm_head = _read_tensor(target_directory, _LM_HEAD)
    return SharedWeights(
        embed_tokens=embedding,
        lm_head=embedding if lm_head is None else lm_head,
        final_norm=_read_tensor(target_directory, _FINAL_NORM),
    )


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
