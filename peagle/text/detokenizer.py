"""Text of an answer as it grows, token by token.

Owns the question of which text is certain. Refuses to know stop strings and requests.

A token is not a piece of text: a character may be spread over several tokens, and what a token reads as may depend on
its neighbours. So text comes out only once no later token can change it. Each token costs the same, however long the
answer: the answer is never decoded anew.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from peagle.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one answer. All that `push` and `flush` return, joined, is `decode` of all the tokens at once,
    without a last character whose last bytes never came.

    U+FFFD comes out only where the answer really has bytes that are no character, never for the first half of one: an
    answer that ends in the middle of a character ends before it.

    Args:
        tokenizer: shared, not changed.
        skip_special_tokens: leave special tokens out of the text.
        visible_special_tokens: but for these, by their text.
        prompt_tail_ids: last tokens of the prompt (a few suffice). With them the answer is read as the continuation
            of a text: sentencepiece's decoders drop the space of a *text's* first token, and an answer to a prompt
            does not begin a text. A tail of skipped special tokens counts as no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        visible_special_tokens: Iterable[str] = (),
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        self._skipped_ids: frozenset[int] = frozenset()
        if skip_special_tokens:
            special_ids = tokenizer.special_ids
            visible = {special_ids[token] for token in visible_special_tokens if token in special_ids}
            self._skipped_ids = tokenizer.special_token_ids - visible
        self._stream: _TextStream
        if tokenizer.is_byte_level:
            self._stream = _ByteStream(tokenizer)
        else:
            tail = [token_id for token_id in prompt_tail_ids if token_id not in self._skipped_ids]
            self._stream = _WindowStream(tokenizer, tail)

    def push(self, token_id: int) -> str:
        """Take the answer's next token; the text that became certain with it, often ""."""
        return "" if token_id in self._skipped_ids else self._stream.push(token_id)

    def flush(self) -> str:
        """The answer has ended: the text that was still held back. A second call gives ""."""
        return self._stream.flush()


class _TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """For byte-level decoders: tokens are bytes, whatever their neighbours, and only UTF-8 has to be waited for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        held = self._decoder.getstate()[0]
        self._decoder.reset()
        return "" if _begins_character(held) else held.decode("utf-8", "replace")


class _WindowStream:
    """For all other decoders: decode a window of the last tokens, with and without the new ones.

    The window is `context`, a token whose text is out already and which shows the decoder that its neighbours stand
    in the middle of a text, and `pending`, tokens whose text is not out yet.

    A run of byte tokens is held until a token of another kind ends it: if any of its bytes is wrong, `tokenizers`
    decodes the whole run as U+FFFD, so nothing of it is certain before. Inside a run nothing is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = [token_id for token_id in tail if self._is_plain(token_id)][-1:]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.piece(token_id) is None:
            return ""  # outside the vocabulary: stands for nothing and may not become the context
        self._pending.append(token_id)
        if not self._is_plain(token_id):
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) or not text.startswith(self._context_text):
            return ""  # a decoder of a kind unknown here: the next tokens will settle it
        new_text = text[len(self._context_text) :]
        self._context, self._pending = [token_id], []
        self._context_text = self._decode(self._context)
        return new_text

    def flush(self) -> str:
        complete = self._pending[: len(self._pending) - self._num_unfinished_bytes()]
        self._pending = []
        return self._decode(self._context + complete)[len(self._context_text) :] if complete else ""

    def _num_unfinished_bytes(self) -> int:
        """How many byte tokens at the end are the beginning of a character that never came."""
        run = list(itertools.takewhile(self._tokenizer.is_byte_token, reversed(self._pending)))[::-1]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(b"".join(self._tokenizer.token_bytes(token_id) for token_id in run))
        held = decoder.getstate()[0]
        return len(held) if _begins_character(held) else 0

    def _is_plain(self, token_id: int) -> bool:
        return not self._tokenizer.is_byte_token(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _begins_character(held: bytes) -> bool:
    """Whether bytes that a decoder holds back may become a character.

    Python's waits for the third byte of a surrogate (ED A0 to ED BF), which is no character in UTF-8, whatever comes.
    """
    return not (len(held) > 1 and held[0] == 0xED and held[1] >= 0xA0)
