"""Every served family against the unmodified `transformers` model, in float64, through paged attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.attention.sdpa import SdpaAttention
from peagle.config import ModelConfig
from peagle.errors import ModelLoadError, UnsupportedModelError
from peagle.kv_cache.storage import KVGeometry, KVStorage
from peagle.models.interface import TargetModel, TargetOutput
from peagle.models.loader import choose_precision, load_target, read_model_config
from tests.builders.model import FAMILIES, build_model, write_model

BLOCK_SIZE = 4
TAPS = (1, 2, 4)


def load(directory: Path, dtype: str = "float64", taps: tuple[int, ...] = TAPS) -> TargetModel:
    """Load a checkpoint the way the engine does."""
    config = read_model_config(directory)
    precision = choose_precision(ModelConfig(dtype=dtype), config.dtype, torch.device("cpu"))  # type: ignore[arg-type]
    return load_target(directory, config, precision, SdpaAttention(), tap_layer_ids=taps)


def make_storage(target: TargetModel, dtype: torch.dtype = torch.float64) -> KVStorage:
    """A pool of 64 blocks."""
    geometry = KVGeometry(
        block_size=BLOCK_SIZE,
        num_kv_heads=target.geometry.num_kv_heads,
        head_dim=target.geometry.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return KVStorage(num_layers=target.geometry.num_layers, num_blocks=64, geometry=geometry)


def step(target: TargetModel, storage: KVStorage, rows: list[tuple[list[int], int, list[int]]]) -> TargetOutput:
    """One pass. `rows`: for each sequence its new tokens, their first position, and its block table."""
    groups, slots, ids, positions = [], [], [], []
    first_row = 0
    for tokens, start, table in rows:
        span = list(range(start, start + len(tokens)))
        groups.append(
            QueryGroup(
                first_row=first_row,
                positions=torch.tensor([span]),
                block_tables=torch.tensor([table]),
                block_size=BLOCK_SIZE,
                dtype=storage.layers[0].key.dtype,
            )
        )
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        ids += tokens
        positions += span
        first_row += len(tokens)
    metadata = AttentionMetadata(slot_mapping=torch.tensor(slots), groups=tuple(groups))
    with torch.inference_mode():
        return target.forward(torch.tensor(ids), torch.tensor(positions), metadata, storage)


def reference(family: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [num_tokens, vocab_size] and taps [num_tokens, 3 * hidden_size] of the unmodified model."""
    model = build_model(family)
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hidden = list(output.hidden_states)
    if TAPS[-1] == len(hidden) - 1:  # transformers reports the last one after the final norm
        captured: list[Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(lambda _m, _a, out: captured.append(out))
        with torch.inference_mode():
            model(torch.tensor([tokens]), use_cache=False)
        hook.remove()
        hidden[-1] = captured[0]
    return output.logits[0], torch.cat([hidden[tap][0] for tap in TAPS], -1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_paged_passes_equal_the_unmodified_model(family: str, chunk: int, tmp_path: Path) -> None:
    """Prefill, chunked prefill and decode of two sequences side by side, blocks out of order."""
    target = load(write_model(tmp_path, family))
    storage = make_storage(target)
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, 300, (23,), generator=generator).tolist()
    second = torch.randint(0, 300, (23,), generator=generator).tolist()
    tables = [[7, 3, 40, 12, 5, 21], [9, 2, 33, 13, 6, 20]]
    logits: list[list[Tensor]] = [[], []]
    features: list[list[Tensor]] = [[], []]
    for start in range(0, 23, chunk):
        spans = [first[start : start + chunk], second[start : start + chunk]]
        output = step(target, storage, [(spans[i], start, tables[i]) for i in range(2)])
        assert output.features is not None
        for i, rows in enumerate(output.hidden.view(2, len(spans[0]), -1)):
            logits[i].append(target.logits(rows))
        for i, rows in enumerate(output.features.view(2, len(spans[0]), -1)):
            features[i].append(rows)
    for i, tokens in enumerate([first, second]):
        wanted_logits, wanted_features = reference(family, tokens)
        assert (torch.cat(logits[i]) - wanted_logits).abs().max() < 1e-6
        # the residual stream of some families grows far beyond 1, and float32 norms err relative to it
        scale = wanted_features.abs().max().clamp(min=1.0)
        assert (torch.cat(features[i]) - wanted_features).abs().max() < 1e-6 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_equal_float32_with_the_same_rounded_weights(family: str, tmp_path: Path) -> None:
    """Packing a half-precision checkpoint changes nothing but the order of float32 sums."""
    build_model(family, dtype=torch.float16).save_pretrained(str(tmp_path))
    tokens = list(range(40, 60))
    outputs = []
    for dtype in ("auto", "float32"):
        target = load(tmp_path, dtype)
        output = step(target, make_storage(target, torch.float32), [(tokens, 0, [4, 1, 9, 2, 5])])
        outputs.append(target.logits(output.hidden))
    assert (outputs[0] - outputs[1]).abs().max() < 2e-3 * outputs[1].abs().max()


def test_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama"):
        read_model_config(tmp_path)


def test_batch_dependent_rope_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        read_model_config(tmp_path)


def test_missing_checkpoint_says_where(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        read_model_config(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
        load(tmp_path)


def test_tap_beyond_the_target_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ModelLoadError, match="4 layers"):
        load(tmp_path, taps=(1, 2, 9))
