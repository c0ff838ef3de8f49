"""`GET /metrics`.

Owns the format: always the plain text one, which every scraper takes. prometheus_client's OpenMetrics writer turns the
colon of our names into an underscore for scrapers that do not ask for UTF-8 names, so the same metric would have two
names. Refuses to know the metrics (`server.metrics_page`).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from server.guard import METRICS_PATH
from server.metrics_page import CONTENT_TYPE, MetricsPage

router = APIRouter()


@router.get(METRICS_PATH, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All metrics of this process. Without a key this is not reached: `ScrapeMiddleware` has answered."""
    page: MetricsPage = request.app.state.metrics_page
    return Response(page.render(), headers={"content-type": CONTENT_TYPE.decode()})
