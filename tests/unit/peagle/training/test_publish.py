"""Published heads: they load back to the same logits, and nothing that was trained is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.drafter.export import save_flat
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import load_head
from peagle.drafter.reference import reference_drafts
from peagle.errors import ConfigError, ModelLoadError
from peagle.training.publish import Layout, PublishConfig, SharedTable, find_head, publish, read_target_tables
from tests.builders.head import tiny_head
from tests.builders.model import write_model

SHAPE = TargetShape(num_layers=4, hidden_size=32, vocab_size=300)
BOTH = frozenset(SharedTable)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose weights bfloat16 holds exactly, as published targets' are."""
    return write_model(tmp_path_factory.mktemp("publish") / "target", dtype=torch.bfloat16)


def trained_head(target: Path, *, freezes_tables: bool) -> DraftHead:
    """A head whose weights bfloat16 holds exactly; its tables are the target's if they were not trained."""
    head = tiny_head(dtype=torch.bfloat16).float()
    if freezes_tables:
        tables = read_target_tables(target)
        assert tables.embed_tokens is not None
        assert tables.lm_head is not None
        head.embed_tokens.weight.data.copy_(tables.embed_tokens)
        head.lm_head.weight.data.copy_(tables.lm_head)
    return head


def draft_logits(head: DraftHead) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(300, (9,), generator=generator).tolist()
    features = torch.randn(8, head.config.feature_size, generator=generator)
    return reference_drafts(head, token_ids, features, 4).logits


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("leave_out", [frozenset(), frozenset({SharedTable.EMBEDDINGS}), BOTH])
def test_a_published_head_drafts_as_it_was_trained(
    tmp_path: Path, target: Path, leave_out: frozenset[SharedTable], layout: Layout
) -> None:
    head = trained_head(target, freezes_tables=bool(leave_out))
    trained = save_flat(head, tmp_path / "trained")
    config = PublishConfig(
        checkpoint=trained, target=target, output=tmp_path / "out", leave_out=leave_out, layout=layout
    )
    output = publish(config)
    assert ("transformer_layer_config" in (output / "config.json").read_text()) == (layout is Layout.SPECULATORS)
    again = load_head(output, target=SHAPE, shared=read_target_tables(target))
    assert torch.equal(draft_logits(again), draft_logits(head))
    tensors = load_file(output / "model.safetensors")
    assert tensors.keys().isdisjoint(table.value for table in leave_out)
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1


@pytest.mark.parametrize("mask_token_id", [7, None])
@pytest.mark.parametrize("layout", Layout)
def test_a_reduced_vocabulary_is_left_out_too(
    tmp_path: Path, target: Path, layout: Layout, mask_token_id: int | None
) -> None:
    """Most of a small head's file is lm_head: servers take the rows of the draft vocabulary from the target."""
    tables = read_target_tables(target)
    assert tables.embed_tokens is not None
    assert tables.lm_head is not None
    head = tiny_head(dtype=torch.bfloat16, draft_vocab_size=50, mask_token_id=mask_token_id).float()
    head.draft_to_target_offsets.copy_(torch.arange(50) * 4)
    head.embed_tokens.weight.data.copy_(tables.embed_tokens)
    head.lm_head.weight.data.copy_(tables.lm_head[torch.arange(50) * 5])
    trained = save_flat(head, tmp_path / "trained")
    config = PublishConfig(checkpoint=trained, target=target, output=tmp_path / "out", leave_out=BOTH, layout=layout)
    again = load_head(publish(config), target=SHAPE, shared=tables)
    expected = head.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("table", SharedTable)
def test_a_trained_table_is_never_left_out(tmp_path: Path, target: Path, table: SharedTable) -> None:
    head = trained_head(target, freezes_tables=True)
    own = head.embed_tokens if table is SharedTable.EMBEDDINGS else head.lm_head
    own.weight.data[299, 0] += 1.0
    trained = save_flat(head, tmp_path / "trained")
    config = PublishConfig(checkpoint=trained, target=target, output=tmp_path / "out", leave_out=frozenset({table}))
    with pytest.raises(ConfigError, match=f"{table.value} cannot be left out: it was trained"):
        publish(config)
    assert not config.output.exists()


def test_a_table_of_another_width_is_never_left_out(tmp_path: Path, target: Path) -> None:
    trained = save_flat(tiny_head(hidden_size=16, dtype=torch.float32), tmp_path / "trained")
    config = PublishConfig(
        checkpoint=trained, target=target, output=tmp_path / "out", leave_out=frozenset({SharedTable.LM_HEAD})
    )
    with pytest.raises(ConfigError, match=r"the head's has the shape \[300, 16\], the target's \[300, 32\]"):
        publish(config)


def test_another_target_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=310)
    trained = save_flat(tiny_head(dtype=torch.float32), tmp_path / "trained")
    with pytest.raises(ModelLoadError, match="made for another target"):
        publish(PublishConfig(checkpoint=trained, target=other, output=tmp_path / "out"))


def test_the_trained_head_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be another directory"):
        PublishConfig(checkpoint=tmp_path / "a", target=tmp_path, output=tmp_path / "b" / ".." / "a")


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        find_head(tmp_path)
    for step in (100, 90):
        save_flat(tiny_head(seed=step), tmp_path / f"step-{step:08d}")
    assert find_head(tmp_path).name == "step-00000100"
    assert find_head(tmp_path / "step-00000090").name == "step-00000090"


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no target at .*: config.json is missing"):
        PublishConfig(checkpoint=tmp_path / "a", target=tmp_path, output=tmp_path / "b")


def test_tied_tables_are_one(tmp_path: Path) -> None:
    tables = read_target_tables(write_model(tmp_path / "tied", tie_word_embeddings=True))
    assert tables.embed_tokens is tables.lm_head is not None
