"""Converts a GGUF file of the Llama family into a directory that `transformers` loads: weights and configurations.

Owns the names and the layout of GGUF tensors, and undoes what GGUF does to the query and key weights. Refuses to know
where the file came from, and torch: dequantising is numpy work. The tokenizer is `peagle.text.gguf_tokenizer`'s.

GGUF stores each head's query and key rows for rotary pairs that are neighbours (2i, 2i+1); `transformers` pairs row i
with row i + head_dim/2. The rows are therefore interleaved in the file, and `_split_rotary_pairs` sorts them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaMetadata:
    """What a GGUF header says about a Llama model. Sizes are in elements; `None` is "not in the header"."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> LlamaMetadata:
        """Read the header.

        Args:
            fields: GGUF key to value.

        Raises:
            ModelLoadError: another architecture, a missing key, or rotary embeddings that are scaled or partial.
        """
        architecture = fields.get("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(f"only GGUF files of architecture 'llama' are converted; this one is {architecture!r}")
        _refuse_special_rotary(fields)
        try:
            num_heads = int(fields["llama.attention.head_count"])
            return cls(
                num_layers=int(fields["llama.block_count"]),
                num_heads=num_heads,
                num_kv_heads=int(fields.get("llama.attention.head_count_kv", num_heads)),
                hidden_size=int(fields["llama.embedding_length"]),
                intermediate_size=int(fields["llama.feed_forward_length"]),
                vocab_size=len(fields["tokenizer.ggml.tokens"]),
                max_position_embeddings=int(fields["llama.context_length"]),
                rms_norm_eps=_shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
                rope_theta=_shortest(fields.get("llama.rope.freq_base", 10000.0)),
                bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
                eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
                pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
            )
        except KeyError as missing:
            raise ModelLoadError(f"the GGUF header lacks {missing}") from missing


def convert_gguf_checkpoint(gguf_path: Path, directory: Path) -> None:
    """Write `model.safetensors` (float16), `config.json` and `generation_config.json` into an existing directory.

    Raises:
        ModelLoadError: not a GGUF file, another architecture, or tensors that do not make a Llama model.
    """
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(gguf_path)
    except (OSError, ValueError, LookupError) as error:  # what the reader meets in a file that is cut off or no GGUF
        raise ModelLoadError(f"{gguf_path} cannot be read as GGUF: {error}") from error
    metadata = LlamaMetadata.from_fields({key: field.contents() for key, field in reader.fields.items()})
    weights = _read_weights(reader.tensors, metadata)
    _check_complete(weights, metadata)
    weights_path = directory / "model.safetensors"
    try:
        save_file(weights, weights_path, metadata={"format": "pt"})
        weights_path.chmod(0o644)  # safetensors makes it private; a shared cache is read by other users
    except SafetensorError as error:
        raise ModelLoadError(f"the weights cannot be written into {directory}: {error}") from error
    _write_json(directory / "config.json", model_config(metadata, tied="lm_head.weight" not in weights))
    _write_json(directory / "generation_config.json", generation_config(metadata))


def model_config(metadata: LlamaMetadata, *, tied: bool) -> dict[str, Any]:
    """The content of `config.json`. `tied`: the output layer shares the embedding's weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_tokens(metadata),
        "dtype": "float16",
        "head_dim": metadata.hidden_size // metadata.num_heads,
        "hidden_act": "silu",
        "hidden_size": metadata.hidden_size,
        "intermediate_size": metadata.intermediate_size,
        "max_position_embeddings": metadata.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": metadata.num_heads,
        "num_hidden_layers": metadata.num_layers,
        "num_key_value_heads": metadata.num_kv_heads,
        "rms_norm_eps": metadata.rms_norm_eps,
        "rope_parameters": {"rope_theta": metadata.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": metadata.vocab_size,
    }


def generation_config(metadata: LlamaMetadata) -> dict[str, Any]:
    """The content of `generation_config.json`: the special tokens and nothing about sampling."""
    return _special_tokens(metadata)


def _special_tokens(metadata: LlamaMetadata) -> dict[str, int]:
    ids = {
        "bos_token_id": metadata.bos_token_id,
        "eos_token_id": metadata.eos_token_id,
        "pad_token_id": metadata.pad_token_id,
    }
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _refuse_special_rotary(fields: dict[str, Any]) -> None:
    """Refuse what `config.json` would have to describe and we do not write, rather than serve a wrong model."""
    if any(key.startswith("llama.rope.scaling.") for key in fields):
        raise ModelLoadError("GGUF files with scaled rotary embeddings are not converted; use the safetensors release")
    rotary = fields.get("llama.rope.dimension_count")
    head_dim = fields.get("llama.embedding_length", 0) // max(fields.get("llama.attention.head_count", 1), 1)
    if rotary is not None and rotary != head_dim:
        raise ModelLoadError(f"rotary embeddings over {rotary} of {head_dim} dimensions are not converted")
    if fields.get("llama.expert_count", 0):
        raise ModelLoadError("GGUF files with experts are not converted; use the safetensors release")


def _read_weights(tensors: Iterable[Any], metadata: LlamaMetadata) -> dict[str, np.ndarray]:
    import numpy as np
    from gguf import dequantize

    weights: dict[str, np.ndarray] = {}
    for tensor in tensors:
        name = _transformers_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)  # [out, in], or [hidden] for a norm
        if name.endswith("q_proj.weight"):
            weight = _split_rotary_pairs(weight, metadata.num_heads)
        elif name.endswith("k_proj.weight"):
            weight = _split_rotary_pairs(weight, metadata.num_kv_heads)
        weights[name] = np.ascontiguousarray(weight)
    return weights


def _transformers_name(gguf_name: str) -> str:
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] != "weight":
        raise ModelLoadError(f"a Llama model has no tensor {gguf_name!r}")
    return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"


def _split_rotary_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (0, 1, 2, 3, ...) of each head become (0, 2, ..., 1, 3, ...). `weight`: [num_heads * head_dim, in]."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])  # [num_heads, head_dim / 2, 2, in]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _check_complete(weights: dict[str, np.ndarray], metadata: LlamaMetadata) -> None:
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(metadata.num_layers):
        expected |= {f"model.layers.{layer}.{name}.weight" for name in _LAYER_NAMES.values()}
    missing = sorted(expected - weights.keys())
    if missing:
        raise ModelLoadError(f"the GGUF file lacks {len(missing)} tensors of the model, the first is {missing[0]}")


def _shortest(value: float) -> float:
    """The short decimal that a float32 of the header stands for: 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
