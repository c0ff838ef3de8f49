"""Seconds of the phases of a start."""

from __future__ import annotations

import time

from peagle import EnginePhase
from server.startup_clock import StartupClock


def test_each_phase_that_has_ended_has_its_seconds() -> None:
    clock = StartupClock()
    clock.enter(EnginePhase.LOADING_TARGET)
    time.sleep(0.02)
    clock.enter(EnginePhase.LOADING_TARGET)  # says how far it is; it does not begin again
    clock.enter(EnginePhase.READY)
    seconds = clock.seconds()
    assert list(seconds) == ["starting", "loading_target"]
    assert seconds["loading_target"] >= 0.02
    assert sum(seconds.values()) <= clock.elapsed_s()


def test_what_was_given_out_does_not_change() -> None:
    clock = StartupClock()
    before = clock.seconds()
    clock.enter(EnginePhase.READY)
    assert before == {}
