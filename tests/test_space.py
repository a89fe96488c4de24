"""Disk space: what is evicted goes, whoever reads; readers never lose what they see."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions
from trajstore.local import LocalDirectory
from trajstore.testing.witness import check_batch, check_trajectory, witness


def writer_to(path: Path, **options: object) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)  # type: ignore[arg-type]


def reader_of(path: Path) -> TrajectoryReplayBuffer:
    reader = TrajectoryReplayBuffer(sample_window_size=0)
    reader.load_checkpoint(path)
    return reader


def add_one_by_one(buffer: TrajectoryReplayBuffer, keys: range) -> None:
    """Add trajectories in shards of their own."""
    for key in keys:
        buffer.add_trajectories([witness(key)])
        buffer.flush()


def shard_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "shards").iterdir())


# -- readers ----------------------------------------------------------------------------------------


def test_a_reader_that_is_always_one_commit_behind_does_not_stop_deletion(tmp_path: Path) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=5)) as source:
        add_one_by_one(source, range(5))
        reader = reader_of(tmp_path)
        for key in range(5, 60):
            add_one_by_one(source, range(key, key + 1))
            assert len(shard_files(tmp_path)) <= 7, "what the reader has passed stays"
            assert reader.refresh()
            assert check_trajectory(reader.get(key - 4)) == key - 4
        reader.close()


def test_a_reader_that_never_refreshes_holds_what_it_sees_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=5), enable_cache=False) as source:
        add_one_by_one(source, range(5))
        reader = reader_of(tmp_path)
        assert source.get_stats()["held_bytes"] == 0
        with caplog.at_level(logging.WARNING):
            add_one_by_one(source, range(5, 60))
        assert len(shard_files(tmp_path)) == 10
        assert [check_trajectory(reader.get(number)) for number in range(5)] == list(range(5))
        held = source.get_stats()["held_bytes"]
        assert held == sum((tmp_path / "shards" / name).stat().st_size for name in shard_files(tmp_path)[:5])
        told = [record.getMessage() for record in caplog.records if "refresh" in record.getMessage()]
        assert len(told) == 1
        assert f"process {os.getpid()} on " in told[0]
        reader.close()
        add_one_by_one(source, range(60, 61))
        assert len(shard_files(tmp_path)) == 5
        assert source.get_stats()["held_bytes"] == 0


def test_a_reader_of_a_pin_keeps_its_files_when_the_pin_goes(tmp_path: Path) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_one_by_one(source, range(3))
        source.pin("kept")
        source.evict([0, 1])
        reader = TrajectoryReplayBuffer(sample_window_size=0)
        reader.load_checkpoint(tmp_path, pin="kept")
        source.unpin("kept")
        assert [check_trajectory(reader.get(number)) for number in range(3)] == [0, 1, 2]
        reader.close()
        add_one_by_one(source, range(3, 4))
        source.evict([2])
        assert len(shard_files(tmp_path)) == 1


def test_a_writer_that_opens_while_somebody_reads_deletes_what_was_left_when_the_reader_has_passed(
    tmp_path: Path,
) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_one_by_one(source, range(4))
        reader = reader_of(tmp_path)
        source.evict([0, 1])
    (tmp_path / "shards" / "shard_00000099.pt").write_bytes(b"of a writer that was killed before its commit")
    with writer_to(tmp_path, enable_cache=False) as source:
        assert len(shard_files(tmp_path)) == 4, "two live, two for the reader, none that no commit names"
        assert [check_trajectory(reader.get(number)) for number in range(4)] == [0, 1, 2, 3]
        assert reader.refresh()
        source.evict([2])
        assert reader.refresh()
        add_one_by_one(source, range(4, 6))
        source.evict([4])
        reader.close()
        source.evict([5])
        assert len(shard_files(tmp_path)) == 1


def test_readers_of_earlier_versions_hold_what_they_say(tmp_path: Path) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_one_by_one(source, range(3))
        lease = LocalDirectory(tmp_path).announce_reader()
        (file,) = (tmp_path / "readers").iterdir()
        file.write_bytes(b"")  # it has not read anything yet
        source.evict([0])
        assert len(shard_files(tmp_path)) == 3
        file.write_bytes(b"%020d" % 4)
        source.evict([1])
        assert len(shard_files(tmp_path)) == 2
        assert len(check_batch(source.sample(4))) == 4
        lease.release()


def test_a_batch_of_a_follower_survives_what_a_busy_writer_deletes(tmp_path: Path) -> None:
    options = WriterOptions(commit_interval=0, snapshot_bytes=1 << 13)
    with writer_to(tmp_path, retention=Retention(max_trajectories=5), writer=options) as source:
        add_one_by_one(source, range(5))
        readers = [reader_of(tmp_path) for _ in range(3)]
        for key in range(5, 65):
            add_one_by_one(source, range(key, key + 1))
            for at, reader in enumerate(readers):
                if key % (at + 1) == 0:
                    reader.refresh()
                check_batch(reader.sample(8))
        assert len(shard_files(tmp_path)) <= 12
        for reader in readers:
            reader.close()
