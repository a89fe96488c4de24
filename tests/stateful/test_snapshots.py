"""Snapshots against a model in plain Python: ids, rows, late values and saved points, through crashes and copies.

One-hour run: ``TRAJSTORE_SNAPSHOT_EXAMPLES=3000 python -m pytest -m campaign tests/stateful/test_snapshots.py``.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.remote.stores import level
from tests.stateful.machines import long, short
from tests.stateful.places import Place, Ranks
from tests.stores import writer_to
from tests.support.witness import check_trajectory, witness
from trajstore import Mirror, Retention, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.files.opening import open_directory
from trajstore._core.formats import FORMATS
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import in_run
from trajstore._core.store.saved_points import STEP
from trajstore.errors import StoreWriteError, TrajectoryUnavailableError
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at, run_points
from trajstore.remote.mirror.restoring import restore

T = TypeVar("T")

# -- the model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A store's visible state.

    Attributes:
        keys: of its trajectories, by id.
        values: late values by id.
        line: names of saved points by step.
        given: names of the late values in the order in which they were given, by id. A value that is given again
            is another state, although readers see the same.
    """

    keys: dict[int, int] = field(default_factory=dict)
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    line: dict[int, str] = field(default_factory=dict)
    given: dict[int, tuple[str, ...]] = field(default_factory=dict, compare=False)


class Model:
    """The head and immutable snapshots."""

    def __init__(self) -> None:
        self.head, self.snapshots, self.visit, self.line = State(), dict[str, State](), 0, dict[int, str]()

    def give(self, number: int, name: str, value: Any) -> None:
        values = self.head.values | {number: self.head.values.get(number, {}) | {name: value}}
        given = self.head.given | {number: (*self.head.given.get(number, ()), name)}
        self.head = replace(self.head, values=values, given=given)

    def save(self, step: int, keep: int | None = None) -> None:
        name, old = f"step-{step}.{self.visit}", self.head.line.get(step)
        self.head = replace(self.head, line=self.shown(self.head).line | {step: name})
        self.take(name)
        self.drop([] if old is None else self.on_no_line([old]))
        self.drop(list(self.shown(self.head).line.values())[:-keep] if keep else [])

    def take(self, name: str) -> None:
        self.snapshots[name] = self.head
        self.snapshots[name] = self.shown(self.head)

    def go_to(self, name: str, left: str | None, aside: bool = True) -> None:
        if left is not None:
            self.take(left)
        self.visit += self.differs(self.snapshots[name])
        self.head, self.line = self.snapshots[name], self.snapshots[name].line
        if not aside:
            self.drop(self.on_no_line([point for point in self.snapshots if point.startswith("step-")]))

    def differs(self, state: State) -> bool:
        """Return whether visible contents or value histories of a state differ from the head's."""
        head, state = self.shown(self.head), self.shown(state)
        return head != state or head.given != state.given

    def remove(self, name: str) -> None:
        state = self.snapshots.pop(name)
        if not any(point.endswith(f".{self.visit}") for point in self.snapshots):
            self.head = replace(self.head, line=self.line)
        if name.startswith("aside-"):
            self.drop(self.on_no_line(list(state.line.values())))

    def drop(self, names: list[str]) -> None:
        self.snapshots = {name: state for name, state in self.snapshots.items() if name not in names}

    def on_no_line(self, points: list[str]) -> list[str]:
        lines = [self.head, *(state for name, state in self.snapshots.items() if name.startswith("aside-"))]
        return [point for point in points if not any(point in state.line.values() for state in lines)]

    def shown(self, state: State, line: bool = True) -> State:
        """Return the visible part of a state: values of its trajectories, and points that still exist."""
        points = {step: name for step, name in sorted(state.line.items()) if name in self.snapshots and line}
        values = {number: state.values[number] for number in state.keys if state.values.get(number)}
        given = {number: state.given[number] for number in state.keys if number in state.given}
        return State(state.keys, values, points, given)


# -- a store and its model -----------------------------------------------------------------------------


def seen(buffer: Any) -> State:
    """Return the trajectories and late values that a buffer shows, after comparing every row."""
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
    return State(keys, values)


class Twin:
    """A store, its writer, a follower and its model.

    Args:
        place: of everything.
        path: of the store.
        options: of the writer.
        mirrored: whether it has a mirror.
    """

    buffer: TrajectoryReplayBuffer

    def __init__(self, place: Place, path: str, options: dict[str, Any], mirrored: bool) -> None:
        self.place, self.path, self.options, self.mirrored = place, path, options, mirrored
        self.limit = options["retention"].max_trajectories if options.get("retention") else None
        self.model, self.key = Model(), 0
        self.held: list[tuple[Any, State]] = []
        self.open()
        self.follower = TrajectoryReplayBuffer.open(path)

    def open(self) -> None:
        self.mirror = self.place.new("mirror") if self.mirrored else None
        mirror = None if self.mirror is None else Mirror(self.mirror, interval=0.001)
        writer = WriterOptions(commit_interval=0.001, shard_bytes=60_000)
        self.buffer = writer_to(self.path, seed=1, writer=writer, mirror=mirror, **self.options)

    def close(self) -> None:
        self.follower.close()
        self.buffer.close()

    def continue_at(self, path: str) -> None:
        """Close the store and continue with a copy."""
        self.close()
        self.path = path
        self.open()
        self.follower = TrajectoryReplayBuffer.open(path)

    def release(self) -> None:
        for reader, state in self.held:
            assert seen(reader) == state
            reader.close()
        self.held.clear()

    def numbers(self, pick: int) -> list[int]:
        """Return a live trajectory, if there is one."""
        return picked(sorted(self.model.head.keys), pick)

    def add(self, count: int) -> None:
        keys = range(self.key, self.key + count)
        self.key += count
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        self.buffer.flush()
        live = list((self.model.head.keys | dict(zip(ids, keys, strict=True))).items())
        self.model.head = replace(self.model.head, keys=dict(live[-self.limit :] if self.limit else live))

    def annotate(self, number: int, how: str, value: int) -> None:
        if how == "rows":
            shape = witness(self.model.head.keys[number]).rewards.shape[:2]  # type: ignore[union-attr]
            annotate(self.buffer, number, {"rows": [torch.full(shape, float(value))]})
        else:
            annotate(self.path if how == "outside" else self.buffer, number, {"score": value})
        self.model.give(number, "rows" if how == "rows" else "score", value)

    def evict(self, number: int) -> None:
        self.buffer.evict([number])
        keys = {other: key for other, key in self.model.head.keys.items() if other != number}
        self.model.head = replace(self.model.head, keys=keys)

    def apply_values(self) -> None:
        self.buffer._sink.take_in_values()

    def change(self, operation: Callable[[], Any], update: Callable[[], None], crash: int | None) -> None:
        """Change store and model; ``crash``: percentage of the changes on disk at which the writer is killed."""
        self.apply_values()
        if crash is None:
            operation()
            update()
            return
        before = copy.deepcopy(self.model)
        with self.place.moments(self.path) as copies:
            operation()
        update()
        self.crashed(copies[crash * len(copies) // 100], before)

    def crashed(self, files: dict[str, bytes], before: Model, path: str | None = None) -> None:
        """Continue with the files of a crash between two states; readers see one of them before a writer opens it."""
        after, path = self.model, path or self.place.new("store")
        self.place.write(path, files)
        report = inspect(path)
        listed = [f"step-{point['step']}" for point in report["saved_points"]]
        for name in [*listed, *report["other_points"], *report["pins"], *(head["name"] for head in report["aside"])]:
            with TrajectoryReplayBuffer.open(path, pin=name) as reader:
                states = [
                    model.shown(state, line=False)
                    for model in (before, after)
                    for key, state in model.snapshots.items()
                    if key.partition(".")[0] == name or key == name
                ]
                assert seen(reader) in states, name
        with TrajectoryReplayBuffer.open(path) as reader:
            assert seen(reader) in [model.shown(model.head, line=False) for model in (before, after)]
        self.continue_at(path)
        self.apply_values()
        names = {snapshot.name for snapshot in self.buffer.points.snapshots}
        assert before.snapshots.keys() & after.snapshots.keys() <= names, "lost"
        assert names <= before.snapshots.keys() | after.snapshots.keys()
        before.snapshots = {name: self.state_of(name, before, after) for name in names}
        after.snapshots = dict(before.snapshots)
        shown = self.head()
        assert shown in (before.shown(before.head), after.shown(after.head))
        self.model = after if shown == after.shown(after.head) else before

    def state_of(self, name: str, before: Model, after: Model) -> State:
        """Return which of the two states of a snapshot survived."""
        states = [model.snapshots[name] for model in (after, before) if name in model.snapshots]
        catalog = Catalog.open(open_directory(self.path))
        line = catalog.present_line(catalog.snapshot(name))
        with TrajectoryReplayBuffer.open(self.path, pin=name) as reader:
            shown = replace(seen(reader), line={int(STEP.fullmatch(point)[1]): point for point in line})  # type: ignore[index]
        model = Model()
        model.snapshots = dict.fromkeys(catalog.pins.heads, State())
        return next(state for state in states if model.shown(state) == shown)

    def head(self) -> State:
        line = {point.step: point.name for point in self.buffer.points.saved}
        return replace(seen(self.buffer), line=line)

    def went(self, name: str, aside: bool = True) -> None:
        """Move the model to a snapshot; the store chooses the name for an abandoned state that it keeps."""
        left = {snapshot.name for snapshot in self.buffer.points.snapshots} - self.model.snapshots.keys()
        assert len(left) <= aside
        state = self.model.shown(self.model.head)
        if aside and not left and state != self.model.shown(self.model.snapshots[name]):
            assert state in map(self.model.shown, self.model.snapshots.values()), "the left head is lost"
        self.model.go_to(name, next(iter(left), None), aside)

    def check(self) -> None:
        """Compare the head, and the names of the snapshots."""
        assert {snapshot.name for snapshot in self.buffer.points.snapshots} == self.model.snapshots.keys()
        self.apply_values()
        assert self.head() == self.model.shown(self.model.head)

    def check_follower(self) -> None:
        self.apply_values()
        self.follower.refresh()
        assert seen(self.follower) == self.model.shown(self.model.head, line=False)

    def check_snapshots(self, path: str | None = None) -> None:
        for name, state in self.model.snapshots.items():
            with TrajectoryReplayBuffer.open(path or self.path, pin=name) as reader:
                assert seen(reader) == self.model.shown(state, line=False), name


# -- one store -----------------------------------------------------------------------------------------

CRASH = st.none() | st.integers(0, 99)
PICK = st.integers(0, 999)
"""Which of some things. What a crash leaves depends on timing; rules and their arguments must not."""


def picked(options: list[T], pick: int) -> list[T]:
    """Return one of some things, or nothing if there are none."""
    return [options[pick % len(options)]] if options else []


class Snapshots(RuleBasedStateMachine):
    """One store with its snapshots, readers, mirror and copies."""

    twin: Twin

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    @initialize(
        fmt=st.sampled_from(list(FORMATS)),
        mirrored=st.sampled_from([False, False, True]),
        bucket=st.sampled_from([False, False, True]),
        limit=st.sampled_from([None, None, 4]),
    )
    def begin(self, fmt: Any, mirrored: bool, bucket: bool, limit: int | None) -> None:
        self.place = Place(self.folder, bucket)
        retention = None if limit is None else Retention(max_trajectories=limit)
        options = {"trajectory_format": fmt, "retention": retention}
        self.twin = Twin(self.place, self.place.new("store"), options, mirrored)
        self.twin.add(2)

    def snapshots(self, pick: int) -> list[str]:
        """Return the name of a snapshot, if there is one."""
        return picked(sorted(self.twin.model.snapshots), pick)

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        self.twin.add(count)

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        for number in self.twin.numbers(pick):
            self.twin.evict(number)

    @rule(pick=PICK, how=st.sampled_from(["number", "outside", "rows"]), value=st.integers(0, 9))
    def annotate(self, pick: int, how: str, value: int) -> None:
        for number in self.twin.numbers(pick):
            self.twin.annotate(number, how, value)

    @rule(name=st.sampled_from(["number", "outside"]))
    def annotate_evicted(self, name: str) -> None:
        model = self.twin.model
        gone = {number for state in model.snapshots.values() for number in state.keys} - model.head.keys.keys()
        store = self.twin.path if name == "outside" else self.twin.buffer
        for number in sorted(gone)[:1]:
            with pytest.raises(TrajectoryUnavailableError, match=rf"\({number}: evicted, only in snapshots"):
                annotate(store, number, {"score": 5})

    @rule(crash=CRASH)
    def compact(self, crash: int | None) -> None:
        self.twin.change(self.twin.buffer.compact, lambda: None, crash)

    @rule(more=st.integers(0, 1), keep=st.sampled_from([None, None, 2]), crash=CRASH)
    def save(self, more: int, keep: int | None, crash: int | None) -> None:
        step = max(self.twin.model.shown(self.twin.model.head).line, default=0) + more
        points = self.twin.buffer.points
        self.twin.change(
            lambda: points.save(step, {"step": step}, keep=keep), lambda: self.twin.model.save(step, keep), crash
        )

    @rule(name=st.sampled_from(["one", "two"]), crash=CRASH)
    def pin(self, name: str, crash: int | None) -> None:
        self.twin.change(lambda: self.twin.buffer.points.pin(name), lambda: self.twin.model.take(name), crash)

    @rule(pick=PICK, crash=CRASH)
    def remove(self, pick: int, crash: int | None) -> None:
        points, model = self.twin.buffer.points, self.twin.model
        for name in self.snapshots(pick):
            self.twin.change(partial(points.remove, name), partial(model.remove, name), crash)

    @rule(pick=PICK, crash=CRASH, aside=st.sampled_from([True, True, True, False]))
    def go_to(self, pick: int, crash: int | None, aside: bool) -> None:
        points = self.twin.buffer.points
        for name in self.snapshots(pick):
            self.twin.change(partial(points.go_to, name, aside=aside), partial(self.twin.went, name, aside), crash)

    @rule()
    def kill(self) -> None:
        path = self.place.new("store")
        with self.place.moments(self.twin.path) as copies:
            pass
        self.place.write(path, copies[-1])
        self.twin.continue_at(path)

    @rule()
    def reopen(self) -> None:
        self.twin.buffer.close()
        report = verify(self.twin.path)
        assert report.sound, report.problems
        self.twin.open()

    @rule(call=st.booleans())
    def copy(self, call: bool) -> None:
        self.twin.apply_values()
        target = self.place.new("copy")
        if call:
            copy_store(self.twin.path, target)
        else:
            self.twin.buffer.save_checkpoint(target)
        with TrajectoryReplayBuffer.open(target) as reader:
            assert seen(reader) == self.twin.model.shown(self.twin.model.head, line=False)

    @precondition(lambda self: self.twin.mirror is not None)
    @rule(moves=st.booleans())
    def restore(self, moves: bool) -> None:
        self.twin.apply_values()
        level(self.twin.buffer)
        target = self.place.new("restored")
        restore(str(self.twin.mirror), target)
        with writer_to(target, seed=1) as other:
            assert {snapshot.name for snapshot in other.points.snapshots} == self.twin.model.snapshots.keys()
            self.twin.check_snapshots(target)
        if moves:
            self.twin.continue_at(target)

    @rule()
    def refresh(self) -> None:
        self.twin.check_follower()

    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        for name in self.snapshots(pick) if len(self.twin.held) < 2 else []:
            state = self.twin.model.shown(self.twin.model.snapshots[name], line=False)
            self.twin.held.append((TrajectoryReplayBuffer.open(self.twin.path, pin=name), state))

    @rule()
    def release(self) -> None:
        self.twin.release()

    @rule()
    def compare(self) -> None:
        self.twin.check_snapshots()

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "twin"):
            self.twin.check()

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.twin.release()
            self.twin.close()
            self.twin.check_snapshots()
            if not self.twin.model.head.keys and not self.twin.model.snapshots:
                assert not [name for name in self.place.files(self.twin.path) if name.startswith("shards/")]
            self.place.remove()


def gone_to(twin: Twin, step: int | None) -> tuple[int | None, dict[str, Any]]:
    """Go to a point of a run, the newest one without a step."""
    points = run_points(twin.buffer)
    newest = points.newest()
    step = newest if step is None else step
    return step, {} if step is None else points.go_to(step)


# -- several ranks ---------------------------------------------------------------------------------------


class Runs(RuleBasedStateMachine):
    """A run of ranks that save points together, go back together, and die meanwhile."""

    twins: list[Twin]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    @initialize(
        fmt=st.sampled_from(list(FORMATS)), count=st.integers(2, 3), bucket=st.sampled_from([False, False, True])
    )
    def begin(self, fmt: Any, count: int, bucket: bool) -> None:
        self.place = Place(self.folder, bucket)
        self.path = self.place.new("run")
        options = {"trajectory_format": fmt}
        self.twins = [Twin(self.place, f"{self.path}/rank_{rank}", options, False) for rank in range(count)]
        for rank in range(count):
            self.add(rank, 1)
        self.save(0, None, None)

    @rule(rank=st.integers(0, 2), count=st.integers(1, 2))
    def add(self, rank: int, count: int) -> None:
        self.twins[rank % len(self.twins)].add(count)

    @rule(
        rank=st.integers(0, 2),
        pick=PICK,
        how=st.sampled_from(["number", "outside", "rows", "evict"]),
        value=st.integers(0, 9),
    )
    def alter(self, rank: int, pick: int, how: str, value: int) -> None:
        twin = self.twins[rank % len(self.twins)]
        for number in twin.numbers(pick):
            twin.evict(number) if how == "evict" else twin.annotate(number, how, value)

    def together(
        self, call: Callable[[Twin], Any], dies: tuple[int, int] | None, crash: int
    ) -> tuple[list[Any], dict[str, bytes]]:
        """Call a function on all ranks; return the results, and the files of the dying rank at a moment."""
        for twin in self.twins:
            twin.apply_values()
        rank, number = dies or (0, 0)
        first = 0

        def met(who: int, meeting: int) -> None:
            nonlocal first
            if who == rank and meeting < number:
                first = len(copies)

        ranks = Ranks(len(self.twins), dies, met)
        with self.place.moments(self.twins[rank].path) as copies:
            results = ranks.call(lambda rank: call(self.twins[rank]))
        possible = copies[min(first, len(copies) - 1) :]
        return results, possible[crash * len(possible) // 100]

    def restart(self, rank: int, files: dict[str, bytes], before: Model) -> None:
        """Start the job again after a rank was killed."""
        self.path = self.place.new("run")
        for other, twin in enumerate(self.twins):
            path = f"{self.path}/rank_{other}"
            if other == rank:
                twin.crashed(files, before, path)
            else:
                twin.close()
                self.place.write(path, self.place.files(twin.path))
                twin.continue_at(path)

    @rule(
        more=st.integers(0, 1),
        keep=st.sampled_from([None, 1, 2]),
        kill=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 99)),
    )
    def save(self, more: int, keep: int | None, kill: tuple[int, int, int] | None) -> None:
        """``kill``: rank, number of the meeting before which it dies, and percentage of its changes by then."""
        steps = [max(twin.model.shown(twin.model.head).line, default=0) for twin in self.twins]
        step = max(steps) + more
        dies = None if kill is None else (kill[0] % len(self.twins), kill[1])
        before = copy.deepcopy(self.twins[dies[0]].model) if dies else None
        results, files = self.together(
            lambda twin: run_points(twin.buffer).save(step, {"step": step}, keep=keep), dies, kill[2] if kill else 0
        )
        for twin, result in zip(self.twins, results, strict=True):
            complete = dies is None or dies[1] > 0
            assert isinstance(result, StoreWriteError) is not complete, result
            twin.model.save(step)
        lines = self.points().items()
        oldest = ([-1] * (keep or 0) + [number for number, lacking in lines if not lacking])[-(keep or 0)]
        for twin in self.twins if keep and complete else ():
            line = twin.model.shown(twin.model.head).line
            twin.model.drop([name for number, name in line.items() if number < oldest])
        if dies and before:
            if dies[1] > 0:
                before.save(step)
            self.restart(dies[0], files, before)

    @rule(
        pick=PICK,
        newest=st.booleans(),
        kill=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 99)),
    )
    def roll_back(self, pick: int, newest: bool, kill: tuple[int, int, int] | None) -> None:
        complete = [step for step, lacking in self.points().items() if not lacking]
        [step] = [max(complete)] if newest else picked(complete, pick)
        dies = None if kill is None else (kill[0] % len(self.twins), kill[1])
        before = copy.deepcopy(self.twins[dies[0]].model) if dies else None
        results, files = self.together(
            lambda twin: gone_to(twin, None if newest else step), dies, kill[2] if kill else 0
        )
        for twin, result in zip(self.twins, results, strict=True):
            if dies is None:
                assert result == (step, {"step": step})
            else:
                assert isinstance(result, StoreWriteError), result
            if dies is None or dies[1] == 2:
                twin.went(twin.model.head.line[step])
        if dies and before:
            self.restart(dies[0], files, before)

    @rule(pick=PICK)
    def go_to(self, pick: int) -> None:
        """Go to a point without a job."""
        [step] = picked([step for step, lacking in self.points().items() if not lacking], pick)
        for twin in self.twins:
            twin.apply_values()
            twin.buffer.close()
        points_at(self.path).go_to(step)
        for twin in self.twins:
            twin.open()
            twin.went(twin.model.head.line[step])

    def points(self) -> dict[int, tuple[int, ...]]:
        """Return the steps of the run's points, and the ranks that lack each."""
        lines = [twin.model.shown(twin.model.head).line for twin in self.twins]
        steps = sorted({step for line in lines for step in line})
        return {step: tuple(rank for rank, line in enumerate(lines) if step not in line) for step in steps}

    def seen_in_run(self, states: list[State]) -> State:
        """Return the states of the ranks as one with the run's ids."""
        keys: dict[int, int] = {}
        values: dict[int, dict[str, Any]] = {}
        for rank, state in enumerate(states):
            numbers = {number: int(in_run(rank, np.array([number]))[0]) for number in state.keys}
            keys |= {numbers[number]: key for number, key in state.keys.items()}
            values |= {numbers[number]: late for number, late in state.values.items()}
        return State(keys, values)

    @rule()
    def read(self) -> None:
        for step, lacking in self.points().items():
            if not lacking:
                models = [twin.model for twin in self.twins]
                states = [model.shown(model.snapshots[model.head.line[step]], line=False) for model in models]
                with TrajectoryReplayBuffer.open(self.path, pin=f"step-{step}") as reader:
                    assert seen(reader) == self.seen_in_run(states)
        for twin in self.twins:
            twin.check_follower()
            twin.check_snapshots()

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "twins"):
            for twin in self.twins:
                twin.check()
            assert {point.step: point.lacking for point in points_at(self.path).saved} == self.points()

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            for twin in self.twins:
                twin.close()
            self.place.remove()


EXAMPLES = int(os.environ.get("TRAJSTORE_SNAPSHOT_EXAMPLES", "200"))
TestSnapshots = short(Snapshots, 4, 20)
TestLongSnapshots = long(Snapshots, EXAMPLES)
TestRuns = short(Runs, 2, 14)
TestLongRuns = long(Runs, EXAMPLES // 3)
