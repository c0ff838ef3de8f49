"""One line in the log for each request that the engine has ended, with what an operator asks about.

Owns the line's words and its fields (`extra` of the record, for logs that are read by machines). Prompts and answers
are in neither. Refuses to know when a request ends: the engine tells.
"""

from __future__ import annotations

import logging
from typing import Any

from peagle import RequestOutput

logger = logging.getLogger(__name__)


def log_request(output: RequestOutput) -> None:
    """Log the end of a request. `output` is its last one."""
    fields = request_fields(output)
    logger.info(
        "%s: %s, %d prompt tokens (%d cached), %d generated, first token after %s, %s in all%s",
        fields["completion_id"],
        fields["finish_reason"],
        fields["prompt_tokens"],
        fields["cached_tokens"],
        fields["completion_tokens"],
        _seconds(fields["first_token_s"]),
        _seconds(fields["total_s"]),
        _acceptance(fields),
        extra=fields,
    )


def request_fields(output: RequestOutput) -> dict[str, Any]:
    """The line as data. Times are in seconds from arrival, None where that never happened."""
    times, spec = output.times, output.spec_stats
    has_drafts = spec is not None and spec.num_drafts > 0
    return {
        "event": "request_finished",
        "completion_id": output.request_id,
        "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
        "prompt_tokens": output.usage.prompt_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "queue_s": None if times is None else _rounded(times.queue_s),
        "first_token_s": None if times is None else _rounded(times.first_token_s),
        "total_s": None if times is None else _rounded(times.total_s),
        "draft_tokens": 0 if spec is None else spec.num_draft_tokens,
        "accepted_tokens": 0 if spec is None else spec.num_accepted_tokens,
        "acceptance_length": round(1 + spec.num_accepted_tokens / spec.num_drafts, 3) if spec and has_drafts else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _acceptance(fields: dict[str, Any]) -> str:
    if fields["acceptance_length"] is None:
        return ""
    return (
        f", {fields['acceptance_length']:.2f} tokens a proposal "
        f"({fields['accepted_tokens']} of {fields['draft_tokens']} drafts accepted)"
    )
