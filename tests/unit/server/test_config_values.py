"""Texts and YAML values become the declared types, or an error that says what is wanted."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import ConfigError
from peagle.spec_config import SpecConfig
from server.config_options import ConfigKey
from server.config_values import parse_text, parse_yaml

Choice = Literal["auto", "off"]


def key(annotation: Any, name: str = "x") -> ConfigKey:
    return ConfigKey(name=name, group="g", annotation=annotation, default=None, help="h")


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, " a b ", " a b "),
        (int, "-12", -12),
        (int | None, "7", 7),
        (float, "1.5", 1.5),
        (float, "2", 2.0),
        (bool, "Yes", True),
        (bool, "0", False),
        (Choice, "off", "off"),
        (Choice | None, "auto", "auto"),
        (tuple[int, ...], "1, 2,4", (1, 2, 4)),
        (tuple[str, ...] | None, "a,b/c", ("a", "b/c")),
        (SpecConfig, '{"model": "h", "num_speculative_tokens": 2}', SpecConfig(model="h", num_speculative_tokens=2)),
    ],
)
def test_text(annotation: Any, text: str, value: Any) -> None:
    parsed = parse_text(key(annotation), text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "wanted"),
    [
        (int, "1.0", "a whole number"),
        (int, "1_000", "a whole number"),
        (int, "٣", "a whole number"),
        (int, "", "a whole number"),
        (float, "nan", "a finite number"),
        (float, "inf", "a finite number"),
        (float, "a", "a finite number"),
        (bool, "maybe", "true or false"),
        (Choice, "on", "one of auto, off"),
        (tuple[int, ...], "1,,2", "whole numbers, separated by commas"),
        (SpecConfig, "[1]", "a JSON object"),
        (SpecConfig, '{"a": }', "it breaks at character 7"),
        (SpecConfig, '{"model": "a", "model": "b"}', "'model' is given twice"),
    ],
)
def test_text_that_is_refused(annotation: Any, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        parse_text(key(annotation), text)


@pytest.mark.parametrize(
    ("annotation", "raw", "value"),
    [
        (str, "a", "a"),
        (str, 7, "7"),
        (int, 7, 7),
        (int | None, None, None),
        (float, 3, 3.0),
        (bool, True, True),
        (bool, "off", False),
        (Choice, "auto", "auto"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, ...], "1,2", (1, 2)),
        (tuple[int, ...], 4, (4,)),
        (tuple[str, ...], "a", ("a",)),
        (SpecConfig, {}, SpecConfig()),
        (SpecConfig, "{}", SpecConfig()),
    ],
)
def test_yaml(annotation: Any, raw: Any, value: Any) -> None:
    parsed = parse_yaml(key(annotation), raw)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "raw"),
    [
        (str, 1.5),
        (str, True),
        (int, True),
        (int, "7"),
        (int, 7.0),
        (int, None),
        (float, True),
        (bool, 1),
        (Choice, False),
        (tuple[int, ...], ["1"]),
        (tuple[str, ...], [1]),
        (SpecConfig, 4),
    ],
)
def test_yaml_that_is_refused(annotation: Any, raw: Any) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        parse_yaml(key(annotation), raw)


def test_sizes_have_units() -> None:
    assert parse_text(key(int, "max_body_bytes"), "2MiB") == 2 * 2**20
    assert parse_yaml(key(int, "max_body_bytes"), "2MiB") == 2 * 2**20
    assert parse_yaml(key(int, "max_body_bytes"), 5) == 5


@given(st.integers())
def test_whole_numbers_round_trip(number: int) -> None:
    assert parse_text(key(int), str(number)) == number


@given(st.text(), st.sampled_from([str, int, float, bool, Choice, tuple[int, ...], tuple[str, ...], SpecConfig]))
def test_any_text_is_read_or_refused(text: str, annotation: Any) -> None:
    try:
        parse_text(key(annotation), text)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 (both outcomes are right)
