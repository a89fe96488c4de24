"""The buffer has a dict as its twin: random operations, equal after each step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions
from trajstore.inspection.verify import verify
from trajstore.testing.witness import check_batch, check_trajectory, rows_of, witness

LIMIT = 10
FORMATS = st.sampled_from(["pt", "zarr", "pkl"])


class Twin(RuleBasedStateMachine):
    """``self.twin`` maps id to key, oldest first; ``self.generator`` draws what the buffer must draw."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.path = Path(self.temporary.name)
        self.twin: dict[int, int] = {}
        self.next_id = 0
        self.next_key = 0
        self.pins: dict[str, dict[int, int]] = {}
        self.checkpoint: tuple[dict[int, int], torch.Tensor] | None = None
        self.generator = torch.Generator().manual_seed(9)
        self.buffer: TrajectoryReplayBuffer

    @initialize(fmt=FORMATS, limited=st.booleans())
    def begin(self, fmt: str, limited: bool) -> None:
        self.retention = Retention(max_trajectories=LIMIT) if limited else Retention()
        self.open(fmt)

    def open(self, fmt: str) -> None:
        self.buffer = TrajectoryReplayBuffer(
            seed=9,
            cache_size=2,
            sample_window_size=5,
            auto_save=True,
            auto_save_path=self.path / "store",
            trajectory_format=fmt,
            retention=self.retention,
            writer=WriterOptions(commit_interval=0.001, shard_bytes=60_000),
        )
        self.buffer.load_state_dict({"seed": 9, "rng_state": self.generator.get_state()})

    def finish_adding(self) -> None:
        """Flush, so that retention has acted, and let the twin do the same."""
        self.buffer.flush()
        if self.retention.max_trajectories is not None:
            self.twin = dict(list(self.twin.items())[-LIMIT:])

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        keys = range(self.next_key, self.next_key + count)
        self.next_key += count
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        assert ids == list(range(self.next_id, self.next_id + count))
        self.next_id += count
        self.twin |= dict(zip(ids, keys, strict=True))
        self.finish_adding()

    @rule()
    def flush(self) -> None:
        self.finish_adding()

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.twin)), unique=True, max_size=3))
        self.buffer.evict(chosen)
        for number in chosen:
            del self.twin[number]

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.twin = {}

    @precondition(lambda self: self.twin)
    @rule(count=st.integers(1, 12))
    def sample(self, count: int) -> None:
        window = [rows for key in list(self.twin.values())[-5:] for rows in witness(key).curr_obs["tag"].reshape(-1)]
        drawn = torch.randint(0, len(window), (min(count, len(window)),), generator=self.generator)
        expected = rows_of(torch.stack([window[number] for number in drawn.tolist()]))
        batch = self.buffer.sample(count)
        check_batch(batch)
        assert torch.equal(batch["curr_obs"]["tag"], expected["curr_obs.tag"])
        assert torch.equal(batch["rewards"], expected["rewards"])

    @rule(fmt=FORMATS)
    def reopen(self, fmt: str) -> None:
        self.buffer.close()
        assert verify(self.path / "store").sound
        self.open(fmt)

    @rule(name=st.sampled_from(["a", "b"]))
    def pin(self, name: str) -> None:
        self.buffer.pin(name)
        self.pins[name] = dict(self.twin)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        name, _ = self.pins.popitem()
        self.buffer.unpin(name)

    @precondition(lambda self: self.pins)
    @rule()
    def load_pins(self) -> None:
        for name, expected in self.pins.items():
            assert self.read(self.path / "store", pin=name) == expected

    @rule()
    def save(self) -> None:
        self.buffer.save_checkpoint(self.path / "checkpoint")
        self.checkpoint = dict(self.twin), self.generator.get_state()

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def load(self) -> None:
        assert self.checkpoint is not None
        expected, state = self.checkpoint
        assert self.read(self.path / "checkpoint") == expected
        other = TrajectoryReplayBuffer(sample_window_size=5)
        other.load_checkpoint(self.path / "checkpoint")
        assert torch.equal(other.state_dict()["rng_state"], state)
        other.close()

    def read(self, path: Path, **options: Any) -> dict[int, int]:
        other = TrajectoryReplayBuffer(sample_window_size=0)
        other.load_checkpoint(path, **options)
        found = {number: check_trajectory(other.get(number)) for number in other.trajectory_ids.tolist()}
        other.close()
        return found

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.trajectory_ids.tolist() == list(self.twin)
        assert len(self.buffer) == len(self.twin)
        assert self.buffer.total_samples == sum(witness(key).curr_obs["tag"].numel() for key in self.twin.values())
        assert self.buffer.trajectory_counter == self.next_id
        for number, key in list(self.twin.items())[::3]:
            assert check_trajectory(self.buffer.get(number)) == key

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            assert self.read(self.path / "store") == self.twin
        self.temporary.cleanup()


TestTwin = Twin.TestCase
TestTwin.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLongTwin(Twin.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=400,
        stateful_step_count=60,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
