"""How the server logs: one line a record on stderr, with the id of the request that it belongs to.

Owns the format and the request id of the current context. Refuses to know what is logged;
prompts and answers never are.
"""

from __future__ import annotations

import logging
import logging.config
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: nothing is dropped here."""
        record.request_id = current_request_id.get()
        return True


def configure_logging(level: str) -> None:
    """Send everything from `level` up to stderr. uvicorn speaks from warnings up: we log its life and its requests."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"request_id": {"()": RequestIdFilter}},
            "formatters": {"line": {"format": _FORMAT}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["request_id"]},
            },
            "root": {"handlers": ["stderr"], "level": level.upper()},
            "loggers": {"uvicorn": {"level": "WARNING"}},
        }
    )
