"""Secrets do not show."""

from __future__ import annotations

from typing import Any

import pytest

from server.masking import masked


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("api_key", "sk-1", "***"),
        ("HF_TOKEN", "hf_1", "***"),
        ("secret", 5, "***"),
        ("api_key", None, None),
        ("max_num_batched_tokens", 512, 512),
        ("num_speculative_tokens", 4, 4),
        ("keyboard", "a", "a"),
        ("model", "https://me:pw@host/m", "https://***@host/m"),
        ("model", "https://host/m@v1", "https://host/m@v1"),
        ("names", ("a", "s3://k:s@b"), ["a", "s3://***@b"]),
        ("spec", {"token": "t", "model": "m", "parts": [{"password": "p"}]}, None),
    ],
)
def test_masked(name: str, value: Any, shown: Any) -> None:
    if name == "spec":
        shown = {"token": "***", "model": "m", "parts": [{"password": "***"}]}
    assert masked(name, value) == shown
