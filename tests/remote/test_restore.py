"""Restoring a store from its mirror is atomic and resumes after interruptions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.remote.stores import add, is_sound, make
from tests.stores import flip, keys_at
from trajstore._core.files.base import EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.sealed import RESTORE_NAME
from trajstore.cli import main
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreError,
    StoreLockedError,
    StoreNotFoundError,
    StoreWriteError,
    TrajstoreError,
)
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.remote.mirror.restoring import restore


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """Return the mirror of a lost store."""
    with make(tmp_path / "lost", tmp_path / "mirror") as buffer:
        for key in range(4):
            add(buffer, [key])
        buffer.points.save(3, {"a": 1})
        buffer.evict([0])
    return tmp_path / "mirror"


def test_an_interrupted_restore_is_taken_up(tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LocalDirectory.publish
    allowed = 0

    def failing(self: LocalDirectory, files: Sequence[EncodedFile]) -> None:
        nonlocal allowed
        if allowed == 0:
            raise OSError(28, "no space")
        allowed -= 1
        publish(self, files)

    target = tmp_path / "new"
    target.mkdir()
    (target / f"{RESTORE_NAME}.tmp").write_bytes(b'{"mir')  # as a kill leaves its first write
    with monkeypatch.context() as patched:
        patched.setattr(LocalDirectory, "publish", failing)
        for allowed in (1, 2, 2, 1):  # noqa: B007  # the marker, then one or two files each time
            with pytest.raises(StoreWriteError, match="call restore again to continue"):
                restore(mirror, target)
            assert (target / RESTORE_NAME).exists()
            for read in (verify, inspect, keys_at):
                with pytest.raises(
                    StoreNotFoundError, match=f"unfinished restore.*`trajstore restore MIRROR {target}` again"
                ):
                    read(target)
            with pytest.raises(StoreError):
                make(target, None)  # must not pass for an empty directory
    os.truncate(target / "shards" / "shard_00000001.pt", 10)  # power loss on a disk that ignores syncs
    restored = restore(mirror, target)
    assert 0 < restored.copied < restored.nbytes
    assert keys_at(target) == {1: 1, 2: 2, 3: 3}
    assert keys_at(target, pin="step-3") == {0: 0, 1: 1, 2: 2, 3: 3}
    is_sound(target)
    with pytest.raises(ConfigurationError, match="is not empty"):
        restore(mirror, target)
    (target / "shards" / "shard_00000009.pt").touch()  # its next shard has a number above a billion
    assert "what they held was evicted or is elsewhere" in str(verify(target).notes)
    (target / "trajectory_index.json").unlink()  # there are two
    assert keys_at(target) == {1: 1, 2: 2, 3: 3}


def test_of_two_restores_to_one_target_the_second_is_refused(tmp_path: Path, mirror: Path) -> None:
    said = []

    def again(*_: int) -> None:
        if not said:
            with pytest.raises(StoreLockedError, match=r"new is being written by process .*; wait for it") as refusal:
                restore(mirror, tmp_path / "new", again)
            said.append(str(refusal.value))

    restore(mirror, tmp_path / "new", again)
    assert said
    assert keys_at(tmp_path / "new") == {1: 1, 2: 2, 3: 3}
    assert not (tmp_path / "new" / "writer.lock").exists()


def test_a_restore_that_was_interrupted_at_its_very_end(tmp_path: Path, mirror: Path) -> None:
    whole = restore(mirror, tmp_path / "new")
    (tmp_path / "new" / RESTORE_NAME).write_bytes(
        json.dumps({"mirror": str(mirror), "store_id": _store_id(mirror)}, separators=(",", ":")).encode()
    )
    again = restore(mirror, tmp_path / "new")
    assert (again.trajectories, again.newest_id, again.next_id) == (whole.trajectories, whole.newest_id, whole.next_id)
    assert not (tmp_path / "new" / RESTORE_NAME).exists()


def _store_id(path: Path) -> str:
    return str(json.loads((path / "metadata.json").read_bytes())["store_id"])


def test_what_cannot_be_restored_is_named(tmp_path: Path, mirror: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        restore(tmp_path / "nowhere", tmp_path / "new")
    copy_store(tmp_path / "lost", tmp_path / "copy")
    for store in ("lost", "copy"):
        with pytest.raises(ConfigurationError, match=r"is not a mirror \(it has no mirror\.json\).*`trajstore copy`"):
            restore(tmp_path / store, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(ConfigurationError, match=r"is not empty \(mine\.txt\)"):
        restore(mirror, tmp_path / "full")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / RESTORE_NAME).write_text('{"mirror":"elsewhere"}')
    with pytest.raises(ConfigurationError, match="another mirror was begun"):
        restore(mirror, tmp_path / "begun")
    flip(mirror / "shards" / "shard_00000002.pt")
    with pytest.raises(CorruptStoreError, match=r"shard_00000002\.pt: its checksum does not fit"):
        restore(mirror, tmp_path / "new")
    (mirror / "shards" / "shard_00000002.pt").unlink()
    with pytest.raises(CorruptStoreError, match=r"shard_00000002\.pt.*the mirror lacks it; `trajstore repair`"):
        restore(mirror, tmp_path / "new")


def test_a_run_of_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        with make(tmp_path / "run" / f"rank_{rank}", tmp_path / "mirrors" / f"rank_{rank}") as buffer:
            add(buffer, [10 * rank + 1, 10 * rank + 2])
    assert main(["restore", str(tmp_path / "mirrors"), str(tmp_path / "new"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trajectories"] == 4
    assert [part["next_id"] > part["newest_id"] for part in report["parts"]] == [True, True]
    is_sound(tmp_path / "new")
    assert sorted(keys_at(tmp_path / "new").values()) == [1, 2, 11, 12]
    assert main(["restore", str(tmp_path / "mirrors" / "rank_1"), str(tmp_path / "one")]) == 0
    assert "new ids begin at " in capsys.readouterr().out
    assert main(["restore", str(tmp_path / "mirrors"), str(tmp_path / "new")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_an_interrupted_restore_of_a_run_is_no_run_and_is_taken_up(tmp_path: Path) -> None:
    for rank in range(3):
        with make(tmp_path / "run" / f"rank_{rank}", tmp_path / "mirrors" / f"rank_{rank}") as buffer:
            add(buffer, [10 * rank + 1, 10 * rank + 2])
    shard = min((tmp_path / "mirrors" / "rank_1" / "shards").iterdir())
    flip(shard)
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=shard.name):
            restore(tmp_path / "mirrors", tmp_path / "new")
        with pytest.raises(TrajstoreError, match="rank_1: an unfinished restore"):
            keys_at(tmp_path / "new")
    flip(shard)
    assert restore(tmp_path / "mirrors", tmp_path / "new").trajectories == 6
    assert sorted(keys_at(tmp_path / "new").values()) == [1, 2, 11, 12, 21, 22]
    is_sound(tmp_path / "new")
    assert not list((tmp_path / "new").rglob(RESTORE_NAME))


def test_a_restore_that_begins_again_counts_what_it_had_copied(tmp_path: Path, mirror: Path) -> None:
    parts: list[int] = []

    def progress(done: int, _: int) -> None:
        parts.append(done)
        if len(parts) == 2:  # as if the mirror had deleted the file read next, with a later commit
            with make(tmp_path / "lost", mirror) as buffer:
                add(buffer, [9])
            raise FileNotFoundError(2, "gone", str(mirror / "shards" / "shard"))

    restored = restore(mirror, tmp_path / "new", progress)
    assert len(parts) > 2
    assert restored.copied == restored.nbytes > 0
    is_sound(tmp_path / "new")


def test_a_target_that_is_removed_meanwhile_is_not_damage_of_the_mirror(tmp_path: Path, mirror: Path) -> None:
    with pytest.raises(StoreWriteError, match="is not complete; call restore again"):
        restore(mirror, tmp_path / "new", lambda *_: shutil.rmtree(tmp_path / "new", ignore_errors=True))


def test_two_stores_of_one_mirror_keep_apart(tmp_path: Path, mirror: Path) -> None:
    ids, shards = set(), set()
    for name in ("a", "b"):
        restore(mirror, tmp_path / name)
        with make(tmp_path / name, None) as buffer:
            ids.update(add(buffer, [7]))
        shards |= {path.name for path in (tmp_path / name / "shards").iterdir()}
    assert len(ids) == 2  # fails once in 4 billion runs
    assert len(shards) == 4 + 2


def test_hundreds_of_restores_leave_ids_to_a_run(tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.remote.mirror.restoring.randbelow", lambda limit: limit - 1)
    left = inspect(mirror)["ids_left"]
    restore(mirror, tmp_path / "new")
    assert 0 < left - inspect(tmp_path / "new")["ids_left"] < left / 1000


def test_a_pin_whose_trajectories_the_mirror_lacks_is_left_out(
    tmp_path: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A late mirror gets an index without a pin's trajectories before the pin is deleted."""
    with make(tmp_path / "other", None) as other:
        add(other, range(6))
        other.points.pin("early")
    (mirror / "pins" / "early.json").write_bytes((tmp_path / "other" / "pins" / "early.json").read_bytes())
    restore(mirror, tmp_path / "restored")
    assert "the pin 'early' is left out: 2 of its trajectories" in caplog.text
    is_sound(tmp_path / "restored")
    assert keys_at(tmp_path / "restored") == {1: 1, 2: 2, 3: 3}
