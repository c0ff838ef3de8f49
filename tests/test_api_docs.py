"""docs/api.md is what the schemas say."""

from __future__ import annotations

import subprocess
import sys

from tests.source_tree import ROOT


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "api_docs", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
