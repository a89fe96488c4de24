"""A mirror follows its store, is always a valid store, and never blocks the writer."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.remote.stores import add, is_sound, level, make
from tests.stores import keys_at, keys_of
from tests.support.waiting import wait_until
from tests.support.witness import witness
from trajstore import Mirror, Retention, TrajectoryReplayBuffer, annotate
from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.sealed import LEDGER_NAME
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, StoreNotFoundError
from trajstore.operations.inspect import inspect
from trajstore.operations.mending import compact
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.remote.mirror import mirror as mirror_module
from trajstore.remote.mirror.restoring import IDS_LEFT_OUT, restore


class Watched(LocalDirectory):
    """Calls a function after each change of the directory."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        super().__init__(path)
        self._changed = changed

    def publish(self, files: Sequence[EncodedFile]) -> None:
        for file in files:
            super().publish([file])
            self._changed()

    def append(self, name: str, data: Buffer) -> None:
        super().append(name, data)
        self._changed()

    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        for name in names:
            super().remove([name], durable=durable)
            self._changed()


def left(buffer: TrajectoryReplayBuffer) -> str:
    """Return the name of the last head that was set aside."""
    return buffer._sink.writer.log.catalog.asides()[-1].name  # type: ignore[attr-defined]


def session(buffer: TrajectoryReplayBuffer, done: Callable[[], None]) -> None:
    """Run every operation on a store; call ``done`` after each step."""
    steps: list[Callable[[], object]] = [
        lambda: add(buffer, range(6)),
        lambda: add(buffer, range(6, 9)),
        lambda: buffer.evict([0, 4]),
        lambda: buffer.points.pin("early"),
        lambda: buffer.evict([1, 2]),
        lambda: buffer.points.save(1, {"a": 1}),
        lambda: add(buffer, range(9, 14)),
        lambda: buffer.evict([3, 9]),
        lambda: buffer.points.save(2, {"a": 2}),
        lambda: buffer.points.save(2, {"a": 3}),
        buffer.compact,
        lambda: add(buffer, range(14, 18)),
        lambda: buffer.points.rollback(1),
        lambda: add(buffer, range(18, 20)),
        lambda: annotate(buffer, buffer.trajectory_ids.tolist()[:2], {"v": 1.0}),
        lambda: buffer.points.go_to(left(buffer)),
        lambda: buffer.points.remove("early"),
        lambda: buffer.points.save(5, {"a": 5}, keep=1),
        lambda: buffer.evict(buffer.trajectory_ids.tolist()[:-1]),
    ]
    for step in steps:
        step()
        done()


@pytest.mark.parametrize(
    ("waiting", "every"),
    [(True, 20), (False, 20), *(pytest.param(waiting, 1, marks=pytest.mark.campaign) for waiting in (True, False))],
)
def test_a_mirror_is_a_whole_store_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: bool, every: int
) -> None:
    """Follow step by step or far behind; the mirror is read at each moment and restored at regular intervals."""
    copies: list[Path] = []
    held = threading.Event()
    held.set()

    def changed() -> None:
        held.wait()
        copies.append(tmp_path / f"copy_{len(copies)}")
        shutil.copytree(tmp_path / "mirror", copies[-1], ignore=shutil.ignore_patterns("writer.lock", "*.tmp"))

    monkeypatch.setattr(mirror_module, "open_directory", lambda url: Watched(Path(url), changed))
    shown: dict[int, dict[int, int]] = {}
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:

        def done() -> None:
            generation = buffer._sink.writer.log.catalog.generation  # type: ignore[attr-defined]
            shown[generation] = keys_of(buffer)
            if waiting:
                level(buffer)
            elif generation > 1:
                held.clear() if generation % 2 else held.set()

        session(buffer, done)
        held.set()
        level(buffer)
        points = [point.step for point in buffer.points.saved]
    is_sound(tmp_path / "mirror")
    assert keys_at(tmp_path / "mirror") == keys_at(tmp_path / "store")
    assert [point.step for point in points_at(tmp_path / "mirror").saved] == points
    compared = 0
    for at, copy in enumerate(copies):
        try:
            keys = keys_at(copy)
        except (StoreNotFoundError, CorruptStoreError):
            assert not (copy / "metadata.json").exists()
            continue
        if at % every and copy is not copies[-1]:  # the last one is compared whatever the mirror took together
            continue
        restore(copy, tmp_path / "restored")
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "restored") as again:
            generation = again._sink.writer.log.catalog.generation  # type: ignore[attr-defined]
            assert keys_of(again) == keys == shown.get(generation, keys)
            compared += generation in shown
            for point in again.points.saved:
                assert keys_at(tmp_path / "restored", pin=f"step-{point.step}")
        is_sound(tmp_path / "restored")
        shutil.rmtree(tmp_path / "restored")
    assert compared > (2 if waiting else 0)
    assert verify(tmp_path / "mirror").notes == []  # no orphaned file
    left = {path.name for path in (tmp_path / "mirror" / "shards").iterdir()}
    assert left <= {path.name for path in (tmp_path / "store" / "shards").iterdir()}


def test_a_mirror_is_continued_and_nothing_is_copied_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(5))
    assert buffer.mirror.state is not None
    assert buffer.mirror.state.newest_id == 4
    copied: list[str] = []
    publish = LocalDirectory.publish

    def noting(self: LocalDirectory, files: Sequence[EncodedFile]) -> None:
        copied.extend(file.name for file in files if self.url.endswith("mirror"))
        publish(self, files)

    monkeypatch.setattr(LocalDirectory, "publish", noting)
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        level(buffer)
        assert not copied
        before = {f"shards/{path.name}" for path in (tmp_path / "mirror" / "shards").iterdir()}
        add(buffer, range(5, 8))
    after = {f"shards/{path.name}" for path in (tmp_path / "mirror" / "shards").iterdir()}
    assert sorted(name for name in copied if name.startswith("shards/")) == sorted(after - before)
    assert keys_at(tmp_path / "mirror") == {number: number for number in range(8)}


def test_a_first_copy_that_was_interrupted_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path / "store", None) as buffer:
        for key in range(6):
            add(buffer, [key])
    monkeypatch.setattr("trajstore.remote.mirror.replica._BATCH_BYTES", 1)
    monkeypatch.setattr("trajstore.remote.mirror.replica._LEDGER_BYTES", 1)
    copied: list[str] = []
    publish = LocalDirectory.publish

    def failing(self: LocalDirectory, files: Sequence[EncodedFile]) -> None:
        shards = [file.name for file in files if file.name.startswith("shards/") and self.url.endswith("mirror")]
        if len(copied) == 4 and shards:
            raise OSError(5, "the cable is out")
        copied.extend(shards)
        publish(self, files)

    monkeypatch.setattr(LocalDirectory, "publish", failing)
    options = Mirror(tmp_path / "mirror", close_timeout=0.2)
    with make(tmp_path / "store", options) as buffer:
        wait_until(lambda: buffer.mirror.state is not None and buffer.mirror.state.error is not None)
        assert "the cable is out" in str(buffer.mirror.state)
        assert buffer.get_stats()["mirror_behind"] == 6
        assert buffer.get_stats()["mirror_failures"] >= 1
    assert (tmp_path / "mirror" / LEDGER_NAME).exists()
    with pytest.raises((StoreNotFoundError, CorruptStoreError)):
        keys_at(tmp_path / "mirror")
    monkeypatch.setattr(LocalDirectory, "publish", publish)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mirror" / "shards").iterdir()}
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        level(buffer)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mirror" / "shards").iterdir()}
    assert len(before) == 4
    assert {name: after[name] for name in before} == before
    assert len(after) == 6
    is_sound(tmp_path / "mirror")


def test_writing_goes_on_without_the_mirror_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = LocalDirectory.append
    broken = threading.Event()

    def failing(self: LocalDirectory, name: str, data: Buffer) -> None:
        if broken.is_set() and self.url.endswith("mirror"):
            raise OSError(28, "no space left on the mirror")
        append(self, name, data)

    monkeypatch.setattr(LocalDirectory, "append", failing)
    monkeypatch.setattr("trajstore.remote.mirror.mirror._FIRST_PAUSE", 0.05)
    monkeypatch.setattr("trajstore.remote.mirror.mirror._LONGEST_PAUSE", 0.05)
    late = threading.Event()
    monkeypatch.setattr("trajstore.remote.mirror.mirror.microseconds", lambda: 700_000_000 * (1 + late.is_set()))
    with make(tmp_path / "store", Mirror(tmp_path / "mirror", close_timeout=0.1)) as buffer:
        ids = add(buffer, range(3))
        assert buffer.mirror.wait(ids, 600)
        broken.set()
        ids = add(buffer, range(3, 6))
        assert not buffer.mirror.wait(ids, 0.2)
        wait_until(lambda: buffer.mirror.state is not None and buffer.mirror.state.failures > 2)
        assert keys_at(tmp_path / "mirror") == {0: 0, 1: 1, 2: 2}
        report = inspect(tmp_path / "store")
        assert report["mirror"]["newest_id"] == 2
        assert "no space left" in report["mirror"]["error"]
        assert report["mirror"]["behind"] == 3
        assert "the mirror is not written: " in str(report["integrity"]["problems"])
        assert caplog.text.count("is not mirrored at present") == 1
        late.set()
        wait_until(lambda: caplog.text.count("is not mirrored at present") == 2)
    assert "closed with 3 trajectories that are not on the mirror" in caplog.text
    assert caplog.text.count("is not mirrored at present") == 2, "repeated after ten minutes"
    broken.clear()
    with make(tmp_path / "store", Mirror(tmp_path / "mirror")) as buffer:
        level(buffer)
    assert keys_at(tmp_path / "mirror") == {number: number for number in range(6)}
    assert inspect(tmp_path / "store")["mirror"]["error"] is None


@pytest.mark.parametrize("replaced", [False, True])
def test_a_mirror_that_is_removed_is_filled_again_while_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr("trajstore.remote.mirror.mirror._FIRST_PAUSE", 0.05)
    with make(tmp_path / "store", tmp_path / "disk" / "mirror") as buffer:
        add(buffer, range(3))
        level(buffer)
        shutil.rmtree(tmp_path / "disk")
        if replaced:
            (tmp_path / "disk" / "mirror").mkdir(parents=True)
        add(buffer, range(3, 5))
        level(buffer)
        assert keys_at(tmp_path / "disk" / "mirror") == {number: number for number in range(5)}
    is_sound(tmp_path / "disk" / "mirror")


def test_an_empty_mount_point_is_not_filled_in_place_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.remote.mirror.mirror._FIRST_PAUSE", 0.05)
    store, mount, disk = tmp_path / "store", tmp_path / "mount", tmp_path / "disk"
    mount.mkdir()
    is_mounted, ismount = threading.Event(), os.path.ismount
    is_mounted.set()
    monkeypatch.setattr(os.path, "ismount", lambda path: (path == str(mount) and is_mounted.is_set()) or ismount(path))
    with make(store, mount / "mirror") as buffer:
        add(buffer, [0])
        level(buffer)
    (mount / "mirror").rename(disk)
    is_mounted.clear()
    with make(store, Mirror(mount / "mirror", close_timeout=0.1)) as buffer:
        add(buffer, [1])
        wait_until(lambda: f"not mounted at {mount}; mount it, or delete" in str(buffer.mirror.state))
        assert not any(mount.iterdir())
        disk.rename(mount / "mirror")
        is_mounted.set()
        level(buffer)
    assert keys_at(mount / "mirror") == {0: 0, 1: 1}
    shutil.rmtree(mount / "mirror")
    is_mounted.clear()
    (store / "mirrored.json").unlink()
    with make(store, mount / "mirror") as buffer:
        level(buffer)
    is_sound(mount / "mirror")


def test_a_reader_of_the_mirror_follows_and_keeps_what_it_shows(tmp_path: Path) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(4))
        level(buffer)
        with TrajectoryReplayBuffer.open(tmp_path / "mirror") as reader:
            add(buffer, range(4, 6))
            buffer.evict([0, 1, 2, 3])
            level(buffer)
            assert keys_of(reader) == {0: 0, 1: 1, 2: 2, 3: 3}
            assert reader.refresh()
            assert keys_of(reader) == {4: 4, 5: 5}
        wait_until(lambda: len(list((tmp_path / "mirror" / "shards").iterdir())) == 1)


def test_a_point_that_is_saved_again_is_mirrored_again(tmp_path: Path) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(3))
        buffer.points.save(1)
        level(buffer)
        buffer.sample(2)
        buffer.points.save(1)  # the same trajectories, but another generator state
        level(buffer)
        expected = buffer.sample(2)["curr_obs"]["tag"].tolist()
    restore(tmp_path / "mirror", tmp_path / "new")
    with make(tmp_path / "new", None) as buffer:
        buffer.points.rollback(1)
        assert buffer.sample(2)["curr_obs"]["tag"].tolist() == expected


def test_another_copy_of_the_store_cannot_take_the_mirror(tmp_path: Path) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(3))
    restore(tmp_path / "mirror", tmp_path / "new")
    with make(tmp_path / "new", tmp_path / "mirror") as buffer:
        (new,) = add(buffer, [9])
        assert new >= IDS_LEFT_OUT + 3
        level(buffer)
        with make(tmp_path / "store", Mirror(tmp_path / "mirror", close_timeout=0.0)) as old:
            wait_until(lambda: "is being written by" in str(old.mirror.state))
            add(old, range(3, 7))
    with make(tmp_path / "store", Mirror(tmp_path / "mirror", close_timeout=0.0)) as old:
        wait_until(lambda: "another copy of the store was mirrored there" in str(old.mirror.state))
    assert keys_at(tmp_path / "mirror") == {0: 0, 1: 1, 2: 2, new: 9}


def test_a_mirror_that_moved_on_after_the_restore_is_not_taken_over(tmp_path: Path) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(3))
    restore(tmp_path / "mirror", tmp_path / "new")
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:  # the machine was not lost
        add(buffer, [3])
        level(buffer)
    for key in (8, 9):  # generations reach the mirror's, then pass it
        with make(tmp_path / "new", Mirror(tmp_path / "mirror", close_timeout=0.0)) as new:
            add(new, [key])
            wait_until(lambda: "another copy of the store was mirrored there" in str(new.mirror.state))
    assert verify(tmp_path / "mirror").sound
    assert keys_at(tmp_path / "mirror") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_what_the_store_notes_of_its_mirror_is_not_old(tmp_path: Path) -> None:
    with make(tmp_path / "store", Mirror(tmp_path / "mirror", interval=0.01)) as buffer:
        for key in range(3):  # within a second; the last one wins
            add(buffer, [key])
            level(buffer)
        wait_until(lambda: (inspect(tmp_path / "store")["mirror"] or {}).get("newest_id") == 2)
    assert inspect(tmp_path / "store")["mirror"]["newest_id"] == 2


def _retained(path: Path) -> None:
    with make(path, None, retention=Retention(max_trajectories=2)):
        pass


def _rolled_back(path: Path) -> None:
    points_at(path).rollback(1)


@pytest.mark.parametrize(
    "change",
    [_rolled_back, _retained, lambda path: annotate(path, [0], {"judge": [1.0]}), lambda path: evict_and_compact(path)],
    ids=["rollback", "retention", "annotate", "compact"],
)
def test_a_change_without_the_mirror_warns_once_and_is_a_problem_until_a_writer_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], object]
) -> None:
    path, place = tmp_path / "store", tmp_path / "mirror"
    with make(path, place) as buffer:
        add(buffer, [0, 1])
        buffer.points.save(1)
        add(buffer, [2])
        level(buffer)
    assert inspect(path)["integrity"]["problems"] == []
    assert "mirror" not in caplog.text
    change(path)
    change(path)
    assert caplog.text.count(f"{path}: is opened for writing without its mirror {place}, which does not follow") == 1
    report = inspect(path)
    [problem] = report["integrity"]["problems"]
    assert problem == f"{place}: the mirror is not written: {report['mirror']['error']}"
    assert "and no running writer has opened it with mirror=..." in problem
    with make(path, place) as buffer:
        level(buffer)
        expected = keys_of(buffer)
    assert inspect(path)["integrity"]["problems"] == []
    assert keys_at(place) == expected
    change(path)
    (path / "mirrored.json").unlink()
    assert inspect(path)["integrity"]["problems"] == []


def evict_and_compact(path: Path) -> None:
    with make(path, None) as buffer:
        buffer.evict([buffer.trajectory_ids.tolist()[0]])
    compact(path)


def test_a_living_writer_without_the_mirror_does_not_feed_it(tmp_path: Path) -> None:
    path, place = tmp_path / "store", Mirror(tmp_path / "mirror", interval=30.0)
    with make(path, place) as buffer:
        add(buffer, [0])
    with make(path, place) as buffer:
        level(buffer)
        add(buffer, [1])
        assert inspect(path)["integrity"]["problems"] == [], "perhaps behind, but fed"
    with make(path, None) as buffer:
        assert inspect(path)["integrity"]["problems"] == [], "not changed"
        add(buffer, [2])
        assert "the store has 1 commit more" in str(inspect(path)["integrity"]["problems"])


def test_a_mirror_elsewhere_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(tmp_path / "other", None) as buffer:
        add(buffer, range(2))
    with make(tmp_path / "store", Mirror(tmp_path / "other", close_timeout=0.0)) as buffer:
        add(buffer, range(2))
        wait_until(lambda: "is another store" in str(buffer.mirror.state))
        assert not buffer.mirror.wait(timeout=0.1)
    assert "what is there is not known" in caplog.text
    assert "up to id -1" not in caplog.text
    assert keys_at(tmp_path / "other") == {0: 0, 1: 1}
    for place in (tmp_path / "store", tmp_path / "store" / "mirror", tmp_path):
        with pytest.raises(ConfigurationError, match="lies in the other"):
            make(tmp_path / "store", place)
    with pytest.raises(ConfigurationError, match="auto_save=True"):
        TrajectoryReplayBuffer(mirror=tmp_path / "mirror")
    with pytest.raises(ConfigurationError, match="must be a path"):
        make(tmp_path / "store", 7)
    with pytest.raises(StoreError, match="has no mirror"):
        make(tmp_path / "store", None).mirror.wait([0])


def test_shards_that_are_lost_on_the_mirror_are_copied_again(tmp_path: Path) -> None:
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        add(buffer, range(3))
        add(buffer, range(3, 5))
    os.truncate(tmp_path / "mirror" / "shards" / "shard_00000000.pt", 100)
    (tmp_path / "mirror" / "shards" / "shard_00000001.pt").unlink()
    with make(tmp_path / "store", tmp_path / "mirror") as buffer:
        level(buffer)
    is_sound(tmp_path / "mirror")
    assert keys_at(tmp_path / "mirror") == {number: number for number in range(5)}


@pytest.mark.parametrize(("fmt", "store"), [("zarr", "local"), ("pt", "remote")])
def test_files_and_folders_in_an_object_store(tmp_path: Path, fmt: str, store: str) -> None:
    if fmt == "zarr":
        pytest.importorskip("zarr")
    url = f"memory://bucket-{uuid.uuid4()}/mirror"
    path = tmp_path / "store" if store == "local" else f"memory://bucket-{uuid.uuid4()}/run"
    with make(path, url, trajectory_format=fmt) as buffer:
        session(buffer, lambda: None)
        level(buffer)
        expected = keys_of(buffer)
    assert keys_at(url) == expected
    is_sound(url)
    assert restore(url, tmp_path / "new").trajectories == len(expected)
    with make(tmp_path / "new", url) as buffer:
        assert keys_of(buffer) == expected
        level(buffer)
    is_sound(url)


def test_waiting_for_everything_waits_for_saved_points_and_rollbacks(tmp_path: Path) -> None:
    with make(tmp_path / "store", Mirror(tmp_path / "mirror", interval=30.0)) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.points.save(1, {"note": "one"})
        assert buffer.mirror.wait(timeout=600)
        assert [point.step for point in points_at(tmp_path / "mirror").saved] == [1]
        buffer.add_trajectories([witness(1)])
        assert buffer.mirror.wait(timeout=600)
        assert keys_at(tmp_path / "mirror") == {0: 0, 1: 1}
        buffer.points.rollback(1)
        assert buffer.mirror.wait(timeout=600)
        assert keys_at(tmp_path / "mirror") == {0: 0}
        buffer.evict([0])
        assert buffer.mirror.wait(timeout=600)
        assert keys_at(tmp_path / "mirror") == {}


def test_paths_that_are_no_text_do_not_end_the_mirror(tmp_path: Path) -> None:
    path, place = tmp_path / "surr\udcff", tmp_path / "mirror\udcff"
    with make(path, place) as buffer:
        ids = add(buffer, [0, 1])
        assert buffer.mirror.wait(ids, timeout=600)
        level(buffer)
    assert keys_at(place) == {0: 0, 1: 1}
    assert inspect(path)["mirror"]["newest_id"] == 1
