"""A load that rises in steps: `locust -f loadtest/locustfile.py,loadtest/steps.py`. It replaces -u, -r and -t."""

from __future__ import annotations

import os

from locust import LoadTestShape

USERS = tuple(int(part) for part in os.environ.get("LOADTEST_STEPS", "1,4,8,16").split(","))
STEP_S = float(os.environ.get("LOADTEST_STEP_S", "60"))


class Steps(LoadTestShape):
    """Each number of users for the same time."""

    def tick(self) -> tuple[int, float] | None:
        """The users now, and how many start a second; None at the end."""
        step = int(self.get_run_time() // STEP_S)
        return (USERS[step], max(USERS)) if step < len(USERS) else None
