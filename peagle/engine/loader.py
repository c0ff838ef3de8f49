"""From a configuration to a running engine, phase by phase.

Owns the order of loading. Refuses to know HTTP; whoever starts an engine listens to its phases.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peagle.attention.sdpa import SdpaAttention
from peagle.config import CacheConfig, EngineConfig, LogprobsMode, SchedulerConfig
from peagle.drafter.interface import Drafter
from peagle.engine.async_engine import AsyncLLMEngine
from peagle.engine.checkpoint import resolve_checkpoint
from peagle.engine.drafter_loader import DrafterPlan, DrafterSizes, HeadDrafter, build_drafter, plan_drafter
from peagle.engine.engine import EngineParts, LLMEngine
from peagle.engine.interface import EndListener, EnginePhase, PhaseListener
from peagle.engine.sizing import cache_size, drafter_sizes, kv_geometry, longest_sequence, runner_limits
from peagle.engine.speculation_loader import (
    add_lookups,
    build_speculation,
    choose_spec,
    drafter_name,
    num_lookup_drafts,
)
from peagle.heads.shipped import shipped_heads
from peagle.kv_cache.block_manager import BlockManager
from peagle.kv_cache.cache_manager import KVCacheManager
from peagle.kv_cache.storage import KVStorage
from peagle.models.loader import (
    choose_device,
    choose_precision,
    load_target,
    read_model_config,
)
from peagle.models.rank_group import RankGroup, join_ranks
from peagle.runner.drawn_verification import DrawnVerification
from peagle.runner.led_runner import LeadingRunner, StepRunner, follow
from peagle.runner.memory import CacheSize
from peagle.runner.model_runner import ModelRunner
from peagle.runner.row_logprobs import AnswerLogprobs
from peagle.runner.verification import MatchVerification, Verification
from peagle.runner.warmup import HeadSlots, measure_steps, warm_up
from peagle.scheduler.scheduler import Scheduler
from peagle.scheduler.speculation import Speculation
from peagle.spec_config import SpecConfig
from peagle.stats import GraphStats
from peagle.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A synchronous engine and what its users need beside it."""

    engine: LLMEngine
    tokenizer: Tokenizer
    config: EngineConfig
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRunner:
    """Everything of an engine that is on the device, and what the rest is derived from."""

    runner: ModelRunner
    tokenizer: Tokenizer
    config: EngineConfig
    directory: Path
    plan: DrafterPlan
    head_drafter: HeadDrafter
    drafter: Drafter
    cache_size: CacheSize
    sizes: DrafterSizes
    vocab_size: int
    is_on_cpu: bool


def load_engine(config: EngineConfig, on_phase: PhaseListener = lambda phase, detail: None) -> LoadedEngine:
    """Load everything and build an engine that is ready for its first request.

    Args:
        config: the configuration; "auto" and None are derived here.
        on_phase: called at the start of every phase.

    Raises:
        ConfigError, ModelLoadError: it can't be done; the message says what to change.
    """
    group = _join(config)
    loaded = _load_runner(config, on_phase, group)
    config, sizes, spec, has_head = loaded.config, loaded.sizes, loaded.config.spec, loaded.plan.directory is not None
    runner = loaded.runner if group.size == 1 else LeadingRunner(loaded.runner, group)
    _warm_up(runner, loaded, on_phase)
    parts = EngineParts(
        scheduler=_build_scheduler(
            config.scheduler.resolve(is_on_cpu=loaded.is_on_cpu),
            kv := _build_kv(config.cache, loaded.cache_size, has_head=has_head),
            _build_speculation(config, loaded.drafter, runner, sizes),
            sizes.max_model_len,
        ),
        kv=kv,
        runner=runner,
        tokenizer=loaded.tokenizer,
        max_model_len=sizes.max_model_len,
        vocab_size=loaded.vocab_size,
        num_speculative_tokens=max(loaded.plan.num_depths, num_lookup_drafts(spec)),
        cuts_drafts=spec.draft_sample_method == "greedy",
        drafter_name=drafter_name(spec, loaded.plan.head_config),
        graph_stats=_fresh_graph_stats(runner, loaded.head_drafter),
        seed=config.model.seed,
    )
    _give_back_memory()
    return LoadedEngine(engine=LLMEngine(parts), tokenizer=loaded.tokenizer, config=config, directory=loaded.directory)


def follow_engine(config: EngineConfig) -> None:
    """Be a rank other than 0 of a tensor-parallel model: load its part, and run rank 0's steps until that one ends.

    Args:
        config: the same as rank 0's.

    Raises:
        ConfigError, ModelLoadError: it can't be done, here or on any rank.
    """
    group = _join(config)
    loaded = _load_runner(config, lambda phase, detail: None, group)
    _give_back_memory()
    follow(loaded.runner, group)


def _join(config: EngineConfig) -> RankGroup:
    return join_ranks(config.model.tensor_parallel_size, device_type=choose_device(config.model).type)


def _load_runner(config: EngineConfig, on_phase: PhaseListener, group: RankGroup) -> LoadedRunner:
    _set_threads(config)
    on_phase(EnginePhase.LOADING_TOKENIZER, config.model.model)
    directory = resolve_checkpoint(config.model.model, lambda line: on_phase(EnginePhase.LOADING_TOKENIZER, line))
    tokenizer = Tokenizer.from_directory(directory)
    model_config = read_model_config(directory)
    longest_sequence(config, model_config)  # refused before anything large is loaded
    precision = choose_precision(config.model, model_config.dtype, choose_device(config.model))
    config = replace(config, spec=choose_spec(config.spec, directory, shipped_heads()))
    plan = plan_drafter(config.spec, model_config)

    on_phase(EnginePhase.LOADING_TARGET, _describe_weights(directory))
    target = load_target(
        directory, model_config, precision, SdpaAttention(), tap_layer_ids=plan.tap_layer_ids, group=group
    )
    if plan.directory is not None:
        on_phase(EnginePhase.LOADING_DRAFTER, _describe_weights(plan.directory))
    head = plan.load_head(directory, precision)

    geometry = kv_geometry(config.cache, target.geometry, precision)
    size = cache_size(config, geometry.block_bytes(target.geometry.num_layers), head, precision.device, group)
    on_phase(EnginePhase.ALLOCATING_KV_CACHE, f"{size.num_bytes / 2**30:.2f} GiB")
    sizes = drafter_sizes(config, plan, size, model_config, precision.device)
    head_drafter = build_drafter(plan, head, sizes)
    limits = runner_limits(config, plan, sizes.max_model_len)
    drafter = add_lookups(config.spec, head_drafter.drafter, max_num_seqs=limits.max_num_seqs)
    runner = ModelRunner(
        target,
        KVStorage(num_layers=target.geometry.num_layers, num_blocks=size.num_blocks, geometry=geometry),
        drafter,
        padding=sizes.padding,
        limits=limits,
        capture=sizes.capture,
        verification=_verification(config.spec, config.model.logprobs_mode),
    )
    return LoadedRunner(
        runner=runner,
        tokenizer=tokenizer,
        config=config,
        directory=directory,
        plan=plan,
        head_drafter=head_drafter,
        drafter=drafter,
        cache_size=size,
        sizes=sizes,
        vocab_size=target.geometry.vocab_size,
        is_on_cpu=precision.device.type == "cpu",
    )


def _warm_up(runner: StepRunner, loaded: LoadedRunner, on_phase: PhaseListener) -> None:
    sizes = loaded.sizes
    warm_up(
        runner,
        batch_sizes=sizes.padding.batch_sizes.sizes if sizes.capture else (1,),
        max_num_tokens=sizes.max_model_len - 1,
        block_size=sizes.block_size,
        has_drafter=loaded.plan.directory is not None,
        has_trees=loaded.plan.tree is not None,
        num_next_drafts=loaded.head_drafter.drafter.num_speculative_tokens,
        on_step=lambda line: on_phase(EnginePhase.WARMING_UP, line),
    )


def _build_speculation(config: EngineConfig, drafter: Drafter, runner: StepRunner, sizes: DrafterSizes) -> Speculation:
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


def _fresh_graph_stats(runner: StepRunner, head_drafter: HeadDrafter) -> dict[str, GraphStats]:
    """Counters by who counts, from zero: warming up does not count."""
    counters = {"target": runner.graph_stats}
    if head_drafter.graph_stats is not None:
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
