"""Simulated kills before every change on disk: the next writer opens a copy of the directory at that moment."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.saved_points.stores import add, keys_of, loaded, make, moments, names_in, state_files
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.saved_points import Snapshot
from trajstore.errors import StoreError
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.remote.directory import RemoteDirectory


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[Callable[[TrajectoryReplayBuffer], Any]], list[Path]]:
    def record(change: Callable[[TrajectoryReplayBuffer], Any]) -> list[Path]:
        path = tmp_path / "store"
        with make(path) as buffer:
            add(buffer, range(4))
            buffer.points.save(1, {"step": 1})
            buffer.evict([0])
            add(buffer, range(4, 6))
            buffer.points.save(2, {"step": 2})
            add(buffer, [6])
            if change is returning:
                annotate(buffer, [1, 6], {"v": [1.0, 2.0]})
                buffer.points.rollback(1)
            with moments(path, tmp_path / "moments") as copies:
                change(buffer)
        assert len(copies) >= 4
        return copies

    return record


def heads(buffer: TrajectoryReplayBuffer) -> list[Snapshot]:
    """Return the snapshots of a buffer's store."""
    return list(buffer._sink.writer.log.catalog.pins.heads.values())  # type: ignore[attr-defined]


def returning(buffer: TrajectoryReplayBuffer) -> None:
    buffer.points.go_to(next(head.name for head in heads(buffer) if head.kind == "aside"))


def values_in(buffer: TrajectoryReplayBuffer) -> dict[int, float]:
    """Return the late values ``v`` by id."""
    return {row["trajectory_id"]: row["v"] for row in buffer.query().rows() if row.get("v") is not None}


NOW = {number: number for number in range(1, 7)}
THEN = {number: number for number in range(4)}


def look(copy: Path) -> tuple[dict[int, int], list[int]]:
    """Return the keys by id, on which a reader and a writer must agree, and the steps of the saved points."""
    before = loaded(copy)
    assert verify(copy).sound
    with make(copy) as buffer:
        assert keys_of(buffer) == before
        steps = [point.step for point in buffer.points.saved]
        named = {file.name for head in heads(buffer) for file in head.files}
        assert {f"pins/{path.name}" for path in (copy / "pins").iterdir() if path.suffix != ".json"} == named
        assert add(buffer, [50]) == [7]
    assert loaded(copy) == {**before, 7: 50}
    assert verify(copy).sound
    return before, steps


def with_two_points(place: Path | str) -> TrajectoryReplayBuffer:
    """Return a buffer with point 1 after four trajectories, and point 2 after six."""
    buffer = make(place)
    add(buffer, range(4))
    buffer.points.save(1)
    add(buffer, range(4, 6))
    buffer.points.save(2)
    return buffer


def fail_at(patch: pytest.MonkeyPatch, kind: type[LocalDirectory | RemoteDirectory], what: str, error: OSError) -> None:
    """Make publishing fail for files whose names begin with ``what``."""
    genuine: Any = kind.publish

    def failing(directory: Any, files: Any) -> None:
        if any(file.name.startswith(what) for file in files):
            raise error
        genuine(directory, files)

    patch.setattr(kind, "publish", failing)


def test_a_kill_during_a_rollback_leaves_the_store_before_or_after_it(killed: Any) -> None:
    seen = []
    for copy in killed(lambda buffer: buffer.points.rollback(1)):
        keys, steps = look(copy)
        assert (keys, steps) in ((NOW, [1, 2]), (THEN, [1]))
        seen.append(keys == THEN)
        with make(copy) as buffer:  # either way, a resumed loop can roll back to point 1
            assert buffer.points.rollback(1) == {"step": 1}
            assert keys_of(buffer) == THEN
            assert add(buffer, [51]) == [8]
    assert seen == sorted(seen), "once rolled back, always rolled back"
    assert set(seen) == {False, True}


def test_a_kill_while_a_point_is_saved_leaves_the_earlier_point_or_the_new_one(killed: Any) -> None:
    seen = set()
    for copy in killed(lambda buffer: buffer.points.save(2, {"step": "again"}, keep=1)):
        with make(copy) as buffer:
            steps = [point.step for point in buffer.points.saved]
            assert steps in ([1, 2], [2])
            assert state_files(copy) == len(steps)
            state = buffer.points.rollback(2)
            assert state in ({"step": 2}, {"step": "again"})
            seen.add(state["step"])
            assert len(keys_of(buffer)) == (5 if state["step"] == 2 else 6)
    assert seen == {2, "again"}


def test_a_kill_while_the_store_returns_leaves_it_here_or_there(killed: Any) -> None:
    seen = set()
    for copy in killed(returning):
        with make(copy) as buffer:
            values = values_in(buffer)
        keys, steps = look(copy)
        assert (keys, steps, values) in ((THEN, [1], {}), (NOW, [1, 2], {1: 1.0, 6: 2.0}))
        seen.add(len(keys))
        with make(copy) as buffer:
            returning(buffer)
            assert keys_of(buffer) == NOW
            assert values_in(buffer) == {1: 1.0, 6: 2.0}
            assert [point.step for point in buffer.points.saved] == [1, 2]
    assert seen == {len(THEN), len(NOW)}


@pytest.mark.parametrize("change", ["values", "points"])
def test_a_kill_while_values_or_points_alone_return(tmp_path: Path, change: str) -> None:
    """Both states have the same trajectories, so only the index distinguishes them."""
    path = tmp_path / "store"
    with make(path) as buffer:
        add(buffer, range(2))
        buffer.points.save(1)
        if change == "values":
            annotate(buffer, [0], {"v": 1.0})
        buffer.points.save(2)
        buffer.points.rollback(1)
        [name] = names_in(path, "aside")
        with moments(path, tmp_path / "moments") as copies:
            buffer.points.go_to(name)
    there = {0: 1.0} if change == "values" else {}
    seen = []
    for copy in copies:
        with make(copy) as buffer:
            state = values_in(buffer), [point.step for point in buffer.points.saved]
            assert state in (({}, [1]), (there, [1, 2]))
            seen.append(state[1] == [1, 2])
            buffer.points.go_to(name)
            assert (values_in(buffer), [point.step for point in buffer.points.saved]) == (there, [1, 2])
    assert set(seen) == {False, True}
    assert seen == sorted(seen)


@pytest.mark.parametrize("what", ["pins/aside", "trajectory_index.json", "metadata.json"])
def test_a_rollback_that_cannot_be_written_says_so_and_is_decided_when_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    buffer = with_two_points(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, LocalDirectory, what, OSError(28, "No space left on device", what))
        with pytest.raises(StoreError, match="No space left"):
            buffer.points.rollback(1)
        if what == "pins/aside":
            assert len(keys_of(buffer)) == 6
    try:
        buffer.close()
    except StoreError:
        assert what in ("trajectory_index.json", "metadata.json")
    with make(tmp_path) as buffer:
        assert len(keys_of(buffer)) == (6 if what in ("pins/aside", "trajectory_index.json") else 4)
        buffer.points.rollback(1)
        assert keys_of(buffer) == THEN
        assert [point.step for point in buffer.points.saved] == [1]
    assert verify(tmp_path).sound


@pytest.mark.parametrize("what", ["pins/aside", "trajectory_index.json", "metadata.json"])
def test_a_rollback_in_an_object_store_that_was_cut_short_makes_no_point_void(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The next writer's first commit has the generation that the rollback would have had."""
    url = f"memory://bucket-{uuid.uuid4()}"
    buffer = with_two_points(url)
    with monkeypatch.context() as patch:
        fail_at(patch, RemoteDirectory, what, OSError(5, "the node is gone", what))
        with pytest.raises(StoreError, match="node is gone"):
            buffer.points.rollback(1)
        with suppress(StoreError):
            buffer.close()
    happened = what == "metadata.json"
    for _ in range(2):
        with make(url) as buffer:
            assert len(keys_of(buffer)) == (4 if happened else 6)
            assert [point.step for point in buffer.points.saved] == ([1] if happened else [1, 2])
        assert [point.step for point in points_at(url).saved] == ([1] if happened else [1, 2])
        report = verify(url)
        assert (report.problems, report.notes) == ([], [])
