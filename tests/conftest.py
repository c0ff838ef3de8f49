"""What a run of the suite reports beside pass and fail."""

from __future__ import annotations

import os

# Before torch is imported: threads that wait for one another give up the core soon, as in `peagle serve`. Tests run
# servers beside the suite, and spinning threads would slow both down tenfold.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("MKL_CBWR", "AUTO")

import pytest
from hypothesis import settings

REPORT = pytest.StashKey[list[str]]()


# A deadline is a timed test, and the machine may be busy.
settings.register_profile("peagle", deadline=None)
settings.load_profile("peagle")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = []


@pytest.fixture
def report_line(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end of the run, such as the number of near-ties."""
    lines: list[str] = request.config.stash[REPORT]
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[REPORT]:
        terminalreporter.write_line(line)
