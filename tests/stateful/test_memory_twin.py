"""A memory-only buffer against a dict: trajectories that left memory are counted but never drawn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stateful.machines import long, short
from tests.support.witness import check_batch, check_trajectory, rows_of, witness
from trajstore import Retention, TrajectoryReplayBuffer, errors

LIMIT = 10


class MemoryTwin(RuleBasedStateMachine):
    """``self.twin``: id to key, oldest first; ``self.held``: ids whose trajectories can be read."""

    buffer: TrajectoryReplayBuffer

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.path = Path(self.temporary.name)
        self.twin: dict[int, int] = {}
        self.next_id = 0
        self.generator = torch.Generator().manual_seed(9)  # predicts the buffer's draws
        self.held: list[int] = []
        self.loaded: set[int] = set()

    @initialize(kept=st.sampled_from([3, 1, 0]), limited=st.booleans())
    def begin(self, kept: int, limited: bool) -> None:
        self.kept = kept
        self.limit = LIMIT if limited else None
        self.buffer = TrajectoryReplayBuffer(
            seed=9, sample_window_size=kept, retention=Retention(max_trajectories=self.limit)
        )

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        keys = range(self.next_id, self.next_id + count)
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        assert ids == list(keys)
        self.next_id += count
        self.twin |= dict(zip(ids, keys, strict=True))
        self.held += ids
        in_memory = [number for number in self.held if number not in self.loaded]
        gap = in_memory[: -self.kept] if self.kept else []
        if self.limit is not None:
            self.twin = dict(list(self.twin.items())[-self.limit :])
        self.held = [number for number in self.held if number in self.twin and number not in gap]

    @precondition(lambda self: self.twin)
    @rule(data=st.data(), newest=st.booleans())
    def evict(self, data: Any, newest: bool) -> None:
        known = list(self.twin)[-3:] if newest else list(self.twin)
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
        self.buffer.evict(chosen)
        self.twin = {number: key for number, key in self.twin.items() if number not in chosen}
        self.held = [number for number in self.held if number not in chosen]

    @precondition(lambda self: len(self.twin) > 2 * LIMIT)
    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.twin, self.held = {}, []

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @rule(window=st.sampled_from([0, 2, 6]))
    def change_window(self, window: int) -> None:
        self.buffer.sample_window_size = window

    def window(self) -> list[int]:
        return [self.twin[number] for number in self.held[-self.buffer.sample_window_size :]]

    @rule(count=st.integers(1, 12))
    def sample(self, count: int) -> None:
        window = [tag for key in self.window() for tag in witness(key).curr_obs["tag"].reshape(-1)]
        if not window:
            with pytest.raises(errors.EmptyBufferError, match="evicted from it" if self.twin else None):
                self.buffer.sample(count)
            return
        drawn = torch.randint(0, len(window), (min(count, len(window)),), generator=self.generator)
        expected = rows_of(torch.stack([window[number] for number in drawn.tolist()]))
        batch = self.buffer.sample(count)
        check_batch(batch)
        assert torch.equal(batch["curr_obs"]["tag"], expected["curr_obs.tag"])

    @rule(count=st.integers(1, 7))
    def sample_trajectories(self, count: int) -> None:
        window = self.window()
        if not window:
            with pytest.raises(errors.EmptyBufferError):
                self.buffer.sample_trajectories(count)
            return
        drawn = torch.randperm(len(window), generator=self.generator)[:count].tolist()
        keys = [check_trajectory(item) for item in self.buffer.sample_trajectories(count)]
        assert keys == [window[at] for at in drawn]

    @precondition(lambda self: len(self.twin) > LIMIT - 2)  # rarely enough for trajectories to leave memory in between
    @rule(layout=st.sampled_from(["trajstore", "rlinf"]))
    def save_and_load(self, layout: Any) -> None:
        """Only trajectories in memory are saved; loaded ones stay on disk and always remain readable."""
        self.buffer.save_checkpoint(self.path / "checkpoint", layout=layout)
        self.buffer.load_checkpoint(self.path / "checkpoint")
        self.twin = {number: self.twin[number] for number in self.held}
        self.loaded = set(self.held)
        if layout == "rlinf":  # RLinf's metadata do not store the generator's state
            self.generator.manual_seed(9)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.trajectory_ids.tolist() == list(self.twin)
        assert len(self.buffer) == len(self.twin)
        assert self.buffer.total_samples == sum(witness(key).curr_obs["tag"].numel() for key in self.twin.values())
        for number, key in list(self.twin.items())[::2]:
            if number in self.held:
                assert check_trajectory(self.buffer.get(number)) == key
            else:
                with pytest.raises(errors.TrajectoryUnavailableError, match="dropped"):
                    self.buffer.get(number)

    def teardown(self) -> None:
        self.temporary.cleanup()


TestMemoryTwin = short(MemoryTwin, 8, 25)
TestLongMemoryTwin = long(MemoryTwin, 300)
