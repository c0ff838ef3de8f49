from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from peagle.errors import InvalidParameterError, ModelLoadError
from peagle.text import Tokenizer
from tests.builders.tokenizer import (
    ENDOFTEXT_ID,
    IM_END_ID,
    IM_START_ID,
    VOCAB_SIZE,
    build_byte_fallback_tokenizer_directory,
    build_tokenizer_directory,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return build_tokenizer_directory(tmp_path)


def change_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**value, **changes}), encoding="utf-8")


def test_attributes(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == VOCAB_SIZE
    assert byte_level.special_token_ids == {ENDOFTEXT_ID, IM_START_ID, IM_END_ID}
    assert byte_level.eos_token_ids == {ENDOFTEXT_ID, IM_END_ID}
    assert (byte_level.bos_token, byte_level.bos_token_id) == ("<|im_start|>", IM_START_ID)
    assert (byte_level.eos_token, byte_level.eos_token_id) == ("<|im_end|>", IM_END_ID)
    assert (byte_level.pad_token, byte_level.pad_token_id) == ("<|im_end|>", IM_END_ID)
    assert (byte_level.unk_token, byte_level.unk_token_id) == (None, None)
    assert byte_level.is_byte_level
    assert not byte_level.has_byte_fallback


@given(text=st.text(max_size=50))
def test_text_survives(byte_level: Tokenizer, text: str) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(token_ids, skip_special_tokens=True) == text
    assert b"".join(map(byte_level.token_bytes, token_ids)) == text.encode()


def test_special_tokens_in_the_text_become_their_ids(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert token_ids == [IM_START_ID, *b"hi", IM_END_ID]
    assert byte_level.decode(token_ids, skip_special_tokens=True) == "hi"
    assert byte_level.decode(token_ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_bytes_of_a_sentencepiece_vocabulary(byte_fallback: Tokenizer) -> None:
    token_ids = byte_fallback.encode("the \n你é", add_special_tokens=True)
    assert [byte_fallback.token_bytes(token_id) for token_id in token_ids] == [
        *(b"<s>", b" the", b" ", b"\n"),
        *("你".encode(), "é".encode()),
    ]
    assert byte_fallback.token_bytes(10_000) == b""
    assert byte_fallback.piece(10_000) is None
    assert byte_fallback.is_byte_token(3 + 0x0A)
    assert not byte_fallback.is_byte_token(0)


@pytest.mark.parametrize(
    ("generation_eos", "config", "expected"),
    [
        (7, {"eos_token_id": 9}, {7, IM_END_ID}),  # generation settings win over the model's configuration
        ([7, 8], {}, {7, 8, IM_END_ID}),
        (None, {"eos_token_id": 9}, {9, IM_END_ID}),
        (None, {"eos_token_id": [9, 10]}, {9, 10, IM_END_ID}),
        (None, {"text_config": {"eos_token_id": 11}}, {11, IM_END_ID}),
        (None, {}, {IM_END_ID}),
        (0, {"eos_token_id": 9}, {0, IM_END_ID}),  # an id of 0 is an id
    ],
)
def test_ids_that_end_an_answer(directory: Path, generation_eos: Any, config: Any, expected: set[int]) -> None:
    change_json(directory / "generation_config.json", eos_token_id=generation_eos)
    change_json(directory / "config.json", **config)
    assert Tokenizer.from_directory(directory).eos_token_ids == expected


def test_special_tokens_may_be_objects_and_in_the_older_file(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["bos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "<|endoftext|>"}}))
    change_json(directory / "special_tokens_map.json", bos_token={"content": "<|im_start|>"}, eos_token="ignored")
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (IM_START_ID, ENDOFTEXT_ID)


def test_tokens_declared_only_in_the_configuration_are_added_and_special(directory: Path) -> None:
    change_json(
        directory / "tokenizer_config.json",
        added_tokens_decoder={
            str(VOCAB_SIZE + 1): {"content": "<tool>", "special": False},
            str(VOCAB_SIZE): {"content": "<think>", "special": True},
        },
        additional_special_tokens=["he", "<absent>"],
    )
    tokenizer, reference = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.vocab_size == VOCAB_SIZE + 2
    he = tokenizer.encode("he", add_special_tokens=False)[0]
    assert tokenizer.special_token_ids == {ENDOFTEXT_ID, IM_START_ID, IM_END_ID, VOCAB_SIZE, he}
    text = "a<think>the<tool>hello<absent"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == reference.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_an_added_token_with_another_id_is_refused(directory: Path) -> None:
    change_json(directory / "tokenizer_config.json", added_tokens_decoder={"900": {"content": "<x>", "special": True}})
    with pytest.raises(ModelLoadError, match=r"'<x>' the id 900, but .* it is 272"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("single", ["$A", "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_tokenizer_json_alone_decides_what_surrounds_a_text(
    directory: Path, single: str, flags: dict[str, bool]
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    special_tokens = [("<|im_start|>", IM_START_ID), ("<|im_end|>", IM_END_ID)]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=special_tokens)  # type: ignore[assignment,unused-ignore]
    backend.save(str(directory / "tokenizer.json"))
    change_json(directory / "tokenizer_config.json", **flags)
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for add_special_tokens in (True, False):
        expected = theirs.encode("the end", add_special_tokens=add_special_tokens)
        assert ours.encode("the end", add_special_tokens=add_special_tokens) == expected
    assert len(ours.encode("", add_special_tokens=True)) == single.count("<|im_")


def test_a_prompt_is_never_cut_or_padded(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.from_directory(directory).encode("xyzxyz", add_special_tokens=True) == [*b"xyzxyz"]


def test_the_template_has_three_places(directory: Path) -> None:
    def rendered() -> str:
        return Tokenizer.from_directory(directory).chat_template.render([{"role": "user", "content": "Hi"}])

    assert "tiny test model" in rendered()
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]
    change_json(directory / "tokenizer_config.json", chat_template=named)
    assert rendered() == "default"
    (directory / "chat_template.jinja").write_text("of its own: {{ messages[0].content }}", encoding="utf-8")
    assert rendered() == "of its own: Hi"
    (directory / "chat_template.jinja").unlink()
    change_json(directory / "tokenizer_config.json", chat_template=named[1:])
    with pytest.raises(ModelLoadError, match=r"\['tool_use'\] but none named 'default'"):
        rendered()
    change_json(directory / "tokenizer_config.json", chat_template=None)
    assert not Tokenizer.from_directory(directory).chat_template.is_present


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_broken_file_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"{name}.*download it again"):
        Tokenizer.from_directory(directory)


def test_half_a_surrogate_pair_is_the_clients_error(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        byte_level.encode("a\ud83d", add_special_tokens=False)


def test_many_threads_may_share_it(byte_level: Tokenizer) -> None:
    texts = [f"the hello {number} 🙂 <|im_end|>" * 20 for number in range(200)]

    def round_trip(text: str) -> str:
        token_ids = byte_level.encode(text, add_special_tokens=True)
        return byte_level.decode(token_ids, skip_special_tokens=False)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


def test_sentencepiece_style_equals_transformers(tmp_path: Path) -> None:
    build_byte_fallback_tokenizer_directory(tmp_path)
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the hello\n你é🙂 ü", "", " a"):
        token_ids = ours.encode(text, add_special_tokens=True)
        assert token_ids == theirs.encode(text)
        assert ours.decode(token_ids, skip_special_tokens=True) == text == theirs.decode(token_ids[1:])


def test_importing_it_brings_neither_torch_nor_transformers() -> None:
    program = "import sys, peagle.text; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@given(text=st.text(max_size=200))
def test_the_least_number_of_tokens_is_a_lower_bound(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.min_num_tokens(len(text.encode())) <= len(byte_level.encode(text, add_special_tokens=False))


def test_nothing_is_said_of_tokenizers_that_may_drop_text(byte_fallback: Tokenizer) -> None:
    assert byte_fallback.min_num_tokens(10**9) == 0
