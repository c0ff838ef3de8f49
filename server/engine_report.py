"""The lines about the engine's load that appear in the log every few seconds while there is any.

Owns their words and when they are due. Reads snapshots of the engine's counters and keeps the last one to compare with.
Refuses to know requests (`request_log`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from peagle import EngineStats
from server.engine_bundle import EngineBundle

logger = logging.getLogger(__name__)


class EngineReport:
    """Writes the lines from a timer of the event loop.

    Args:
        get_bundle: the engine, once there is one.
        interval_s: seconds between lines; 0: none at all.
    """

    def __init__(self, get_bundle: Callable[[], EngineBundle | None], *, interval_s: float) -> None:
        self._get_bundle = get_bundle
        self._interval_s = interval_s
        self._before = EngineStats()
        self._before_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin. To be called on the event loop."""
        if self._interval_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """Write nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self.start()
        bundle = self._get_bundle()
        if bundle is None:
            return
        stats, now = bundle.engine.stats(), time.monotonic()
        if has_news(self._before, stats):
            for line in report(self._before, stats, seconds=now - self._before_at):
                logger.info(line)
        self._before, self._before_at = stats, now


def has_news(before: EngineStats, after: EngineStats) -> bool:
    """Whether anything ran in between, or is to run. An idle server says nothing."""
    return after.num_steps > before.num_steps or after.num_running + after.num_waiting > 0


def report(before: EngineStats, after: EngineStats, *, seconds: float) -> list[str]:
    """What happened between two snapshots: a line on load, and one on speculation if any draft was verified."""
    prompt, generated = after.prompt_tokens - before.prompt_tokens, after.generation_tokens - before.generation_tokens
    queries = after.prefix_cache.queries - before.prefix_cache.queries
    hits = after.prefix_cache.hits - before.prefix_cache.hits
    lines = [
        f"prompts {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
        f"running {after.num_running}, waiting {after.num_waiting}, KV cache {after.kv_cache_usage:.1%}, "
        f"prefix cache hits {_share(hits, queries)}"
    ]
    speculation = _speculation(before, after)
    return [*lines, speculation] if speculation else lines


def _speculation(before: EngineStats, after: EngineStats) -> str | None:
    new, old = after.spec_decode, before.spec_decode
    num_drafts = new.num_drafts - old.num_drafts
    if num_drafts == 0:
        return None
    drafted = new.num_draft_tokens - old.num_draft_tokens
    accepted = new.num_accepted_tokens - old.num_accepted_tokens
    per_position = _differences(old.num_accepted_tokens_per_pos, new.num_accepted_tokens_per_pos)
    rates = " ".join(f"{count / num_drafts:.2f}" for count in per_position)
    chosen = after.steps.num_verified_drafts.total - before.steps.num_verified_drafts.total
    num_chosen = after.steps.num_verified_drafts.num_observed - before.steps.num_verified_drafts.num_observed
    return (
        f"speculation by {after.drafter}: {1 + accepted / num_drafts:.2f} tokens a proposal, "
        f"{_share(accepted, drafted)} of {drafted} drafts accepted, by position {rates}, "
        f"K {chosen / max(num_chosen, 1):.1f} of {after.num_speculative_tokens}"
    )


def _differences(old: list[int], new: list[int]) -> list[int]:
    padded = [*old, *[0] * (len(new) - len(old))]
    return [b - a for a, b in zip(padded, new, strict=True)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
