"""One step on every rank of a tensor-parallel model.

Rank 0 sends each step to the others before it runs it, and they run the same: target, verification and drafting alike,
so that every rank's part of the cache stays in step. Owns this order. Refuses to know what a step does, and to bring a
rank back that has failed alone: the others then wait for it, which health reports as a step that hangs.
"""

from __future__ import annotations

import atexit
import logging
from typing import Protocol

from peagle.models.rank_group import LeaderGoneError, RankGroup
from peagle.outputs import ModelRunnerOutput, SchedulerOutput
from peagle.stats import GraphStats

logger = logging.getLogger(__name__)

_END = None  # the message after the last step


class StepRunner(Protocol):
    """What `ModelRunner` is to its users."""

    @property
    def graph_stats(self) -> GraphStats:
        """See `ModelRunner.graph_stats`."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See `ModelRunner.execute`."""
        ...


class LeadingRunner:
    """Rank 0's runner.

    Args:
        runner: of this rank.
        group: of all ranks.
    """

    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group
        # However this process ends, short of a kill: the other ranks wait for a word from it, and have no signals.
        atexit.register(self.close)

    def close(self) -> None:
        """Let the other ranks end. Nothing may run afterwards."""
        atexit.unregister(self.close)
        self._group.send(_END)
        self._group.leave()

    @property
    def graph_stats(self) -> GraphStats:
        """Of this rank."""
        return self._runner.graph_stats

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step everywhere. See `ModelRunner.execute`."""
        self._group.send(step)
        return self._runner.execute(step)


def follow(runner: StepRunner, group: RankGroup) -> None:
    """Run rank 0's steps until it is gone.

    Args:
        runner: of this rank.
        group: of all ranks.

    Raises:
        LeaderGoneError: it ended otherwise than by `LeadingRunner.close`.
    """
    while True:
        try:
            step: SchedulerOutput | None = group.receive()
        except LeaderGoneError as error:
            logger.error("Rank %d ends: rank 0 is gone without a word (%s)", group.rank, error)
            raise
        if step is _END:
            logger.info("Rank %d ends, as rank 0 does", group.rank)
            group.leave()
            return
        try:
            runner.execute(step)
        except Exception:
            # The fault of a sequence fails on rank 0 as well, which runs the sequences again one by one.
            logger.exception("Rank %d: a step failed", group.rank)
