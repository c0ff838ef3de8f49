"""The conversations that the target is asked to answer, from a chat JSONL file.

Owns reading, checking and choosing them. Everything that is wrong with the file is said before the first question is
asked. Refuses to know HTTP and tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation, ending with the user's turn."""

    id: str
    index: int  # line of the file, from 0: what is chosen by it does not depend on which other prompts are left out
    source: str
    licence: str | None
    messages: Messages


def read_prompts(path: Path, *, licences: Collection[str] = (), limit: int | None = None) -> list[Prompt]:
    """Read prompts in the file's order.

    A line is an object with `messages`, `prompt` (a string), `question` (a string) or `turns` (a list of strings, of
    which the first is asked); and if it has them `id`, `source` and `licence`. Answers that end a conversation are
    dropped, so that a file of answers can be answered anew.

    Args:
        path: of the file, compressed if it ends with .gz.
        licences: only prompts under one of these; empty means all.
        limit: at most so many.

    Raises:
        ConfigError: the file cannot be read, has a broken line, or nothing is left of it.
    """
    prompts = list(_parse_lines(path))
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    _check_ids(prompts, path)
    if licences:
        known = {prompt.licence for prompt in prompts if prompt.licence is not None}
        unknown = sorted(set(licences) - known)
        if unknown:
            raise ConfigError(
                f"no prompt of {path} is under {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        prompts = [prompt for prompt in prompts if prompt.licence in licences]
    return prompts[:limit]


def _parse_lines(path: Path) -> Iterator[Prompt]:
    for index, record in read_records(path):
        yield _parse_record(record, path, index)


def read_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with its line from 0; empty lines are passed over.

    Raises:
        ConfigError: the file cannot be read, or a line is no object.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    records = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{index + 1} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{index + 1} is no JSON object")
        records.append((index, record))
    return records


def _parse_record(record: dict[str, Any], path: Path, index: int) -> Prompt:
    where = f"{path}:{index + 1}"
    messages = _messages_of(record, where)
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].get("role") != "user":
        raise ConfigError(f"{where}: the conversation has no user's turn to answer at its end")
    return Prompt(
        id=str(record.get("id", f"line-{index + 1}")),
        index=index,
        source=str(record.get("source", path.name.split(".")[0])),
        licence=record.get("licence"),
        messages=messages,
    )


def _messages_of(record: dict[str, Any], where: str) -> Messages:
    match record:
        case {"messages": [*messages]} if all(isinstance(message, dict) for message in messages):
            return messages
        case {"prompt": str() as text} | {"question": str() as text} | {"turns": [str() as text, *_]} if text:
            return [{"role": "user", "content": text}]
    raise ConfigError(
        f"{where} needs 'messages' (a list of objects with 'role' and 'content'), 'prompt', 'question' or 'turns'"
    )


def _check_ids(prompts: list[Prompt], path: Path) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(
                f"{path}:{prompt.index + 1}: the id {prompt.id!r} occurs twice, so a run could not resume"
            )
        seen.add(prompt.id)
