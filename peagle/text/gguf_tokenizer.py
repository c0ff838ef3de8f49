"""A GGUF file's tokenizer, written out in the Hugging Face layout.

Owns the reading of `tokenizer.*` metadata and the table of pre-tokenizers. Refuses to guess: a tokenizer that is not in
the table would split text otherwise than the model learned it, so it is refused by name.

`transformers` can read the metadata too, but splits every text with GPT-2's pattern unless it knows the file's
pre-tokenizer; SmolLM2's is among those it does not know. Merges cannot join two digits there, so digits come out alone
all the same, but runs of spaces and line ends before a digit come out otherwise ("\\n\\n1." for example).

Source of the patterns: the tokenizer.json files of the families, by the names that llama.cpp's converter gives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from gguf import GGUFReader
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from peagle.errors import ModelLoadError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of the values of tokenizer.ggml.token_type

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a family of byte-level tokenizers cuts text before it merges."""

    build_pre_tokenizer: Callable[[], Any]
    adds_bos_token: bool = False  # where the file does not say
    ignores_merges: bool = False  # a piece that is a token is taken whole
    normalizes_nfc: bool = False


def _gpt2_splitter() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_splitter() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_splitter()])


def _pattern_splitter(digits: str) -> Any:
    """Llama 3's pattern, where `digits` says how many digits stay together."""
    pattern = tokenizers.Regex(_SPLIT_PATTERN.replace("{DIGITS}", digits))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), byte_level])


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt-2": _Family(build_pre_tokenizer=_gpt2_splitter),
        "smollm": _Family(build_pre_tokenizer=_smollm_splitter),
        "llama-bpe": _Family(
            build_pre_tokenizer=lambda: _pattern_splitter("{1,3}"), adds_bos_token=True, ignores_merges=True
        ),
        "qwen2": _Family(build_pre_tokenizer=lambda: _pattern_splitter(""), normalizes_nfc=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    """The `tokenizer.*` keys of a GGUF file."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Metadata:
        try:
            fields = GGUFReader(path).fields
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read as a GGUF file ({error}): download it again") from error
        values = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
        return cls(path=path, values=values)

    def require(self, key: str) -> Any:
        if key not in self.values:
            raise ModelLoadError(f"{self.path} has no {key}, so its tokenizer is unknown: use another GGUF file")
        return self.values[key]

    def family(self) -> _Family:
        """How this file's text is cut.

        Raises:
            ModelLoadError: not a byte-level tokenizer, or of a family that is not in the table.
        """
        model, pre = self.require("tokenizer.ggml.model"), self.require("tokenizer.ggml.pre")
        if model != "gpt2":
            raise ModelLoadError(
                f"{self.path} has a tokenizer of type {model!r}; only 'gpt2' (byte-level BPE) can be read from GGUF: "
                "serve the checkpoint's Hugging Face directory"
            )
        if pre not in _FAMILIES:
            raise ModelLoadError(
                f"{self.path} has the pre-tokenizer {pre!r}; known are {', '.join(sorted(_FAMILIES))}: "
                "serve the checkpoint's Hugging Face directory"
            )
        if self.values.get("tokenizer.ggml.add_space_prefix", False):
            raise ModelLoadError(
                f"{self.path} asks for a space before each text, which no tokenizer of pre-tokenizer {pre!r} does: "
                "serve the checkpoint's Hugging Face directory"
            )
        return _FAMILIES[pre]

    def role_tokens(self) -> dict[str, str]:
        """Special tokens by their role, under the names of tokenizer_config.json."""
        tokens = self.require("tokenizer.ggml.tokens")
        keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        roles: dict[str, str] = {}
        for role, key in keys.items():
            token_id = self.values.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is None:
                continue
            if token_id >= len(tokens):
                raise ModelLoadError(
                    f"{self.path} has the {key}_token_id {token_id} but only {len(tokens)} tokens: "
                    "use another GGUF file"
                )
            roles[role] = tokens[token_id]
        return roles


def write_tokenizer_from_gguf(gguf_path: Path, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for the tokenizer in a GGUF file.

    A second end token (end of turn), where the file has one, is added to generation_config.json.

    Args:
        gguf_path: file with a `gpt2` tokenizer whose pre-tokenizer is in the table above.
        directory: created if need be; files of these names are replaced.

    Raises:
        ModelLoadError: the file cannot be read, or its tokenizer cannot be rebuilt exactly.
    """
    metadata = _Metadata.read(gguf_path)
    family = metadata.family()
    backend = _build_backend(metadata, family)
    _surround_texts(backend, metadata, family)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **metadata.role_tokens(),
    }
    if "tokenizer.chat_template" in metadata.values:
        config["chat_template"] = metadata.values["tokenizer.chat_template"]
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", config)
    _record_end_of_turn(metadata, directory)


def _build_backend(metadata: _Metadata, family: _Family) -> tokenizers.Tokenizer:
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError(f"{metadata.path} lists a token twice, so ids are ambiguous: use another GGUF file")
    types = metadata.values.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{metadata.path} has {len(types)} token types for {len(tokens)} tokens: use another GGUF file"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.require("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=family.ignores_merges)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelLoadError(
            f"{metadata.path} has merges that do not fit its tokens ({error}): use another GGUF file"
        ) from error
    backend = tokenizers.Tokenizer(model)
    if family.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.build_pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added_tokens(tokens, types, _CONTROL))
    backend.add_tokens(_added_tokens(tokens, types, _USER_DEFINED))
    return backend


def _surround_texts(backend: tokenizers.Tokenizer, metadata: _Metadata, family: _Family) -> None:
    """Put the begin and end of sequence around texts encoded with special tokens, where the file wants them."""
    roles, values = metadata.role_tokens(), metadata.values
    adds_bos = values.get("tokenizer.ggml.add_bos_token", family.adds_bos_token) and "bos_token" in roles
    adds_eos = values.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in roles
    before = [roles["bos_token"]] if adds_bos else []
    after = [roles["eos_token"]] if adds_eos else []
    if before or after:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _added_tokens(tokens: list[str], types: list[int], wanted_type: int) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(token, normalized=False, special=wanted_type == _CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == wanted_type
    ]


def _record_end_of_turn(metadata: _Metadata, directory: Path) -> None:
    """Some files tell the end of a turn from the end of a text. Both end an answer."""
    eos_token_id = metadata.values.get("tokenizer.ggml.eos_token_id")
    eot_token_id = metadata.values.get("tokenizer.ggml.eot_token_id")
    if eot_token_id is None or eot_token_id == eos_token_id:
        return
    path = directory / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config["eos_token_id"] = [token_id for token_id in (eos_token_id, eot_token_id) if token_id is not None]
    _write_json(path, config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
