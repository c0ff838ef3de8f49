"""Tiny but real tokenizers, written to disk as a checkpoint would hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from peagle.text.byte_alphabet import CHARACTER_OF_BYTE

CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny test model<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Spelled as in the text; "\xf0\x9f" and "\x98\x80" are halves of an emoji, so that one token may be half a character.
_MERGES: tuple[tuple[bytes, bytes], ...] = (
    (b" ", b"t"),
    (b"h", b"e"),
    (b" t", b"he"),
    (b"i", b"n"),
    (b"e", b"r"),
    (b" ", b" "),
    (b"o", b"n"),
    (b"l", b"l"),
    (b"he", b"ll"),
    (b"hell", b"o"),
    (b"\n", b"\n"),
    (b"\xf0", b"\x9f"),
    (b"\x98", b"\x80"),
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(_MERGES) + len(SPECIAL_TOKENS)  # 272
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = range(VOCAB_SIZE - 3, VOCAB_SIZE)


def build_tokenizer_directory(path: Path, *, chat_template: str | None = CHATML_TEMPLATE) -> Path:
    """Write a byte-level BPE of `VOCAB_SIZE` tokens: the id of a byte is the byte, then merges, then special tokens.

    An answer ends with <|im_end|> or <|endoftext|>. Returns `path`, for `Tokenizer.from_directory`.
    """
    merges = [(_spell(left), _spell(right)) for left, right in _MERGES]
    vocab = {char: byte for byte, char in enumerate(CHARACTER_OF_BYTE)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment,unused-ignore]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment,unused-ignore]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    _write(path, tokenizer, config=config, chat_template=chat_template, eos_token_id=[IM_END_ID, ENDOFTEXT_ID])
    return path


_LLAMA_WORDS = (
    "▁",
    "▁t",
    "▁the",
    "he",
    "▁hello",
    "lo",
    "▁▁",
    "é",
    "你",
    "🙂",
    "a",
    "b",
    "c",
    ".",
    "t",
    "h",
    "e",
    "l",
    "o",
)


def build_byte_fallback_tokenizer_directory(path: Path) -> Path:
    """Write a Llama-style BPE: ▁ for space, a token for each byte, and a decoder that strips a text's first space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for word in _LLAMA_WORDS:
        vocab.setdefault(word, len(vocab))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "o"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment,unused-ignore]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment,unused-ignore]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special_tokens = ("<unk>", "<s>", "</s>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment,unused-ignore]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(path, tokenizer, config=config, chat_template=None, eos_token_id=2)
    return path


def _spell(text: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in text)


def _write(
    path: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any],
    chat_template: str | None,
    eos_token_id: int | list[int],
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    template = {} if chat_template is None else {"chat_template": chat_template}
    full_config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, **template}
    (path / "tokenizer_config.json").write_text(json.dumps(full_config, ensure_ascii=False), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}), encoding="utf-8")
