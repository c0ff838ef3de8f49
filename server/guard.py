"""What stands before the routes: keys, and the ticket of each request.

Owns two pure ASGI layers, and the list of paths that need no key. A path that is not on it needs one, whether or not
there is a route: deny by default. Refuses to know keys (`api_keys`) and limits (`admission`).
"""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission, Ticket, current_ticket
from server.api_keys import ApiKeys
from server.errors import AdminOnlyError, InvalidKeyError, describe

EXEMPT_PATHS = frozenset({"/health", "/ready", "/ping"})  # of supervisors and load balancers, which have no keys
METRICS_PATH = "/metrics"
ADMIN_PATHS = frozenset({"/server_info"})
CLIENT_KEY = "peagle.client"  # in the scope: the name of the client, once its key has been found


class AuthMiddleware:
    """Refuses requests without a key.

    Args:
        keys: of clients; without any, clients need none.
        admin_keys: for `ADMIN_PATHS`, which nobody may read while there is none.
        metrics_need_key: /metrics is not exempt.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, admin_keys: ApiKeys, metrics_need_key: bool) -> None:
        self.app = app
        self.keys = keys
        self.admin_keys = admin_keys
        self.exempt = EXEMPT_PATHS if metrics_need_key else EXEMPT_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except (InvalidKeyError, AdminOnlyError) as error:
                await describe(error).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in self.exempt:
            return
        key = _bearer(Headers(scope=scope).get("authorization"))
        if path.rstrip("/") in ADMIN_PATHS:
            if self.admin_keys.is_empty:
                raise AdminOnlyError("This path needs an admin key, and this server has none.")
            keys = self.admin_keys
        elif self.keys.is_empty:
            return
        else:
            keys = self.keys
        client = None if key is None else keys.client_of(key)
        if client is None:
            raise InvalidKeyError(
                "This server needs a key, in the header 'Authorization: Bearer KEY'."
                if key is None
                else "The key in the header 'Authorization' is not one of this server's."
            )
        scope[CLIENT_KEY] = client


class TicketMiddleware:
    """Gives each request that may make work its ticket, and takes its place back when the request is over."""

    def __init__(self, app: ASGIApp, *, admission: Admission) -> None:
        self.app = app
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else "-"
        ticket = Ticket(scope.get(CLIENT_KEY) or address, receive, self.admission, time.monotonic())
        token = current_ticket.set(ticket)
        try:
            await self.app(scope, receive, send)
        finally:
            current_ticket.reset(token)
            self.admission.leave(ticket)


def _bearer(header: str | None) -> str | None:
    scheme, _, key = (header or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
