"""Who may call: keys from the configuration and from a file, which is read again when it changes.

Owns the keys as digests (the keys themselves are not kept), the comparison, whose time says nothing about them, and
the name that a client has in logs and limits. Refuses to know HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # between looks at the file
NAME_LENGTH = 8  # hexadecimal digits of the digest, for keys without a name


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    digest: bytes


class ApiKeys:
    """A set of keys.

    Args:
        keys: from the configuration.
        file: one key a line, or a name, a space and a key; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: the file can't be read, or a line is no key.
    """

    def __init__(self, keys: tuple[str, ...], file: Path | None) -> None:
        self._given = tuple(_parse_line(key) for key in keys)
        self._file = file
        self._state: tuple[int, int, int] | None = None
        self._looked_at = time.monotonic()
        self._read: tuple[_Key, ...] = ()
        if file is not None:
            self._state = _state_of(file)
            self._read = read_keys(file)

    @property
    def is_empty(self) -> bool:
        """True if no key was configured at all. A file without keys is not that: it lets nobody in."""
        return not self._given and self._file is None

    def client_of(self, key: str) -> str | None:
        """The name of the client that has this key, or None. Takes the same time whichever it is."""
        self._look_at_file()
        digest, found = _digest(key), None
        for entry in (*self._given, *self._read):
            if hmac.compare_digest(entry.digest, digest):
                found = entry.name
        return found

    def _look_at_file(self) -> None:
        if self._file is None or time.monotonic() - self._looked_at < CHECK_INTERVAL_S:
            return
        self._looked_at = time.monotonic()
        try:
            state = _state_of(self._file)
            if state == self._state:
                return
            self._read, self._state = read_keys(self._file), state
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        logger.info("read %d API keys", len(self._read))


def read_keys(file: Path) -> tuple[_Key, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it can't be read, or a line is no key. No key is in the message.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {getattr(error, 'strerror', None) or error}") from error
    wanted = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = []
    for number, line in wanted:
        if line and not line.startswith("#"):
            try:
                keys.append(_parse_line(line))
            except ConfigError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from None
    return tuple(keys)


def _parse_line(line: str) -> _Key:
    words = line.split()
    if not 1 <= len(words) <= 2:
        raise ConfigError("wanted a key, or a name, a space and a key")
    digest = _digest(words[-1])
    return _Key(words[0] if len(words) == 2 else digest.hex()[:NAME_LENGTH], digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _state_of(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {file}: {error.strerror or error}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino
