"""How the server logs: one line a record on stderr, with the id of the request that it belongs to.

Owns the formats, for people and for machines, and the request id of the current context. Refuses to know what is
logged; prompts and answers never are.
"""

from __future__ import annotations

import logging
import logging.config
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import orjson

from server.settings import LogFormat

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: nothing is dropped here."""
        record.request_id = current_request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, request_id, message, the record's own fields, any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. A value that JSON does not know is written as its text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": record.__dict__.get("request_id", "-"),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _USUAL and name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


# What every record has; the rest is what the caller gave as `extra`.
_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Send everything from `level` up to stderr. uvicorn speaks from warnings up: we log its life and its requests."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"request_id": {"()": RequestIdFilter}},
            "formatters": {"text": {"format": _FORMAT}, "json": {"()": JsonFormatter}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": log_format, "filters": ["request_id"]},
            },
            "root": {"handlers": ["stderr"], "level": level.upper()},
            "loggers": {"uvicorn": {"level": "WARNING"}},
        }
    )
