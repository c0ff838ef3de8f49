"""One client's connection: what uvicorn's HTTP/1.1 protocol leaves open towards clients that err, dawdle or leave.

Owns the limits of a request's head, the replies to what never became a request, and the end of a connection in every
case: requests whose client has gone are all told so, and a connection is closed so that its last reply arrives. Refuses
to know routes and bodies: a request that can be read goes to the app, as ever.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import HeadersTooLargeError, MalformedRequestError, RequestTimeoutError, describe, log_failure
from server.head_meter import HeadMeter
from server.logging import current_request_id

access_logger = logging.getLogger("server.access")

MAX_PIPELINED = 8  # requests that wait for the one before them; with more, nothing is read, not even a disconnect
LINGER_S = 2.0  # after a last reply, until a client that goes on writing is cut off


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, strict with the wire. Its `cycle` is the request read last, `_active` the one being answered.

    Args:
        head_timeout_s: how long a client may take to send a request's head, from connecting or from the first byte.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s = head_timeout_s
        self._active: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None  # for a head to be whole, or for the client to hang up
        self._is_in_head = False
        self._meter = HeadMeter()
        self._is_deaf = False  # what arrives is thrown away
        self._is_shut_down = False

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Greet a client, which should say something soon."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests of this client, where uvicorn tells the last: the one being answered must be aborted."""
        for cycle in self._due_cycles():
            _disconnect(cycle)
        self.pipeline.clear()
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close once the requests under way are answered, without lingering."""
        self._is_shut_down = True
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Parse."""
        self._unset_keepalive_if_required()
        self._meter.count_fed(len(data))
        while data and not self._is_deaf:
            data = self._parse(data)
        if not self._is_deaf and self._timer is None and not self._due_cycles():
            self._start_timer()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser. Returns what it left over, which is seldom anything."""
        try:
            self.parser.feed_data(data)
            self._meter.check_progress()
        except HeadersTooLargeError as error:
            self._refuse(error)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            self._refuse(error.__context__ or error)  # raised by a method of this class
        except httptools.HttpParserError as error:
            self._refuse(MalformedRequestError(f"This is not a valid HTTP/1.1 request: {error}."))
        return b""

    def _without_upgrade(self) -> bytes:
        """The head just read, for a new parser, as if it asked for no upgrade; the old one would skip the body.

        Clients that would like HTTP/2 ask so with their first request (RFC 9110, 7.8: a server may ignore it).
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(MalformedRequestError("This server is no proxy: CONNECT is not served."))
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_in_head = True
        self._meter.start()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._meter.count_target(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field, of the head or of the trailer after a body; trailers are read and dropped."""
        self._meter.count_field(len(name) + len(value) + len(b": \r\n"))
        if not self._is_in_head:
            return
        if name.lower() == b"transfer-encoding":
            if value.lower() != b"chunked" or self.parser.get_http_version() == "1.0":
                raise MalformedRequestError("The only Transfer-Encoding that is read here is chunked, in HTTP/1.1.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request is there: the app is started, or the request queued behind the one being answered."""
        if self.parser.should_upgrade():
            return
        self._is_in_head = False
        self._stop_timer()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        if not _has_path(self.url):
            raise MalformedRequestError("The target of this request has no path.")
        super().on_headers_complete()
        if len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn pauses, and would not notice that the client has gone

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._meter.note_progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # ---- requests and their responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        closing: Any = _ClosingApp(self, cycle, app)  # an ASGI app in starlette's types, which are looser
        super()._start_asgi_task(cycle, closing)

    def _due_cycles(self) -> list[RequestResponseCycle]:
        """The requests that still have to be answered, oldest first."""
        due = [cycle for cycle, _ in reversed(self.pipeline)]
        if self._active is not None and not self._active.response_complete:
            due.insert(0, self._active)
        return due

    def on_response_complete(self) -> None:
        """The next request's turn, or the end of the connection."""
        if self._is_deaf and not self.pipeline:
            self.server_state.total_requests += 1
            self._hang_up()
        else:
            super().on_response_complete()
            if self._is_in_head and self._timer is None and not self._due_cycles():
                self._start_timer()  # the beginning of the next head came with an earlier request

    def is_leaving(self, cycle: RequestResponseCycle) -> bool:
        """True if the connection ends with this response, though there may be more to read.

        What remains of a body that nobody wants must not be taken for a request (RFC 9112, 9.3).
        """
        return cycle.more_body or (self._is_deaf and not self.pipeline)

    def leave(self) -> None:
        """Read nothing more; the response that is about to end is the last."""
        self._is_deaf = True

    # ---- refusals and the end

    def _refuse(self, error: BaseException) -> None:
        """Answer what can't be read any further, and hang up; answers that are still due go out first."""
        self._is_deaf = True
        due = self._due_cycles()
        if due and due[-1].more_body:
            unread = due.pop()
            _disconnect(unread)
            if self.pipeline:
                self.pipeline.popleft()
            if unread.response_started:
                self.transport.close()
                return
        if due:
            due[-1].keep_alive = False
            return
        self._reply(error)
        self._hang_up()

    def _reply(self, error: BaseException) -> None:
        log_failure(error)  # which only a fault of ours is
        reply = describe(error)
        response = reply.response()
        request_id = uuid.uuid4().hex
        response.headers["x-request-id"] = request_id
        lines = [b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *response.raw_headers)]
        self.transport.write(b"".join([STATUS_LINE[reply.status], *lines, b"\r\n", response.body]))
        token = current_request_id.set(request_id)
        access_logger.info("%s - - %d: %s", self.client[0] if self.client else "-", reply.status, reply.message)
        current_request_id.reset(token)

    def _hang_up(self) -> None:
        """Close after the client, which may be still writing: closed at once, the system would drop our reply."""
        if self._is_shut_down or self.transport.is_closing():
            self.transport.close()
            return
        if not self.transport.can_write_eof():  # TLS cannot be closed on one side; its end says that all has been sent
            self.transport.close()
            return
        self.flow.resume_reading()
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._head_timeout_s, self._give_up_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up_head(self) -> None:
        if self.transport.is_closing():
            return
        self._refuse(RequestTimeoutError(f"No whole request came within {self._head_timeout_s:g} s."))


class _ClosingApp:
    """The app, for one request: its response ends the connection where it has to, and an HTTP/1.0 one by doing so."""

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle, app: Any) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._app = app
        self._is_delimited_by_close = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
            else:
                self._go_on(message)
            await send(message)

        await self._app(scope, receive, send_closing)

    def _begin(self, message: Message) -> None:
        cycle = self._cycle
        if self._protocol.is_leaving(cycle):
            cycle.keep_alive = False
        has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        if cycle.scope["http_version"] == "1.0" and not has_length:
            self._is_delimited_by_close = True
            cycle.chunked_encoding = False

    def _go_on(self, message: Message) -> None:
        cycle = self._cycle
        is_last = not message.get("more_body", False)
        if self._is_delimited_by_close:  # uvicorn counts a length down, which has to be 0 at the end
            cycle.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        if is_last and not cycle.keep_alive and self._protocol.is_leaving(cycle):
            self._protocol.leave()
            cycle.keep_alive = True  # else uvicorn closes at once; the head has said that the connection ends


def _has_path(url: bytes) -> bool:
    try:
        return httptools.parse_url(url).path is not None
    except httptools.HttpParserInvalidURLError:
        return False


def _disconnect(cycle: RequestResponseCycle) -> None:
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()
