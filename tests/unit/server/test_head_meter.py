"""The limits of a head, to the byte."""

from __future__ import annotations

import pytest

from server.errors import HeadersTooLargeError
from server.head_meter import MAX_HEAD_BYTES, MAX_HEADERS, HeadMeter


def test_bytes() -> None:
    meter = HeadMeter()
    for _ in range(3):  # each head for itself
        meter.start()
        meter.count_target(MAX_HEAD_BYTES - 10)
        meter.count_field(10)
    with pytest.raises(HeadersTooLargeError, match=str(MAX_HEAD_BYTES)):
        meter.count_field(1)


def test_fields() -> None:
    meter = HeadMeter()
    meter.start()
    for _ in range(MAX_HEADERS):
        meter.count_field(1)
    with pytest.raises(HeadersTooLargeError, match=str(MAX_HEADERS)):
        meter.count_field(1)


def test_bytes_of_which_nothing_is_made() -> None:
    meter = HeadMeter()
    for _ in range(3):
        meter.count_fed(MAX_HEAD_BYTES)
        meter.check_progress()
        meter.note_progress()
    meter.count_fed(MAX_HEAD_BYTES + 1)
    with pytest.raises(HeadersTooLargeError):
        meter.check_progress()
