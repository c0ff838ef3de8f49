"""One pass over trees of drafts against a plain pass over every path from the root to a leaf, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.attention.sdpa import SdpaAttention
from peagle.attention.tree_mask import node_parent_rows, tree_positions
from peagle.config import ModelConfig
from peagle.kv_cache.storage import KVGeometry, KVStorage
from peagle.models.interface import TargetModel
from peagle.models.loader import choose_precision, load_target, read_model_config
from tests.builders.model import FAMILIES, write_model

BLOCK_SIZE = 4
TAPS = (1, 2, 4)
PROMPTS = ([17, 3, 250, 8, 99, 41, 5, 77, 160, 2, 31], [6, 12, 200, 9, 1])
TABLES = ([7, 3, 40, 12, 5, 21, 8], [9, 2, 33, 13, 6, 20, 1])
# Tokens and parents: a bushy tree, and a smaller one that is padded.
TREES = (
    ([60, 61, 62, 63, 64, 65, 66, 67, 60], [-1, -1, 0, 0, 1, 2, 5, 5, 7]),
    ([70, 71, 72], [-1, 0, -1]),
)


def load(directory: Path) -> tuple[TargetModel, KVStorage]:
    config = read_model_config(directory)
    precision = choose_precision(ModelConfig(dtype="float64"), config.dtype, torch.device("cpu"))
    target = load_target(directory, config, precision, SdpaAttention(), tap_layer_ids=TAPS)
    geometry = KVGeometry(
        block_size=BLOCK_SIZE,
        num_kv_heads=target.geometry.num_kv_heads,
        head_dim=target.geometry.head_dim,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    return target, KVStorage(num_layers=target.geometry.num_layers, num_blocks=64, geometry=geometry)


@torch.inference_mode()
def forward(
    target: TargetModel, storage: KVStorage, token_ids: Tensor, group: QueryGroup, slots: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits and features of a grid, each [num_seqs, width, ...]."""
    metadata = AttentionMetadata(slot_mapping=torch.tensor(slots), groups=(group,))
    output = target.forward(token_ids.flatten(), group.positions.flatten(), metadata, storage)
    assert output.features is not None
    shape = (*token_ids.shape, -1)
    return target.logits(output.hidden).view(shape), output.features.view(shape)


def slots_of(table: list[int], places: range) -> list[int]:
    return [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]


def plain_pass(
    target: TargetModel, storage: KVStorage, token_ids: list[int], table: list[int]
) -> tuple[Tensor, Tensor]:
    """A prefill of one sequence from its start: [num_tokens, ...] each."""
    group = QueryGroup(
        first_row=0,
        positions=torch.arange(len(token_ids))[None],
        block_tables=torch.tensor([table]),
        block_size=BLOCK_SIZE,
        dtype=torch.float64,
    )
    slots = slots_of(table, range(len(token_ids)))
    logits, features = forward(target, storage, torch.tensor([token_ids]), group, slots)
    return logits[0], features[0]


def tree_pass(target: TargetModel, storage: KVStorage) -> tuple[Tensor, Tensor]:
    """Both sequences' last known token and trees in one grid, after a prefill of what comes before."""
    width = 1 + max(len(tokens) for tokens, _ in TREES)
    inputs = torch.zeros(2, width, dtype=torch.int64)
    parents = torch.full((2, width - 1), -1)
    slots: list[int] = []
    for n, (prompt, table, (tokens, above)) in enumerate(zip(PROMPTS, TABLES, TREES, strict=True)):
        plain_pass(target, storage, prompt[:-1], table)
        inputs[n, : len(tokens) + 1] = torch.tensor([prompt[-1], *tokens])
        parents[n, : len(above)] = torch.tensor(above)
        start = len(prompt) - 1
        slots += slots_of(table, range(start, start + 1 + len(tokens)))
        slots += [storage.null_slot] * (width - 1 - len(tokens))
    rows = node_parent_rows(parents)
    group = QueryGroup(
        first_row=0,
        positions=tree_positions(torch.tensor([len(prompt) - 1 for prompt in PROMPTS]), rows),
        block_tables=torch.tensor(TABLES),
        block_size=BLOCK_SIZE,
        dtype=torch.float64,
        parent_rows=rows,
    )
    return forward(target, storage, inputs, group, slots)


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_equals_a_plain_pass(family: str, tmp_path: Path) -> None:
    """Windows of 8 in two families: the longer prompt slides out of sight along the path."""
    target, storage = load(write_model(tmp_path, family))
    logits, features = tree_pass(target, storage)
    assert logits.isfinite().all()
    for n, (prompt, (tokens, parents)) in enumerate(zip(PROMPTS, TREES, strict=True)):
        leaves = [node for node in range(len(tokens)) if node not in parents]
        assert len(leaves) > 1
        for leaf in leaves:
            path = path_to(leaf, parents)
            _, clean = load(tmp_path)
            wanted_logits, wanted_features = plain_pass(
                target, clean, [*prompt, *(tokens[node] for node in path)], TABLES[n]
            )
            rows = [0, *(node + 1 for node in path)]
            assert (logits[n, rows] - wanted_logits[len(prompt) - 1 :]).abs().max() < 1e-6
            wanted = wanted_features[len(prompt) - 1 :]
            assert (features[n, rows] - wanted).abs().max() < 1e-6 * wanted.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_the_accepted_path_serve_on_once_they_are_moved_together(family: str, tmp_path: Path) -> None:
    """A key holds its position in its rotation, not in its slot: the path's rows can move up to where a chain's lie."""
    target, storage = load(write_model(tmp_path, family))
    tree_pass(target, storage)
    prompt, table, (tokens, parents) = PROMPTS[0], TABLES[0], TREES[0]
    path = path_to(8, parents)
    assert path != list(range(len(path)))
    start = len(prompt)  # the slot of node 0
    sources = [slots_of(table, range(start + node, start + node + 1))[0] for node in path]
    for layer in storage.layers:
        for cache in (layer.key, layer.value):
            cache.flatten(0, 1)[slots_of(table, range(start, start + len(path)))] = cache.flatten(0, 1)[sources]
    text = [*prompt, *(tokens[node] for node in path), 123]
    place = len(text) - 1
    group = QueryGroup(
        first_row=0,
        positions=torch.tensor([[place]]),
        block_tables=torch.tensor([table]),
        block_size=BLOCK_SIZE,
        dtype=torch.float64,
    )
    logits, _ = forward(target, storage, torch.tensor([[123]]), group, slots_of(table, range(place, place + 1)))
    _, clean = load(tmp_path)
    assert (logits[0, 0] - plain_pass(target, clean, text, table)[0][-1]).abs().max() < 1e-6
