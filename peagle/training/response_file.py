"""A JSONL file of answers that grows line by line, and that a killed run leaves whole but for its last line.

Owns that file and which ids it already has. Refuses to know where answers come from.
"""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.errors import ConfigError

_START = b'{"id": '  # of every record


class ResponseFile:
    """Appends records, each at once and unbuffered. A context manager.

    Opening cuts a half-written last line off, and reads the ids that are there.

    Args:
        path: made if it is not there; its directory must be.

    Raises:
        ConfigError: the file cannot be written, or holds something else than records with an `id`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = path.read_bytes() if path.exists() else b""
            whole, rest = content[: content.rfind(b"\n") + 1], content[content.rfind(b"\n") + 1 :]
            self.ids = {_id_of(line, path, number) for number, line in enumerate(whole.split(b"\n")[:-1], 1)}
            _check_is_ours(rest, path)
            self._file: FileIO = path.open("ab", buffering=0)  # what is written is in the file, or was not written
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._mend(rest, len(whole))

    def __enter__(self) -> ResponseFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, record: dict[str, Any]) -> None:
        """Write one record, whose first key is `id`.

        Raises:
            ConfigError: the disk is full, or the file is gone from under us.
        """
        self._write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.ids.add(record["id"])

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}; make room and run the same command again, which goes on "
                "where it stopped"
            ) from None

    def _mend(self, rest: bytes, num_whole_bytes: int) -> None:
        if not rest:
            return
        try:
            self.ids.add(_id_of(rest, self.path, 0))
        except ConfigError:
            self._file.truncate(num_whole_bytes)
        else:
            self._write(b"\n")  # nothing but the end of the line was missing


def _check_is_ours(rest: bytes, path: Path) -> None:
    """What is cut off must be a beginning of a record, not somebody's only line."""
    if not rest.startswith(_START[: len(rest)]):
        raise ConfigError(f"{path} ends with a line that is no answer; give --output another file")


def _id_of(line: bytes, path: Path, number: int) -> str:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}:{number} is no answer with an 'id'; give --output another file") from None
