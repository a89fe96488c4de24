"""Shared parts of the state machines: run lengths, and the comparison of a buffer with its twin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.support.witness import witness
from trajstore import TrajectoryReplayBuffer


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


class Twinned(RuleBasedStateMachine):
    """A buffer and ``self.twin``, id to key, oldest first; ``self.generator`` predicts the buffer's draws."""

    buffer: TrajectoryReplayBuffer

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.path = Path(self.temporary.name)
        self.twin: dict[int, int] = {}
        self.next_id = 0
        self.next_key = 0
        self.generator = torch.Generator().manual_seed(9)

    def add_some(self, count: int) -> list[int]:
        """Add trajectories to both and return the ids, which must be the next ones."""
        keys = range(self.next_key, self.next_key + count)
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        assert ids == list(range(self.next_id, self.next_id + count))
        self.next_key += count
        self.next_id += count
        self.twin |= dict(zip(ids, keys, strict=True))
        return ids

    @invariant()
    def indexed_alike(self) -> None:
        """Ids, sizes and the next id agree with the twin."""
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.trajectory_ids.tolist() == list(self.twin)
        assert len(self.buffer) == len(self.twin)
        assert self.buffer.total_samples == sum(witness(key).curr_obs["tag"].numel() for key in self.twin.values())
        assert self.buffer._trajectory_counter == self.next_id
