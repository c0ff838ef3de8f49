"""Every error that a client can see, translated at this one boundary into OpenAI's envelope.

Owns the HTTP side's own exceptions, and the table from exception to status, type, code and headers. Refuses to know
where errors come from. A message is written for the client: texts of unexpected exceptions, which may hold paths, are
logged and never sent.

    HttpError                     raised by the server itself
    ├── ModelLoadingError         not ready yet
    ├── LoadFailedError           never will be: the process is about to end
    ├── ShuttingDownError         draining
    ├── RequestAbortedError       ended from the server's side, before it was complete
    ├── GenerationFailedError     the engine gave up this request
    ├── ModelNotFoundError        not a model that is served here
    ├── BodyTooLargeError
    ├── HeadersTooLargeError
    ├── RequestTimeoutError       the client did not send all of it in time
    ├── MalformedRequestError     not HTTP as it is read here
    ├── MissingParameterError
    ├── UnsupportedMediaTypeError
    ├── InvalidKeyError           no key, or a wrong one
    ├── AdminOnlyError            a path that nobody may read here
    ├── RateLimitError            this client has reached one of its limits
    └── QueueTimeoutError         waited too long to be admitted
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from peagle.errors import EngineDeadError, EngineOverloadedError, PeagleError, RequestError

logger = logging.getLogger(__name__)

UNSUPPORTED_PARAMETER = "unsupported_parameter"
INVALID_COMBINATION = "invalid_combination"  # of fields; the schemas' own kind of error, sent as invalid_value
MISSING_PARAMETER = "missing_parameter"  # likewise, sent as missing_required_parameter

_OWN_CODES = {
    UNSUPPORTED_PARAMETER: UNSUPPORTED_PARAMETER,
    INVALID_COMBINATION: "invalid_value",
    MISSING_PARAMETER: "missing_required_parameter",
}

_CLIENT = "invalid_request_error"
_SERVER = "server_error"
_CLOSE = {"connection": "close"}  # the rest of the request must not be taken for another one
_RETRY_SOON = {"retry-after": "1", "retry-after-ms": "1000"}
_RETRY_LATER = {"retry-after": "5", "retry-after-ms": "5000"}
_RETRY_ELSEWHERE = {"retry-after": "1", "retry-after-ms": "1000", "x-should-retry": "true", "connection": "close"}


class HttpError(Exception):
    """Base of what the server raises itself.

    Args:
        message: for the client.
        param: the field at fault, if there is one.
        retry_after_s: when the client should try again, if that is known.
    """

    def __init__(self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class ModelLoadingError(HttpError):
    """The model is not loaded yet."""


class LoadFailedError(HttpError):
    """The model could not be loaded; the process is about to end."""


class ShuttingDownError(HttpError):
    """The server takes no new work, or had to end work, because it is going down."""


class RequestAbortedError(HttpError):
    """The engine ended the request before it was complete, though its client is still there."""


class GenerationFailedError(HttpError):
    """The engine gave up this request."""


class ModelNotFoundError(HttpError):
    """The client names a model that is not served here."""


class ResponseNotFoundError(HttpError):
    """There is no stored response of this id."""


class BodyTooLargeError(HttpError):
    """The body is longer than the server reads."""


class HeadersTooLargeError(HttpError):
    """The head of the request is longer than the server reads."""


class RequestTimeoutError(HttpError):
    """The client did not send the rest of its request in time."""


class MalformedRequestError(HttpError):
    """What came is not HTTP, or not of a kind that is read here."""


class MissingParameterError(HttpError):
    """A field that the request needs is not there."""


class UnsupportedMediaTypeError(HttpError):
    """The body is not declared as JSON, or is compressed."""


class InvalidKeyError(HttpError):
    """The request has no key, or one that is not known here."""


class AdminOnlyError(HttpError):
    """The path is for administrators, and this server has none."""


class RateLimitError(HttpError):
    """The client has reached one of its own limits."""


class QueueTimeoutError(HttpError):
    """The request has waited too long to be admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """One error as its client sees it. The envelope always has its four keys."""

    status: int
    message: str
    type: str = _CLIENT
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body, which is also the event of an error in mid-stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The reply to a request that has none yet."""
        body = orjson.dumps(self.envelope())
        return Response(body, status_code=self.status, headers=self.headers, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Rule:
    status: int
    type: str
    code: str | None
    message: str | None = None  # None: the exception's own text, which is written for the client
    headers: Mapping[str, str] = field(default_factory=dict)


_FAILED = "The server failed while it worked on this request. Other requests go on; this one may be sent again."
_RULES: Mapping[type[BaseException], _Rule] = {
    RequestError: _Rule(400, _CLIENT, None),
    ModelNotFoundError: _Rule(404, _CLIENT, "model_not_found"),
    ResponseNotFoundError: _Rule(404, _CLIENT, "response_not_found"),
    BodyTooLargeError: _Rule(413, _CLIENT, "request_too_large", headers=_CLOSE),
    HeadersTooLargeError: _Rule(431, _CLIENT, "headers_too_large", headers=_CLOSE),
    RequestTimeoutError: _Rule(408, _CLIENT, "request_timeout", headers=_CLOSE),
    MalformedRequestError: _Rule(400, _CLIENT, "malformed_http", headers=_CLOSE),
    MissingParameterError: _Rule(400, _CLIENT, "missing_required_parameter"),
    UnsupportedMediaTypeError: _Rule(415, _CLIENT, "unsupported_media_type"),
    InvalidKeyError: _Rule(401, _CLIENT, "invalid_api_key", headers={"www-authenticate": "Bearer"}),
    AdminOnlyError: _Rule(403, _CLIENT, "admin_only"),
    RateLimitError: _Rule(429, _CLIENT, "rate_limit_exceeded", headers=_RETRY_SOON),
    QueueTimeoutError: _Rule(
        503, _SERVER, "queue_timeout", "The request has waited too long, and others are still before it.", _RETRY_SOON
    ),
    EngineOverloadedError: _Rule(
        503, _SERVER, "server_overloaded", "Too many requests are waiting. Try again in a moment.", _RETRY_SOON
    ),
    ModelLoadingError: _Rule(
        503, _SERVER, "model_loading", "The model is still loading. GET /ready says how far it is.", _RETRY_LATER
    ),
    ShuttingDownError: _Rule(
        503, _SERVER, "server_shutting_down", "The server is shutting down. Send the request again.", _RETRY_ELSEWHERE
    ),
    LoadFailedError: _Rule(500, _SERVER, "model_load_failed", "The model could not be loaded; see the server's log."),
    EngineDeadError: _Rule(500, _SERVER, "engine_dead", "The engine has stopped. The server has to be restarted."),
    RequestAbortedError: _Rule(500, _SERVER, "request_aborted", "The request was ended before it was complete."),
    GenerationFailedError: _Rule(500, _SERVER, "generation_failed", _FAILED),
    BaseException: _Rule(500, _SERVER, "internal_error", _FAILED),
}

_HTTP_MESSAGES: Mapping[int, tuple[str, str]] = {
    404: ("not_found", "There is nothing at this path."),
    405: ("method_not_allowed", "This path does not take this method; the Allow header names those that it takes."),
}


def describe(error: BaseException) -> ErrorReply:
    """Translate any exception. Never raises, and never lets the text of an unexpected one out."""
    if isinstance(error, ValidationError):
        return _describe_validation(error.errors(include_url=False, include_input=False)[0])
    if isinstance(error, RequestValidationError):  # parameters of the path and the query
        return _describe_validation(error.errors()[0])
    if isinstance(error, HTTPException):
        code, message = _HTTP_MESSAGES.get(error.status_code, (None, error.detail))
        return ErrorReply(status=error.status_code, message=message, code=code, headers=dict(error.headers or {}))
    rule = next(_RULES[kind] for kind in type(error).__mro__ if kind in _RULES)
    return ErrorReply(
        status=rule.status,
        message=rule.message or str(error),
        type=rule.type,
        param=getattr(error, "param", None) if rule.status < 500 else None,
        code=rule.code or (getattr(error, "code", None) if rule.status < 500 else None),
        headers={**rule.headers, **_retry_headers(getattr(error, "retry_after_s", None))},
    )


def _retry_headers(seconds: float | None) -> dict[str, str]:
    """When to come back: whole seconds for everybody, milliseconds for those who read them."""
    if seconds is None:
        return {}
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1e3))}


def _describe_validation(error: Mapping[str, Any]) -> ErrorReply:
    """The first thing that is wrong with a body: one clear sentence helps more than a list."""
    kind, context = error["type"], error.get("ctx", {})
    location = list(error["loc"])
    if kind == "json_invalid":
        return ErrorReply(status=400, message=f"The body is not valid JSON: {context['error']}.")
    is_own = kind in _OWN_CODES
    if is_own and "name" in context:  # found by looking at the whole object, so the location stops there
        location.append(context["name"])
    param = parameter_path(location)
    if is_own:
        return ErrorReply(status=400, message=error["msg"], param=param, code=_OWN_CODES[kind])
    if param is None:
        return ErrorReply(status=400, message="The body must be a JSON object.", code="invalid_value")
    if kind == "missing":
        return ErrorReply(status=400, message=f"'{param}' is required.", param=param, code="missing_required_parameter")
    text = error["msg"][:1].lower() + error["msg"][1:]
    return ErrorReply(status=400, message=f"Invalid value for '{param}': {text}.", param=param, code="invalid_value")


def parameter_path(location: Sequence[str | int]) -> str | None:
    """Spell a location as clients write it: ("messages", 0, "role") is `messages[0].role`.

    Tags of a union are written in angle brackets by our schemas and are no part of the path.
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path or None


async def respond(request: Request, error: Exception) -> Response:
    """The exception handler for everything that is expected."""
    log_failure(error)
    reply = describe(error)
    if reply.status == 405 and (methods := _methods_of_path(request)):
        reply = replace(reply, headers={**reply.headers, "Allow": ", ".join(methods)})
    if reply.status in (429, 503):
        request.app.state.http_metrics.count_refusal(reply.code or "other")
    return reply.response()


def _methods_of_path(request: Request) -> list[str]:
    """Methods that any route takes at this path; the router names those of the first that fits."""
    found: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        if compile_path(path)[0].match(request.scope["path"]):
            found.update(method.upper() for method in operations)
    return sorted(found)


def log_failure(error: BaseException) -> None:
    """Leave a trace of errors that are the server's own. Refusals, of bad requests or of more work, leave none."""
    if describe(error).status == 500:
        logger.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)


def install_handlers(app: FastAPI) -> None:
    """Route every expected error through `respond`. The unexpected is caught outside, by the middleware."""
    for kind in (PeagleError, HttpError, HTTPException, RequestValidationError, ValidationError):
        app.add_exception_handler(kind, respond)
