"""What the server may ask of an engine. `AsyncLLMEngine` implements it; tests may implement it with something small.

Owns the contract between event loop and engine. Refuses to know HTTP, torch and how a step works.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from peagle.outputs import RequestInput, RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.stats import EngineStats


class EnginePhase(enum.StrEnum):
    """What the engine is doing, in the order in which a start goes through it."""

    STARTING = "starting"
    LOADING_TOKENIZER = "loading_tokenizer"
    LOADING_TARGET = "loading_target"
    LOADING_DRAFTER = "loading_drafter"
    ALLOCATING_KV_CACHE = "allocating_kv_cache"
    WARMING_UP = "warming_up"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


PhaseListener = Callable[[EnginePhase, str], None]  # phase, one line for people
EndListener = Callable[[RequestOutput], None]  # the last output of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Is the engine thread well? Read from any thread, costs nothing.

    `step_age_s` is how long the current step has been running, or how long work has been pending without one;
    0.0 while idle.
    """

    is_alive: bool
    step_age_s: float
    error: str | None = None  # why the engine ended


class Engine(Protocol):
    """The asynchronous engine, as the server sees it. All methods are called on the event loop and return at once."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """What takes time before a request with these parameters, such as compiling a grammar. May be called from any
        thread, and should be from one that may wait.

        Raises:
            InvalidParameterError: the grammar can't be used.
        """
        ...

    def generate(self, request: RequestInput) -> AsyncIterator[RequestOutput]:
        """Admit a request and yield its outputs as steps finish; the last one has a finish reason.

        Admission happens before the first `__anext__` returns control, on the call itself: errors of the request and of
        an overloaded or dead engine are raised by the call, so that a server can answer with a status.
        Closing the iterator early (client gone) aborts the request within one step.

        Raises:
            RequestError: the request can't be served (ContextLengthError and so on).
            EngineOverloadedError: the waiting queue is full.
            EngineDeadError: the engine has ended.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request with ABORT within one step. Unknown or finished ids are ignored."""
        ...

    def health(self) -> EngineHealth:
        """The state of the engine thread."""
        ...

    def stats(self) -> EngineStats:
        """The latest snapshot of the counters."""
        ...

    def shutdown(self) -> None:
        """Stop the engine thread; requests under way end with ABORT. Idempotent. Blocks for at most one step."""
        ...
