"""All routes of the API in one router.

Owns which resources there are. Refuses to know what they do.
"""

from __future__ import annotations

from fastapi import APIRouter

from server.api import chat, completions, health, metrics, models, responses, sagemaker, server_info, tokenize


def create_router() -> APIRouter:
    """The routes of one app."""
    router = APIRouter(redirect_slashes=False)
    for resource in (chat, completions, responses, models, tokenize, sagemaker, health, metrics, server_info):
        router.include_router(resource.router)
    return router
