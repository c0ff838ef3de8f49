"""From a configuration to a running engine, phase by phase.

Owns the order of loading and the derived values (context length, precision, cache size, padding). Refuses to know
HTTP; whoever starts an engine listens to its phases.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle.attention.sdpa import SdpaAttention
from peagle.config import CacheConfig, EngineConfig, GraphConfig, LogprobsMode, SchedulerConfig
from peagle.cuda_graphs.buckets import Buckets
from peagle.drafter.head import DraftHead
from peagle.drafter.interface import Drafter
from peagle.engine.async_engine import AsyncLLMEngine
from peagle.engine.checkpoint import resolve_checkpoint
from peagle.engine.drafter_loader import DrafterPlan, DrafterSizes, build_drafter, drafter_block_bytes, plan_drafter
from peagle.engine.engine import EngineParts, LLMEngine
from peagle.engine.interface import EndListener, EnginePhase, PhaseListener
from peagle.engine.speculation_loader import (
    add_lookups,
    build_speculation,
    choose_spec,
    drafter_name,
    num_lookup_drafts,
)
from peagle.errors import ConfigError
from peagle.heads.shipped import shipped_heads
from peagle.kv_cache.block_manager import BlockManager
from peagle.kv_cache.cache_manager import KVCacheManager
from peagle.kv_cache.storage import KVGeometry, KVStorage
from peagle.models.interface import TargetGeometry
from peagle.models.loader import (
    Precision,
    choose_device,
    choose_precision,
    has_experts,
    load_target,
    read_model_config,
    torch_dtype,
)
from peagle.runner.drawn_verification import DrawnVerification
from peagle.runner.graphed_drafter import GraphedDrafter
from peagle.runner.input_batch import PaddingPolicy
from peagle.runner.memory import CacheSize, size_cache
from peagle.runner.model_runner import ModelRunner, RunnerLimits
from peagle.runner.row_logprobs import AnswerLogprobs
from peagle.runner.verification import MatchVerification, Verification
from peagle.runner.warmup import HeadSlots, measure_steps, warm_up
from peagle.scheduler.scheduler import Scheduler
from peagle.scheduler.speculation import Speculation
from peagle.spec_config import SpecConfig
from peagle.stats import GraphStats
from peagle.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_MAX_MODEL_LEN = 8192
_SHORTEST_MODEL_LEN = 2  # a token of prompt and one of answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A synchronous engine and what its users need beside it."""

    engine: LLMEngine
    tokenizer: Tokenizer
    config: EngineConfig
    directory: Path


def load_engine(config: EngineConfig, on_phase: PhaseListener = lambda phase, detail: None) -> LoadedEngine:
    """Load everything and build an engine that is ready for its first request.

    Args:
        config: the configuration; "auto" and None are derived here.
        on_phase: called at the start of every phase.

    Raises:
        ConfigError, ModelLoadError: it can't be done; the message says what to change.
    """
    _set_threads(config)
    on_phase(EnginePhase.LOADING_TOKENIZER, config.model.model)
    directory = resolve_checkpoint(config.model.model, lambda line: on_phase(EnginePhase.LOADING_TOKENIZER, line))
    tokenizer = Tokenizer.from_directory(directory)
    model_config = read_model_config(directory)
    precision = choose_precision(config.model, model_config.dtype, choose_device(config.model))
    max_model_len = _max_model_len(config, model_config)
    backend = SdpaAttention()
    config = replace(config, spec=choose_spec(config.spec, directory, shipped_heads()))
    plan = plan_drafter(config.spec, model_config)

    on_phase(EnginePhase.LOADING_TARGET, _describe_weights(directory))
    target = load_target(directory, model_config, precision, backend, tap_layer_ids=plan.tap_layer_ids)
    if plan.directory is not None:
        on_phase(EnginePhase.LOADING_DRAFTER, _describe_weights(plan.directory))
    head = plan.load_head(directory, precision)

    block_size = config.cache.block_size
    geometry = _kv_geometry(config.cache, target.geometry, precision)
    size = _size_cache(config, geometry.block_bytes(target.geometry.num_layers), head, precision.device)
    on_phase(EnginePhase.ALLOCATING_KV_CACHE, f"{size.num_bytes / 2**30:.2f} GiB")
    # A length that nobody asked for gives way to the memory that there is.
    max_model_len = min(max_model_len, size.num_blocks * block_size)
    _log_sizes(size, block_size, max_model_len)
    limits = _limits(config, plan, max_model_len)
    capture = _should_capture(config.graph, precision.device, model_config)
    padding = _padding(config.graph, limits, capture=capture)
    storage = KVStorage(num_layers=target.geometry.num_layers, num_blocks=size.num_blocks, geometry=geometry)
    sizes = DrafterSizes(
        num_blocks=size.num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        padding=padding,
        capture=capture,
    )
    head_drafter = build_drafter(plan, head, sizes)
    drafter = add_lookups(config.spec, head_drafter, max_num_seqs=limits.max_num_seqs)
    runner = ModelRunner(
        target,
        storage,
        drafter,
        padding=padding,
        limits=limits,
        capture=capture,
        verification=_verification(config.spec, config.model.logprobs_mode),
    )

    _warm_up(runner, sizes, on_phase, has_drafter=head is not None)
    parts = EngineParts(
        scheduler=_build_scheduler(
            config.scheduler.resolve(is_on_cpu=precision.device.type == "cpu"),
            kv := _build_kv(config.cache, size, has_head=head is not None),
            _build_speculation(config, drafter, runner, sizes),
            max_model_len,
        ),
        kv=kv,
        runner=runner,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=target.geometry.vocab_size,
        num_speculative_tokens=max(plan.num_depths, num_lookup_drafts(config.spec)),
        cuts_drafts=config.spec.draft_sample_method == "greedy",
        drafter_name=drafter_name(config.spec, plan.head_config),
        graph_stats=_fresh_graph_stats(runner, head_drafter),
        seed=config.model.seed,
    )
    _give_back_memory()
    return LoadedEngine(engine=LLMEngine(parts), tokenizer=tokenizer, config=config, directory=directory)


def _warm_up(runner: ModelRunner, sizes: DrafterSizes, on_phase: PhaseListener, *, has_drafter: bool) -> None:
    warm_up(
        runner,
        batch_sizes=sizes.padding.batch_sizes.sizes if sizes.capture else (1,),
        max_num_tokens=sizes.max_model_len - 1,
        block_size=sizes.block_size,
        has_drafter=has_drafter,
        on_step=lambda line: on_phase(EnginePhase.WARMING_UP, line),
    )


def _build_speculation(config: EngineConfig, drafter: Drafter, runner: ModelRunner, sizes: DrafterSizes) -> Speculation:
    """Limits and policy, which knows what plain steps cost if it goes by that."""
    speculation = build_speculation(config.spec, drafter)
    if drafter.num_speculative_tokens and config.spec.is_adaptive:
        most = sizes.padding.batch_sizes.sizes[-1]
        head = HeadSlots(num_drafts=drafter.num_speculative_tokens, num_mask_slots=drafter.num_mask_slots)
        measured = measure_steps(
            runner,
            batch_sizes=sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}),
            max_num_tokens=sizes.max_model_len - 1,
            block_size=sizes.block_size,
            head=head if drafter.num_layers > 0 else None,
        )
        for step in measured:
            speculation.note_cost(step)
    return speculation


def _fresh_graph_stats(runner: ModelRunner, head_drafter: Drafter) -> dict[str, GraphStats]:
    """Counters by who counts, from zero: warming up does not count."""
    counters = {"target": runner.graph_stats}
    if isinstance(head_drafter, GraphedDrafter):
        counters["drafter"] = head_drafter.graph_stats
    for stats in counters.values():
        stats.reset()
    return counters


def _verification(spec: SpecConfig, mode: LogprobsMode) -> Verification:
    logprobs = AnswerLogprobs(mode)
    if spec.draft_sample_method == "greedy":
        return MatchVerification(logprobs)
    return DrawnVerification(spec.rejection_sample_method, logprobs)


def _give_back_memory() -> None:
    """Return to the system what loading needed and serving does not, such as weights before they were packed."""
    gc.collect()
    libc = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(libc), "malloc_trim", None) if libc else None  # glibc's own
    if trim is not None:
        trim(0)


def start_engine(loaded: LoadedEngine, *, on_end: EndListener = lambda output: None) -> AsyncLLMEngine:
    """Give an engine a thread of its own.

    Args:
        loaded: nobody else may use it afterwards.
        on_end: called on the event loop with the last output of every request.
    """
    scheduler = loaded.config.scheduler
    return AsyncLLMEngine(
        loaded.engine, max_num_requests=scheduler.max_num_queued_reqs + scheduler.max_num_seqs, on_end=on_end
    )


def _set_threads(config: EngineConfig) -> None:
    torch.set_num_threads(config.model.num_threads or len(os.sched_getaffinity(0)))


def _max_model_len(config: EngineConfig, model_config: Any) -> int:
    limit = int(model_config.max_position_embeddings)
    wanted = config.model.max_model_len
    if wanted is None:
        return min(limit, _DEFAULT_MAX_MODEL_LEN)
    if wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}, but the model's positions end at {limit}")
    return wanted


def _kv_geometry(cache: CacheConfig, target: TargetGeometry, precision: Precision) -> KVGeometry:
    name = cache.kv_cache_dtype
    return KVGeometry(
        block_size=cache.block_size,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        dtype=precision.compute_dtype if name == "auto" else torch_dtype(name),
        device=precision.device,
    )


def _size_cache(
    config: EngineConfig, target_block_bytes: int, head: DraftHead | None, device: torch.device
) -> CacheSize:
    return size_cache(
        config.cache,
        target_block_bytes=target_block_bytes,
        drafter_block_bytes=drafter_block_bytes(head, config.cache.block_size),
        max_model_len=config.model.max_model_len or _SHORTEST_MODEL_LEN,
        device=device,
    )


def _limits(config: EngineConfig, plan: DrafterPlan, max_model_len: int) -> RunnerLimits:
    return RunnerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_blocks=-(-max_model_len // config.cache.block_size),
        num_speculative_tokens=max(plan.num_speculative_tokens, num_lookup_drafts(config.spec)),
    )


def _should_capture(graph: GraphConfig, device: torch.device, model_config: Any) -> bool:
    obstacle = None
    if device.type != "cuda":
        obstacle = "needs a CUDA device"
    elif has_experts(model_config):
        obstacle = "cannot hold a mixture of experts, whose shapes depend on the tokens"
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


def _build_kv(cache: CacheConfig, size: CacheSize, *, has_head: bool) -> KVCacheManager:
    pools = [
        BlockManager(
            size.num_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        for num_lookahead_tokens in ((0, 1) if has_head else (0,))
    ]
    return KVCacheManager(*pools)


def _build_scheduler(
    config: SchedulerConfig, kv: KVCacheManager, speculation: Speculation, max_model_len: int
) -> Scheduler:
    # The door counts running and waiting requests together, so the queue behind it must hold both.
    queue = replace(config, max_num_queued_reqs=config.max_num_queued_reqs + config.max_num_seqs)
    return Scheduler(queue, kv, max_model_len=max_model_len, speculation=speculation)


def _describe_weights(directory: Path) -> str:
    """What is about to be read."""
    files = list(directory.glob("*.safetensors"))
    gib = sum(file.stat().st_size for file in files) / 2**30
    return f"{gib:.2f} GiB in {len(files)} {'file' if len(files) == 1 else 'files'} of {directory}"


def _log_sizes(size: CacheSize, block_size: int, max_model_len: int) -> None:
    num_tokens = size.num_blocks * block_size
    logger.info("KV cache: %d blocks, %d tokens, %.2f GiB", size.num_blocks, num_tokens, size.num_bytes / 2**30)
    logger.info("Maximum concurrency at %d tokens a request: %.1f", max_model_len, num_tokens / max_model_len)
