"""Tokens that each client may use a minute.

Owns the balances: one fills up with time to a minute's worth, and is charged with what was used. A request is let in
while the balance is positive, whatever it will cost, so that no request is too large to be ever served; the debt is
waited for afterwards. Refuses to know requests.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_IDLE_CLIENTS = 4096  # balances that are kept; whoever is forgotten starts with a full one


@dataclass(slots=True)
class _Balance:
    tokens: float
    at: float


class TokenBudget:
    """Balances by client.

    Args:
        tokens_per_minute: how much flows in, and the most that a client can have.
    """

    def __init__(self, tokens_per_minute: int) -> None:
        self._limit = tokens_per_minute
        self._balances: dict[str, _Balance] = {}

    def wait_s(self, client: str, now: float) -> float:
        """How long the client has to wait until it may send a request; 0: not at all."""
        tokens = self._balance(client, now).tokens
        return 0.0 if tokens > 0 else (1 - tokens) * 60 / self._limit

    def charge(self, client: str, num_tokens: int, now: float) -> None:
        """The client has used so many tokens."""
        self._balance(client, now).tokens -= num_tokens

    def _balance(self, client: str, now: float) -> _Balance:
        balance = self._balances.get(client)
        if balance is None:
            self._forget_idle(now)
            balance = self._balances[client] = _Balance(self._limit, now)
        balance.tokens = min(self._limit, balance.tokens + max(0.0, now - balance.at) * self._limit / 60)
        balance.at = now
        return balance

    def _forget_idle(self, now: float) -> None:
        if len(self._balances) < MAX_IDLE_CLIENTS:
            return
        full = [name for name, b in self._balances.items() if b.tokens + (now - b.at) * self._limit / 60 >= self._limit]
        for name in full:
            del self._balances[name]
