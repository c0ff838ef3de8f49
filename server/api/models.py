"""`GET /v1/models` and `GET /v1/models/{id}`.

Owns what a model's card says. Refuses to know how a model is served.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.dependencies import BundleDep, ServedNamesDep
from server.engine_bundle import EngineBundle
from server.errors import ModelNotFoundError
from server.schemas.errors import ErrorEnvelope
from server.schemas.models import ModelCard, ModelList

router = APIRouter(responses={"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}})


def _card(name: str, bundle: EngineBundle, request: Request) -> ModelCard:
    created_at: int = request.app.state.created_at
    return ModelCard(id=name, created=created_at, root=bundle.model_id, max_model_len=bundle.engine.max_model_len)


@router.get("/v1/models")
async def list_models(served_names: ServedNamesDep, bundle: BundleDep, request: Request) -> ModelList:
    """All names that the model can be called by."""
    return ModelList(data=[_card(name, bundle, request) for name in served_names])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, served_names: ServedNamesDep, bundle: BundleDep, request: Request) -> ModelCard:
    """One name; it may hold slashes, as hub ids do."""
    if name not in served_names:
        raise ModelNotFoundError(f"The model '{name[:200]}' is not served here.", param="model")
    return _card(name, bundle, request)
