"""Features from the target and from disk: equal, limited, and made anew where a file is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.training.features import FeatureCache, FeatureExtractor, TargetFeatures, target_fingerprint
from tests.builders.model import build_model, write_model
from tests.unit.peagle.training.conversation import random_conversation

EXAMPLES = [random_conversation(20 + number, seed=number).example for number in range(4)]


def extractor() -> FeatureExtractor:
    return FeatureExtractor(build_model("llama", dtype=torch.float32), aux_layer_ids=(0, 2, 3), num_soft_targets=5)


def cache(directory: Path | None, *, limit: int = 10**9) -> FeatureCache:
    return FeatureCache(extractor(), directory=directory, limit=limit)


def assert_equal(first: TargetFeatures, second: TargetFeatures) -> None:
    for name in ("features", "rows", "top_ids", "top_log_probs"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def test_features_are_the_residual_stream_and_the_distributions() -> None:
    example, model = EXAMPLES[0], build_model("llama", dtype=torch.float32)
    found = extractor().extract(example)
    with torch.no_grad():
        output = model(torch.from_numpy(example.token_ids)[None], output_hidden_states=True)
    log_probs = output.logits[0].log_softmax(-1)
    assert torch.equal(found.features, torch.cat([output.hidden_states[layer][0] for layer in (0, 2, 3)], -1))
    assert found.rows.tolist() == [r for r in range(19) if example.is_supervised[r + 1]]
    expected = log_probs[found.rows].topk(5, -1)
    assert torch.equal(found.top_ids, expected.indices)
    torch.testing.assert_close(found.top_log_probs, expected.values, atol=1e-5, rtol=0.0)


def test_disk_memory_and_no_cache_give_the_same(tmp_path: Path) -> None:
    first = cache(tmp_path)
    for example in EXAMPLES:
        computed = first.get(example)
        assert_equal(first.get(example), computed)  # read
        assert_equal(cache(tmp_path).get(example), computed)  # read by another run
        assert_equal(cache(None).get(example), computed)
    assert len(list(tmp_path.iterdir())) == len(EXAMPLES)


@pytest.mark.parametrize("damage", [b"", b"half of it", None])
def test_a_broken_file_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    computed = cache(tmp_path).get(EXAMPLES[0])
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-7] if damage is None else damage)
    assert_equal(cache(tmp_path).get(EXAMPLES[0]), computed)
    assert file.read_bytes() == whole


def test_the_limit_holds_over_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache(tmp_path).get(EXAMPLES[0])
    size = next(tmp_path.iterdir()).stat().st_size
    small = cache(tmp_path, limit=int(size * 2.5))
    for example in EXAMPLES:
        assert_equal(small.get(example), cache(None).get(example))
    assert len(list(tmp_path.iterdir())) == 2
    assert caplog.text.count("the feature cache is full") == 1


def test_another_target_has_another_fingerprint(tmp_path: Path) -> None:
    first, again, other = (write_model(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert target_fingerprint(first) == target_fingerprint(again) != target_fingerprint(other)
