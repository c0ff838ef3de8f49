"""`/v1/responses`: create, retrieve, cancel, delete.

Owns the order of things: read, admit, then answer whole, as a stream, or at once and in the background. Refuses to know
how each is done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from peagle.errors import RequestError
from server.admission import check_admission
from server.api.answers import whole_answer
from server.api.body_docs import BodyDocs, answer_docs
from server.dependencies import DoorDep, JsonDep, ServerConfigDep
from server.errors import describe
from server.guard import CLIENT_KEY
from server.json_bodies import ignored_header, parse_body
from server.response_answers import ResponseEvents
from server.response_desk import ResponseDesk
from server.response_input import field_name
from server.schemas.answers import DeletedResponse, ResponseObject
from server.schemas.errors import ErrorEnvelope
from server.schemas.responses import ResponsesRequest
from server.streaming import AnswerStream

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}}
router = APIRouter(responses=_ERRORS)
BODY = BodyDocs.of(ResponsesRequest)


def get_desk(request: Request) -> ResponseDesk:
    """Where responses are made and kept."""
    desk: ResponseDesk = request.app.state.response_desk
    return desk


def get_client(request: Request) -> str | None:
    """Whose key the request came with; None where there are no keys."""
    client: str | None = request.scope.get(CLIENT_KEY)
    return client


DeskDep = Annotated[ResponseDesk, Depends(get_desk)]
ClientDep = Annotated[str | None, Depends(get_client)]


@router.post("/v1/responses", responses=answer_docs(ResponseObject), openapi_extra=BODY.extra)
async def create_response(
    body: JsonDep, door: DoorDep, desk: DeskDep, client: ClientDep, config: ServerConfigDep, request: Request
) -> Response:
    """Answer an input."""
    check_admission()
    parsed = parse_body(body, ResponsesRequest, is_strict=config.strict_params)
    try:
        if parsed.background:
            return _json(await desk.start_in_background(parsed, door, client), ignored_header(parsed))
        started = await desk.start(parsed, door, client)
    except RequestError as error:  # the chat behind it has other names for some fields
        reply = describe(error)
        return replace(reply, param=None if reply.param is None else field_name(reply.param)).response()
    if parsed.stream:
        return AnswerStream(
            started.generation,
            ResponseEvents(started.answer),
            keep_alive_s=config.keep_alive_s,
            headers=ignored_header(parsed),
        )
    return await whole_answer(parsed, started.generation, started.answer, request)


@router.get("/v1/responses/{response_id}", responses={200: {"model": ResponseObject}})
async def get_response(response_id: str, desk: DeskDep, client: ClientDep) -> Response:
    """A stored response, as it is now."""
    return Response(desk.get(response_id, client).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}})
async def delete_response(response_id: str, desk: DeskDep, client: ClientDep) -> Response:
    """Forget a stored response."""
    desk.delete(response_id, client)
    return _json({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, desk: DeskDep, client: ClientDep) -> Response:
    """The items that were a response's input, all of them."""
    items = orjson.loads(desk.get(response_id, client).input_items)
    ids = [item["id"] for item in items]
    page = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    return _json(page)


@router.post("/v1/responses/{response_id}/cancel", responses={200: {"model": ResponseObject}})
async def cancel_response(response_id: str, desk: DeskDep, client: ClientDep) -> Response:
    """End a response that is in progress in the background."""
    return Response(await desk.cancel(response_id, client), media_type="application/json")


def _json(content: dict[str, Any], headers: Any = None) -> Response:
    return Response(orjson.dumps(content), headers=dict(headers or {}), media_type="application/json")
