"""A GGUF file becomes the model it was made from, compared with the unmodified `transformers` model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from peagle.errors import ModelLoadError
from peagle.gguf_checkpoint import convert_gguf_checkpoint

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(*, tied: bool) -> LlamaForCausalLM:
    """A random Llama whose weights float16 holds exactly, with grouped key-value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # not `model.half()`, which would round the rotary frequencies as well
        parameter.data = parameter.data.half().float()
    return model


def gguf_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A query or key weight in GGUF's order, row by row: rows 2i and 2i + 1 are rows i and i + head_dim / 2."""
    head_dim = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            rows += [weight[head * head_dim + pair], weight[head * head_dim + head_dim // 2 + pair]]
    return np.stack(rows)


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    tensors = {}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            name = f"blk.{layer}.{NAMES[rest]}.weight"
            if rest == "self_attn.q_proj":
                array = gguf_rows(array, model.config.num_attention_heads)
            elif rest == "self_attn.k_proj":
                array = gguf_rows(array, model.config.num_key_value_heads)
        elif name == "lm_head.weight":
            if model.config.tie_word_embeddings:
                continue
            name = "output.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        tensors[name] = array
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    extra: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(64)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_token_list([f"t{token}" for token in range(40)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    extra(writer)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_computes_what_the_original_computes(tmp_path: Path, tied: bool) -> None:
    original = tiny_model(tied=tied)
    convert_gguf_checkpoint(write_gguf(tmp_path / "tiny.gguf", gguf_tensors(original)), tmp_path)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.arange(24).reshape(2, 12)  # [batch, length]
    with torch.inference_mode():
        assert torch.equal(converted(tokens).logits, original(tokens).logits)
    assert converted.config.tie_word_embeddings is tied
    assert converted.config.rms_norm_eps == 1e-5


def test_the_configurations_name_type_and_special_tokens(tmp_path: Path) -> None:
    convert_gguf_checkpoint(write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tiny_model(tied=True))), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"], config["bos_token_id"]) == ("float16", 2, 1)
    assert "pad_token_id" not in config
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_model(tied=True))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors of the model, the first is model.layers.1.mlp.up_proj"):
        convert_gguf_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors), tmp_path)


def test_a_foreign_tensor_is_named(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_model(tied=True)) | {"blk.0.attn_q.bias": np.zeros(48, dtype=np.float32)}
    with pytest.raises(ModelLoadError, match=r"no tensor 'blk.0.attn_q.bias'"):
        convert_gguf_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("qwen2", lambda writer: None, "architecture 'llama' are converted; this one is 'qwen2'"),
        ("llama", lambda writer: writer.add_rope_scaling_factor(8.0), "scaled rotary"),
        ("llama", lambda writer: writer.add_rope_dimension_count(4), "over 4 of 8 dimensions"),
        ("llama", lambda writer: writer.add_expert_count(4), "experts"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(
    tmp_path: Path, architecture: str, extra: Callable[[GGUFWriter], Any], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {}, architecture=architecture, extra=extra)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf_checkpoint(path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match="cannot be read as GGUF"):
        convert_gguf_checkpoint(tmp_path / "x.gguf", tmp_path)
