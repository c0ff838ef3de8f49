"""The line of a finished request."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from peagle.outputs import RequestOutput, RequestSpecStats, RequestTimes, Usage
from peagle.sequence import FinishReason
from server.request_log import log_request, request_fields

SECRET = "the text of an answer"
OUTPUT = RequestOutput(
    request_id="chatcmpl-1",
    text=SECRET,
    token_ids=[7],
    finish_reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=30, completion_tokens=12, cached_tokens=16),
    times=RequestTimes(queue_s=0.01234567, first_token_s=0.25, total_s=1.5),
    spec_stats=RequestSpecStats(
        num_drafts=4, num_draft_tokens=16, num_accepted_tokens=6, num_accepted_tokens_per_pos=(4, 2, 0, 0)
    ),
)


def test_the_line_has_what_an_operator_asks_about_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "server.request_log"):
        log_request(OUTPUT)
    (record,) = caplog.records
    assert record.getMessage() == (
        "chatcmpl-1: stop, 30 prompt tokens (16 cached), 12 generated, first token after 0.250 s, 1.500 s in all, "
        "2.50 tokens a proposal (6 of 16 drafts accepted)"
    )
    assert record.__dict__["acceptance_length"] == 2.5
    assert all(SECRET not in str(value) for value in record.__dict__.values())


def test_what_never_happened_is_none() -> None:
    fields = request_fields(replace(OUTPUT, times=None, spec_stats=None, finish_reason=FinishReason.ABORT))
    assert fields["finish_reason"] == "abort"
    assert (fields["queue_s"], fields["first_token_s"], fields["acceptance_length"]) == (None, None, None)
    assert request_fields(OUTPUT)["queue_s"] == 0.0123


def test_without_a_draft_there_is_no_acceptance(caplog: pytest.LogCaptureFixture) -> None:
    never = RequestSpecStats(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, num_accepted_tokens_per_pos=())
    with caplog.at_level(logging.INFO, "server.request_log"):
        log_request(replace(OUTPUT, spec_stats=never))
    assert caplog.messages[0].endswith("1.500 s in all")
