"""Masks and cuts against a plain reading of the language: every token tried one by one on a fresh matcher."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.grammar.compiler import GrammarCompiler
from peagle.grammar.matcher import GrammarMatcher
from peagle.grammar_spec import GrammarSpec
from tests.builders.server import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)
WORDS = ["ab", "abc", "abd", "b", "bb a", "é"]
SPEC = GrammarSpec(kind="choice", text=json.dumps(WORDS))
EOS = min(TOKENIZER.eos_token_ids)


def allowed_ids(mask: np.ndarray) -> set[int]:
    return set(np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist())


def spelled_next(prefix: bytes) -> set[int]:
    """What may follow, read off the words: the tiny tokenizer's ids of bytes are the bytes."""
    words = [word.encode() for word in WORDS]
    ids = {word[len(prefix)] for word in words if word.startswith(prefix) and len(word) > len(prefix)}
    return ids | (set(TOKENIZER.eos_token_ids) if prefix in words else set())


def at(prefix: bytes) -> GrammarMatcher:
    matcher = COMPILER.compile(SPEC)
    assert matcher.advance(list(prefix))
    return matcher


bytes_of_words = st.sampled_from(sorted({byte for word in WORDS for byte in word.encode()}))
nodes = st.lists(st.tuples(bytes_of_words | st.just(EOS), st.integers(-1, 6)), max_size=7)


@settings(max_examples=200)
@given(drafts=nodes, prefix=st.sampled_from([b"", b"a", b"ab", b"b"]))
def test_masks_of_trees_equal_a_plain_reading(drafts: Sequence[tuple[int, int]], prefix: bytes) -> None:
    token_ids = [token_id for token_id, _ in drafts]
    parents = [min(parent, node - 1) for node, (_, parent) in enumerate(drafts)]
    matcher = at(prefix)
    allowed = matcher.allowed_nodes(token_ids, parents)
    masks = matcher.masks(token_ids, parents)
    assert allowed_ids(masks[0]) & set(range(256)) | (allowed_ids(masks[0]) & TOKENIZER.eos_token_ids) == spelled_next(
        prefix
    )
    texts: list[bytes | None] = []  # None: forbidden, or behind what is, or behind an end
    for node, parent in enumerate(parents):
        before = prefix if parent < 0 else texts[parent]
        is_allowed = before is not None and token_ids[node] in spelled_next(before)
        assert (node in allowed) == is_allowed
        is_end = token_ids[node] in TOKENIZER.eos_token_ids
        texts.append(before + bytes([token_ids[node]]) if before is not None and is_allowed and not is_end else None)
        text = texts[node]
        if text is None:
            assert (masks[1 + node] == -1).all()
        else:
            found = allowed_ids(masks[1 + node])
            assert found & (set(range(256)) | TOKENIZER.eos_token_ids) == spelled_next(text)
    again = matcher.masks([], [])
    assert (again[0] == masks[0]).all()  # looking ahead has moved nothing
    assert matcher.error is None


def test_what_does_not_belong_is_an_error() -> None:
    matcher = at(b"ab")
    assert matcher.is_complete
    assert not matcher.advance([ord("x")])
    assert matcher.error is not None
