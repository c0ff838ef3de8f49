"""`GET /server_info`: the effective configuration, for whoever has the admin key.

Owns the shape. Secrets are masked. Refuses to know keys (`server.guard`).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

import peagle
from server.config_options import config_groups
from server.config_report import effective_value
from server.masking import masked
from server.schemas.errors import ErrorEnvelope
from server.settings import Settings

router = APIRouter(responses={"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}})


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """The version, and every key of the configuration by its group."""
    settings: Settings = request.app.state.settings
    config = {
        group.name: {key.name: masked(key.name, effective_value(settings, key)) for key in group.keys}
        for group in config_groups()
    }
    return {"version": peagle.__version__, "config": config}
