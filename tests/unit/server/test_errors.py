"""The table of errors."""

from __future__ import annotations

import inspect

import pytest
from starlette.exceptions import HTTPException

import peagle.errors
import server.errors
from peagle.errors import InvalidParameterError, PeagleError, RequestError
from server.errors import (
    BodyTooLargeError,
    HeadersTooLargeError,
    HttpError,
    MalformedRequestError,
    RequestTimeoutError,
    ShuttingDownError,
    describe,
    parameter_path,
)

EXPECTED_ERRORS = [
    kind
    for module in (peagle.errors, server.errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, PeagleError | HttpError)
]


@pytest.mark.parametrize("kind", [*EXPECTED_ERRORS, KeyError, MemoryError, BaseException])
def test_every_error_has_a_reply(kind: type[BaseException]) -> None:
    reply = describe(kind("the text"))
    assert 400 <= reply.status < 600
    assert reply.message
    assert reply.type == ("invalid_request_error" if reply.status < 500 else "server_error")
    assert set(reply.envelope()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", EXPECTED_ERRORS)
def test_errors_of_the_server_keep_their_text_to_themselves(kind: type[Exception]) -> None:
    reply = describe(kind("/root/secret.py"))
    assert ("secret" in reply.message) == (reply.status < 500)


def test_a_request_error_brings_its_own_words() -> None:
    reply = describe(InvalidParameterError("top_p must be in (0, 1]", param="top_p"))
    assert (reply.status, reply.message, reply.param) == (400, "top_p must be in (0, 1]", "top_p")
    assert reply.code == "invalid_value"
    assert describe(RequestError("no", code="special")).code == "special"
    assert describe(RequestError("no")).code is None


def test_clients_are_told_to_try_elsewhere_while_we_go_down() -> None:
    response = describe(ShuttingDownError()).response()
    assert response.status_code == 503
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["connection"] == "close"
    assert "retry-after" in response.headers


def test_an_http_error_without_an_entry_keeps_its_detail() -> None:
    reply = describe(HTTPException(418, detail="I am a teapot."))
    assert (reply.status, reply.message, reply.code) == (418, "I am a teapot.", None)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ((), None),
        (("model",), "model"),
        (("messages", 0, "role"), "messages[0].role"),
        (("messages", 2, "content", "<list>", 1, "type"), "messages[2].content[1].type"),
        (("stop", "<text>"), "stop"),
    ],
)
def test_parameter_paths(location: tuple[str | int, ...], path: str | None) -> None:
    assert parameter_path(location) == path


@pytest.mark.parametrize("kind", [BodyTooLargeError, HeadersTooLargeError, MalformedRequestError, RequestTimeoutError])
def test_a_request_that_was_not_read_to_its_end_is_the_last(kind: type[HttpError]) -> None:
    assert describe(kind()).response().headers["connection"] == "close"
