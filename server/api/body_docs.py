"""Documentation of bodies that are read by a dependency of ours, which FastAPI can't see through."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Any

from pydantic import BaseModel

from server.schemas.errors import ErrorEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDocs:
    """What `openapi_extra` of a route says, and the definitions that the document needs for it."""

    extra: dict[str, Any]
    definitions: dict[str, Any]

    @classmethod
    def of(cls, kind: type[BaseModel]) -> BodyDocs:
        """Of a request model."""
        return cls._of_schema(*_schema_of(kind))

    @classmethod
    def of_either(cls, *kinds: type[BaseModel], optional: str) -> BodyDocs:
        """Of a route that takes any of these request models, with a field that may be left out there."""
        arms, definitions = [], {}
        for kind in kinds:
            schema, its_definitions = _schema_of(kind)
            arms.append({**schema, "required": [name for name in schema["required"] if name != optional]})
            definitions.update(its_definitions)
        return cls._of_schema({"anyOf": arms}, definitions)

    @classmethod
    def _of_schema(cls, schema: dict[str, Any], definitions: dict[str, Any]) -> BodyDocs:
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return cls(extra={"requestBody": body}, definitions=definitions)


def answer_docs(answer: type[BaseModel] | UnionType) -> dict[int | str, dict[str, Any]]:
    """What `responses` of a route says that answers whole or as a stream of events."""
    return {
        200: {"model": answer, "content": {"text/event-stream": {}}},
        "4XX": {"model": ErrorEnvelope},
        "5XX": {"model": ErrorEnvelope},
    }


def _schema_of(kind: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a model, and the definitions that it refers to."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return schema, schema.pop("$defs", {})
