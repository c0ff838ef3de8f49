"""`GET /ping` and `POST /invocations`, which SageMaker calls on port 8080.

Owns the choice between a chat and a text completion, by what the body has. Refuses to know how either is answered.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body_docs import BodyDocs, answer_docs
from server.api.chat import answer_chat
from server.api.completions import answer_completion
from server.dependencies import DoorDep, JsonDep, LifecycleDep, ServerConfigDep
from server.errors import ErrorReply, MissingParameterError
from server.json_bodies import parse_body
from server.lifespan import ServerStatus
from server.schemas.answers import ChatCompletion, TextCompletion
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.errors import ErrorEnvelope

router = APIRouter(responses={"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}})
BODY = BodyDocs.of_either(ChatCompletionRequest, CompletionRequest, optional="model")


@router.get("/ping")
async def ping(lifecycle: LifecycleDep) -> Response:
    """200 while requests can be taken, which is what SageMaker waits for before it sends some."""
    if lifecycle.readiness().status is ServerStatus.READY:
        return Response(b"{}", media_type="application/json")
    return ErrorReply(status=503, message="Not ready.", type="server_error", code="model_loading").response()


@router.post("/invocations", responses=answer_docs(ChatCompletion | TextCompletion), openapi_extra=BODY.extra)
async def invoke(
    body: JsonDep, door: DoorDep, lifecycle: LifecycleDep, config: ServerConfigDep, request: Request
) -> Response:
    """Answer a conversation if there are `messages`, else continue a `prompt`. `model` may be left out."""
    fields = _fields(body)
    if "model" not in fields:
        fields["model"] = door.served_names[0]
        body = orjson.dumps(fields)
    if fields.get("messages") is not None:
        return await answer_chat(parse_body(body, ChatCompletionRequest, is_strict=config.strict_params), door, request)
    if fields.get("prompt") is not None:
        parsed = parse_body(body, CompletionRequest, is_strict=config.strict_params)
        return await answer_completion(parsed, door, request)
    raise MissingParameterError("'messages' or 'prompt' is required.", param="messages")


def _fields(body: bytes) -> dict[str, object]:
    """The top level of a body; what is no object is left to the schema to complain about."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        parse_body(body, ChatCompletionRequest, is_strict=False)  # says where it is wrong
        raise
    return fields if isinstance(fields, dict) else {}
