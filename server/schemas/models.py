"""The bodies of `GET /v1/models`.

Owns their shape: OpenAI's, with vLLM's `root` and `max_model_len`, which clients read. Refuses to know the engine.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One name that the model can be called by."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "peagle"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
