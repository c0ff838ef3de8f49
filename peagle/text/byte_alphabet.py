"""The printable alphabet in which byte-level BPE vocabularies spell bytes.

Owns the table from each byte to its character and back. Refuses to know tokens and vocabularies.

Source: GPT-2's byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2):
printable bytes stand for themselves, the others take the characters from U+0100 on, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _is_spelled_as_itself(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


def _build_alphabet() -> tuple[str, ...]:
    alphabet: list[str] = []
    num_moved = 0
    for byte in range(256):
        if _is_spelled_as_itself(byte):
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + num_moved))
            num_moved += 1
    return tuple(alphabet)


CHARACTER_OF_BYTE: tuple[str, ...] = _build_alphabet()
BYTE_OF_CHARACTER: Mapping[str, int] = MappingProxyType({char: byte for byte, char in enumerate(CHARACTER_OF_BYTE)})


def spelled_bytes(token: str) -> bytes:
    """Bytes that a byte-level decoder makes of `token`.

    An added token with a character outside the alphabet is taken literally, as UTF-8: so does the decoder.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[char] for char in token])
    except KeyError:
        return token.encode()
