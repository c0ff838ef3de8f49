from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from peagle.text.byte_alphabet import CHARACTER_OF_BYTE, spelled_bytes


def test_the_alphabet_is_the_one_of_the_tokenizers_library() -> None:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("".join(map(chr, range(0x80))), "".join(map(chr, range(0x80, 0x800))), "你好🙂\U0010ffff"):
        spelled = "".join(piece for piece, _ in splitter.pre_tokenize_str(text))
        assert spelled == "".join(CHARACTER_OF_BYTE[byte] for byte in text.encode())
    assert set(CHARACTER_OF_BYTE) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("token", "expected"),
    [("Ġthe", b" the"), ("ðŁĺĢ", "😀".encode()), ("", b""), ("a b", b"a b"), ("漢Ġ", "漢Ġ".encode()), ("é", b"\xe9")],
)
def test_tokens_are_spelled_back(token: str, expected: bytes) -> None:
    assert spelled_bytes(token) == expected
