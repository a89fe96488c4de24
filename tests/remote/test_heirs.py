"""Mirrors written by successive stores: ownership, and late writes of earlier owners."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.remote.stores import add, is_sound, level, make
from tests.stores import keys_at
from tests.support.waiting import wait_until
from trajstore import Mirror, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.files.base import EncodedFile
from trajstore._core.files.opening import open_directory
from trajstore._core.store.log_records import id_ranges, segment_name
from trajstore._core.store.saved_points import pin_file
from trajstore._core.store.sealed import LEDGER_NAME
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.remote.mirror.replica import Replica
from trajstore.remote.mirror.restoring import restore


@pytest.fixture(params=["local", "remote"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "local" else f"memory://bucket-{uuid.uuid4()}/mirror"


def lost_before_it_published(path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the mirror as a node lost during its first copy would."""

    def lost(*given: Any) -> None:
        raise OSError(5, "the node is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "publish_whole", lost)
        with make(path, None) as buffer:
            for key in range(5):
                add(buffer, [key])
        with make(path, Mirror(mirror, close_timeout=0.0)) as buffer:
            wait_until(lambda: "node is gone" in str(buffer.mirror.state))


def test_a_place_where_nothing_was_published_becomes_the_next_stores(
    tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost_before_it_published(tmp_path / "lost", mirror, monkeypatch)
    assert open_directory(mirror).names("shards")
    with make(tmp_path / "next", mirror) as buffer:
        add(buffer, [7, 8])
        level(buffer)
        wait_until(lambda: len(open_directory(mirror).names("shards")) == 1)
    assert "was begun as the mirror of the store" in caplog.text
    assert f"{tmp_path / 'lost'}" in caplog.text
    assert keys_at(mirror) == {0: 7, 1: 8}
    is_sound(mirror)
    with make(tmp_path / "lost", Mirror(mirror, close_timeout=0.0)) as buffer:
        wait_until(lambda: "is another store" in str(buffer.mirror.state))
    assert keys_at(mirror) == {0: 7, 1: 8}


def test_a_first_copy_that_has_not_ended_is_no_store_yet_and_without_its_ledger_is_not_taken_over(
    tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_before_it_published(tmp_path / "lost", mirror, monkeypatch)
    for look in (TrajectoryReplayBuffer.open, lambda url: restore(url, tmp_path / "restored")):
        with pytest.raises(StoreNotFoundError, match="no store here yet"):
            look(mirror)
    open_directory(mirror).remove([LEDGER_NAME])
    with make(tmp_path / "next", Mirror(mirror, close_timeout=0.0)) as buffer:
        add(buffer, [7])
        wait_until(lambda: "is not a mirror of this store" in str(buffer.mirror.state))


def test_a_mirror_is_changed_by_its_store_alone(tmp_path: Path, mirror: str) -> None:
    def is_refused() -> None:
        for change in (
            lambda: annotate(mirror, ids, {"judge": 1.0}),
            lambda: points_at(mirror).go_to("named"),
            lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=mirror),
        ):
            with pytest.raises(ConfigurationError, match=r"is the mirror of a store \(it has a mirror.json\)"):
                change()
        assert not open_directory(mirror).names("inbox")

    with make(tmp_path / "store", mirror) as buffer:
        ids = add(buffer, [1, 2])
        buffer.points.pin("named")
        level(buffer)
        is_refused()  # with a writer
    is_refused()
    with make(tmp_path / "store", mirror) as buffer:
        annotate(buffer, ids, {"judge": 0.5})
        add(buffer, [3])
        level(buffer)
    is_sound(mirror)
    restore(mirror, tmp_path / "restored")
    annotate(tmp_path / "restored", ids, {"judge": 0.25})
    assert [notes_of(path, ids[0])[-1].value for path in (mirror, tmp_path / "restored")] == [0.5, 0.25]


def test_the_places_of_all_earlier_writers_stay_taken(tmp_path: Path) -> None:
    mirror = f"memory://bucket-{uuid.uuid4()}/mirror"
    directory = open_directory(mirror)
    places = []
    for number in range(4):
        path = tmp_path / str(number)
        if number:
            restore(mirror, path)
        with make(path, mirror) as buffer:
            for key in range(3):
                add(buffer, [10 * number + key])
                level(buffer)
            places.append(segment_name(buffer._sink.mirror.state.generation + 1))  # type: ignore[union-attr]
    for place in places[:-1]:
        with pytest.raises(FileExistsError):
            directory.append(place, b"what was under way when the node was frozen")
    assert sorted(keys_at(mirror).values()) == [10 * number + key for number in range(4) for key in range(3)]
    is_sound(mirror)


def lost_while_rolling_back(path: Path, mirror: str) -> dict[int, int]:
    """Lose a node between a rollback's pin and its index on the mirror; return the live keys."""
    with make(path, mirror) as buffer:
        add(buffer, [0, 1])
        buffer.points.save(1)
        add(buffer, [2])
        buffer.points.save(2)
        add(buffer, [3])
        level(buffer)
        generation = buffer._sink.mirror.state.generation  # type: ignore[union-attr]
    shutil.rmtree(path)
    ids = np.array([2, 3, 4], np.int64)  # 4 was added but not mirrored
    open_directory(mirror).publish([late_aside(ids, generation)])
    return {0: 0, 1: 1, 2: 2, 3: 3}


def late_aside(ids: np.ndarray[Any, Any], generation: int) -> EncodedFile:
    """Return the snapshot of a head that a writer was about to set aside."""
    left = {"ids": id_ranges(ids).tolist(), "generation": generation, "left_for": "step-1.0"}
    return pin_file(f"aside-{generation + 1}", left)


def pins_at(url: str) -> set[str]:
    return {name.removeprefix("pins/").removesuffix(".json") for name in open_directory(url).names("pins")}


def steps_at(url: str | Path) -> list[int]:
    return [point.step for point in points_at(url).saved]


def test_a_rollback_that_did_not_reach_the_mirror_leaves_no_pin_in_the_restored_store(
    tmp_path: Path, mirror: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = lost_while_rolling_back(tmp_path / "lost", mirror)
    assert (keys_at(mirror), steps_at(mirror)) == (before, [1, 2])
    restore(mirror, tmp_path / "next")
    assert "going to the snapshot step-1.0 had not reached the mirror" in caplog.text
    report = verify(tmp_path / "next")
    assert (report.problems, report.notes) == ([], [])
    with make(tmp_path / "next", mirror) as buffer:
        level(buffer)
        assert pins_at(mirror) == {"step-1.0", "step-2.0"}
        for key in range(4, 12):  # past the rollback's generation
            add(buffer, [key])
        level(buffer)
    assert steps_at(mirror) == steps_at(tmp_path / "next") == [1, 2]
    assert set(keys_at(mirror).values()) == set(range(12))
    report = verify(mirror)
    assert (report.problems, report.notes) == ([], [])


@pytest.mark.parametrize("named", ["live", "absent"])
def test_the_pin_of_a_rollback_that_comes_late_makes_no_point_void(tmp_path: Path, mirror: str, named: str) -> None:
    """A frozen writer's pin arrives after another writer has passed its generation."""
    late = late_aside(np.array([2, 3] if named == "live" else [2, 3, 900], np.int64), 5)
    with make(tmp_path / "store", mirror) as buffer:
        add(buffer, [0, 1])
        buffer.points.save(1)
        add(buffer, [2])
        buffer.points.save(2)
        for key in range(3, 9):
            add(buffer, [key])
        level(buffer)
    open_directory(mirror).publish([late])
    assert steps_at(mirror) == [1, 2]
    restore(mirror, tmp_path / "next")
    with make(tmp_path / "next", None) as other:
        assert [point.step for point in other.points.saved] == [1, 2]
    assert verify(tmp_path / "next").sound
    with make(tmp_path / "store", mirror) as buffer:
        wait_until(lambda: pins_at(mirror) == {"step-1.0", "step-2.0"})
        if "://" in mirror:  # on local disks, the frozen writer's lock would block this one
            open_directory(mirror).publish([late])
            assert steps_at(mirror) == [1, 2]
            buffer.points.save(3)
            wait_until(lambda: pins_at(mirror) == {"step-1.0", "step-2.0", "step-3.0"})
    assert verify(mirror).sound
