"""A run directory against a plain list: ranks add, evict, end and join; readers refresh and draw."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stateful.machines import long, short
from tests.stores import opened
from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore._core.formats import FORMATS
from trajstore._core.store.run_ids import in_run, shown_id
from trajstore.operations.trajectory_report import inspect_trajectory
from trajstore.operations.verify import verify
from trajstore.samplers import EpochSampler, WeightedSampler

WINDOW = 3
RANKS = 4
Run = dict[int, int]
"""Key of each trajectory by its id in the run, in the order of the commits."""


class Ranks(RuleBasedStateMachine):
    """``self.run_now`` is the ranks' committed state, ``self.shown`` the reader's last view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.path = Path(self.temporary.name) / "run"
        self.writers: list[TrajectoryReplayBuffer | None] = []
        self.next_key = 0
        self.run_now: Run = {}
        self.shown: Run = {}
        self.every_id: dict[int, int] = {}
        self.pinned: dict[str, Run] = {}
        self.to_come: set[int] = set()
        self.reader: TrajectoryReplayBuffer

    @initialize(fmt=st.sampled_from(list(FORMATS)), count=st.integers(1, 2))
    def begin(self, fmt: Any, count: int) -> None:
        self.fmt = fmt
        for _ in range(count):
            self.join()
        self.add(0, 1)
        self.new_reader(0)

    # -- writers ----------------------------------------------------------------------------------

    def writer(self, rank: int) -> TrajectoryReplayBuffer:
        """Return the writer of a rank, reopened if it had ended."""
        rank %= len(self.writers)
        writer = self.writers[rank]
        if writer is None:
            options = WriterOptions(commit_interval=0.001, shard_bytes=60_000)
            path = self.path / f"rank_{rank}"
            writer = self.writers[rank] = opened(path, trajectory_format=self.fmt, writer=options)
        return writer

    @precondition(lambda self: len(self.writers) < RANKS)
    @rule()
    def join(self) -> None:
        self.writers.append(None)
        self.writer(len(self.writers) - 1)

    @rule(rank=st.integers(0, RANKS - 1))
    def end(self, rank: int) -> None:
        rank %= len(self.writers)
        self.writer(rank).close()
        self.writers[rank] = None

    @rule(rank=st.integers(0, RANKS - 1), count=st.integers(1, 4))
    def add(self, rank: int, count: int) -> None:
        writer = self.writer(rank)
        keys = range(self.next_key, self.next_key + count)
        self.next_key += count
        own = writer.add_trajectories([witness(key) for key in keys])
        writer.flush()
        ids = in_run(rank % len(self.writers), torch.tensor(own).numpy()).tolist()
        assert not self.every_id.keys() & set(ids)
        added = dict(zip(ids, keys, strict=True))
        self.every_id |= added
        self.run_now |= added

    @precondition(lambda self: self.run_now)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.run_now)))
        rank, own = map(int, shown_id(number).split("/"))
        self.writer(rank).evict([own])
        del self.run_now[number]

    @rule(rank=st.integers(0, RANKS - 1))
    def compact(self, rank: int) -> None:
        self.writer(rank).compact()

    @rule(name=st.sampled_from(["a", "b"]))
    def pin(self, name: str) -> None:
        for rank in range(len(self.writers)):
            self.writer(rank).points.pin(name)
        self.pinned[name] = dict(self.run_now)

    # -- readers ----------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 5))
    def new_reader(self, seed: int) -> None:
        """Replace the reader by a new one with the same sampler states."""
        reader = TrajectoryReplayBuffer.open(self.path, seed=seed, sample_window_size=WINDOW)
        epoch, weighted = EpochSampler(unit="trajectory"), WeightedSampler()
        for sampler in (epoch, weighted):
            sampler.follow(reader)
        if hasattr(self, "reader"):
            self.reader.close()
            epoch.load_state_dict(self.epoch.state_dict())
            weighted.load_state_dict(self.weighted.state_dict())
        self.reader, self.epoch, self.weighted = reader, epoch, weighted
        self.shown = dict(self.run_now)

    @rule()
    def refresh(self) -> None:
        changed = self.reader.refresh()
        assert changed or self.shown == self.run_now
        self.shown = dict(self.run_now)

    @precondition(lambda self: self.shown)
    @rule(count=st.integers(1, 5))
    def go_on_with_the_epoch(self, count: int) -> None:
        """Each trajectory in the window at the epoch's start comes once, unless it was evicted since."""
        drawn = self.reader.sample_trajectories(count, sampler=self.epoch)
        for key in map(check_trajectory, drawn):
            self.to_come &= set(self.shown.values())
            if not self.to_come:
                self.to_come = set(list(self.shown.values())[-WINDOW:])
            self.to_come.remove(key)

    @precondition(lambda self: self.shown)
    @rule(count=st.integers(1, 12), weighted=st.booleans())
    def newest(self, count: int, weighted: bool) -> None:
        batch = self.reader.sample(count, sampler=self.weighted) if weighted else self.reader.sample(count)
        assert set(check_batch(batch).tolist()) <= set(list(self.shown.values())[-WINDOW:])

    @precondition(lambda self: self.shown)
    @rule()
    def whole_epoch(self) -> None:
        self.reader.sample_window_size = 0
        sampler = EpochSampler(unit="trajectory", epochs=1)
        keys = [
            check_trajectory(trajectory)
            for trajectory in self.reader.sample_trajectories(len(self.shown), sampler=sampler)
        ]
        assert sorted(keys) == sorted(self.shown.values())
        self.reader.sample_window_size = WINDOW

    @precondition(lambda self: self.run_now)
    @rule()
    def another_reader_draws_alike(self) -> None:
        """A newly opened reader agrees with the refreshed one in ids, order and draws."""
        self.refresh()
        with TrajectoryReplayBuffer.open(self.path, seed=0, sample_window_size=WINDOW) as other:
            assert other.trajectory_ids.tolist() == self.reader.trajectory_ids.tolist()
            other.load_state_dict(self.reader.state_dict())
            assert torch.equal(other.sample(7)["curr_obs"]["tag"], self.reader.sample(7)["curr_obs"]["tag"])

    @precondition(lambda self: self.pinned)
    @rule()
    def as_it_was(self) -> None:
        for name, expected in self.pinned.items():
            ranks = [self.path / f"rank_{rank}" for rank in range(len(self.writers))]
            if all((rank / "pins" / f"{name}.json").exists() for rank in ranks):
                with TrajectoryReplayBuffer.open(self.path, pin=name) as then:
                    assert then.trajectory_ids.tolist() == list(expected)

    @rule(share=st.integers(1, 3))
    def shares(self, share: int) -> None:
        ids: list[int] = []
        for rank in range(share):
            with TrajectoryReplayBuffer.open(self.path, share=(rank, share)) as mine:
                ids += mine.trajectory_ids.tolist()
        assert sorted(ids) == sorted(self.run_now)

    @precondition(lambda self: self.run_now)
    @rule(data=st.data())
    def inspected(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.run_now)))
        report = inspect_trajectory(self.path, shown_id(number))
        assert report["trajectory_id"] == shown_id(number)
        assert report == inspect_trajectory(self.path, number)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "reader"):
            return
        assert self.reader.trajectory_ids.tolist() == list(self.shown)
        for number, key in list(self.shown.items())[::3]:
            assert check_trajectory(self.reader.get(number)) == key
            assert check_trajectory(self.reader.get(shown_id(number))) == key

    def teardown(self) -> None:
        for writer in self.writers:
            if writer is not None:
                writer.close()
        if hasattr(self, "reader"):
            self.reader.close()
            assert verify(self.path).sound
        self.temporary.cleanup()


TestRun = short(Ranks, 5, 25)
TestLongRun = long(Ranks, 300)
