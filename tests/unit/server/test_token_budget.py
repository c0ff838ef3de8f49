"""Tokens a minute. Time is whatever a test says."""

from __future__ import annotations

import pytest

from server.token_budget import MAX_IDLE_CLIENTS, TokenBudget


def test_a_debt_is_waited_for_and_then_forgotten() -> None:
    budget = TokenBudget(600)  # ten a second
    assert budget.wait_s("a", 0.0) == 0.0
    budget.charge("a", 650, 0.0)
    assert budget.wait_s("a", 0.0) == pytest.approx(5.1)
    assert budget.wait_s("b", 0.0) == 0.0
    assert budget.wait_s("a", 5.0) == pytest.approx(0.1)
    assert budget.wait_s("a", 5.2) == 0.0


def test_saving_up_ends_at_a_minute() -> None:
    budget = TokenBudget(600)
    budget.charge("a", 1, 0.0)
    budget.charge("a", 600, 10_000.0)
    assert budget.wait_s("a", 10_000.0) > 0.0


def test_a_request_that_is_larger_than_a_minute_can_be_served() -> None:
    budget = TokenBudget(60)
    assert budget.wait_s("a", 0.0) == 0.0
    budget.charge("a", 600, 0.0)
    assert 540 < budget.wait_s("a", 0.0) < 542


def test_a_clock_that_stands_still_gives_nothing() -> None:
    budget = TokenBudget(60)
    budget.charge("a", 60, 5.0)
    assert budget.wait_s("a", 4.0) > 0.0


def test_clients_that_owe_nothing_are_forgotten() -> None:
    budget = TokenBudget(60)
    budget.charge("debtor", 10**6, 0.0)
    for index in range(2 * MAX_IDLE_CLIENTS):
        budget.wait_s(f"{index}", 0.0)
    assert len(budget._balances) <= MAX_IDLE_CLIENTS + 1
    assert budget.wait_s("debtor", 0.0) > 0.0
