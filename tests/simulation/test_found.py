"""Faults that the simulator found, each as a small test."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stores import add_each, filled, keys_at, opened
from tests.support.copies import copy_live, tell_ids
from tests.support.witness import key_of
from trajstore import Reader, Reward, Sessions, TrajectoryReplayBuffer
from trajstore._core.files.holder import may_be_brief
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import CorruptStoreError, IncompleteCheckpointError
from trajstore.operations.copying import copy_store, repair_store
from trajstore.operations.verify import verify
from trajstore.points import points_at


def test_a_refresh_shows_the_commits_of_a_writer_that_closes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, read = opened(tmp_path / "store"), LocalDirectory.read
    add_each(writer, [1])
    writer.flush()

    def close_after(self: LocalDirectory, name: str, offset: int = 0) -> bytes:
        data = read(self, name, offset)
        if name == "metadata.json":
            monkeypatch.undo()
            writer.close()  # puts the log into the index
        return data

    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        add_each(writer, [2])
        writer.flush()
        monkeypatch.setattr(LocalDirectory, "read", close_after)
        reader.refresh()
        assert len(reader) == 2


def test_ranks_that_begin_at_this_moment_are_no_damage(tmp_path: Path) -> None:
    """Rank 0 has no folder yet, and rank 1 has all files but the last one of a new store."""
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "rank_1").close()
    (tmp_path / "rank_1" / "metadata.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"rank_0 is absent.*rank_1: no trajectory store here"):
        TrajectoryReplayBuffer.open(tmp_path)


def test_a_reader_of_a_copy_keeps_what_it_shows_once_a_writer_has_begun_there(tmp_path: Path) -> None:
    """Nobody had written there, so it was not announced: at the next refresh it is."""
    with opened(tmp_path / "store") as buffer:
        add_each(buffer, [1, 2])
    for name in ("copy", "other"):
        copy_store(tmp_path / "store", tmp_path / name)
    with TrajectoryReplayBuffer.open(tmp_path / "copy") as reader, opened(tmp_path / "copy") as writer:
        reader.refresh()
        writer.evict([0, 1])
        writer.compact()
        assert key_of(reader.get(0)) == 1
    with TrajectoryReplayBuffer.open(tmp_path / "other") as reader, opened(tmp_path / "other") as writer:
        writer.evict([0, 1])
        writer.compact()
        with pytest.raises(CorruptStoreError, match="a writer, which does not know of this reader, has begun"):
            reader.get(0)
        reader.refresh()
        assert len(reader) == 0


def test_reading_a_directory_of_rlinf_writes_nothing_whatever_its_log_is(shared_fixtures: Path, tmp_path: Path) -> None:
    source = next(shared_fixtures.rglob("trajectory_index.json")).parent
    shutil.copytree(source, tmp_path / "store")
    (tmp_path / "store" / "log").mkdir()
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        assert len(reader)
        assert not (tmp_path / "store" / "readers").exists()


def test_a_lock_whose_text_a_power_loss_has_torn_names_nobody() -> None:
    """A tool that takes it for a moment has not written its own text yet: writers wait."""
    assert may_be_brief(b'{"pid": 4200')


@pytest.mark.parametrize("made", [(), ("log",), ("log", "trajectory_index.json")], ids=len)
def test_a_run_shows_its_ranks_news_while_another_rank_is_being_created(tmp_path: Path, made: tuple[str, ...]) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    for rank in range(2):
        filled(run / f"rank_{rank}", [rank])
    opened(whole).close()
    with Reader.open(run) as reader:
        (run / "rank_2").mkdir()
        for name in made:
            copy = shutil.copytree if (whole / name).is_dir() else shutil.copy
            copy(whole / name, run / "rank_2" / name)
        filled(run / "rank_0", [3])
        assert reader.refresh()
        assert sorted(key_of(reader.get(number)) for number in reader.trajectory_ids.tolist()) == [0, 1, 3]
        shutil.copytree(whole, run / "rank_2", dirs_exist_ok=True)
        filled(run / "rank_2", [4])
        assert reader.refresh()
        assert len(reader) == 4


def test_a_few_bytes_of_a_record_and_zeros_are_an_interrupted_commit(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        add_each(writer, [1])
        copy_live(tmp_path / "store", tmp_path / "crashed")
    with (tmp_path / "crashed/log/0000000000000001.log").open("ab") as log:
        log.write(b"c84aad" + bytes(54))
    assert verify(tmp_path / "crashed").problems == []


@pytest.mark.parametrize("reads", range(6))
def test_a_snapshot_that_is_removed_during_a_repair_is_copied_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """It is removed before one of the reads of its files."""
    read, left = LocalDirectory.read, reads
    with opened(tmp_path / "store") as writer:
        add_each(writer, [1])
        writer.points.save(1, {"mine": 5})

        def remove_before(self: LocalDirectory, name: str, offset: int = 0) -> bytes:
            nonlocal left
            if name.startswith("pins/step-1."):
                left -= 1
                if left == -1:
                    monkeypatch.undo()
                    writer.points.remove(1)
            return read(self, name, offset)

        monkeypatch.setattr(LocalDirectory, "read", remove_before)
        repair_store(tmp_path / "store", tmp_path / "copy")
    assert verify(tmp_path / "copy").problems == []
    saved = points_at(tmp_path / "copy").saved
    assert [points_at(tmp_path / "copy").state(point.step) for point in saved] == [{"mine": 5}] * len(saved)


def test_a_writer_that_finds_a_full_disk_makes_the_log_of_a_killed_one_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed one may have written a record without reaching its fsync."""
    with opened(tmp_path / "store") as writer:
        add_each(writer, [1])
        writer.flush()
        copy_live(tmp_path / "store", tmp_path / "killed")
    synced, fsync = [], os.fsync

    def full(self: LocalDirectory, files: Sequence[object]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(LocalDirectory, "publish", full)
    monkeypatch.setattr(os, "fsync", record)
    with opened(tmp_path / "killed") as writer:
        assert len(writer) == 1
        assert [path.stat().st_ino in synced for path in (tmp_path / "killed" / "log").iterdir()] == [True]
        monkeypatch.undo()


def test_a_repair_leaves_out_what_a_writer_that_begins_meanwhile_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is named by no commit, as a killed writer may leave it."""
    with opened(tmp_path / "store") as writer:
        add_each(writer, [1, 2])
        copy_live(tmp_path / "store", tmp_path / "killed", "writer.lock")
    tell_ids(tmp_path / "killed", 1)
    [log] = (tmp_path / "killed" / "log").iterdir()
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    repair_store(tmp_path / "killed", tmp_path / "whole")
    assert keys_at(tmp_path / "whole") == {0: 1, 1: 2}
    bring = LocalDirectory.bring

    def begin_first(self: LocalDirectory, *arguments: Any) -> None:
        monkeypatch.undo()
        opened(tmp_path / "killed").close()
        bring(self, *arguments)

    monkeypatch.setattr(LocalDirectory, "bring", begin_first)
    repair_store(tmp_path / "killed", tmp_path / "copy")
    assert keys_at(tmp_path / "copy") == {0: 1}


@pytest.mark.parametrize("emptied", [True, False])
def test_a_reader_on_a_full_disk_keeps_the_trajectories_that_a_refresh_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied: bool
) -> None:
    """The writer cannot be told that newer files are needed: it keeps all, or the reader shows the older ones."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path / "store") as writer, TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        add_each(writer, [1])
        writer.flush()
        monkeypatch.setattr(os, "pwrite", full)
        monkeypatch.setattr(os, "ftruncate", os.ftruncate if emptied else full)
        with contextlib.nullcontext() if emptied else pytest.raises(OSError, match="No space left"):
            reader.refresh()
        monkeypatch.undo()
        assert len(reader) == (1 if emptied else 0)
        writer.evict(range(1))
        writer.flush()
        assert [key_of(reader.get(found)) for found in reader.trajectory_ids.tolist()] == [1] * len(reader)
        reader.refresh()
        assert len(reader) == 0
        [lease] = LocalDirectory(tmp_path / "store").readers()
        assert f"process {os.getpid()}" in lease.holder


def test_a_session_that_a_killed_process_finished_is_durable_before_its_rollouts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss may open it again, beside the rollouts."""
    opened(tmp_path / "store").close()
    with Sessions(tmp_path / "store") as sessions:
        session = sessions.session("task", "rollout")
        session.add_call([1, 2], [3], [-0.1])
        session.finish(Reward(outcome=1.0))
    [journal] = (tmp_path / "store" / "calls").glob("*.calls")
    synced, fdatasync = [], os.fdatasync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", record)
    with opened(tmp_path / "store") as writer:
        writer.flush()
        assert len(writer) == 1
        assert synced[0] == str(journal)
        assert synced[1].startswith(str(tmp_path / "store" / "log"))
