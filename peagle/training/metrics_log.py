"""What a training run measured, one JSON object a line, so that it survives the run and any tool can read it.

Owns the file: whole lines only, appended and flushed; and what a resumed run must forget, namely what was logged after
the checkpoint that it starts from. Refuses to know what the numbers mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

Entry = dict[str, Any]


class MetricsLog:
    """Appends entries to a file; every entry has a `step`.

    Args:
        path: of the file; its directory must be there.
        resume_step: the step of the checkpoint that the run continues from; later entries are removed, for their steps
            are done again. 0 begins anew.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        self._path = path
        kept = [entry for entry in read_metrics(path) if entry["step"] <= resume_step] if path.exists() else []
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(_line(entry) for entry in kept), encoding="utf-8")
        partial.replace(path)

    def append(self, *, step: int, **values: Any) -> None:
        """Write one entry. Numbers that are not finite become null, for JSON has no word for them."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))


def read_metrics(path: Path) -> list[Entry]:
    """Every whole entry; a last line that a killed run left unfinished is dropped.

    Raises:
        ConfigError: there is no such file, or a line is not an entry.
    """
    try:
        *lines, unfinished = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"there are no metrics at {path}") from None
    del unfinished
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is not JSON ({error}); it is no metrics file") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ConfigError(f"{path}:{number} has no 'step'; it is no metrics file")
        entries.append(entry)
    return entries


def _line(entry: Entry) -> str:
    return json.dumps({key: _finite(value) for key, value in entry.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
