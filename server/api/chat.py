"""`POST /v1/chat/completions`.

Owns the order of things: read, admit, then answer whole or as a stream. Refuses to know how each is done.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.dependencies import ChatRequestDep, LifecycleDep, ServedNamesDep, ServerConfigDep
from server.generation import collect, start_chat, until_disconnect
from server.schemas.chat import ChatCompletion, ChatCompletionRequest
from server.schemas.errors import ErrorEnvelope
from server.streaming import ChatStream

router = APIRouter()

# The body is read by a dependency of ours, which FastAPI can't see through; this is for the documentation alone.
_BODY_SCHEMA = ChatCompletionRequest.model_json_schema(ref_template="#/components/schemas/{model}")
BODY_DEFINITIONS: dict[str, Any] = _BODY_SCHEMA.pop("$defs")
_DOCUMENTED_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY_SCHEMA}}},
}


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatCompletion}, "4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}},
    openapi_extra=_DOCUMENTED_BODY,
)
async def create_chat_completion(
    body: ChatRequestDep,
    served_names: ServedNamesDep,
    lifecycle: LifecycleDep,
    config: ServerConfigDep,
    request: Request,
) -> Response:
    """Answer a conversation."""
    generation = await start_chat(body, served_names=served_names, lifecycle=lifecycle)
    if body.stream:
        return ChatStream(generation, include_usage=body.include_usage, keep_alive_s=config.keep_alive_s)
    completion = await until_disconnect(request.receive, collect(generation))
    return Response(completion.model_dump_json(), media_type="application/json")
