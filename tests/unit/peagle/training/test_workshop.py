"""What a run computes in."""

from __future__ import annotations

import pytest
import torch

from peagle.training.config import ComputeDtype
from peagle.training.workshop import choose_compute_dtype


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_is_taken(name: ComputeDtype, device: str) -> None:
    assert choose_compute_dtype(name, torch.device(device)) == getattr(torch, name)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({"avx2": True, "avx512_bf16": True}, torch.bfloat16),
        ({"neon": True, "bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_a_processor_that_emulates_bfloat16_computes_in_float32(
    capabilities: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_compute_dtype("auto", torch.device("cpu")) == dtype
    assert choose_compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
