"""Keys from the configuration and from a file that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.errors import ConfigError
from server import api_keys
from server.api_keys import ApiKeys


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)


def test_each_key_has_its_name() -> None:
    keys = ApiKeys(("alice secret-1", "secret-2"), None)
    assert keys.client_of("secret-1") == "alice"
    unnamed = keys.client_of("secret-2")
    assert unnamed is not None
    assert len(unnamed) == 8
    assert "secret" not in unnamed
    for wrong in ("", "secret", "secret-1 ", "SECRET-1", "alice", "alice secret-1", "\udc80"):
        assert keys.client_of(wrong) is None


def test_no_keys_and_no_file_is_empty(tmp_path: Path) -> None:
    assert ApiKeys((), None).is_empty
    file = tmp_path / "keys"
    file.write_text("# nobody yet\n\n")
    assert not ApiKeys((), file).is_empty


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice one\n\n  two\n")
    keys = ApiKeys(("given",), file)
    assert keys.client_of("one") == "alice"
    assert keys.client_of("two") is not None
    replacement = tmp_path / "new"  # as Kubernetes does it: a new file in the place of the old one
    replacement.write_text("bob three\n")
    replacement.replace(file)
    assert keys.client_of("one") is None
    assert keys.client_of("three") == "bob"
    assert keys.client_of("given") is not None
    file.unlink()
    assert keys.client_of("three") == "bob"  # what cannot be read changes nothing
    assert "stay as they were" in caplog.text
    assert "three" not in caplog.text


@pytest.mark.parametrize("text", ["a b c\n", "ok\nname key more\n"])
def test_a_line_that_is_no_key_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="line") as caught:
        ApiKeys((), file)
    assert "more" not in str(caught.value)


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys((), tmp_path / "missing")
