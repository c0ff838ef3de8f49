"""The numbers that follow from a configuration, a model and the memory there is.

Owns the longest sequence, the number of KV blocks, the largest step and how steps are padded. Refuses to load and to
allocate anything.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from peagle.config import CacheConfig, EngineConfig, GraphConfig
from peagle.cuda_graphs.buckets import Buckets
from peagle.drafter.head import DraftHead
from peagle.engine.drafter_loader import DrafterPlan, DrafterSizes, drafter_block_bytes
from peagle.engine.speculation_loader import num_lookup_drafts
from peagle.errors import ConfigError
from peagle.kv_cache.storage import KVGeometry
from peagle.models.interface import TargetGeometry
from peagle.models.loader import Precision, has_experts, torch_dtype
from peagle.models.rank_group import RankGroup
from peagle.runner.input_batch import PaddingPolicy
from peagle.runner.memory import CacheSize, size_cache
from peagle.runner.model_runner import RunnerLimits

logger = logging.getLogger(__name__)

_DEFAULT_MAX_MODEL_LEN = 8192
_SHORTEST_MODEL_LEN = 2  # a token of prompt and one of answer


def drafter_sizes(
    config: EngineConfig, plan: DrafterPlan, size: CacheSize, model_config: Any, device: torch.device
) -> DrafterSizes:
    """What the cache holds decides how long a sequence may be, and that how steps are padded.

    Args:
        config: the configuration.
        plan: of the drafter.
        size: of the cache.
        model_config: the target's, of `transformers`.
        device: where steps run.

    Raises:
        ConfigError: a length or a capture is asked for that is not possible.
    """
    block_size = config.cache.block_size
    # A length that nobody asked for gives way to the memory that there is.
    max_model_len = min(longest_sequence(config, model_config), size.num_blocks * block_size)
    _log_sizes(size, block_size, max_model_len)
    capture = _should_capture(config, device, model_config)
    return DrafterSizes(
        num_blocks=size.num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        padding=_padding(config.graph, runner_limits(config, plan, max_model_len), capture=capture),
        capture=capture,
    )


def longest_sequence(config: EngineConfig, model_config: Any) -> int:
    """Tokens of a sequence at most, by the configuration and the model's positions.

    Raises:
        ConfigError: more is configured than the model has.
    """
    limit = int(model_config.max_position_embeddings)
    wanted = config.model.max_model_len
    if wanted is None:
        return min(limit, _DEFAULT_MAX_MODEL_LEN)
    if wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}, but the model's positions end at {limit}")
    return wanted


def kv_geometry(cache: CacheConfig, target: TargetGeometry, precision: Precision) -> KVGeometry:
    """Shape and type of a KV block."""
    name = cache.kv_cache_dtype
    return KVGeometry(
        block_size=cache.block_size,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        dtype=precision.compute_dtype if name == "auto" else torch_dtype(name),
        device=precision.device,
    )


def cache_size(
    config: EngineConfig, target_block_bytes: int, head: DraftHead | None, device: torch.device, group: RankGroup
) -> CacheSize:
    """Blocks of both pools; every rank of `group` has as many.

    Raises:
        ConfigError: they could not hold one sequence of the configured length.
    """
    size = size_cache(
        config.cache,
        target_block_bytes=target_block_bytes,
        drafter_block_bytes=drafter_block_bytes(head, config.cache.block_size),
        max_model_len=config.model.max_model_len or _SHORTEST_MODEL_LEN,
        device=device,
    )
    # Rank 0 hands out the blocks of all.
    num_blocks = group.smallest(size.num_blocks)
    return CacheSize(num_blocks=num_blocks, num_bytes=size.num_bytes // size.num_blocks * num_blocks)


def runner_limits(config: EngineConfig, plan: DrafterPlan, max_model_len: int) -> RunnerLimits:
    """The largest step."""
    return RunnerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_blocks=-(-max_model_len // config.cache.block_size),
        num_speculative_tokens=max(plan.num_speculative_tokens, num_lookup_drafts(config.spec)),
    )


def _should_capture(config: EngineConfig, device: torch.device, model_config: Any) -> bool:
    graph, obstacle = config.graph, None
    if device.type != "cuda":
        obstacle = "needs a CUDA device"
    elif has_experts(model_config):
        obstacle = "cannot hold a mixture of experts, whose shapes depend on the tokens"
    elif config.model.tensor_parallel_size > 1:
        obstacle = "has not been tried on a model that is split between processes"
    if graph.graph_mode == "capture" and obstacle is not None:
        raise ConfigError(f"graph_mode capture {obstacle}; use auto or eager")
    return graph.graph_mode != "eager" and obstacle is None


def _padding(graph: GraphConfig, limits: RunnerLimits, *, capture: bool) -> PaddingPolicy:
    sizes = graph.graph_batch_sizes
    if sizes is not None:
        # sizes beyond the largest batch are never used; the largest batch itself always is
        below = tuple(size for size in sizes if size < limits.max_num_seqs)
        batch_sizes = Buckets((*below, limits.max_num_seqs))
    elif capture:
        batch_sizes = Buckets.doubling(limits.max_num_seqs)
    else:
        batch_sizes = Buckets.every(limits.max_num_seqs)
    counts = Buckets.doubling if capture else Buckets.every
    return PaddingPolicy(
        batch_sizes=batch_sizes,
        block_counts=counts(limits.max_num_blocks),
        draft_block_counts=counts(limits.max_num_blocks + 1 + limits.num_speculative_tokens),
        fixed_width=limits.num_speculative_tokens + 1 if capture else None,
        may_split=not capture and sizes is None,
    )


def _log_sizes(size: CacheSize, block_size: int, max_model_len: int) -> None:
    num_tokens = size.num_blocks * block_size
    logger.info("KV cache: %d blocks, %d tokens, %.2f GiB", size.num_blocks, num_tokens, size.num_bytes / 2**30)
    logger.info("Maximum concurrency at %d tokens a request: %.1f", max_model_len, num_tokens / max_model_len)
