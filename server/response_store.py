"""Responses that clients may come back to, in the memory of this process.

Owns the limit and who may see what: a response belongs to the client whose key it was made with. The least recently
used make room. Refuses to know what responses look like.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from server.errors import ResponseNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response.

    Attributes:
        client: whose it is; None where clients have no keys.
        response: its JSON.
        input_items: JSON of the items that were its input.
        messages: JSON of the conversation that it ends; empty while it is in progress.
    """

    client: str | None
    response: bytes
    input_items: bytes = b"[]"
    messages: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.response) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """See the module.

    Args:
        max_bytes: of all responses together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of all responses."""
        return self._num_bytes

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, in place of what it was before."""
        self._drop(response_id)
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def update(self, response_id: str, response: bytes, messages: bytes = b"") -> None:
        """A response has gone on. One that has been deleted or dropped stays away."""
        if response_id in self._stored:
            self.put(response_id, replace(self._stored[response_id], response=response, messages=messages))

    def get(self, response_id: str, client: str | None) -> StoredResponse:
        """A response of this client's.

        Raises:
            ResponseNotFoundError: there is none of this id.
        """
        stored = self._stored.get(response_id)
        if stored is None or stored.client != client:
            raise ResponseNotFoundError(
                f"Response with id '{response_id[:100]}' not found. Responses are kept in the memory of one server "
                "process, and the oldest make room for new ones.",
                param="response_id",
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, client: str | None) -> None:
        """Forget a response of this client's. Raises what `get` raises."""
        self.get(response_id, client)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
