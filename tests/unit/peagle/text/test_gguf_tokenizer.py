from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from peagle.errors import ModelLoadError
from peagle.text import Tokenizer
from peagle.text.byte_alphabet import CHARACTER_OF_BYTE
from peagle.text.gguf_tokenizer import write_tokenizer_from_gguf

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
# As in SmolLM2's file: special tokens come first, bytes next, merges last.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
MERGES = ["Ċ Ċ", "Ġ 1", "1 2", "12 3", "a b", "Ġ Ġ"]
TOKENS = [*SPECIAL, *CHARACTER_OF_BYTE, *(merge.replace(" ", "") for merge in MERGES)]
TYPES = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (256 + len(MERGES))
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
}


def write_gguf(path: Path, **changes: Any) -> Path:
    """Write a GGUF file of tokenizer metadata alone. In `changes`, None leaves a key out; `.` is written `__`."""
    writer = GGUFWriter(path, "llama")
    values = {**METADATA, **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}}
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(tmp_path: Path, **changes: Any) -> Tokenizer:
    write_tokenizer_from_gguf(write_gguf(tmp_path / "model.gguf", **changes), tmp_path / "out")
    return Tokenizer.from_directory(tmp_path / "out")


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("smollm"))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.piece(token_id) for token_id in tokenizer.encode(text, add_special_tokens=True)]


def test_special_tokens_and_template(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == len(TOKENS)
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm.pad_token, smollm.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert smollm.special_token_ids == {0, 1, 2}
    assert smollm.eos_token_ids == {2}
    assert smollm.encode("<|im_start|>a<tool><|im_end|>", add_special_tokens=True) == [1, 4 + ord("a"), 3, 2]
    assert smollm.decode([1, 4 + ord("a"), 3, 2], skip_special_tokens=True) == "a<tool>"
    assert smollm.chat_template.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>Hi"


@given(text=st.text(max_size=40))
def test_text_survives(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_smollm_takes_every_digit_alone(smollm: Tokenizer) -> None:
    assert pieces_of(smollm, "ab 123") == ["ab", "Ġ", "1", "2", "3"]  # although the vocabulary has Ġ1, 12 and 123
    assert pieces_of(smollm, "\n\n12  1") == ["ĊĊ", "1", "2", "ĠĠ", "1"]  # GPT-2's pattern would break the run


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123\n\n12", ["ab", "Ġ1", "2", "3", "Ċ", "Ċ", "12"]),
        ("llama-bpe", "ab 123\n\n1234", ["<|im_start|>", "ab", "Ġ", "123", "ĊĊ", "123", "4"]),
        ("qwen2", "ab 123\n\n12", ["ab", "Ġ", "1", "2", "3", "ĊĊ", "1", "2"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first: NFC
    ],
)
def test_other_families_cut_text_their_own_way(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    # Here Ġ1 is used by gpt-2 alone, and llama-bpe begins a text with bos where the file does not say.
    assert pieces_of(load(tmp_path, ggml__pre=pre, ggml__add_bos_token=None), text) == pieces


@given(text=st.text(alphabet=st.sampled_from("aéß你12²  \n\r\t.,'sTLl🙂\u0301"), max_size=30))
def test_qwen2_equals_transformers(qwen2: Tokenizer, text: str) -> None:
    reference = Qwen2Tokenizer(
        vocab={token: token_id for token_id, token in enumerate(TOKENS)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
    )
    assert qwen2.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("qwen2"), ggml__pre="qwen2")


def test_gpt2_cuts_like_the_byte_level_pre_tokenizer(tmp_path: Path) -> None:
    load(tmp_path, ggml__pre="gpt-2")
    backend = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    expected = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=False).__getstate__())
    assert backend["pre_tokenizer"] == expected


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"),
    [(False, False, []), (True, False, [1]), (False, True, [2]), (True, True, [1, 2])],
)
def test_the_file_says_what_surrounds_a_text(tmp_path: Path, add_bos: bool, add_eos: bool, expected: list[int]) -> None:
    tokenizer = load(tmp_path, ggml__add_bos_token=add_bos, ggml__add_eos_token=add_eos)
    assert tokenizer.encode("", add_special_tokens=True) == expected
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    generation_config = tmp_path / "out" / "generation_config.json"
    generation_config.write_text('{"bos_token_id": 1, "eos_token_id": 2}', encoding="utf-8")
    assert load(tmp_path, ggml__eot_token_id=0).eos_token_ids == {0, 2}
    assert json.loads(generation_config.read_text(encoding="utf-8")) == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_a_file_without_template_gives_a_checkpoint_without(tmp_path: Path) -> None:
    assert not load(tmp_path, chat_template=None).chat_template.is_present


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ggml__model": "llama"}, "type 'llama'; only 'gpt2'"),
        ({"ggml__pre": "tekken"}, "pre-tokenizer 'tekken'; known are gpt-2, llama-bpe, qwen2, smollm"),
        ({"ggml__pre": "default"}, "pre-tokenizer 'default'"),
        ({"ggml__pre": None}, "has no tokenizer.ggml.pre"),
        ({"ggml__model": None}, "has no tokenizer.ggml.model"),
        ({"ggml__merges": None}, "has no tokenizer.ggml.merges"),
        ({"ggml__merges": ["a zz"]}, "merges that do not fit"),
        ({"ggml__merges": ["ab"]}, "merges that do not fit"),
        ({"ggml__tokens": [*TOKENS[:-1], "a"]}, "lists a token twice"),
        ({"ggml__token_type": TYPES[:-1]}, "265 token types for 266 tokens"),
        ({"ggml__eos_token_id": 4000}, "eos_token_id 4000"),
        ({"ggml__add_space_prefix": True}, "space before each text"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load(tmp_path, **changes)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be read as a GGUF file"):
        write_tokenizer_from_gguf(tmp_path / "model.gguf", tmp_path / "out")
    with pytest.raises(ModelLoadError, match=r"absent\.gguf cannot be read"):
        write_tokenizer_from_gguf(tmp_path / "absent.gguf", tmp_path / "out")
