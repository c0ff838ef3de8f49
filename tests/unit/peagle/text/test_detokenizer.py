from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from peagle.text import IncrementalDetokenizer, Tokenizer
from tests.builders.tokenizer import IM_END_ID
from tests.builders.tokenizer import VOCAB_SIZE as BYTE_LEVEL_VOCAB_SIZE

BYTE_FALLBACK_VOCAB_SIZE = 3 + 256 + 19
# Texts full of what takes more than one token, and bytes at random, which are mostly no characters at all.
TEXTS = st.text(alphabet=st.sampled_from("ab th.é你🙂👩‍👩\ufffd\n hello"), max_size=20)
PIECES = st.lists(st.one_of(TEXTS, st.binary(max_size=4)), max_size=6)


def push_all(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> Iterator[str]:
    for token_id in token_ids:
        yield detokenizer.push(token_id)
    yield detokenizer.flush()
    assert detokenizer.flush() == ""


def unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character, found by trying to finish it."""
    endings = [bytes(end) for size in (1, 2, 3) for end in itertools.product((0x80, 0x90, 0xA0, 0xBF), repeat=size)]
    for count in (3, 2, 1):
        start = data[len(data) - count :] if len(data) >= count else b""
        if start and any(is_one_character(start + ending) for ending in endings):
            return count
    return 0


def is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def whole_text(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> str:
    """What `text_of` must be: the decoded answer without the beginning of a character at its end."""
    shown = [t for t in token_ids if not (skip and t in tokenizer.special_token_ids)]
    if tokenizer.is_byte_level:
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in shown)
        return data[: len(data) - unfinished(data)].decode(errors="replace")
    known = [token_id for token_id in shown if tokenizer.piece(token_id) is not None]
    run = list(itertools.takewhile(tokenizer.is_byte_token, reversed(known)))[::-1]
    num_left_out = unfinished(b"".join(tokenizer.token_bytes(token_id) for token_id in run))
    return tokenizer.decode(known[: len(known) - num_left_out], skip_special_tokens=skip)


def text_of(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True, tail: tuple[int, ...] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_tail_ids=tail)
    return "".join(push_all(detokenizer, token_ids))


@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL_VOCAB_SIZE + 2), max_size=60), skip=st.booleans())
@example(token_ids=[0xED, 0xA0], skip=False)  # a surrogate's first bytes, which no third byte makes a character
def test_byte_level_equals_decode_for_any_ids(byte_level: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert text_of(byte_level, token_ids, skip=skip) == whole_text(byte_level, token_ids, skip=skip)


@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK_VOCAB_SIZE + 2), max_size=60), skip=st.booleans())
def test_byte_fallback_equals_decode_for_any_ids(byte_fallback: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert text_of(byte_fallback, token_ids, skip=skip) == whole_text(byte_fallback, token_ids, skip=skip)


@given(pieces=PIECES)
def test_byte_level_equals_decode_for_mixed_text_and_bytes(byte_level: Tokenizer, pieces: list[str | bytes]) -> None:
    token_ids: list[int] = []
    for piece in pieces:
        is_text = isinstance(piece, str)
        token_ids += byte_level.encode(piece, add_special_tokens=False) if is_text else list(piece)  # type: ignore[arg-type]
    assert text_of(byte_level, token_ids) == whole_text(byte_level, token_ids)


@given(pieces=PIECES, word_ids=st.lists(st.integers(3 + 256, BYTE_FALLBACK_VOCAB_SIZE - 1), min_size=6, max_size=6))
def test_byte_fallback_equals_decode_for_runs_of_bytes(
    byte_fallback: Tokenizer, pieces: list[str | bytes], word_ids: list[int]
) -> None:
    token_ids: list[int] = []
    for piece, word_id in zip(pieces, word_ids, strict=False):
        token_ids += [3 + byte for byte in (piece.encode() if isinstance(piece, str) else piece)] + [word_id]
    assert text_of(byte_fallback, token_ids) == whole_text(byte_fallback, token_ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_half_character_is_ever_shown(byte_level: Tokenizer, byte_fallback: Tokenizer, name: str, text: str) -> None:
    tokenizer = byte_level if name == "byte_level" else byte_fallback
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = list(push_all(IncrementalDetokenizer(tokenizer), token_ids))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_an_answer_cut_within_a_character_ends_before_it(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    smile = byte_level.encode("🙂", add_special_tokens=False)
    assert list(push_all(IncrementalDetokenizer(byte_level), smile)) == ["", "", "🙂", ""]
    assert list(push_all(IncrementalDetokenizer(byte_level), smile[:-1])) == ["", "", ""]
    hello = byte_fallback.encode("hello", add_special_tokens=False)
    smile = [3 + byte for byte in "🙂".encode()]
    assert text_of(byte_fallback, hello + smile) == "hello🙂"
    assert text_of(byte_fallback, hello + smile[:-1]) == "hello"


def test_a_wrong_byte_before_the_cut_character_is_shown(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert text_of(byte_level, [0xFF, 0xF0, 0x9F]) == "\ufffd"
    assert text_of(byte_fallback, [3 + 0xFF, 3 + 0xF0, 3 + 0x9F]) == "\ufffd"


def test_text_is_not_held_back_longer_than_needed(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        token_ids = tokenizer.encode("the hello the", add_special_tokens=False)
        *pieces, rest = push_all(IncrementalDetokenizer(tokenizer), token_ids)
        assert all(pieces)
        assert rest == ""


def test_special_tokens_can_be_shown(byte_level: Tokenizer) -> None:
    token_ids = [*b"hi", IM_END_ID]
    assert text_of(byte_level, token_ids) == "hi"
    assert text_of(byte_level, token_ids, skip=False) == "hi<|im_end|>"


def test_an_answer_that_continues_a_text_keeps_its_first_space(byte_fallback: Tokenizer) -> None:
    answer = byte_fallback.encode("hello", add_special_tokens=False)  # sentencepiece writes it as " hello"
    prompt = byte_fallback.encode("the", add_special_tokens=False)
    assert text_of(byte_fallback, answer) == "hello"
    assert text_of(byte_fallback, answer, tail=tuple(prompt)) == " hello"


def test_a_prompt_that_ends_in_byte_tokens_does_not_mix_with_the_answer(byte_fallback: Tokenizer) -> None:
    line_end, broken = 3 + 0x0A, 3 + 0xFF
    the = byte_fallback.encode("the", add_special_tokens=False)
    assert text_of(byte_fallback, [broken, *the], tail=(*the, line_end)) == "\ufffd the"


def test_a_tail_of_skipped_special_tokens_is_no_text(byte_fallback: Tokenizer) -> None:
    answer = byte_fallback.encode("hello", add_special_tokens=False)
    assert text_of(byte_fallback, answer, tail=(1,)) == "hello"


@given(
    tail=st.lists(st.integers(3 + 256, BYTE_FALLBACK_VOCAB_SIZE - 1), min_size=1, max_size=4),
    token_ids=st.lists(st.integers(0, BYTE_FALLBACK_VOCAB_SIZE - 1), max_size=30),
)
def test_a_primed_answer_is_the_rest_of_the_whole(
    byte_fallback: Tokenizer, tail: list[int], token_ids: list[int]
) -> None:
    prompt_text = byte_fallback.decode(tail, skip_special_tokens=True)
    whole = whole_text(byte_fallback, [*tail, *token_ids])
    assert prompt_text + text_of(byte_fallback, token_ids, tail=tuple(tail)) == whole


OTHER_DECODERS = [
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.WordPiece(),
    decoders.BPEDecoder(suffix="</w>"),
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    decoders.Sequence([decoders.Replace("_", " "), decoders.ByteLevel()]),
    None,
]
OTHER_WORDS = ["a", "##b", "c</w>", "▁d", "▁", "▁▁", ".", "Ġe", "_f", "<0xE4>", "<0xBD>", "<0xA0>", "ä", "½", "ł"]


@pytest.mark.parametrize("decoder", OTHER_DECODERS, ids=lambda decoder: type(decoder).__name__)
def test_other_decoders_equal_decode(tmp_path: Path, decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(OTHER_WORDS)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)

    @given(token_ids=st.lists(st.integers(0, len(OTHER_WORDS) - 1), max_size=30))
    def check(token_ids: list[int]) -> None:
        assert text_of(tokenizer, token_ids) == whole_text(tokenizer, token_ids)

    check()


def test_the_cost_of_a_token_does_not_grow(byte_fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = Tokenizer.decode

    def spy(self: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(self, token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", spy)
    text_of(byte_fallback, byte_fallback.encode("hello the é你🙂" * 50, add_special_tokens=False))
    assert longest <= 2
