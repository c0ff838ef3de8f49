"""Who runs in a step, and what a step's result changes. Pure bookkeeping: no torch, no threads, no clock."""

from __future__ import annotations

from peagle.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
