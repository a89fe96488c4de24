"""Snapshots against a model in plain Python: ids, rows, late values and saved points, through crashes and copies.

One-hour run: ``TRAJSTORE_SNAPSHOT_EXAMPLES=3000 python -m pytest -m campaign tests/stateful/test_snapshots.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.mirroring.stores import level
from tests.saved_points.stores import moments
from tests.stateful.machines import long, short
from tests.stores import writer_to
from trajstore import Mirror, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore.core.formats import FORMATS
from trajstore.operations.verify import verify
from trajstore.remote.mirror.restoring import restore
from trajstore.testing.witness import check_trajectory, witness

# -- the model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A store's visible state: keys and late values by id, and names of saved points by step."""

    keys: dict[int, int] = field(default_factory=dict)
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    line: dict[int, str] = field(default_factory=dict)


class Model:
    """The head and immutable snapshots."""

    def __init__(self) -> None:
        self.head, self.snapshots, self.visit = State(), dict[str, State](), 0

    def give(self, number: int, name: str, value: Any) -> None:
        values = self.head.values | {number: self.head.values.get(number, {}) | {name: value}}
        self.head = replace(self.head, values=values)

    def save(self, step: int) -> None:
        name = f"step-{step}.{self.visit}"
        self.head = replace(self.head, line=self.head.line | {step: name})
        self.snapshots[name] = self.head

    def go_to(self, name: str, left: str | None) -> None:
        if left is not None:
            self.snapshots[left] = self.head
        self.visit += self.shown(self.head) != self.shown(self.snapshots[name])
        self.head = self.snapshots[name]

    def remove(self, name: str) -> None:
        del self.snapshots[name]
        if name.startswith("aside-"):
            lines = [self.head, *(state for key, state in self.snapshots.items() if key.startswith("aside-"))]
            named = {point for state in lines for point in state.line.values()}
            self.snapshots = {
                key: state for key, state in self.snapshots.items() if not key.startswith("step-") or key in named
            }

    def shown(self, state: State) -> State:
        """Return the visible part of a state: values of its trajectories, and points that still exist."""
        line = {step: name for step, name in sorted(state.line.items()) if name in self.snapshots}
        values = {number: state.values[number] for number in state.keys if state.values.get(number)}
        return State(state.keys, values, line)


# -- the store under test ----------------------------------------------------------------------------


class Snapshots(RuleBasedStateMachine):
    """``self.buffer`` writes the store that ``self.model`` describes."""

    buffer: TrajectoryReplayBuffer

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "store"
        self.copies = 0
        self.key = 0
        self.model = Model()

    @initialize(fmt=st.sampled_from(list(FORMATS)), mirrored=st.sampled_from([False, False, True]))
    def begin(self, fmt: Any, mirrored: bool) -> None:
        self.fmt, self.mirror = fmt, str(self.folder / "mirror") if mirrored else None
        self.open()
        self.add(2)
        self.reader = TrajectoryReplayBuffer.open(self.path)

    def open(self) -> None:
        options = WriterOptions(commit_interval=0.001, shard_bytes=60_000)
        mirror = None if self.mirror is None else Mirror(self.mirror, interval=0.001)
        self.buffer = writer_to(self.path, seed=1, trajectory_format=self.fmt, writer=options, mirror=mirror)

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        keys = range(self.key, self.key + count)
        self.key += count
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        self.buffer.flush()
        self.model.head = replace(self.model.head, keys=self.model.head.keys | dict(zip(ids, keys, strict=True)))

    @precondition(lambda self: self.model.head.keys)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.head.keys)))
        self.buffer.evict([number])
        keys = {other: key for other, key in self.model.head.keys.items() if other != number}
        self.model.head = replace(self.model.head, keys=keys)

    @precondition(lambda self: self.model.head.keys)
    @rule(data=st.data(), how=st.sampled_from(["number", "outside", "rows"]), value=st.integers(0, 9))
    def annotate(self, data: Any, how: str, value: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.head.keys)))
        if how == "rows":
            shape = witness(self.model.head.keys[number]).rewards.shape[:2]  # type: ignore[union-attr]
            annotate(self.buffer, number, {"rows": [torch.full(shape, float(value))]})
            self.model.give(number, "rows", value)
        else:
            annotate(self.path if how == "outside" else self.buffer, number, {"score": value})
            self.model.give(number, "score", value)

    @rule()
    def compact(self) -> None:
        self.buffer.compact()

    @rule(more=st.integers(0, 1), keep=st.sampled_from([None, None, 2]))
    def save(self, more: int, keep: int | None) -> None:
        step = max(self.model.shown(self.model.head).line, default=0) + more
        before = dict(self.model.head.line)
        self.buffer.points.save(step, {"step": step}, keep=keep)
        self.model.save(step)
        line = list(self.model.shown(self.model.head).line.items())
        gone = [name for _, name in line[:-keep]] if keep else []
        asides = [state for name, state in self.model.snapshots.items() if name.startswith("aside-")]
        old = before.get(step)
        if old != self.model.head.line[step] and not any(old in state.line.values() for state in asides):
            gone.append(str(old))
        for name in gone:
            self.model.snapshots.pop(name, None)

    @rule(name=st.sampled_from(["one", "two"]))
    def pin(self, name: str) -> None:
        self.buffer.points.pin(name)
        self.model.snapshots[name] = self.model.head

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        self.buffer.points.remove(name)
        self.model.remove(name)

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data(), crash=st.sampled_from([False, False, True]))
    def go_to(self, data: Any, crash: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        self.look()  # the abandoned state includes pending values
        if not crash:
            self.buffer.points.go_to(name)
            self.went(name)
            return
        with moments(self.path, self.folder / f"moments-{self.copies}") as copies:
            self.buffer.points.go_to(name)
        self.buffer.close()
        self.reader.close()
        self.take(data.draw(st.sampled_from(copies)))
        if self.seen(self.buffer) == self.model.shown(self.model.snapshots[name]):
            self.went(name)
        self.reader = TrajectoryReplayBuffer.open(self.path)

    def went(self, name: str) -> None:
        """Move the model to a snapshot; the store chooses the name for an abandoned state that it keeps."""
        left = {snapshot.name for snapshot in self.buffer.points.snapshots} - self.model.snapshots.keys()
        assert len(left) <= 1
        state = self.model.shown(self.model.head)
        if not left and state != self.model.shown(self.model.snapshots[name]):
            assert state in map(self.model.shown, self.model.snapshots.values()), "lost what was left"
        self.model.go_to(name, next(iter(left), None))

    def take(self, copy: Path) -> None:
        """Continue with a copy of the directory from the moment of the kill."""
        shutil.rmtree(self.path)
        shutil.copytree(copy, self.path)
        if self.mirror is not None:  # the mirror may be ahead of the copy
            shutil.rmtree(self.mirror, ignore_errors=True)
        self.copies += 1
        self.open()

    @rule()
    def kill(self) -> None:
        self.reader.close()
        copy = self.folder / f"killed-{self.copies}"
        shutil.copytree(self.path, copy, ignore=shutil.ignore_patterns("readers", "writer.lock", "*.tmp"))
        self.buffer.close()
        self.take(copy)
        self.reader = TrajectoryReplayBuffer.open(self.path)

    @rule()
    def reopen(self) -> None:
        self.buffer.close()
        assert verify(self.path).sound
        self.open()

    @rule()
    def copy(self) -> None:
        self.buffer.save_checkpoint(self.folder / "copy")
        with TrajectoryReplayBuffer.open(self.folder / "copy") as reader:
            assert self.seen(reader, line=False) == replace(self.model.shown(self.model.head), line={})

    @precondition(lambda self: self.mirror is not None)
    @rule()
    def restore(self) -> None:
        self.look()
        level(self.buffer)
        target = self.folder / f"restored-{self.copies}"
        self.copies += 1
        restore(str(self.mirror), target)
        with writer_to(target, seed=1) as other:
            assert self.seen(other) == self.model.shown(self.model.head)
            assert {snapshot.name for snapshot in other.points.snapshots} == self.model.snapshots.keys()
            self.compare_snapshots(target)

    @rule()
    def refresh(self) -> None:
        self.look()
        self.reader.refresh()
        assert self.seen(self.reader, line=False) == replace(self.model.shown(self.model.head), line={})

    def look(self) -> None:
        self.buffer.sink.take_in_values()

    @rule()
    def compare(self) -> None:
        self.compare_snapshots(self.path)

    def compare_snapshots(self, path: Path) -> None:
        for name, state in self.model.snapshots.items():
            with TrajectoryReplayBuffer.open(path, pin=name) as reader:
                assert self.seen(reader, line=False) == replace(self.model.shown(state), line={}), name

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "buffer"):
            assert {snapshot.name for snapshot in self.buffer.points.snapshots} == self.model.snapshots.keys()
            self.look()
            assert self.seen(self.buffer) == self.model.shown(self.model.head)

    def seen(self, buffer: TrajectoryReplayBuffer | Any, line: bool = True) -> State:
        scores = {row["trajectory_id"]: row.get("score") for row in buffer.query().rows()}
        keys: dict[int, int] = {}
        values: dict[int, dict[str, Any]] = {}
        for number in buffer.trajectory_ids.tolist():
            trajectory = buffer.get(number)
            keys[number] = check_trajectory(trajectory)
            late = {} if scores.get(number) is None else {"score": scores[number]}
            if (rows := trajectory.notes.get("rows")) is not None:
                late["rows"] = rows.flatten()[0].item()
            if late:
                values[number] = late
        points = {point.step: point.name for point in buffer.points.saved} if line else {}
        return State(keys, values, points)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.reader.close()
            self.buffer.close()
            self.compare_snapshots(self.path)
            needed = self.path / "shards"
            if not self.model.head.keys and not self.model.snapshots:
                assert list(needed.iterdir()) == []
        shutil.rmtree(self.folder)


TestSnapshots = short(Snapshots, 12, 25)
TestLongSnapshots = long(Snapshots, int(os.environ.get("TRAJSTORE_SNAPSHOT_EXAMPLES", "200")))
