"""`POST /v1/chat/completions`.

Owns the order of things: read, admit, then answer whole or as a stream. Refuses to know how each is done.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import stream_answer, whole_answer
from server.api.body_docs import BodyDocs, answer_docs
from server.chat_answers import ChatAnswer, ChatChunks
from server.dependencies import ChatRequestDep, DoorDep
from server.generation import Door
from server.schemas.answers import ChatCompletion
from server.schemas.chat import ChatCompletionRequest

router = APIRouter()
BODY = BodyDocs.of(ChatCompletionRequest)


@router.post(
    "/v1/chat/completions",
    responses=answer_docs(ChatCompletion),
    openapi_extra=BODY.extra,
)
async def create_chat_completion(body: ChatRequestDep, door: DoorDep, request: Request) -> Response:
    """Answer a conversation."""
    return await answer_chat(body, door, request)


async def answer_chat(body: ChatCompletionRequest, door: Door, request: Request) -> Response:
    """The answer to a request that has been read."""
    generation = await door.start_chat(body)
    if body.stream:
        return stream_answer(body, generation, ChatChunks(body, generation), request)
    return await whole_answer(body, generation, ChatAnswer(body, generation), request)
