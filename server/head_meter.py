"""How large the head of a request is, while it arrives.

Owns the limits of heads, and of bytes that a parser swallows without making anything of them. Refuses to know HTTP.
"""

from __future__ import annotations

from server.errors import HeadersTooLargeError

MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 100

_MESSAGE = f"The head of a request may have {MAX_HEADERS} header fields and {MAX_HEAD_BYTES} bytes, and no more."


class HeadMeter:
    """Counts on one connection. Everything that counts raises `HeadersTooLargeError` beyond a limit.

    The fields of a trailer, after a body, count as fields of the head.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_fields = 0
        self._num_opaque_bytes = 0

    def start(self) -> None:
        """A new request begins."""
        self._num_bytes = self._num_fields = 0

    def count_target(self, num_bytes: int) -> None:
        """A piece of the request's target was read."""
        self._count(num_bytes)

    def count_field(self, num_bytes: int) -> None:
        """A whole header field was read."""
        self._num_fields += 1
        self._count(num_bytes)

    def count_fed(self, num_bytes: int) -> None:
        """Bytes are about to go to the parser, which keeps those of a field, or of a chunk's extension, to itself."""
        self._num_opaque_bytes += num_bytes

    def note_progress(self) -> None:
        """The parser has made something of what it was fed."""
        self._num_opaque_bytes = 0

    def check_progress(self) -> None:
        """The parser has taken all that it was fed."""
        if self._num_opaque_bytes > MAX_HEAD_BYTES:
            raise HeadersTooLargeError(_MESSAGE)

    def _count(self, num_bytes: int) -> None:
        self.note_progress()
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_HEAD_BYTES or self._num_fields > MAX_HEADERS:
            raise HeadersTooLargeError(_MESSAGE)
