"""The public names exist, are all that is promised, and cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import peagle


def test_every_public_name_resolves() -> None:
    assert peagle.__all__ == sorted(peagle.__all__)
    for name in peagle.__all__:
        assert getattr(peagle, name).__name__ == name or name == "PhaseListener"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = peagle.no_such_name


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, peagle, peagle.config, peagle.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
