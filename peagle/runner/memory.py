"""How many KV blocks there are.

Owns the sizing of both pools and the refusal to start with a cache that could not hold one full sequence. Refuses to
allocate anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peagle.config import CacheConfig, parse_bytes
from peagle.errors import ConfigError

_DEFAULT_CPU_BYTES = 2**30
_MIN_MODEL_LEN = 2  # a token of prompt and one of answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Blocks of each pool. Both pools have the same number: a sequence needs its tokens in both."""

    num_blocks: int
    num_bytes: int  # both pools together


def size_cache(
    config: CacheConfig, *, target_block_bytes: int, drafter_block_bytes: int, max_model_len: int, device: torch.device
) -> CacheSize:
    """Decide the number of blocks.

    Args:
        config: the cache group.
        target_block_bytes: bytes of a target block over all layers.
        drafter_block_bytes: the same for the drafter; 0 without one.
        max_model_len: longest sequence in tokens.
        device: whose free memory counts when nothing is configured.

    Raises:
        ConfigError: the pools could not hold one sequence of `max_model_len`; says which length would fit.
    """
    block_bytes = target_block_bytes + drafter_block_bytes
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        num_blocks = _available_bytes(config, device) // block_bytes
    num_tokens = num_blocks * config.block_size
    if num_tokens < max_model_len:
        needed = -(-max_model_len // config.block_size)
        more = f"--num-kv-blocks {needed}" if config.num_kv_blocks else f"--kv-cache-memory {needed * block_bytes}"
        shorter = f"--max-model-len {num_tokens} or lower, or " if num_tokens >= _MIN_MODEL_LEN else ""
        raise ConfigError(
            f"the KV cache holds {num_tokens} tokens, less than max_model_len {max_model_len}: "
            f"set {shorter}{more} or higher"
        )
    return CacheSize(num_blocks=num_blocks, num_bytes=num_blocks * block_bytes)


def _available_bytes(config: CacheConfig, device: torch.device) -> int:
    if config.kv_cache_memory is not None:
        return parse_bytes(config.kv_cache_memory)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)  # what others and the weights have taken is not free
        return max(int(total * config.gpu_memory_utilization) - (total - free), 0)
    return _DEFAULT_CPU_BYTES
