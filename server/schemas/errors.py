"""The error envelope, for the API's documentation (`server.errors` writes it).

Owns the shape that OpenAI's clients read. Refuses to know which errors exist.
"""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong. All four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """The body of every reply from 400 up."""

    error: ErrorDetail
