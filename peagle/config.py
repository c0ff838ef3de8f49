"""The engine's configuration: frozen groups, each handed whole to the component that needs it.

Owns names, defaults, ranges and help texts (the command line, the environment and YAML are built from these fields).
Refuses to know where a value came from, and torch. `None` and "auto" mean "derived at load"; derived values are made
by `resolve` functions that return new objects, never by changing a frozen one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from peagle.config_field import option
from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

Dtype = Literal["auto", "float64", "float32", "float16", "bfloat16"]
KVCacheDtype = Literal["auto", "float64", "float32", "float16", "bfloat16", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
SchedulingPolicy = Literal["fcfs", "priority"]
GraphMode = Literal["auto", "eager", "capture"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(text: str | int) -> int:
    """Read a size such as `1073741824`, `2GiB` or `500MB`.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(f"not a size: {text!r}; write bytes or a unit, such as 2GiB or 500MB")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def _check_choice(name: str, value: str, literal: Any) -> None:
    if value not in get_args(literal):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(literal))}; got {value!r}")


def _check_min(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which target model, and how it is loaded."""

    model: str = option(
        DEFAULT_MODEL,
        "target model: a local directory (safetensors), a .gguf file, a hub id, or the embedded default",
    )
    dtype: Dtype = option(
        "auto",
        "compute type; auto is packed fp16 weights with float32 arithmetic on CPU, the checkpoint's type on CUDA",
    )
    device: Device = option("auto", "where the model runs; auto takes CUDA if there is one")
    max_model_len: int | None = option(
        None,
        "longest sequence in tokens, with its answer; default: the model's limit, at most 8192 and what fits the cache",
    )
    tensor_parallel_size: int = option(
        1, "processes that hold the model together, each a part of every layer; torchrun has to start as many"
    )
    num_threads: int | None = option(None, "CPU threads of a step; default: the cores that this process may use")
    seed: int = option(0, "seed from which the seeds of requests without one are drawn")
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "what logprobs are of: raw_logprobs, the model's own distribution, or processed_logprobs, the one that tokens "
        "are drawn from, after bias, penalties, temperature and truncation",
    )

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, Dtype)
        _check_choice("device", self.device, Device)
        _check_choice("logprobs_mode", self.logprobs_mode, LogprobsMode)
        _check_min("max_model_len", self.max_model_len, 2)
        _check_min("num_threads", self.num_threads, 1)
        _check_min("tensor_parallel_size", self.tensor_parallel_size, 1)
        if not self.model:
            raise ConfigError("model must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens in a KV block")
    num_kv_blocks: int | None = option(None, "KV blocks of the target's pool; excludes kv_cache_memory")
    kv_cache_memory: str | None = option(
        None, "bytes for the KV pools, such as 2GiB (default: 1GiB on CPU, on CUDA what gpu_memory_utilization leaves)"
    )
    gpu_memory_utilization: float = option(
        0.85, "share of the GPU's memory for weights and KV together; not used with num_kv_blocks and kv_cache_memory"
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "type of cached keys and values; auto is the compute type, fp8 (e4m3, without scales) holds most tokens and "
        "changes answers a little",
    )
    enable_prefix_caching: bool = option(True, "share the KV blocks of equal prefixes")

    def __post_init__(self) -> None:
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KVCacheDtype)
        _check_min("block_size", self.block_size, 1)
        _check_min("num_kv_blocks", self.num_kv_blocks, 1)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("set num_kv_blocks or kv_cache_memory, not both")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step."""

    max_num_seqs: int = option(32, "most sequences that run at once")
    max_num_batched_tokens: int | None = option(
        None,
        "token budget of a step: prefill chunks, decodes and drafts together (default: 128 on CPU, 2048 on CUDA, more "
        "if max_num_seqs needs it)",
    )
    max_num_queued_reqs: int = option(1024, "most requests that wait; more are refused")
    scheduling_policy: SchedulingPolicy = option(
        "fcfs", "fcfs, or priority (lower RequestInput.priority runs first; the HTTP API has no field for it yet)"
    )

    def __post_init__(self) -> None:
        _check_choice("scheduling_policy", self.scheduling_policy, SchedulingPolicy)
        _check_min("max_num_seqs", self.max_num_seqs, 1)
        _check_min("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_min("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or some sequence could never decode"
            )

    def resolve(self, *, is_on_cpu: bool) -> SchedulerConfig:
        """The same with the token budget set.

        A processor computes a token of a chunk of 128 as fast as one of 512, and streams wait for a chunk to end
        (docs/log.md); a CUDA device needs long chunks to be busy. Four tokens a sequence leave room for drafts.
        """
        if self.max_num_batched_tokens is not None:
            return self
        return replace(self, max_num_batched_tokens=max(128 if is_on_cpu else 2048, 4 * self.max_num_seqs))

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens` of a resolved configuration."""
        assert self.max_num_batched_tokens is not None, "resolve() first"
        return self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Fixed-shape execution of decoding steps."""

    graph_mode: GraphMode = option("auto", "capture CUDA graphs, or run the same fixed shapes eagerly; auto: by device")
    graph_batch_sizes: tuple[int, ...] | None = option(
        None, "batch-size buckets, comma-separated; default: every size on CPU, 1,2,4,8,16,... on CUDA"
    )

    def __post_init__(self) -> None:
        _check_choice("graph_mode", self.graph_mode, GraphMode)
        sizes = self.graph_batch_sizes
        if sizes is not None and (not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes))):
            raise ConfigError(f"graph_batch_sizes must be increasing positive numbers, got {sizes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All groups. Components get their own group only."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
