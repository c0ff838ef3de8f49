"""The exceptions of peagle, drawn as one tree.

    PeagleError
    ├── ConfigError                    a configuration that cannot work; says what to change
    ├── ModelLoadError                 a checkpoint that cannot be read or served exactly
    │   └── UnsupportedModelError      a model family that we refuse by name
    ├── RequestError                   the client's request is at fault; carries `param` and `code`
    │   ├── InvalidParameterError      a value out of range
    │   └── ContextLengthError         prompt (+ answer) longer than the context
    ├── EngineError                    the server is at fault
    │   ├── EngineDeadError            the engine thread has ended; nothing can be served
    │   ├── EngineOverloadedError      the queue is full; try again later
    │   └── DeviceLostError            the device is unusable until the process is restarted
    └── IntegrityError                 an internal invariant is broken (raised by self-checks only)

Owns the names and what they carry. Refuses to know HTTP: `server.errors` translates at one boundary.
"""

from __future__ import annotations


class PeagleError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(PeagleError):
    """A configuration that cannot work. The message says what to change."""


class ModelLoadError(PeagleError):
    """A checkpoint that cannot be read, or cannot be served exactly."""


class UnsupportedModelError(ModelLoadError):
    """A model family that is refused by name."""


class RequestError(PeagleError):
    """The request is at fault.

    Attributes:
        param: path of the offending field, such as `temperature` or `messages[0].role`; None if no field is.
        code: machine-readable reason in OpenAI's vocabulary, such as `invalid_value`; None if there is none.
    """

    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code if code is not None else self.default_code


class InvalidParameterError(RequestError):
    """A parameter's value is out of its range."""

    default_code = "invalid_value"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the answer asked for, do not fit the context."""

    default_code = "context_length_exceeded"


class EngineError(PeagleError):
    """The server is at fault, not the client."""


class EngineDeadError(EngineError):
    """The engine thread has ended; nothing can be served by this process any more."""


class EngineOverloadedError(EngineError):
    """The waiting queue is full."""


class DeviceLostError(EngineError):
    """The device is in a state that only a new process can leave; every further step would fail."""


class IntegrityError(PeagleError):
    """An invariant of the bookkeeping is broken. Raised by self-checks, never by normal work."""
