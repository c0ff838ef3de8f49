"""Documentation of bodies that are read by a dependency of ours, which FastAPI can't see through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDocs:
    """What `openapi_extra` of a route says, and the definitions that the document needs for it."""

    extra: dict[str, Any]
    definitions: dict[str, Any]

    @classmethod
    def of(cls, kind: type[BaseModel]) -> BodyDocs:
        """Of a request model."""
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions = schema.pop("$defs", {})
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return cls(extra={"requestBody": body}, definitions=definitions)
