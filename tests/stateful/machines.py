"""What state machines share: how long they run, and what is compared of a buffer and its twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

from trajstore import TrajectoryReplayBuffer
from trajstore.buffer.internals import internals_of
from trajstore.testing.witness import witness


def short(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> Any:
    """Return the test that runs a machine with every test run."""
    test = machine.TestCase
    test.settings = settings(settings.get_profile("stateful"), max_examples=examples, stateful_step_count=steps)
    return test


def long(machine: type[RuleBasedStateMachine], examples: int) -> Any:
    """Return the slow test, which goes other ways each time."""
    usual = settings.get_profile("stateful")

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    class Long(machine.TestCase):  # type: ignore[name-defined,misc]
        settings = settings(usual, max_examples=examples, stateful_step_count=60, derandomize=False)

    return Long


def add_witnesses(buffer: TrajectoryReplayBuffer, keys: range, next_id: int) -> dict[int, int]:
    """Add trajectories, which must get the ids from ``next_id`` on; return their keys by id."""
    ids = buffer.add_trajectories([witness(key) for key in keys])
    assert ids == list(range(next_id, next_id + len(keys)))
    return dict(zip(ids, keys, strict=True))


def compare_index(buffer: TrajectoryReplayBuffer, twin: Mapping[int, int], next_id: int) -> None:
    """Compare ids, sizes and the next id with those of a twin, which maps id to key."""
    assert buffer.trajectory_ids.tolist() == list(twin)
    assert len(buffer) == len(twin)
    assert buffer.total_samples == sum(witness(key).curr_obs["tag"].numel() for key in twin.values())
    assert internals_of(buffer).trajectory_counter == next_id
