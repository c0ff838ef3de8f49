"""How many blocks there are, and the advice when they are too few."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from peagle.config import CacheConfig
from peagle.errors import ConfigError
from peagle.runner.memory import CacheSize, size_cache

CPU = torch.device("cpu")


def size(config: CacheConfig, *, max_model_len: int = 64, **overrides: Any) -> CacheSize:
    sizes = {"target_block_bytes": 1000, "drafter_block_bytes": 0} | overrides
    return size_cache(config, max_model_len=max_model_len, device=CPU, **sizes)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert size(CacheConfig(num_kv_blocks=10), drafter_block_bytes=24) == CacheSize(num_blocks=10, num_bytes=10240)


def test_memory_is_shared_by_both_pools_and_never_exceeded() -> None:
    config = CacheConfig(kv_cache_memory="100kb")
    assert size(config) == CacheSize(num_blocks=100, num_bytes=100_000)
    assert size(config, drafter_block_bytes=500) == CacheSize(num_blocks=66, num_bytes=99_000)


def test_default_on_cpu_is_one_gib() -> None:
    assert size(CacheConfig()).num_blocks == 2**30 // 1000


def test_exactly_one_sequence_is_enough() -> None:
    assert size(CacheConfig(num_kv_blocks=4)).num_blocks == 4


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (CacheConfig(num_kv_blocks=3), "--num-kv-blocks"),
        (CacheConfig(kv_cache_memory="4999"), "--kv-cache-memory"),
    ],
)
def test_advice_works_when_followed(config: CacheConfig, option: str) -> None:
    """Both ways out that the message names are taken, and both must be the tight bound."""
    with pytest.raises(ConfigError, match="less than max_model_len 64") as caught:
        size(config, drafter_block_bytes=500)
    advice = re.search(rf"--max-model-len (\d+) or lower, or {option} (\d+) or higher", str(caught.value))
    assert advice is not None
    assert size(config, drafter_block_bytes=500, max_model_len=int(advice[1]))
    raised = int(advice[2])
    for value, is_enough in ((raised, True), (raised - 1, False)):
        if option == "--num-kv-blocks":
            changed = CacheConfig(num_kv_blocks=value)
        else:
            changed = CacheConfig(kv_cache_memory=str(value))
        if is_enough:
            assert size(changed, drafter_block_bytes=500).num_blocks == 4
        else:
            with pytest.raises(ConfigError):
                size(changed, drafter_block_bytes=500)


def test_no_length_is_advised_where_none_would_do() -> None:
    with pytest.raises(ConfigError, match="set --kv-cache-memory 4000 or higher"):
        size(CacheConfig(kv_cache_memory="10"))
