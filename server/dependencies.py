"""What route functions ask for, as annotated aliases.

Owns the way from a request to the objects on `app.state`, and the reading of a JSON body. Refuses to do the work.
All are coroutines: FastAPI would call plain functions in a thread.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from server.admission import check_admission
from server.engine_bundle import EngineBundle
from server.errors import UnsupportedMediaTypeError
from server.generation import Door
from server.json_bodies import parse_body
from server.json_items import LARGE_BODY_BYTES, refuse_too_many_items
from server.lifespan import Lifecycle
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from server.settings import ServerConfig, Settings


async def get_lifecycle(request: Request) -> Lifecycle:
    """The process's state."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    return lifecycle


async def get_server_config(request: Request) -> ServerConfig:
    """The server's settings."""
    config: ServerConfig = request.app.state.settings.server
    return config


LifecycleDep = Annotated[Lifecycle, Depends(get_lifecycle)]
ServerConfigDep = Annotated[ServerConfig, Depends(get_server_config)]


async def get_bundle(lifecycle: LifecycleDep) -> EngineBundle:
    """The engine, for new work. Raises what `Lifecycle.admit` raises."""
    return lifecycle.admit()


BundleDep = Annotated[EngineBundle, Depends(get_bundle)]


async def get_served_names(config: ServerConfigDep, bundle: BundleDep) -> tuple[str, ...]:
    """The names that the model can be called by; the first is used in answers."""
    return config.served_model_name or (bundle.model_id,)


ServedNamesDep = Annotated[tuple[str, ...], Depends(get_served_names)]


async def get_door(request: Request, served_names: ServedNamesDep, lifecycle: LifecycleDep) -> Door:
    """Where generations are admitted."""
    settings: Settings = request.app.state.settings
    return Door(
        served_names=served_names,
        lifecycle=lifecycle,
        trusts_templates=settings.server.trust_request_chat_template,
        has_priorities=settings.engine.scheduler.scheduling_policy == "priority",
    )


DoorDep = Annotated[Door, Depends(get_door)]


async def read_json(request: Request, _bundle: BundleDep) -> bytes:
    """The body. Asking for the engine first means that nothing is read which could not be answered.

    Raises:
        UnsupportedMediaTypeError: not declared as JSON, or compressed.
        InvalidParameterError: too many values.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaTypeError("The body must be JSON, with the header 'Content-Type: application/json'.")
    encodings = ",".join(request.headers.getlist("content-encoding")).lower().replace(",", " ").split()
    if any(encoding != "identity" for encoding in encodings):
        raise UnsupportedMediaTypeError("The body must not be compressed: send it without 'Content-Encoding'.")
    body = await request.body()
    if len(body) > LARGE_BODY_BYTES:
        await asyncio.sleep(0)  # several at once take turns with the streams
        refuse_too_many_items(body)
        await asyncio.sleep(0)
    return body


JsonDep = Annotated[bytes, Depends(read_json)]


async def read_chat_request(body: JsonDep, config: ServerConfigDep) -> ChatCompletionRequest:
    """See `parse_body`. Under overload most requests are refused, so that is found out first."""
    check_admission()
    return parse_body(body, ChatCompletionRequest, is_strict=config.strict_params)


async def read_completion_request(body: JsonDep, config: ServerConfigDep) -> CompletionRequest:
    """As `read_chat_request`."""
    check_admission()
    return parse_body(body, CompletionRequest, is_strict=config.strict_params)


async def read_tokenize_request(body: JsonDep, config: ServerConfigDep) -> TokenizeRequest:
    """See `parse_body`."""
    return parse_body(body, TokenizeRequest, is_strict=config.strict_params)


async def read_detokenize_request(body: JsonDep, config: ServerConfigDep) -> DetokenizeRequest:
    """See `parse_body`."""
    return parse_body(body, DetokenizeRequest, is_strict=config.strict_params)


ChatRequestDep = Annotated[ChatCompletionRequest, Depends(read_chat_request)]
CompletionRequestDep = Annotated[CompletionRequest, Depends(read_completion_request)]
TokenizeRequestDep = Annotated[TokenizeRequest, Depends(read_tokenize_request)]
DetokenizeRequestDep = Annotated[DetokenizeRequest, Depends(read_detokenize_request)]
