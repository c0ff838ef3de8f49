"""Server-sent events, from bytes as they come.

Owns splitting a byte stream into the payloads of its events (WHATWG HTML, section 9.2, only the `data` field).
Refuses to know what a payload means.
"""

from __future__ import annotations


class SseParser:
    """Incremental parser: whatever way the stream is cut into chunks, the same events come out."""

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._data_lines: list[bytes] = []
        self._is_after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the payloads of the events that they complete.

        An event is complete at its blank line; what has no blank line when the stream ends was never sent in full.
        """
        if not chunk:
            return []
        if self._is_after_cr and chunk.startswith(b"\n"):  # the second half of a CR LF that was cut in two
            chunk = chunk[1:]
            self._is_after_cr = False
            if not chunk:
                return []
        self._is_after_cr = chunk.endswith(b"\r")
        text = self._unfinished_line + chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._unfinished_line = text.split(b"\n")
        return [payload for line in lines if (payload := self._take_line(line)) is not None]

    def _take_line(self, line: bytes) -> bytes | None:
        if not line:
            payload = b"\n".join(self._data_lines) if self._data_lines else None
            self._data_lines = []
            return payload
        name, _, value = line.partition(b":")  # a comment has the empty name
        if name == b"data":
            self._data_lines.append(value.removeprefix(b" "))
        return None
