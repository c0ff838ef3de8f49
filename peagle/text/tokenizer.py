"""Text to token ids and back, for one checkpoint.

Owns the `tokenizers` object, the special tokens and the ids that end an answer. Refuses to know `transformers` (whose
import costs seconds and brings torch), requests and streams: `IncrementalDetokenizer` decodes an answer as it grows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from peagle.errors import InvalidParameterError, ModelLoadError
from peagle.text.byte_alphabet import spelled_bytes
from peagle.text.chat_template import ChatTemplate
from peagle.text.tokenizer_files import AddedTokenEntry, TokenizerFiles, read_tokenizer_files

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARKER = "\u2581"  # sentencepiece writes a space as this character


class Tokenizer:
    """The tokenizer of a checkpoint. Not changed after construction, so any thread may use it at any time.

    Attributes:
        vocab_size: number of tokens, added ones included. The model's embedding may have more rows.
        eos_token_ids: ids that end an answer: those of the generation settings, and the tokenizer's own.
        special_token_ids: ids that `skip_special_tokens` leaves out of the text.
        bos_token, eos_token, pad_token, unk_token: the special tokens, or None.
        bos_token_id, eos_token_id, pad_token_id, unk_token_id: their ids; None also for a token that has no id.
        is_byte_level: every token stands for bytes whatever its neighbours, so text is these bytes as UTF-8.
        has_byte_fallback: tokens such as `<0x0A>` stand for single bytes (sentencepiece's way out).
        chat_template: renders messages for this checkpoint.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        self._backend = backend
        tokens = files.role_tokens
        self.bos_token, self.eos_token = tokens.get("bos_token"), tokens.get("eos_token")
        self.pad_token, self.unk_token = tokens.get("pad_token"), tokens.get("unk_token")
        self.bos_token_id, self.eos_token_id = self._id_of(self.bos_token), self._id_of(self.eos_token)
        self.pad_token_id, self.unk_token_id = self._id_of(self.pad_token), self._id_of(self.unk_token)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added_tokens: Mapping[int, Any] = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        own_eos = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids: frozenset[int] = files.eos_token_ids | own_eos
        kinds = _decoder_kinds(backend)
        self.is_byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self.has_byte_fallback = "ByteFallback" in kinds
        self._longest_token = _longest_token_bytes(backend) if self.is_byte_level else None
        self._marks_spaces = not kinds.isdisjoint({"Metaspace", "Replace"})
        self.chat_template = ChatTemplate(
            files.chat_template,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            other_tokens={role: token for role, token in tokens.items() if role not in ("bos_token", "eos_token")},
        )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint directory.

        Raises:
            ModelLoadError: a file is missing, broken, or contradicts another one; the message says what to do.
        """
        files = read_tokenizer_files(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ModelLoadError(f"{files.tokenizer_json} cannot be read ({error}): download it again") from error
        backend.no_truncation()  # a checkpoint may carry over what its training set; a prompt is never cut silently
        backend.no_padding()
        _register_added_tokens(backend, files)
        return cls(backend, files)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in the text become their ids.

        Args:
            text: any text that can be written as UTF-8.
            add_special_tokens: put the checkpoint's usual special tokens around it (many add a begin of sequence).
                False for a rendered chat template, which has them already.

        Raises:
            InvalidParameterError: the text has half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        """
        try:
            # A batch of one: unlike `encode` it lets other threads run, and it computes no offsets.
            encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameterError(
                "the text has an unpaired surrogate (such as \\ud83d alone), which is not valid Unicode"
            ) from error
        ids: list[int] = encodings[0].ids
        return ids

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by their text."""
        return {piece: one for one in sorted(self.special_token_ids) if (piece := self.piece(one)) is not None}

    def min_num_tokens(self, num_bytes: int) -> int:
        """Least number of tokens that text of `num_bytes` in UTF-8 can have; costs nothing, unlike counting them.

        0 where the tokenizer may drop text before it looks for tokens, so that nothing can be said.
        """
        return 0 if self._longest_token is None else -(-num_bytes // self._longest_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of whole answer `token_ids`. Ids outside the vocabulary stand for nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        """How the vocabulary spells a token, such as `Ġthe` or `▁the`; None for an id outside the vocabulary."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds in the middle of a text; b"" for an id outside the vocabulary.

        Special tokens are spelled out. The bytes of one token need not be whole characters.
        """
        token = self.piece(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return spelled_bytes(token)
        if self.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._marks_spaces:
            return token.replace(_SPACE_MARKER, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def is_byte_token(self, token_id: int) -> bool:
        """True for a token that stands for one byte, whose text depends on the byte tokens around it."""
        token = self.piece(token_id)
        return self.has_byte_fallback and token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _id_of(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Types of the decoder's parts, sequences taken apart, such as {"Replace", "ByteFallback", "Fuse", "Strip"}."""
    if backend.decoder is None:
        return frozenset()
    kinds: set[str] = set()
    waiting: list[dict[str, Any]] = [json.loads(backend.decoder.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting.extend(part["decoders"])
        else:
            kinds.add(part["type"])
    return frozenset(kinds)


def _longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Most bytes that one token stands for; None if some text stands for no token at all."""
    added: Mapping[int, Any] = backend.get_added_tokens_decoder()
    if backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added.values()):
        return None
    plain = (len(piece) for piece in backend.get_vocab(with_added_tokens=False))  # a character spells a byte
    return max(*plain, *(len(token.content.encode()) for token in added.values()), 1)


def _register_added_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Make tokens known, and special, that only tokenizer_config.json or special_tokens_map.json declares so.

    A declared token without an id is left out: the model has no embedding for it.
    """
    for entry in files.added_tokens:
        _register_added_token(backend, entry, files)
    registered: Mapping[int, Any] = backend.get_added_tokens_decoder()
    known = {token.content for token in registered.values()}
    for content in (*files.role_tokens.values(), *files.extra_special_tokens):
        if content not in known and backend.token_to_id(content) is not None:
            backend.add_special_tokens([content])


def _register_added_token(backend: tokenizers.Tokenizer, entry: AddedTokenEntry, files: TokenizerFiles) -> None:
    token = tokenizers.AddedToken(
        entry.content,
        single_word=entry.is_single_word,
        lstrip=entry.strips_left,
        rstrip=entry.strips_right,
        normalized=entry.is_normalized,
        special=entry.is_special or entry.content in files.role_tokens.values(),
    )
    add = backend.add_special_tokens if token.special else backend.add_tokens
    add([token])
    token_id = backend.token_to_id(entry.content)
    if token_id != entry.token_id:
        raise ModelLoadError(
            f"tokenizer_config.json gives {entry.content!r} the id {entry.token_id}, but in {files.tokenizer_json} "
            f"it is {token_id}: take both files from the same checkpoint"
        )
