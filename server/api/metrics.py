"""`GET /metrics`.

Owns the format: always the plain text one, which every scraper takes. prometheus_client's OpenMetrics writer turns the
colon of our names into an underscore for scrapers that do not ask for UTF-8 names, so the same metric would have two
names. Refuses to know the metrics (`server.prometheus`).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics of this process."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})
