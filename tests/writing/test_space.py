"""Disk space: evicted trajectories are deleted despite readers, and readers keep the data they see."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import add_each, contents_of, flip, keys_of, reader_of, writer_to
from tests.support.waiting import wait_until
from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import Retention, WriterOptions, errors
from trajstore._core.files.base import EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore._core.writing.rewriting import Usage, choose
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify


def shard_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "shards").iterdir())


# -- readers -----------------------------------------------------------------------------------------


def test_a_reader_that_is_always_one_commit_behind_does_not_stop_deletion(tmp_path: Path) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=5)) as source:
        add_each(source, range(5))
        reader = reader_of(tmp_path)
        for key in range(5, 60):
            add_each(source, range(key, key + 1))
            assert len(shard_files(tmp_path)) <= 7, "shards before the reader stay"
            assert reader.refresh()
            assert check_trajectory(reader.get(key - 4)) == key - 4
        reader.close()


def test_a_reader_that_never_refreshes_holds_what_it_sees_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=5), enable_cache=False) as source:
        add_each(source, range(5))
        reader = reader_of(tmp_path)
        assert source.get_stats()["held_bytes"] == 0
        with caplog.at_level(logging.WARNING):
            add_each(source, range(5, 60))
        assert len(shard_files(tmp_path)) == 10
        assert [check_trajectory(reader.get(number)) for number in range(5)] == list(range(5))
        held = source.get_stats()["held_bytes"]
        assert held == sum((tmp_path / "shards" / name).stat().st_size for name in shard_files(tmp_path)[:5])
        warnings = [record.getMessage() for record in caplog.records if "refresh" in record.getMessage()]
        assert len(warnings) == 1
        assert f"process {os.getpid()} on " in warnings[0]
        reader.close()
        add_each(source, range(60, 61))
        assert len(shard_files(tmp_path)) == 5
        assert source.get_stats()["held_bytes"] == 0


def test_a_writer_that_opens_while_somebody_reads_deletes_what_was_left_when_the_reader_has_passed(
    tmp_path: Path,
) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_each(source, range(4))
        reader = reader_of(tmp_path)
        source.evict([0, 1])
    (tmp_path / "shards" / "shard_00000099.pt").write_bytes(b"of a writer that was killed before its commit")
    with writer_to(tmp_path, enable_cache=False) as source:
        assert len(shard_files(tmp_path)) == 4, "two live, two for the reader, none that no commit names"
        assert [check_trajectory(reader.get(number)) for number in range(4)] == [0, 1, 2, 3]
        assert reader.refresh()
        source.evict([2])
        assert reader.refresh()
        add_each(source, range(4, 6))
        source.evict([4])
        reader.close()
        source.evict([5])
        assert len(shard_files(tmp_path)) == 1


def test_readers_of_earlier_versions_hold_what_they_say(tmp_path: Path) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_each(source, range(3))
        lease = LocalDirectory(tmp_path).announce_reader()
        (file,) = (tmp_path / "readers").iterdir()
        file.write_bytes(b"")  # a reader that has not read anything yet
        source.evict([0])
        assert len(shard_files(tmp_path)) == 3
        file.write_bytes(b"%020d" % 4)
        source.evict([1])
        assert len(shard_files(tmp_path)) == 2
        assert len(check_batch(source.sample(4))) == 4
        lease.release()


# -- partly evicted shards ---------------------------------------------------------------------------


def disk(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path / "shards"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += os.stat(f"{folder}/{name}").st_size
    return total


@pytest.mark.parametrize("fmt", ["zarr", pytest.param("pkl", marks=pytest.mark.campaign)])
def test_random_eviction_gives_space_back(tmp_path: Path, fmt: str) -> None:
    choose = random.Random(5)
    options = WriterOptions(shard_bytes=1 << 18)
    with writer_to(tmp_path, writer=options, trajectory_format=fmt, sample_window_size=0, cache_size=3) as source:
        keys = {number: number for number in source.add_trajectories([witness(key, 8) for key in range(600)])}
        source.flush()
        follower = reader_of(tmp_path)
        before = disk(tmp_path)
        going = choose.sample(sorted(keys), 590)
        for start in range(0, len(going), 59):
            source.evict(going[start : start + 59])
        for number in going:
            del keys[number]

        def has_shrunk() -> bool:
            follower.refresh()
            return disk(tmp_path) <= before / 4

        wait_until(has_shrunk)
        assert keys_of(source, 8) == keys
        follower.refresh()
        assert keys_of(follower, 8) == keys
        assert len(check_batch(follower.sample(64))) == 64
        follower.close()
    assert verify(tmp_path).sound
    with writer_to(tmp_path) as again:
        assert keys_of(again, 8) == keys


def test_compact_leaves_one_shard_of_many(tmp_path: Path) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_each(source, range(30))
        source.evict(list(range(0, 30, 3)))
        source.compact()
        assert len(shard_files(tmp_path)) == 1
        kept = [number for number in range(30) if number % 3]
        assert [check_trajectory(source.get(number)) for number in kept] == kept
        source.compact()
        assert len(shard_files(tmp_path)) == 1
        assert source.add_trajectories([witness(77)]) == [30]
    assert verify(tmp_path).sound
    assert contents_of(tmp_path) == [*kept, 77]


def test_a_damaged_shard_is_not_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_each(source, range(4))
        damaged = tmp_path / "shards" / shard_files(tmp_path)[1]
        flip(damaged)
        with caplog.at_level(logging.WARNING):
            source.compact()
        assert damaged.name in caplog.text
        assert len(shard_files(tmp_path)) == 3, "the damaged one, its like, and one made of the two others"
        assert [check_trajectory(source.get(number)) for number in (0, 2, 3)] == [0, 2, 3]
    assert [problem.file.split("/")[-1] for problem in verify(tmp_path).problems] == [damaged.name]


@settings(max_examples=100, deadline=None)
@given(
    shards=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 1)), max_size=12),
    everything=st.booleans(),
    limit=st.integers(1, 20),
)
def test_choosing_ends_and_gains_at_each_step(shards: list[tuple[int, int, int]], everything: bool, limit: int) -> None:
    table = [(live_ + dead, live_, schema) for live_, dead, schema in shards if live_]
    for _ in range(100):
        usage = Usage(
            np.array([total << 20 for total, _, _ in table], np.int64),
            np.array([live_ << 20 for _, live_, _ in table], np.int64),
            np.array([live_ << 20 for _, live_, _ in table], np.int64),
        )
        rows = choose(
            usage,
            np.array([schema for *_, schema in table], np.int32),
            limit << 20,
            np.zeros(len(table), np.bool_),
            everything=everything,
        )
        if not rows:
            break
        (schema,) = {table[row][2] for row in rows}
        kept = sum(table[row][1] for row in rows)
        assert kept <= limit or len(rows) == 1
        assert len(rows) > 1 or kept < table[rows[0]][0]
        table = [item for row, item in enumerate(table) if row not in rows] + [(kept, kept, schema)]
    else:
        pytest.fail("it never ends")
    total, alive = sum(total for total, _, _ in table), sum(live_ for _, live_, _ in table)
    assert total <= 2 * alive + 1
    assert not everything or total == alive


def test_inspect_tells_what_is_live_what_lies_on_disk_and_who_reads(tmp_path: Path) -> None:
    with writer_to(tmp_path, enable_cache=False) as source:
        add_each(source, range(4))
        reader = reader_of(tmp_path)
        source.evict([0, 1])
        report = inspect(tmp_path)
        assert report["live_bytes"] == source.get_stats()["live_bytes"]
        stats = source.get_stats()
        assert report["shard_bytes"] == stats["shard_bytes"] == disk(tmp_path) - stats["held_bytes"]
        assert [f"process {os.getpid()} on " in lease["holder"] for lease in report["readers"]] == [True]
        [kept] = report["kept_on_disk"]
        assert (kept["names"], kept["bytes"]) == ([], stats["held_bytes"])
        assert kept["readers"] == [lease["holder"] for lease in report["readers"]]
        with reader_of(tmp_path):
            assert inspect(tmp_path)["kept_on_disk"] == [kept], "only what keeps them is named"
        reader.close()
        report = inspect(tmp_path)
        assert (report["readers"], report["kept_on_disk"]) == ([], [kept | {"readers": []}]), "they have ended"
        source.compact()
        assert inspect(tmp_path)["kept_on_disk"] == []


def test_a_store_is_closed_only_when_nothing_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next writer reuses the new shard's number, so a late write would be lost."""
    buffer = writer_to(tmp_path)
    add_each(buffer, range(4))
    closing = threading.Thread(target=buffer.close)
    publish = LocalDirectory.publish
    waited: list[bool] = []

    def published(self: LocalDirectory, files: Sequence[EncodedFile]) -> None:
        if threading.current_thread() is threading.main_thread() and not waited:
            closing.start()
            closing.join(1)
            waited.append(closing.is_alive())
        publish(self, files)

    monkeypatch.setattr(LocalDirectory, "publish", published)
    with pytest.raises(errors.StoreClosedError):
        buffer.compact()
    closing.join()
    assert waited == [True]
    writer_to(tmp_path).close()
    assert contents_of(tmp_path) == list(range(4))
    assert not verify(tmp_path).problems
