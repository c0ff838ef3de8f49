"""Builders of sequences, block pools and schedulers with small defaults, so that tests name only what they check."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from peagle.config import SchedulerConfig, SchedulingPolicy
from peagle.kv_cache import BlockManager, KVCacheManager
from peagle.sampling_params import SamplingParams
from peagle.scheduler import Scheduler
from peagle.scheduler.speculation import Speculation
from peagle.sequence import Sequence


def make_sequence(
    seq_id: int = 0,
    prompt: SequenceOf[int] = (1, 2, 3),
    *,
    max_tokens: int = 8,
    priority: int = 0,
    cache_salt: str | None = None,
    eos_token_ids: Iterable[int] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
) -> Sequence:
    """A waiting sequence that may generate `max_tokens` tokens."""
    return Sequence(
        seq_id=seq_id,
        request_id=f"request-{seq_id}",
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=params or SamplingParams(),
        seed=seed,
        eos_token_ids=frozenset(eos_token_ids),
        max_num_tokens=len(prompt) + max_tokens,
        priority=priority,
        cache_salt=cache_salt,
        arrival_time=float(seq_id),
    )


def make_kv(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    has_drafter: bool = True,
    num_drafter_blocks: int | None = None,
    enable_prefix_caching: bool = True,
) -> KVCacheManager:
    """Both pools, of the same size unless told otherwise."""
    target = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    if not has_drafter:
        return KVCacheManager(target)
    drafter = BlockManager(
        num_blocks if num_drafter_blocks is None else num_drafter_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_lookahead_tokens=1,
    )
    return KVCacheManager(target, drafter)


def make_scheduler(
    *,
    kv: KVCacheManager | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_queued_reqs: int = 1000,
    policy: SchedulingPolicy = "fcfs",
    max_model_len: int = 64,
    num_speculative_tokens: int = 3,
) -> Scheduler:
    """A scheduler over `kv`, or over fresh pools."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_queued_reqs=max_num_queued_reqs,
        scheduling_policy=policy,
    )
    return Scheduler(
        config,
        kv or make_kv(has_drafter=num_speculative_tokens > 0),
        max_model_len=max_model_len,
        speculation=Speculation(num_speculative_tokens=num_speculative_tokens),
    )
