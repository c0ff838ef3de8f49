"""What the files of a checkpoint say about its text side.

Owns their names, their variants over the years, and which file wins. Refuses to know how text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import ModelLoadError

# Roles that a special token can have, as tokenizer_config.json, special_tokens_map.json and chat templates name them.
SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTokenEntry:
    """One entry of `added_tokens_decoder` in tokenizer_config.json."""

    token_id: int
    content: str
    is_special: bool
    is_normalized: bool
    is_single_word: bool
    strips_left: bool
    strips_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The text side of a checkpoint directory.

    Attributes:
        tokenizer_json: path of tokenizer.json, which exists.
        role_tokens: special tokens by role, such as {"eos_token": "<|im_end|>"}.
        extra_special_tokens: further tokens declared special, without a role.
        added_tokens: added tokens that tokenizer_config.json lists, by rising id.
        eos_token_ids: ids that the generation settings (else the model's configuration) name as ending an answer.
        chat_template: Jinja source, or None.
    """

    tokenizer_json: Path
    role_tokens: Mapping[str, str]
    extra_special_tokens: tuple[str, ...]
    added_tokens: tuple[AddedTokenEntry, ...]
    eos_token_ids: frozenset[int]
    chat_template: str | None


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the text side of the checkpoint directory `path`.

    Raises:
        ModelLoadError: tokenizer.json is missing, or a file does not hold what it should.
    """
    tokenizer_json = path / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise ModelLoadError(
            f"{tokenizer_json} is missing. It comes with every checkpoint in the Hugging Face layout: download it "
            "beside the weights, or make it from an older tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    config = _read_object(path / "tokenizer_config.json")
    tokens = {**_read_object(path / "special_tokens_map.json"), **config}  # the configuration wins
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        role_tokens={role: _content(tokens[role]) for role in SPECIAL_TOKEN_ROLES if tokens.get(role) is not None},
        extra_special_tokens=_extra_special_tokens(tokens),
        added_tokens=_added_tokens(config),
        eos_token_ids=_eos_token_ids(path),
        chat_template=_chat_template(path, config),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON and broken UTF-8 alike
        raise ModelLoadError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(value).__name__}: download it again")
    return value


def _content(token: str | dict[str, Any]) -> str:
    """A token is written as a string, or as an object with its content and flags."""
    return token if isinstance(token, str) else str(token["content"])


def _extra_special_tokens(tokens: Mapping[str, Any]) -> tuple[str, ...]:
    """Both names that the list has had. The newer one may also map names of a model's own to tokens."""
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = tokens.get(key) or []
        extra.extend(_content(token) for token in (value.values() if isinstance(value, dict) else value))
    return tuple(dict.fromkeys(extra))


def _added_tokens(config: Mapping[str, Any]) -> tuple[AddedTokenEntry, ...]:
    entries = [
        AddedTokenEntry(
            token_id=int(token_id),
            content=entry["content"],
            is_special=entry.get("special", False),
            is_normalized=entry.get("normalized", not entry.get("special", False)),
            is_single_word=entry.get("single_word", False),
            strips_left=entry.get("lstrip", False),
            strips_right=entry.get("rstrip", False),
        )
        for token_id, entry in config.get("added_tokens_decoder", {}).items()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.token_id))


def _eos_token_ids(path: Path) -> frozenset[int]:
    """Generation settings win over the model's configuration, as in `transformers`' `generate`."""
    config = _read_object(path / "config.json")
    text_config = config.get("text_config") or {}  # models that also see or hear nest the language part
    for source in (_read_object(path / "generation_config.json"), config, text_config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return frozenset({value})
        if value:
            return frozenset(value)
    return frozenset()


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins. Several named templates: the one called `default`."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    sources: dict[str, str] = {entry["name"]: entry["template"] for entry in template}
    if "default" not in sources:
        raise ModelLoadError(
            f"{path / 'tokenizer_config.json'} has chat templates named {sorted(sources)} but none named 'default': "
            "put the one to use into chat_template.jinja"
        )
    return sources["default"]
