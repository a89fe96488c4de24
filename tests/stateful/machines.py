"""Run lengths of the state machines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine


def short(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> Any:
    """Return the test that runs a machine in every test run."""
    test = machine.TestCase
    test.settings = settings(settings.get_profile("stateful"), max_examples=examples, stateful_step_count=steps)
    return test


def long(machine: type[RuleBasedStateMachine], examples: int) -> Any:
    """Return the slow test, which takes different paths each time."""
    usual = settings.get_profile("stateful")

    @pytest.mark.campaign
    @pytest.mark.timeout(1800)
    class Long(machine.TestCase):  # type: ignore[name-defined,misc]
        settings = settings(usual, max_examples=examples, stateful_step_count=60, derandomize=False)

    return Long
