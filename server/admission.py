"""The door to the engine: who may come in, who waits, and who is refused before any work is done for him.

Owns the places that requests take in the engine, the queue in front of them and its bounds, and the limits of single
clients. A request is admitted before its reply begins, so every refusal is a status with headers that say when to come
back. Everything here runs on the event loop. Refuses to know what requests ask for, and where clients' names come from.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from peagle.errors import EngineOverloadedError
from server.errors import QueueTimeoutError, RateLimitError, ShuttingDownError
from server.fair_queue import FairQueue
from server.token_budget import TokenBudget

SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
_NEW_WEIGHT = 0.1  # of the latest request in the mean time that a place is held


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How much may be under way.

    Attributes:
        num_places: requests in the engine at once.
        max_waiting: requests that wait for a place.
        max_waiting_tokens: tokens of their prompts; None: any number.
        queue_timeout_s: how long one waits.
        max_requests_per_client: of one client, waiting or in the engine; None: any number.
        tokens_per_minute: of one client, prompts and answers; None: any number.
    """

    num_places: int
    max_waiting: int
    max_waiting_tokens: int | None = None
    queue_timeout_s: float = 60.0
    max_requests_per_client: int | None = None
    tokens_per_minute: int | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request at the door. `receive` tells when its client goes away."""

    client: str
    receive: Receive
    door: Admission
    arrived_at: float
    num_tokens: int = 0
    seated_at: float | None = None
    turn: asyncio.Future[None] | None = field(default=None)


current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


def check_admission() -> None:
    """Refuse the current request, if it is sure to be refused, before work is done for it.

    Raises:
        RateLimitError: its client has reached a limit.
        EngineOverloadedError: too many wait.
    """
    ticket = current_ticket.get()
    if ticket is not None:
        ticket.door.check(ticket)


async def admit(num_prompt_tokens: int) -> float:
    """Wait until the current request may enter the engine. Returns when it arrived, as `time.monotonic()` seconds.

    Raises:
        RateLimitError: its client has reached a limit.
        EngineOverloadedError: too many wait.
        QueueTimeoutError: it has waited too long.
        ShuttingDownError: the server ended it while it waited.
        ClientDisconnect: its client has gone.
    """
    ticket = current_ticket.get()
    if ticket is None:  # not from HTTP
        return time.monotonic()
    await ticket.door.admit(ticket, num_prompt_tokens)
    return ticket.arrived_at


class Admission:
    """The door of one server.

    Args:
        limits: how much may be under way.
        on_wait: called with True when a ticket begins to wait, with False when it ends: a shutdown waits for it, too.
    """

    def __init__(self, limits: AdmissionLimits, *, on_wait: Callable[[Ticket, bool], None] = lambda t, w: None) -> None:
        self._limits = limits
        self._on_wait = on_wait
        self._queue: FairQueue[Ticket] = FairQueue()
        self._num_held: Counter[str] = Counter()
        self._num_free = limits.num_places
        self._num_waiting_tokens = 0
        self._mean_hold_s = 1.0
        rate = limits.tokens_per_minute
        self._budget = None if rate is None else TokenBudget(rate)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def check(self, ticket: Ticket, num_tokens: int = 0) -> None:
        """Refuse what cannot be admitted now. See `check_admission`."""
        limits, client = self._limits, ticket.client
        most = limits.max_requests_per_client
        if most is not None and self._num_held[client] + self._queue.num_waiting(client) >= most:
            raise RateLimitError(
                f"You have {most} requests under way, which is the limit of this server; wait for one to end.",
                retry_after_s=self._retry_after_s(1),
            )
        wait_s = 0.0 if self._budget is None else self._budget.wait_s(client, time.monotonic())
        if wait_s > 0:
            raise RateLimitError(
                f"You have used the {limits.tokens_per_minute} tokens a minute that this server gives to a client; "
                f"come back in {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )
        if self._must_wait() and not self._has_room(client, num_tokens):
            raise self._overloaded()

    async def admit(self, ticket: Ticket, num_tokens: int) -> None:
        """Give the ticket a place, at once or later. See the function of this name."""
        self.check(ticket, num_tokens)
        ticket.num_tokens = num_tokens
        if self._must_wait():
            await self._wait(ticket)
        else:
            self._seat(ticket)
        self.charge(ticket.client, num_tokens)

    def leave(self, ticket: Ticket) -> None:
        """The request is over, whether or not it ever got a place."""
        if ticket.seated_at is None:
            return
        held_s = time.monotonic() - ticket.seated_at
        self._mean_hold_s += _NEW_WEIGHT * (held_s - self._mean_hold_s)
        ticket.seated_at = None
        self._num_held[ticket.client] -= 1
        if not self._num_held[ticket.client]:
            del self._num_held[ticket.client]
        self._num_free += 1
        while self._num_free > 0 and len(self._queue) > 0:
            self._call(self._queue.pop(self._num_held))

    def charge(self, client: str, num_tokens: int) -> None:
        """A client has used tokens."""
        if self._budget is not None:
            self._budget.charge(client, num_tokens, time.monotonic())

    def close(self) -> None:
        """End all who wait."""
        for ticket in list(self._queue):
            self._turn_away(ticket, ShuttingDownError())

    # ---- the queue

    def _must_wait(self) -> bool:
        return self._num_free <= 0 or len(self._queue) > 0

    def _has_room(self, client: str, num_tokens: int) -> bool:
        """True if one more may wait, perhaps in the place of the newest request of a client that has many."""
        largest = self._queue.largest_line()
        may_displace = largest is not None and self._queue.num_waiting(largest) > self._queue.num_waiting(client) + 1
        return may_displace or not self._is_full(num_tokens)

    def _is_full(self, num_tokens: int) -> bool:
        limits = self._limits
        if len(self._queue) >= limits.max_waiting:
            return True
        most = limits.max_waiting_tokens
        # An empty queue takes a prompt of any length: else it could never be served.
        return most is not None and len(self._queue) > 0 and self._num_waiting_tokens + num_tokens > most

    async def _wait(self, ticket: Ticket) -> None:
        while self._is_full(ticket.num_tokens):
            largest = self._queue.largest_line()
            if largest is None or self._queue.num_waiting(largest) <= self._queue.num_waiting(ticket.client) + 1:
                raise self._overloaded()
            self._turn_away(self._queue.newest_of(largest), self._overloaded())
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        self._queue.push(ticket.client, ticket)
        self._num_waiting_tokens += ticket.num_tokens
        self._on_wait(ticket, True)
        gone = asyncio.ensure_future(_until_gone(ticket.receive))
        try:
            await asyncio.wait({turn, gone}, timeout=self._limits.queue_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                turn.result()
            elif gone.done():
                raise ClientDisconnect
            else:
                raise QueueTimeoutError(retry_after_s=self._retry_after_s(self.num_waiting))
        finally:
            gone.cancel()
            self._forget(ticket)
            self._on_wait(ticket, False)

    def _forget(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue, if it is still there."""
        before = len(self._queue)
        self._queue.remove(ticket.client, ticket)
        if len(self._queue) < before:
            self._num_waiting_tokens -= ticket.num_tokens

    def _call(self, ticket: Ticket) -> None:
        """It is this ticket's turn; it was just taken out of the queue."""
        self._num_waiting_tokens -= ticket.num_tokens
        if ticket.turn is None or ticket.turn.done():
            return
        self._seat(ticket)
        ticket.turn.set_result(None)

    def _turn_away(self, ticket: Ticket, error: Exception) -> None:
        self._forget(ticket)
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_exception(error)

    def _seat(self, ticket: Ticket) -> None:
        ticket.seated_at = time.monotonic()
        self._num_held[ticket.client] += 1
        self._num_free -= 1

    def _overloaded(self) -> EngineOverloadedError:
        error = EngineOverloadedError(f"{len(self._queue)} requests are waiting already; try again later")
        error.__dict__["retry_after_s"] = self._retry_after_s(len(self._queue))
        return error

    def _retry_after_s(self, num_before: int) -> float:
        """When so many requests will probably have had their turn."""
        seconds = num_before * self._mean_hold_s / self._limits.num_places
        return min(max(seconds, SHORTEST_RETRY_S), LONGEST_RETRY_S)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
