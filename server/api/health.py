"""`/health`, `/ready` and `/version`: for supervisors and load balancers, answered from the first moment.

Owns the replies. They read a few attributes and never wait for the engine, so a probe's timeout of a second is ample.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.responses import Response

import peagle
from server.dependencies import LifecycleDep
from server.errors import ErrorReply
from server.lifespan import ServerStatus
from server.schemas.errors import ErrorEnvelope

router = APIRouter()


@router.get("/health", responses={503: {"model": ErrorEnvelope}})
async def health(lifecycle: LifecycleDep) -> Response:
    """200 unless the process should be restarted: loading failed, or the engine is dead or stuck."""
    illness = lifecycle.illness()
    if illness is None:
        return Response(b"{}", media_type="application/json")
    return ErrorReply(status=503, message=f"Unhealthy: {illness}.", type="server_error", code="unhealthy").response()


@router.get("/ready", responses={503: {"description": "Not ready; the body is the same."}})
async def ready(lifecycle: LifecycleDep) -> Response:
    """200 while requests can be taken; always says how far the process is."""
    readiness = lifecycle.readiness()
    status_code = 200 if readiness.status is ServerStatus.READY else 503
    return Response(orjson.dumps(readiness), status_code=status_code, media_type="application/json")


@router.get("/version")
async def version() -> dict[str, str]:
    """The version that runs."""
    return {"version": peagle.__version__}
