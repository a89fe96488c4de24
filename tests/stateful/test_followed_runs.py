"""A followed run beside one that is loaded again: both are what opening it shows, whatever its ranks did meanwhile.

One-hour run: ``TRAJSTORE_FOLLOWED_EXAMPLES=3000 python -m pytest -m campaign tests/stateful/test_followed_runs.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.stateful.machines import long, short
from tests.stores import writer_to
from tests.support.witness import check_batch, difference, witness
from trajstore import AgentTrajectory, Reader, Retention, Reward, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.formats import FORMATS
from trajstore.errors import ConfigurationError
from trajstore.samplers import EpochSampler, Recency, Sampler, WeightedSampler
from trajstore.trajectory import AnyTrajectory

CLOCK = "trajstore._core.writing.commit_log.microseconds"


def rollout(key: int) -> AgentTrajectory:
    """Return a rollout with facts that follow from the key; some names of scores are rare."""
    scores = {f"score{key % 3}": float(key)} if key % 4 else {}
    return AgentTrajectory(
        messages=[{"role": "assistant", "content": f"rollout {key}"}],
        input_ids=torch.arange(3 + key % 5),
        reward=Reward(outcome=float(key % 2), metadata=scores),
        task_id=f"task {key % 7}",
        policy_version=key,
    )


def shown(reader: Reader) -> dict[str, Any]:
    """Return everything that a reader shows, except its rows."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in reader.query().rows()]
    counts = len(reader), reader.total_samples, reader._trajectory_counter, reader.get_stats()["left_out"]
    return {
        "ids": reader.trajectory_ids.tolist(),
        "uuids": reader._uuids.tobytes(),
        "stores": reader._store_ids,
        "counts": counts,
        "facts": rows,
        "generations": reader._live.generations,
        "twins": [source.twins.tolist() for source in reader._live.contents.sources],  # type: ignore[attr-defined]
    }


def equal(left: AnyTrajectory, right: AnyTrajectory) -> bool:
    """Return whether two trajectories are equal, with their late values by row."""
    notes = left.notes.keys() == right.notes.keys() and all(
        torch.equal(left.notes[name], right.notes[name]) for name in left.notes
    )
    return notes and difference(left, right) is None


class FollowedRun(RuleBasedStateMachine):
    """A run, a reader that follows it, and one that loads it again, with samplers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run = self.folder / "run"
        self.writers: list[TrajectoryReplayBuffer] = []
        self.key, self.now, self.copies = 0, 1_000_000, 0
        self.clock = patch(CLOCK, lambda: self.now)
        self.clock.start()

    @initialize(
        fmt=st.sampled_from(list(FORMATS)),
        ranks=st.integers(2, 4),
        limit=st.sampled_from([None, None, 5]),
        rollouts=st.booleans(),
        loads=st.sampled_from([False, False, True]),
    )
    def begin(self, fmt: Any, ranks: int, limit: int | None, rollouts: bool, loads: bool) -> None:
        """``loads``: whether things happen after which the run has to be loaded again."""
        self.loads, self.make = loads, rollout if rollouts else witness
        self.options = {
            "trajectory_format": fmt,
            "retention": None if limit is None else Retention(max_trajectories=limit),
            "writer": WriterOptions(commit_interval=0.001, shard_bytes=60_000),
        }
        for rank in range(ranks):
            self.writers.append(self.opened(rank))
            self.add(rank, 1 + rank, 0)
            self.writers[rank].points.save(0)
        self.readers = [TrajectoryReplayBuffer.open(self.run, seed=1) for _ in range(2)]
        self.samplers: list[list[Sampler]] = [[EpochSampler(), WeightedSampler([Recency(4)])] for _ in range(2)]
        if rollouts:
            self.samplers = [[WeightedSampler([Recency(4)], unit="trajectory")] for _ in range(2)]

    def opened(self, rank: int) -> TrajectoryReplayBuffer:
        return writer_to(self.run / f"rank_{rank}", seed=1, **self.options)

    def rank(self, rank: int) -> TrajectoryReplayBuffer:
        return self.writers[rank % len(self.writers)]

    def some(self, writer: TrajectoryReplayBuffer, pick: int, count: int) -> list[int]:
        """Return ids of a store that follow each other, if it has any."""
        ids: list[int] = writer.trajectory_ids.tolist()
        begin = pick % len(ids) if ids else 0
        return ids[begin : begin + count]

    @rule(rank=st.integers(0, 3), count=st.integers(1, 3), behind=st.sampled_from([0, 0, 1, 2_500, 1 << 30]))
    def add(self, rank: int, count: int, behind: int) -> None:
        """Add some; the clock of the rank's machine may be behind those of others."""
        self.now += 1_000
        before, self.now = self.now, max(0, self.now - behind)
        self.rank(rank).add_trajectories([self.make(key) for key in range(self.key, self.key + count)])
        self.rank(rank).flush()
        self.key, self.now = self.key + count, before

    @rule(rank=st.integers(0, 3), other=st.integers(0, 3), pick=st.integers(0, 99))
    def repeat(self, rank: int, other: int, pick: int) -> None:
        """Add a trajectory of a store to another one."""
        source, target = self.rank(rank), self.rank(other)
        for number in self.some(source, pick, 1) if self.loads and source is not target else ():
            at = source.trajectory_ids.tolist().index(number)
            flat = FlatTrajectories.runs([flatten(replace(source.get(number), notes={}))])
            target._sink.add_flattened(flat, source._uuids[at : at + 1].tobytes())
            target.flush()

    @rule(rank=st.integers(0, 3), pick=st.integers(0, 99), count=st.integers(1, 3))
    def evict(self, rank: int, pick: int, count: int) -> None:
        writer = self.rank(rank)
        writer.evict(self.some(writer, pick, count))

    @rule(
        rank=st.integers(0, 3),
        pick=st.integers(0, 99),
        how=st.sampled_from(["number", "none", "text", "rows", "outside"]),
        value=st.integers(0, 9),
    )
    def give(self, rank: int, pick: int, how: str, value: int) -> None:
        writer = self.rank(rank)
        for number in self.some(writer, pick, 1):
            if how == "rows":
                trajectory = writer.get(number)
                rewards = getattr(trajectory, "rewards", None)
                shape = (len(trajectory.input_ids),) if rewards is None else rewards.shape[:2]  # type: ignore
                annotate(writer, number, {"rows": [torch.full(shape, float(value))]})
            elif how == "text":
                annotate(writer, number, {"tag": f"text {value}"})
            else:
                path = self.run / f"rank_{rank % len(self.writers)}"
                with suppress(ConfigurationError):  # there is none to remove
                    annotate(path if how == "outside" else writer, number, {"score": None if how == "none" else value})
        writer._sink.take_in_values()

    @rule(rank=st.integers(0, 3))
    def compact(self, rank: int) -> None:
        self.rank(rank).compact()

    @rule(rank=st.integers(0, 3))
    def save(self, rank: int) -> None:
        points = self.rank(rank).points
        points.save(max((point.step for point in points.saved), default=0) + 1)

    @rule(rank=st.integers(0, 3), pick=st.integers(0, 99))
    def go_to(self, rank: int, pick: int) -> None:
        points = self.rank(rank).points
        steps = [point.step for point in points.saved]
        if steps and self.loads:
            points.go_to(steps[pick % len(steps)])

    @rule(rank=st.integers(0, 3))
    def reopen(self, rank: int) -> None:
        rank %= len(self.writers)
        self.writers[rank].close()
        self.writers[rank] = self.opened(rank)

    @rule()
    def join(self) -> None:
        if len(self.writers) < 5 and self.loads:
            self.writers.append(self.opened(len(self.writers)))

    @rule()
    def refresh(self) -> None:
        followed, loaded = self.readers
        before = loaded._live.generations
        with loaded._live.steady:
            loaded._show(loaded._live.request)  # type: ignore[arg-type]
        assert followed.refresh() is (loaded._live.generations != before)
        with TrajectoryReplayBuffer.open(self.run, seed=1) as fresh:
            expected = shown(fresh)
            assert shown(loaded) == expected
            assert shown(followed) == expected
            for number in expected["ids"]:
                assert equal(followed.get(number), fresh.get(number)), number
        self.draw(followed, loaded)

    def draw(self, followed: Reader, loaded: Reader) -> None:
        """Compare draws, also of samplers that have drawn before."""
        if not len(loaded):
            return
        if self.make is witness:
            check_batch(followed.sample(8))  # decodes some, which the cache keeps
        loaded.load_state_dict(followed.state_dict())
        for mine, its in zip(*self.samplers, strict=True):
            if mine.unit == "trajectory":
                drawn = [one.sample_trajectories(3, sampler=use) for one, use in ((followed, mine), (loaded, its))]
                assert all(map(equal, *drawn))
                continue
            rows = [followed.draw(4, sampler=mine), loaded.draw(4, sampler=its)]
            for sampler in (None, EpochSampler):
                rows += [reader.draw(8, sampler=sampler and sampler()) for reader in (followed, loaded)]
            assert all(
                left.ids.tolist() == right.ids.tolist() and left.samples.tolist() == right.samples.tolist()
                for left, right in zip(rows[::2], rows[1::2], strict=True)
            )

    @rule()
    def copy(self) -> None:
        """A checkpoint of the followed run, with all late values, is one of the run."""
        self.refresh()
        self.copies += 1
        states = []
        for reader in self.readers:
            path = self.folder / f"copy_{self.copies}_{len(states)}"
            reader.save_checkpoint(path)
            with TrajectoryReplayBuffer.open(path) as copied:
                rows = [copied.get(number) for number in copied.trajectory_ids.tolist()]
                states.append((shown(copied) | {"stores": [], "generations": []}, rows))
        (left, mine), (right, its) = states
        assert left == right
        assert all(map(equal, mine, its))

    def teardown(self) -> None:
        if hasattr(self, "readers"):
            self.refresh()
        for closing in (*self.writers, *getattr(self, "readers", ())):
            closing.close()
        self.clock.stop()
        shutil.rmtree(self.folder)


EXAMPLES = int(os.environ.get("TRAJSTORE_FOLLOWED_EXAMPLES", "200"))
TestFollowedRun = short(FollowedRun, 2, 12)
TestLongFollowedRun = long(FollowedRun, EXAMPLES)
