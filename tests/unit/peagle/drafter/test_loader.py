from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import SharedWeights, load_head
from peagle.drafter.reference import reference_drafts
from peagle.errors import ModelLoadError
from tests.builders.head import TINY_TARGET, head_tensors, write_tiny_head

TARGET = TargetShape(num_layers=4, hidden_size=32, vocab_size=300)


def logits_of(head: DraftHead) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(6, head.config.feature_size, generator=generator).double()
    return reference_drafts(head, [3, 1, 4, 1, 5, 9, 2], features, 3).logits


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_every_tensor_lands(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET, num_layers=3, draft_vocab_size=120)
    head = load_head(tmp_path, target=TARGET)
    tensors = load_file(tmp_path / "model.safetensors")
    state = head.state_dict()
    assert len(state) == len(tensors) - 1  # all but t2d
    assert torch.equal(state["layers.0.hidden_norm.weight"], tensors["midlayer.hidden_norm.weight"])
    assert torch.equal(state["layers.2.mlp.up_proj.weight"], tensors["layers.2.mlp.up_proj.weight"])
    assert torch.equal(state["mask_hidden"], tensors["mask_hidden"].flatten())
    ids = head.to_target_ids(torch.arange(120))
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_float_type(tmp_path: Path, dtype: torch.dtype) -> None:
    head = load_head(write_tiny_head(tmp_path, TINY_TARGET), target=TARGET, dtype=dtype)
    assert {parameter.dtype for parameter in head.parameters()} == {dtype}
    assert head.rotary.inv_freq.dtype == torch.float32
    assert head.draft_to_target_offsets.dtype == torch.int64
    exact = load_head(tmp_path, target=TARGET, dtype=torch.float64)
    tolerance = {torch.float32: 1e-4, torch.float64: 0.0, torch.bfloat16: 0.3}[dtype]
    assert (logits_of(head).double() - logits_of(exact)).abs().max() <= tolerance


def test_round_trip(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    write_tiny_head(
        tmp_path / "first", TINY_TARGET, draft_vocab_size=77, rope_scaling=scaling, norm_before_residual=True
    )
    head = load_head(tmp_path / "first", target=TARGET)
    again = load_head(save_flat(head, tmp_path / "second"), target=TARGET)
    assert again.config == head.config
    assert torch.equal(logits_of(again), logits_of(head))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sharded_files_and_prefixes(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET)
    expected = logits_of(load_head(tmp_path, target=TARGET))
    tensors = {f"model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(load_head(tmp_path, target=TARGET)), expected)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"part-1\.safetensors"):
        load_head(tmp_path, target=TARGET)


def test_tables_of_the_target(tmp_path: Path) -> None:
    tensors = head_tensors(json.loads((write_tiny_head(tmp_path, TINY_TARGET) / "config.json").read_text()))
    expected = logits_of(load_head(tmp_path, target=TARGET))
    rewrite(tmp_path, lambda found: (found.pop("embed_tokens.weight"), found.pop("lm_head.weight"), found.pop("d2t")))
    shared = SharedWeights(embed_tokens=tensors["embed_tokens.weight"], lm_head=tensors["lm_head.weight"])
    head = load_head(tmp_path, target=TARGET, shared=shared)
    assert torch.equal(logits_of(head), expected)
    assert head.embed_tokens.weight.data_ptr() == tensors["embed_tokens.weight"].data_ptr()
    assert head.to_target_ids(torch.arange(300)).tolist() == list(range(300))
    with pytest.raises(ModelLoadError, match=r"no embed_tokens\.weight"):
        load_head(tmp_path, target=TARGET)
    with pytest.raises(ModelLoadError, match=r"\[300, 16\] instead of \[300, 32\]"):
        load_head(tmp_path, target=TARGET, shared=SharedWeights(embed_tokens=torch.zeros(300, 16)))


def test_a_reduced_vocabulary_may_share_the_targets_rows(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET, draft_vocab_size=50)
    table = torch.randn(300, 32)
    offsets = load_file(tmp_path / "model.safetensors")["d2t"]
    drafted = torch.arange(50) + offsets
    rewrite(tmp_path, lambda found: found.update({"lm_head.weight": table[drafted]}))
    expected = logits_of(load_head(tmp_path, target=TARGET))
    rewrite(tmp_path, lambda found: found.pop("lm_head.weight"))
    assert torch.equal(logits_of(load_head(tmp_path, target=TARGET, shared=SharedWeights(lm_head=table))), expected)
    with pytest.raises(ModelLoadError, match=r"no lm_head\.weight"):
        load_head(tmp_path, target=TARGET)
    rewrite(tmp_path, lambda found: found.pop("d2t"))
    with pytest.raises(ModelLoadError, match=r"neither lm_head\.weight nor d2t"):
        load_head(tmp_path, target=TARGET, shared=SharedWeights(lm_head=table))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("mask_hidden"), "cannot draft in parallel"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing tensors: layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing tensors: midlayer\.hidden_norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown tensors: extra"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), r"unknown tensors: fc_norm\.0\.weight"),
        (lambda t: t.update({"fc.weight_scale": torch.ones(1)}), r"unknown tensors: fc\.weight_scale"),
        (
            lambda t: t.update({"layers.1.self_attn.q_proj.lora_A.weight": torch.ones(1)}),
            r"unknown tensors: layers\.1\.self_attn\.q_proj\.lora_A\.weight",
        ),
        (
            lambda t: t.update({"layers.1.self_attn.q_proj.bias": torch.ones(32)}),
            r"unknown tensors: layers\.1\.self_attn\.q_proj\.bias",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"fc\.weight has the shape \[32, 64\].*\[32, 96\]"),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(32, 32)}),
            r"midlayer\.self_attn\.q_proj\.weight has the shape \[32, 32\], but config.json asks for \[32, 64\]",
        ),
        (lambda t: t.update({"mask_hidden": torch.zeros(1, 1, 95)}), r"mask_hidden has the shape \[95\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32)}), "given twice"),
        (lambda t: t.update({"d2t": torch.arange(300)}), "d2t leads to token ids"),
    ],
)
def test_refused_by_name(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], reason: str) -> None:
    rewrite(write_tiny_head(tmp_path, TINY_TARGET), change)
    with pytest.raises(ModelLoadError, match=reason):
        load_head(tmp_path, target=TARGET)


def test_a_mask_without_its_token_is_refused(tmp_path: Path) -> None:
    write_tiny_head(tmp_path, TINY_TARGET, ptd_token_id=None)
    with pytest.raises(
        ModelLoadError, match=r"has mask_hidden, but its config\.json names no mask token \(ptd_token_id"
    ):
        load_head(tmp_path, target=TARGET)


def test_no_weights(tmp_path: Path) -> None:
    (write_tiny_head(tmp_path, TINY_TARGET) / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        load_head(tmp_path, target=TARGET)


def test_truncated_weights(tmp_path: Path) -> None:
    path = write_tiny_head(tmp_path, TINY_TARGET) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match="cannot read"):
        load_head(tmp_path, target=TARGET)
