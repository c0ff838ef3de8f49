"""The life of a server process: loading, ready, draining or failed.

Owns the state that /health and /ready report, the thread that loads the engine, and the set of requests under way, so
that a shutdown can wait for them. Refuses to know routes and signals: `main` says when to drain and ends the process.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from peagle import EnginePhase
from peagle.errors import EngineDeadError, PeagleError
from server.engine_bundle import EngineBundle, EngineStarter
from server.engine_report import EngineReport
from server.errors import LoadFailedError, ModelLoadingError, ShuttingDownError
from server.settings import ServerConfig
from server.startup_clock import StartupClock

logger = logging.getLogger(__name__)

FAILURE_LINGER_S = 1.0  # how long a failed start still answers /ready
ABORT_GRACE_S = 2.0  # how long aborted requests get to tell their clients
ENGINE_STOP_TIMEOUT_S = 10.0  # a step that never ends must not keep the process alive

_DIRECTORIES = re.compile(r"(?<![\w/:.])/(?:[^\s/'\":,]+/)+")


class ServerStatus(enum.StrEnum):
    """What /ready says."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The answer of /ready. `elapsed_s` counts from the start of the process until loading ended.

    `detail` says how far the phase is, and `phase_seconds` what the phases that have ended took.
    """

    status: ServerStatus
    phase: EnginePhase
    detail: str
    elapsed_s: float
    phase_seconds: dict[str, float]


class Lifecycle:
    """The state of one server process. Everything but the loading itself runs on the event loop.

    Args:
        config: the server's settings.
        start_engine: loads the model; called once, in a thread of its own.
    """

    def __init__(self, config: ServerConfig, start_engine: EngineStarter) -> None:
        self._config = config
        self._start_engine = start_engine
        self._clock = StartupClock()
        self._load_ended_at: float | None = None
        self._status = ServerStatus.STARTING
        self._phase = EnginePhase.STARTING
        self._detail = ""
        self._bundle: EngineBundle | None = None
        self._active: set[str] = set()
        self._drain_deadline = 0.0
        self._is_aborted = False
        self._is_stopped = False
        self.on_abort: Callable[[], None] = lambda: None  # what else to end, together with the engine's requests

    # ---- what the routes ask

    @property
    def bundle(self) -> EngineBundle | None:
        """The engine, once it is loaded. Draining does not take it away."""
        return self._bundle

    @property
    def is_failed(self) -> bool:
        """True if the model could not be loaded."""
        return self._status is ServerStatus.FAILED

    @property
    def num_active(self) -> int:
        """Requests that a shutdown would wait for."""
        return len(self._active)

    def admit(self) -> EngineBundle:
        """The engine, for new work.

        Raises:
            ModelLoadingError, LoadFailedError, ShuttingDownError, EngineDeadError: there can be no new work.
        """
        if self._status is ServerStatus.DRAINING:
            raise ShuttingDownError
        if self._status is ServerStatus.FAILED:
            raise LoadFailedError
        if self._bundle is None:
            raise ModelLoadingError
        return self.require_engine()

    def require_engine(self) -> EngineBundle:
        """The engine, for work that was admitted before: a drain does not end it.

        Raises:
            ShuttingDownError, EngineDeadError: it is too late.
        """
        if self._bundle is None or self._is_aborted:
            raise ShuttingDownError
        if not self._bundle.engine.health().is_alive:
            raise EngineDeadError
        return self._bundle

    def readiness(self) -> Readiness:
        """Where the process stands. A dead engine is a failure, whatever came before."""
        status, phase, detail = self._status, self._phase, self._detail
        if self._bundle is not None and not self._bundle.engine.health().is_alive:
            status, phase, detail = ServerStatus.FAILED, EnginePhase.STOPPED, "the engine has stopped"
        ended_at = time.monotonic() if self._load_ended_at is None else self._load_ended_at
        return Readiness(
            status=status,
            phase=phase,
            detail=_without_directories(detail),
            elapsed_s=round(ended_at - self._clock.started_at, 3),
            phase_seconds={name: round(seconds, 3) for name, seconds in self._clock.seconds().items()},
        )

    def illness(self) -> str | None:
        """Why a supervisor should restart this process, or None if it is well (also while loading and draining)."""
        if self.is_failed:
            return "the model could not be loaded"
        if self._bundle is None:
            return None
        health = self._bundle.engine.health()
        if not health.is_alive:
            return "the engine has stopped"
        if health.step_age_s > self._config.heartbeat_timeout_s:
            return f"the engine has not finished a step for {health.step_age_s:.0f} s, though there is work"
        return None

    @property
    def is_draining(self) -> bool:
        """True once a shutdown has been asked for."""
        return self._status is ServerStatus.DRAINING

    @property
    def is_aborting(self) -> bool:
        """True once the requests under way are being ended."""
        return self._is_aborted

    def enter(self, request_id: str) -> None:
        """A request is under way: a shutdown waits for it."""
        self._active.add(request_id)

    def leave(self, request_id: str) -> None:
        """A request is over."""
        self._active.discard(request_id)

    # ---- what the process asks

    def start(self) -> None:
        """Begin to load, in a daemon thread, so that a shutdown need not wait for it."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop,), name="load-engine", daemon=True).start()

    def begin_drain(self) -> None:
        """Take no new work. The second call ends what is still running at once."""
        now = time.monotonic()
        if self.is_draining:
            self._drain_deadline = now
            return
        if self._status is not ServerStatus.FAILED:
            logger.info("shutting down: %d requests under way", len(self._active))
            self._status = ServerStatus.DRAINING
            self._drain_deadline = now + self._config.shutdown_timeout_s

    def may_exit(self) -> bool:
        """True once the process has nothing left to do. To be called again and again: it also ends a drain in time."""
        now = time.monotonic()
        if self._status is ServerStatus.FAILED:
            assert self._load_ended_at is not None
            return now >= self._load_ended_at + FAILURE_LINGER_S
        if not self.is_draining:
            return False
        if not self._active:
            return True
        if now >= self._drain_deadline and not self._is_aborted:
            logger.warning("ending %d requests that did not finish in time", len(self._active))
            self._abort_active()
        return now >= self._drain_deadline + ABORT_GRACE_S

    async def stop(self) -> None:
        """End what is left and stop the engine."""
        self._is_stopped = True
        self.begin_drain()
        self._abort_active()
        if self._bundle is None:
            return
        stopping = threading.Thread(target=self._bundle.engine.shutdown, name="stop-engine", daemon=True)
        stopping.start()
        give_up_at = time.monotonic() + ENGINE_STOP_TIMEOUT_S
        while stopping.is_alive() and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)
        if stopping.is_alive():
            logger.error("the engine did not stop within %.0f s; leaving it behind", ENGINE_STOP_TIMEOUT_S)

    def _abort_active(self) -> None:
        self._is_aborted = True
        self.on_abort()
        if self._bundle is not None:
            for request_id in list(self._active):
                self._bundle.engine.abort(request_id)

    # ---- the loading thread

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            bundle = self._start_engine(self._on_phase)
        except PeagleError as error:
            logger.error("the model could not be loaded: %s", error)
            self._hand_over(loop, None, str(error))
        except BaseException as error:
            logger.exception("the model could not be loaded")
            self._hand_over(loop, None, f"unexpected {type(error).__name__}; the server's log has the details")
        else:
            self._hand_over(loop, bundle, "")

    def _hand_over(self, loop: asyncio.AbstractEventLoop, bundle: EngineBundle | None, problem: str) -> None:
        try:
            loop.call_soon_threadsafe(self._end_load, bundle, problem)
        except RuntimeError:  # the loop is closed: the server was stopped while loading
            if bundle is not None:
                bundle.engine.shutdown()

    def _on_phase(self, phase: EnginePhase, detail: str) -> None:
        self._clock.enter(phase)
        logger.info("%.1f s: %s%s", self._clock.elapsed_s(), phase.value, f" ({detail})" if detail else "")
        if phase is not EnginePhase.READY:  # ready is said on the event loop, once requests can be taken
            self._phase, self._detail = phase, detail

    def _end_load(self, bundle: EngineBundle | None, problem: str) -> None:
        self._load_ended_at = time.monotonic()
        if bundle is None:
            self._status, self._phase, self._detail = ServerStatus.FAILED, EnginePhase.FAILED, problem
            self._clock.enter(EnginePhase.FAILED)
            return
        if self._is_stopped:
            threading.Thread(target=bundle.engine.shutdown, name="stop-engine", daemon=True).start()
            return
        self._bundle = bundle
        self._clock.enter(EnginePhase.READY)
        self._phase, self._detail = EnginePhase.READY, f"serving {bundle.model_id}"
        if not self.is_draining:
            self._status = ServerStatus.READY
        seconds = self._load_ended_at - self._clock.started_at
        phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in self._clock.seconds().items())
        logger.info("ready after %.1f s (%s), serving %s", seconds, phases, bundle.model_id)


def _without_directories(text: str) -> str:
    """A text for everybody: of an absolute path, only the last part stays."""
    return _DIRECTORIES.sub("", text)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start loading when the server starts, and stop the engine when it ends."""
    lifecycle: Lifecycle = app.state.lifecycle
    report: EngineReport = app.state.engine_report
    lifecycle.start()
    report.start()
    try:
        yield
    finally:
        report.stop()
        await lifecycle.stop()
