"""What happens around every request: its id, its access log line, the last catch for errors, the limits of its body.

Owns two pure ASGI layers; they wrap `send` and `receive` once a request and add one frame to each chunk. Refuses to
know routes and models.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.body_reads import BodyReads
from server.errors import BodyTooLargeError, describe
from server.logging import current_request_id

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("server.access")

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/ping"})
CLIENT_GONE = 499  # in the access log only: there is nobody to send it to

_CLOSED_TRANSPORT = "the handler is closed"  # how uvloop says that there is nobody to write to
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Gives a request its id, logs it when it is over, and answers for exceptions that nothing else caught."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        id_header = (b"x-request-id", request_id.encode("ascii"))
        status, started_at = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED_TRANSPORT not in str(error):
                    raise
                raise ClientDisconnect from error  # the client reset the connection a moment before this write

        token = current_request_id.set(request_id)
        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if status:
                raise  # too late to answer: the server closes the connection and logs the traceback
            logger.exception("a request failed unexpectedly")
            await describe(error).response()(scope, receive, send_with_id)
        finally:
            _log_access(scope, status, time.monotonic() - started_at)
            current_request_id.reset(token)


class BodyLimitMiddleware:
    """Refuses bodies longer than `max_body_bytes`: by their declared length, and by counting while they arrive.

    `reads` waits for the bytes of a body. Once a body is whole, nothing comes but the end of the connection, for which
    there is no deadline.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, reads: BodyReads) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            await describe(self._too_large()).response()(scope, receive, send)
            return
        received, is_whole = 0, False

        async def receive_counted() -> Message:
            nonlocal received, is_whole
            message = await (receive() if is_whole else self.reads.receive(receive))
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                received += len(message.get("body", b""))
                if received > self.max_body_bytes:
                    raise self._too_large()
            return message

        await self.app(scope, receive_counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is longer than the {self.max_body_bytes} bytes that this server reads.")


def _request_id(wanted: str | None) -> str:
    """The client's own id if it is fit for a header and a log line, else a new one."""
    return wanted if wanted is not None and _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex


def _log_access(scope: Scope, status: int, duration_s: float) -> None:
    path = scope["path"]
    if path in QUIET_PATHS:
        return
    client = scope["client"][0] if scope.get("client") else "-"
    fields = {
        "event": "http_request",
        "client": client,
        "method": scope["method"],
        "path": quote(path),
        "status": status,
        "duration_ms": round(duration_s * 1e3, 1),
    }
    access_logger.info("%s %s %s %d %.1f ms", *list(fields.values())[1:], extra=fields)
