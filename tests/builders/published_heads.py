"""Small random heads in each published layout, with the key names of the released ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import SharedWeights
from tests.builders.head import TINY_TARGET, head_config_values, head_tensors
from tests.builders.naive_head import NaiveHead

TARGET_EPS = 1e-3  # not the head's
TARGET = TargetShape(num_layers=4, hidden_size=32, vocab_size=300, final_norm_eps=TARGET_EPS)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LAYER_KEYS = (
    "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps hidden_act "
    "num_hidden_layers vocab_size max_position_embeddings rope_theta rope_scaling attention_bias mlp_bias model_type"
).split()


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedHead:
    """A head in memory as its files have it."""

    config: dict[str, Any]  # what config.json holds
    values: dict[str, Any]  # the same in flat keys
    tensors: dict[str, Tensor]
    first_layer: str = "midlayer"
    is_pickled: bool = False

    @property
    def is_parallel(self) -> bool:
        return "mask_hidden" in self.tensors

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.is_pickled:
            torch.save(self.tensors, directory / "pytorch_model.bin")
        else:
            save_file(self.tensors, directory / "model.safetensors")
        return directory

    def naive(self) -> NaiveHead:
        """The slow head, with the tables that it has from `shared_weights`."""
        shared = shared_weights()
        tensors = {name.removeprefix("model."): tensor for name, tensor in self.tensors.items()}
        has_taps = self.values.get("eagle_config", {}).get("use_aux_hidden_state", True)
        own = {"embed_tokens.weight": shared.embed_tokens, "lm_head.weight": shared.lm_head}
        return NaiveHead(
            values=self.values | {"target_eps": TARGET_EPS, "mask": self.values.get("ptd_token_id")},
            tensors={name: tensor for name, tensor in own.items() if tensor is not None} | tensors,
            first_layer=self.first_layer,
            final_norm=None if has_taps and "norm.weight" in tensors else shared.final_norm,
        )


def shared_weights() -> SharedWeights:
    """What the target of these heads has."""
    generator = torch.Generator().manual_seed(99)
    table, lm_head, norm = (torch.randn(shape, generator=generator) for shape in ((300, 32), (300, 32), (32,)))
    return SharedWeights(embed_tokens=table, lm_head=lm_head, final_norm=1 + norm * 0.1)


def flat_peagle(**overrides: Any) -> PublishedHead:
    """As amazon/GPT-OSS-20B-P-EAGLE: own tables, `mask_hidden`, several layers."""
    values = head_config_values(TINY_TARGET, num_layers=3, rope_scaling=LLAMA3, **overrides)
    return PublishedHead(config=values, values=values, tensors=_complete(values))


def plain_eagle3(**overrides: Any) -> PublishedHead:
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: one layer, a reduced vocabulary, no embeddings, pickled."""
    values = head_config_values(TINY_TARGET, num_layers=1, draft_vocab_size=120, **overrides)
    del values["ptd_token_id"]
    tensors = _complete(values)
    del tensors["embed_tokens.weight"], tensors["mask_hidden"]
    return PublishedHead(config=values, values=values, tensors=tensors, is_pickled=True)


def speculators_peagle(**overrides: Any) -> PublishedHead:
    """As RedHatAI/Qwen3-8B-speculator.peagle: five taps are four here."""
    taps = [0, 1, 2, 3]
    values = head_config_values(TINY_TARGET, num_layers=2, eagle_aux_hidden_state_layer_ids=taps, **overrides)
    return _nested(values, "peagle", "PEagleSpeculator")


def speculators_eagle3(**overrides: Any) -> PublishedHead:
    """As the EAGLE-3 heads of the speculators library; true is what vLLM takes for an absent norm_before_residual."""
    values = head_config_values(TINY_TARGET, num_layers=1, draft_vocab_size=100, **overrides)
    del values["ptd_token_id"]
    return _nested({"norm_before_residual": True} | values, "eagle3", "Eagle3Speculator")


def last_hidden_eagle3(**overrides: Any) -> PublishedHead:
    """As NVIDIA's heads with `use_aux_hidden_state` false: one feature, and no `fc`."""
    values = head_config_values(TINY_TARGET, num_layers=1, **overrides)
    tensors = _complete(values | {"eagle_aux_hidden_state_layer_ids": [4]})
    for name in ("fc.weight", "mask_hidden"):
        del tensors[name]
    for key in ("eagle_aux_hidden_state_layer_ids", "ptd_token_id"):
        del values[key]
    values["eagle_config"] = {"use_aux_hidden_state": False}
    return PublishedHead(config=values, values=values, tensors=tensors)


def merging_eagle(**overrides: Any) -> PublishedHead:
    """As yuhuili/EAGLE-LLaMA3-Instruct-8B and EAGLE-2: `fc` on embedding and feature, no norms around the layers."""
    values = head_config_values(TINY_TARGET, num_layers=2, **overrides)
    for key in ("ptd_token_id", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"):
        del values[key]
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    whole = _complete(head_config_values(TINY_TARGET, num_layers=3, **overrides))
    tensors = {"embed_tokens.weight": random(300, 32), "fc.weight": random(32, 64), "fc.bias": random(32)}
    for name, tensor in whole.items():
        for source, wanted in (("layers.1.", "layers.0."), ("layers.2.", "layers.1.")):
            if name.startswith(source):
                tensors[wanted + name.removeprefix(source)] = tensor
    del tensors["layers.0.input_layernorm.weight"]
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = random(4)  # older Llamas saved them
    return PublishedHead(config=values, values=values, tensors=tensors, first_layer="layers.0", is_pickled=True)


LAYOUTS: dict[str, Callable[..., PublishedHead]] = {
    "flat peagle": flat_peagle,
    "plain eagle3": plain_eagle3,
    "speculators peagle": speculators_peagle,
    "speculators eagle3": speculators_eagle3,
    "last hidden eagle3": last_hidden_eagle3,
    "merging eagle": merging_eagle,
}


def _complete(values: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors for a flat configuration, with the norms and biases that it asks for."""
    tensors = head_tensors(values)
    generator = torch.Generator().manual_seed(7)

    def around(center: float, size: int) -> Tensor:
        return center + torch.randn(size, generator=generator) * 0.2

    num_taps, size = len(values["eagle_aux_hidden_state_layer_ids"]), values["head_dim"]
    if values.get("norm_before_fc"):
        tensors["input_norm.weight"] = around(1, num_taps * 32)
    if values.get("fc_norm"):
        tensors |= {f"fc_norm.{tap}.weight": around(1, 32) for tap in range(num_taps)}
    for name, weight in list(tensors.items()):
        part = "attention_bias" if "self_attn" in name else "mlp_bias"
        if name.endswith("_proj.weight") and values.get(part):
            tensors[name.removesuffix("weight") + "bias"] = around(0, len(weight))
        if name.endswith("q_proj.weight") and values.get("model_type") == "qwen3":
            stem = name.removesuffix("q_proj.weight")
            tensors |= {f"{stem}{one}_norm.weight": around(1, size) for one in ("q", "k")}
    return tensors


def _nested(values: dict[str, Any], kind: str, architecture: str) -> PublishedHead:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _complete(values).items()}
    if kind == "eagle3":
        del tensors["mask_hidden"]
    beside = {key: value for key, value in values.items() if key not in _LAYER_KEYS and key != "architectures"}
    if "ptd_token_id" in beside:
        beside["mask_token_id"] = beside.pop("ptd_token_id")
    config = beside | {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
            "verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {key: values[key] for key in _LAYER_KEYS if key in values},
    }
    return PublishedHead(config=config, values=values, tensors=tensors, first_layer="layers.0")
