"""Going to a snapshot and deleting the abandoned states; after a kill, a second call deletes the rest."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.saved_points.stores import add, keys_of, loaded, make, moments, names_in, state_files
from trajstore import TrajectoryReplayBuffer
from trajstore._core.writing.commit_log import CommitLog
from trajstore.errors import StoreError, StoreWriteError
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.remote.directory import RemoteDirectory

THEN = {number: number for number in range(4)}


def fill(path: str | Path, *, since: bool = True) -> None:
    """Make points 1, 2, 3 and a point 2 on an abandoned line; ``since`` adds trajectories after them."""
    with make(path) as buffer:
        add(buffer, range(4))
        buffer.points.save(1, {"step": 1})
        add(buffer, [4])
        buffer.points.save(2, {"step": "earlier"})
        buffer.points.rollback(1)
        if since:
            add(buffer, range(5, 7))
        else:
            buffer.evict([0])
        buffer.points.save(2, {"step": 2})
        buffer.points.save(3, {"step": 3})
        if since:
            add(buffer, [7])


def kept(path: str | Path) -> tuple[int, list[str]]:
    """Return the number of abandoned heads, and the names of saved points."""
    return len(names_in(path, "aside")), names_in(path, "point")


AFTER = (1, ["step-1.0", "step-2.0"])


@pytest.mark.parametrize("since", [True, False])
def test_a_kill_anywhere_leaves_nothing_once_it_is_called_again(tmp_path: Path, since: bool) -> None:
    fill(tmp_path / "store", since=since)
    before = loaded(tmp_path / "store")
    with make(tmp_path / "store") as buffer, moments(tmp_path / "store", tmp_path / "copies") as copies:
        buffer.points.rollback(1, aside=False)
    assert kept(tmp_path / "store") == AFTER
    happened = []
    for at, copy in enumerate(copies):
        happened.append([point.step for point in points_at(copy).saved] == [1])
        assert loaded(copy) == (THEN if happened[-1] else before)
        if at % 2:
            points_at(copy).go_to(1, aside=False)
        else:
            with make(copy) as buffer:
                assert buffer.points.rollback(1, aside=False) == {"step": 1}
        assert kept(copy) == AFTER
        assert loaded(copy) == THEN
        assert state_files(copy) == 2
        report = verify(copy)
        assert (report.problems, report.notes) == ([], [])
    assert happened == sorted(happened)
    assert set(happened) == {False, True}


@pytest.mark.parametrize("aside", [True, False])
def test_a_node_that_is_gone_at_any_operation_in_an_object_store(aside: bool) -> None:
    happened = []
    for survived in range(12):
        url = f"memory://bucket-{uuid.uuid4()}"
        fill(url)
        count = 0

        def gone(genuine: Callable[..., Any], survived: int = survived) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count > survived:
                    raise OSError(5, "the node is gone")
                return genuine(*arguments, **options)

            return call

        buffer = make(url)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("publish", "remove", "append"):
                patch.setattr(RemoteDirectory, name, gone(getattr(RemoteDirectory, name)))
            with suppress(StoreError, OSError):
                buffer.points.rollback(1, aside=aside)
            with suppress(StoreError, OSError):
                buffer.close()
        with make(url) as buffer:
            steps = [point.step for point in buffer.points.saved]
            assert steps in ([1], [1, 2, 3])
            happened.append(steps == [1])
            assert buffer.points.rollback(1, aside=aside) == {"step": 1}
            assert keys_of(buffer) == THEN
        if not aside:
            assert kept(url) == AFTER
        else:
            assert len(names_in(url, "aside")) == 2
            assert names_in(url, "point") == ["step-1.0", "step-2.0", "step-2.1", "step-3.1"]
        report = verify(url)
        assert (report.problems, report.notes) == ([], [])
        if count <= survived:
            break
    assert happened == sorted(happened)
    assert set(happened) == {False, True}


def test_a_commit_that_came_between_is_not_taken_for_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unacknowledged commit has the generation that the change would have had."""
    fill(tmp_path, since=False)
    before = kept(tmp_path)

    def late(log: CommitLog, *given: Any) -> None:
        log._evict([1])
        raise StoreWriteError("an earlier change was committed after all; try again")

    with make(tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(CommitLog, "go_to", late)
            with pytest.raises(StoreWriteError, match="after all"):
                buffer.points.rollback(1)
        assert [point.step for point in buffer.points.saved] == [1, 2, 3]
        assert kept(tmp_path) == before
    with make(tmp_path):
        pass
    assert len(list((tmp_path / "pins").glob("aside-*.json"))) == 1, "the next writer removes the other one"


@pytest.mark.parametrize("replaced", [True, False])
def test_a_reader_keeps_the_files_of_its_snapshot_from_the_next_writer(tmp_path: Path, replaced: bool) -> None:
    with make(tmp_path, trajectory_format="pkl") as buffer:
        for key in range(2):
            add(buffer, [key])
        buffer.points.pin("kept")
        buffer.evict([0])
        reader = TrajectoryReplayBuffer.open(tmp_path, pin="kept")
        if replaced:
            buffer.points.pin("kept")
        else:
            buffer.points.remove("kept")
    with reader, make(tmp_path) as buffer:
        add(buffer, [2])
        buffer.compact()
        assert keys_of(reader) == {0: 0, 1: 1}
    with make(tmp_path) as buffer:
        add(buffer, [3])
    assert loaded(tmp_path) == {1: 1, 2: 2, 3: 3}
