"""How long each phase of a start takes.

Owns the seconds. Refuses to know what happens in a phase.
"""

from __future__ import annotations

import time

from peagle import EnginePhase


class StartupClock:
    """Begins in `EnginePhase.STARTING`. Written by the loading thread, read by any.

    Entering the phase that it is in, to say how far it is, does not begin it again.
    """

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self._phase = EnginePhase.STARTING
        self._entered_at = self.started_at
        self._seconds: dict[str, float] = {}

    def enter(self, phase: EnginePhase) -> None:
        """A phase begins, and the one before it has ended."""
        if phase is self._phase:
            return
        now = time.monotonic()
        self._seconds = self._seconds | {self._phase.value: now - self._entered_at}
        self._phase, self._entered_at = phase, now

    def seconds(self) -> dict[str, float]:
        """Of each phase that has ended, in order. The phases after the start (ready, failed) do not end."""
        return dict(self._seconds)

    def elapsed_s(self) -> float:
        """Since the process began to load."""
        return time.monotonic() - self.started_at
