"""On CPU the promise holds to the last bit: a row's logits do not depend on K, on its neighbours, or on padding.

The default model, with its packed weights. The same tokens are decoded one at a time and alone, and as verified rows of
a batch whose other sequences are longer; every logit must have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.attention.sdpa import SdpaAttention
from peagle.config import ModelConfig
from peagle.kv_cache.storage import KVGeometry, KVStorage
from peagle.models.interface import TargetModel
from peagle.models.loader import choose_precision, load_target, read_model_config
from tests.builders.real_server import real_model_directory

BLOCK_SIZE = 16
NUM_BLOCKS = 256
BLOCKS_PER_SEQ = 40
PROMPT_LENS = (3, 31, 60, 97, 140, 600)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no packed weights here"),
]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one sequence in a pass."""

    token_ids: list[int]
    start: int
    first_block: int

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.start + len(self.token_ids)))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    directory = real_model_directory()
    config = read_model_config(directory)
    precision = choose_precision(ModelConfig(), config.dtype, torch.device("cpu"))
    assert precision.packed
    return load_target(directory, config, precision, SdpaAttention())


@pytest.fixture
def storage(target: TargetModel) -> KVStorage:
    geometry = KVGeometry(
        block_size=BLOCK_SIZE,
        num_kv_heads=target.geometry.num_kv_heads,
        head_dim=target.geometry.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return KVStorage(num_layers=target.geometry.num_layers, num_blocks=NUM_BLOCKS, geometry=geometry)


@torch.inference_mode()
def run(target: TargetModel, storage: KVStorage, batch: list[Rows]) -> Tensor:
    """Logits of a grid, [num_seqs * width, vocab_size]; all sequences have equally many rows."""
    num_blocks = max(-(-(rows.start + len(rows.token_ids)) // BLOCK_SIZE) for rows in batch)
    group = QueryGroup(
        first_row=0,
        positions=torch.tensor([rows.positions for rows in batch]),
        block_tables=torch.tensor([list(range(rows.first_block, rows.first_block + num_blocks)) for rows in batch]),
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )
    slots = [rows.first_block * BLOCK_SIZE + position for rows in batch for position in rows.positions]
    token_ids = [token_id for rows in batch for token_id in rows.token_ids]
    metadata = AttentionMetadata(slot_mapping=torch.tensor(slots), groups=(group,))
    output = target.forward(torch.tensor(token_ids), group.positions.flatten(), metadata, storage)
    return target.logits(output.hidden)


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 7, 15])
def test_verified_rows_have_the_bits_of_plain_decoding(
    target: TargetModel, storage: KVStorage, num_speculative_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_speculative_tokens)
    width = num_speculative_tokens + 1
    sequences = [
        torch.randint(0, target.geometry.vocab_size, (length + width,), generator=generator).tolist()
        for length in PROMPT_LENS
    ]
    verified: list[Rows] = []
    plain: list[Tensor] = []
    for index, (tokens, length) in enumerate(zip(sequences, PROMPT_LENS, strict=True)):
        first_block = index * BLOCKS_PER_SEQ
        run(target, storage, [Rows(token_ids=tokens[:length], start=0, first_block=first_block)])
        for position in range(length, length + width):
            row = Rows(token_ids=[tokens[position]], start=position, first_block=first_block)
            plain.append(run(target, storage, [row]))
        verified.append(Rows(token_ids=tokens[length:], start=length, first_block=first_block))
    together = run(target, storage, verified)
    assert torch.equal(together, torch.cat(plain))
