"""`POST /v1/completions`.

Owns the order of things, as `chat` does. Refuses to know how each is done.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import stream_answer, whole_answer
from server.api.body_docs import BodyDocs, answer_docs
from server.dependencies import CompletionRequestDep, DoorDep
from server.generation import Door
from server.schemas.answers import TextCompletion
from server.schemas.completions import CompletionRequest
from server.text_answers import TextAnswer, TextChunks

router = APIRouter()
BODY = BodyDocs.of(CompletionRequest)


@router.post(
    "/v1/completions",
    responses=answer_docs(TextCompletion),
    openapi_extra=BODY.extra,
)
async def create_completion(body: CompletionRequestDep, door: DoorDep, request: Request) -> Response:
    """Continue a text, or several."""
    return await answer_completion(body, door, request)


async def answer_completion(body: CompletionRequest, door: Door, request: Request) -> Response:
    """The answer to a request that has been read."""
    generation = await door.start_completion(body)
    if body.stream:
        return stream_answer(body, generation, TextChunks(body, generation), request)
    return await whole_answer(body, generation, TextAnswer(body, generation), request)
