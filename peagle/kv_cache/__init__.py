"""Paged KV bookkeeping: which blocks hold which tokens, and who may read them.

`block_manager` keeps one pool, `cache_manager` joins the target's pool and the drafter's for the scheduler. All of it
is integers on the host; only `storage` owns tensors, so importing this package never imports torch.
"""

from __future__ import annotations

from peagle.kv_cache.block_manager import BlockManager
from peagle.kv_cache.cache_manager import KVCacheManager, PrefixMatch

__all__ = ["BlockManager", "KVCacheManager", "PrefixMatch"]
