"""The trained head of `tests/builders/trained_head.py` is what other tests need: right sometimes, not always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import TargetShape
from peagle.drafter.loader import load_head
from peagle.drafter.reference import reference_drafts
from tests.builders.trained_head import (
    AUX_LAYER_IDS,
    PROMPT_LEN,
    VOCAB_SIZE,
    build_target,
    train_head,
    write_continuations,
    write_trained_pair,
)

K = 3


def acceptance_rate(target: Any, head: DraftHead, *, temperature: float) -> float:
    """Accepted drafts of all drafts, when the target writes sequences that the head has not seen."""
    data = write_continuations(target, num_seqs=16, seed=1000, temperature=temperature)
    num_drafted = num_accepted = 0
    for tokens, features in zip(data.token_ids.tolist(), data.features, strict=True):
        num_tokens = PROMPT_LEN + 1
        while num_tokens + K < len(tokens):
            logits = reference_drafts(head, tokens[:num_tokens], features[: num_tokens - 1], K).logits
            matches = [a == b for a, b in zip(logits.argmax(-1).tolist(), tokens[num_tokens:], strict=False)]
            accepted = [*matches, False].index(False)
            num_drafted, num_accepted = num_drafted + K, num_accepted + accepted
            num_tokens += accepted + 1
    return num_accepted / num_drafted


@pytest.fixture(scope="module")
def target() -> Any:
    return build_target()


@pytest.fixture(scope="module")
def head(target: Any) -> DraftHead:
    return train_head(target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_is_neither_none_nor_all(target: Any, head: DraftHead, temperature: float) -> None:
    assert 0.2 < acceptance_rate(target, head, temperature=temperature) < 0.95


def test_files(tmp_path: Path) -> None:
    pair = write_trained_pair(tmp_path, num_steps=2)
    again = write_trained_pair(tmp_path / "again", num_steps=2)
    shape = TargetShape(num_layers=4, hidden_size=32, vocab_size=VOCAB_SIZE)
    first, second = (load_head(one.head, target=shape) for one in (pair, again))
    assert first.config.aux_layer_ids == AUX_LAYER_IDS
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert (pair.target / "config.json").exists()
