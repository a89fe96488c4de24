"""A rollback that deletes what came later, and is killed anywhere: what is left of it goes with the next writer."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.mirroring.stores import level
from tests.saved_points.stores import add, keys_of, loaded, make, moments, state_files
from trajstore import TrajectoryReplayBuffer, saved_points
from trajstore.cli import main
from trajstore.core.store.pin_names import removal_order
from trajstore.core.writing.commit_log import CommitLog
from trajstore.errors import StoreError, StoreNotFoundError, StoreWriteError
from trajstore.operations.inspect import inspect
from trajstore.operations.points import roll_back, take_back
from trajstore.operations.verify import verify
from trajstore.remote.directory import RemoteDirectory
from trajstore.remote.mirror.restoring import restore

THEN = {number: number for number in range(4)}


def fill(buffer: TrajectoryReplayBuffer, *, since: bool = True) -> None:
    """Make the points 1, 2, 3; the point 2 of an earlier life is aside; ``since``: whether anything was added."""
    add(buffer, range(4))
    buffer.points.save(1, {"step": 1})
    add(buffer, [4])
    buffer.points.save(2, {"step": "earlier"})
    buffer.flush()
    buffer.points.rollback(1)
    if since:
        add(buffer, range(5, 7))
    else:
        buffer.evict([0])
    buffer.points.save(2, {"step": 2})
    buffer.points.save(3, {"step": 3})
    if since:
        add(buffer, [7])


def pins_of(path: str | Path) -> set[str]:
    """Return what rollbacks have set aside, as ``inspect`` lists the pins."""
    with make(path) as buffer:
        return {name for name in buffer.sink.writer.log.catalog.pins.names if "aside" in name}  # type: ignore[attr-defined]


def asides_of(since: bool, url: str | Path) -> set[str]:
    """Return the names of what is aside before the rollback."""
    with make(url) as buffer:
        fill(buffer, since=since)
    found = pins_of(url)
    assert len(found) == 2
    return found


def ended(copy: Path, kept: set[str], call: Callable[[Path], Any]) -> None:
    """Go back again, after which nothing but what was aside before is aside."""
    assert verify(copy).sound
    call(copy)
    assert pins_of(copy) == kept
    assert loaded(copy) == THEN
    assert [point.step for point in saved_points(copy)] == [1]
    assert state_files(copy) == 2, "of the point, and of the one that the user's own rollback set aside"
    found = verify(copy)
    assert (found.problems, found.notes) == ([], [])


def again(copy: Path) -> None:
    with make(copy) as buffer:
        assert buffer.points.rollback(1, aside=False) == {"step": 1}


@pytest.mark.parametrize("since", [True, False])
def test_a_kill_anywhere_leaves_nothing_aside_once_it_is_called_again(tmp_path: Path, since: bool) -> None:
    kept = asides_of(since, tmp_path / "store")
    with make(tmp_path / "store") as buffer, moments(tmp_path / "store", tmp_path / "first") as copies:
        buffer.points.rollback(1, aside=False)
    happened = []
    for at, copy in enumerate(copies):
        opened = Path(shutil.copytree(copy, tmp_path / "opened" / copy.name))
        assert pins_of(opened) == kept, "opening for writing is enough"
        happened.append([point.step for point in saved_points(opened)] == [1])
        assert loaded(opened).keys() == (THEN.keys() if happened[-1] else loaded(copy).keys())
        ended(copy, kept, again if at % 2 else lambda path: roll_back(path, 1, aside=False))
    assert happened == sorted(happened)
    assert set(happened) == {False, True}


def test_a_kill_while_the_next_writer_ends_it_is_ended_by_the_one_after(tmp_path: Path) -> None:
    kept = asides_of(True, tmp_path / "store")
    cut_short(tmp_path / "store")
    with moments(tmp_path / "store", tmp_path / "second") as copies, make(tmp_path / "store"):
        pass
    assert len(copies) > 5
    for copy in copies:
        assert [point.step for point in saved_points(copy)] == [1]
        ended(copy, kept, again)


def cut_short(url: str | Path, **more: Any) -> str:
    """Kill the rollback before it deletes anything; return what is left of it."""

    def killed(*given: Any) -> None:
        raise StoreWriteError("killed")

    with make(url, **more) as buffer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommitLog, "release_pins", killed)
        generation = buffer.sink.writer.log.catalog.generation  # type: ignore[attr-defined]
        with pytest.raises(StoreWriteError, match="killed"):
            buffer.points.rollback(1, aside=False)
        if more:
            level(buffer)
    return f"aside-{generation + 1}"


def test_what_is_left_of_it_is_shown_as_such_and_cannot_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = asides_of(True, tmp_path)
    left = cut_short(tmp_path)
    shown = {aside["name"]: (aside["deleted"], aside["steps"]) for aside in inspect(tmp_path)["aside"]}
    assert shown == {min(kept): (False, [2]), left: (True, [2, 3])}
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"{left} (the next writer deletes it)" in capsys.readouterr().out
    for dry_run in (True, False):
        with pytest.raises(StoreNotFoundError, match=f"nothing was set aside as '{left}'; there are: {min(kept)}"):
            take_back(tmp_path, left, dry_run=dry_run)
    assert pins_of(tmp_path) == kept
    assert take_back(tmp_path, min(kept)) == 1


@pytest.mark.parametrize("since", [True, False])
def test_a_node_that_is_gone_at_any_operation_in_an_object_store(since: bool) -> None:
    happened = []
    for survived in range(12):
        url = f"memory://bucket-{uuid.uuid4()}"
        kept = asides_of(since, url)
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
                buffer.points.rollback(1, aside=False)
            with suppress(StoreError, OSError):
                buffer.close()
        assert pins_of(url) == kept
        steps = [point.step for point in saved_points(url)]
        assert steps in ([1], [1, 2, 3])
        happened.append(steps == [1])
        with make(url) as buffer:
            assert buffer.points.rollback(1, aside=False) == {"step": 1}
            assert keys_of(buffer) == THEN
        assert pins_of(url) == kept
        found = verify(url)
        assert (found.problems, found.notes) == ([], [])
        if count <= survived:
            break
    assert happened == sorted(happened)
    assert set(happened) == {False, True}


def test_a_store_restored_from_a_mirror_that_saw_half_of_it(tmp_path: Path) -> None:
    kept = asides_of(True, tmp_path / "store")
    left = cut_short(tmp_path / "store", mirror=str(tmp_path / "mirror"))
    restore(str(tmp_path / "mirror"), tmp_path / "next")
    assert (tmp_path / "next" / "pins" / f"{left}.json").exists()
    ended(tmp_path / "next", kept, again)


def test_a_commit_that_came_between_is_not_taken_for_the_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost: it has the generation that the rollback would have had, and makes no point void."""
    kept = asides_of(False, tmp_path)

    def late(log: CommitLog, *given: Any) -> None:
        log._evict([1])
        raise StoreWriteError("an earlier change was committed after all; try again")

    with make(tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(CommitLog, "replace", late)
            with pytest.raises(StoreWriteError, match="after all"):
                buffer.points.rollback(1, aside=False)
        assert [point.step for point in buffer.points.saved] == [1, 2, 3]
    assert pins_of(tmp_path) == kept
    assert [point.step for point in saved_points(tmp_path)] == [1, 2, 3]


def test_what_says_which_points_are_void_goes_last() -> None:
    assert removal_order(["aside-3", "aside-3-step-2", "mine"]) == [["aside-3-step-2", "mine"], ["aside-3"]]
    assert removal_order(["aside-3"]) == [["aside-3"]]
    assert removal_order([]) == []
