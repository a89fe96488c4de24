"""``refresh()``: its results, its cost, and the data that stays valid meanwhile."""

from __future__ import annotations

import multiprocessing
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.stores import add_each, filled, keys_of, opened, reader_of, writer_to
from tests.support.waiting import wait_until
from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import Reader, Retention, TrajectoryReplayBuffer, WriterOptions, annotate, errors
from trajstore._core.base.machine_code import kernels
from trajstore._core.buffer.sink import StoreSink
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import walk
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.files.local import LocalDirectory
from trajstore._core.reading import plan
from trajstore._core.store.catalog import Catalog
from trajstore.samplers import EpochSampler


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_an_empty_store_is_followed(tmp_path: Path, rank: int) -> None:
    with writer_to(tmp_path) as source:
        reader = TrajectoryReplayBuffer(sample_window_size=0)
        reader.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=2)
        source.add_trajectories([witness(key) for key in range(4)])
        source.flush()
        assert reader.refresh()
        assert [check_trajectory(reader.get(2 * rank + at)) for at in range(2)] == [2 * rank, 2 * rank + 1]
        reader.close()


# -- cost -------------------------------------------------------------------------------------------


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every directory that is opened from now on."""
    urls: list[str] = []
    original = Catalog.open.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Catalog], directory: object) -> Catalog:
        urls.append(directory.url)  # type: ignore[attr-defined]
        return original(cls, directory)  # type: ignore[no-any-return]

    monkeypatch.setattr(Catalog, "open", classmethod(counted))
    return urls


@patch("trajstore._core.writing.commit_log.LOG_BYTES", 1 << 12)  # the index is written several times
def test_what_is_new_is_followed_without_opening_the_store_again(tmp_path: Path, openings: list[str]) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=8)) as source:
        add_each(source, range(8))
        reader = reader_of(tmp_path)
        check_batch(reader.sample(8))
        contents = reader._live.contents
        openings.clear()
        for key in range(8, 60):
            add_each(source, [key])
            mapped = reader.get_stats()["mapped_shards"]
            assert reader.refresh()
            assert reader.get_stats()["mapped_shards"] >= mapped - 1, "maps of remaining shards stay"
            assert reader.trajectory_ids.tolist() == source.trajectory_ids.tolist()
            check_batch(reader.sample(8))
        assert openings == []
        assert reader._live.contents is contents
        reader.close()


def test_an_idle_refresh_of_a_run_reads_no_file_of_its_ranks_and_misses_no_commit(tmp_path: Path) -> None:
    for rank in range(3):
        filled(tmp_path / f"rank_{rank}", [rank])
    with Reader.open(tmp_path) as reader:
        assert not reader.refresh()
        with patch.object(LocalDirectory, "read", side_effect=AssertionError("a file is read")):
            assert not reader.refresh()
        filled(tmp_path / "rank_1", [3])  # opened and closed meanwhile: the log is empty again
        assert reader.refresh()
        with writer_to(tmp_path / "rank_2") as writer:
            for key in (4, 5):  # begins a segment of the log; goes on in it
                assert not reader.refresh()
                add_each(writer, [key])
                assert reader.refresh()
            assert not reader.refresh()
            writer.points.save(1)
            add_each(writer, [6])
            assert reader.refresh()
            assert not reader.refresh()
            writer.points.rollback(1)
            assert reader.refresh()
        assert sorted(check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()) == [*range(6)]


@patch("trajstore._core.writing.commit_log.LOG_BYTES", 1 << 12)
def test_a_follower_that_comes_too_late_for_the_log_loads_again(tmp_path: Path, openings: list[str]) -> None:
    with writer_to(tmp_path) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        openings.clear()
        add_each(source, range(1, 60))
        assert reader.refresh()
        assert openings != []
        assert [check_trajectory(reader.get(number)) for number in range(60)] == list(range(60))
        add_each(source, [60])
        openings.clear()
        assert reader.refresh()
        assert openings == []
        assert check_trajectory(reader.get(60)) == 60
        reader.close()


def test_nothing_grows_with_what_has_come_and_gone(tmp_path: Path) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=4), cache_size=2) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        for key in range(1, 90):
            add_each(source, [key])
            assert reader.refresh()
            assert check_trajectory(reader.get(key)) == key
            assert check_trajectory(source.get(max(0, key - 3))) == max(0, key - 3)
        for buffer in (source, reader):
            contents = buffer._live.contents
            assert len(contents.index.before) <= 65
            assert len(contents.addresses.first) <= 64
            assert contents.addresses.mapped <= 5
            assert len(contents.sources[0].catalog.index.before) <= 65
        reader.close()


# -- Readers beside a writer in threads and forked processes never see a torn or vanished row --


def test_nobody_samples_what_was_added_and_evicted_between_two_refreshes(tmp_path: Path) -> None:
    """Deletes files before the reader learns of it; the reader must never show a state in which they existed."""

    class Watched:
        """A lock that reads all visible data whenever it is released."""

        def __init__(self, lock: Any) -> None:
            self._lock, self._depth, self.reads = lock, 0, 0
            self.acquire, self.release = lock.acquire, lock.release  # used by the fork handlers

        def __enter__(self) -> None:
            self._lock.__enter__()
            self._depth += 1

        def __exit__(self, *error: object) -> None:
            self._depth -= 1
            self._lock.__exit__(*error)
            if not self._depth and error[0] is None:
                self._depth += 1  # reading acquires it too
                self.reads += 1
                for number in reader.trajectory_ids.tolist():
                    check_trajectory(reader.get(number))
                self._depth -= 1

    with writer_to(tmp_path, retention=Retention(max_trajectories=2), enable_cache=False) as source:
        add_each(source, range(3))
        reader = reader_of(tmp_path)
        add_each(source, range(3, 9))
        lock = Watched(reader._live.contents.lock)
        reader._live.contents.lock = lock  # type: ignore[assignment]
        assert reader.refresh()
        assert lock.reads > 0
        assert reader.trajectory_ids.tolist() == [7, 8]
        reader.close()


def test_a_snapshot_between_the_two_reads_of_opening(tmp_path: Path) -> None:
    class Interrupted(LocalDirectory):
        def listing(self, below: str = "") -> tuple[list[str], list[str]]:
            if below == "log" and interruptions:
                interruptions.pop()()
            return super().listing(below)

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as source:
        add_each(source, [0])
        assert isinstance(source._sink, StoreSink)
        interruptions = [source._sink.writer.log.snapshot]
        catalog = Catalog.open(Interrupted(tmp_path))
        assert interruptions == []
        assert catalog.index["trajectory_id"].tolist() == [0]
        add_each(source, [1])
        interruptions.append(source._sink.writer.log.snapshot)
        assert catalog.refresh()
        assert catalog.index["trajectory_id"].tolist() == [0, 1]


# -- workers ----------------------------------------------------------------------------------------


def sample_in_child(buffer: TrajectoryReplayBuffer, results: Any) -> None:
    try:
        keys = check_batch(buffer.sample(32))
        try:
            buffer.add_trajectories([witness(1)])
            results.put("adding in a child was possible")
        except errors.StoreClosedError as error:
            results.put("a reader here, or record to a directory per process" in str(error) and len(keys) == 32)
        buffer.close()
    except BaseException as error:  # report any error to the parent
        results.put(repr(error))


@pytest.mark.parametrize("held", ["contents", "queue"])
def test_forked_workers_sample_whatever_locks_other_threads_hold(tmp_path: Path, held: str) -> None:
    context = multiprocessing.get_context("fork")
    results, begun, forked = context.Queue(), threading.Event(), threading.Event()
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=0)) as buffer:
        buffer.add_trajectories([witness(key) for key in range(8)])
        check_batch(buffer.sample(8))
        buffer.flush()  # no thread of the buffer holds a lock that the fork waits for
        writer = buffer._sink.writer

        def hold() -> None:
            if held == "contents":  # the fork waits for it
                with buffer._live.contents.lock:
                    begun.set()
                    forked.wait(0.2)
            else:  # it stays locked in the child
                with buffer._sink.lock, writer.log._lock, writer.queue._lock:
                    begun.set()
                    forked.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        begun.wait()
        child = context.Process(target=sample_in_child, args=(buffer, results), daemon=True)
        child.start()
        child.join(300)
        hung = child.is_alive()
        child.kill()
        forked.set()
        holder.join()
        assert not hung, "a lock was held by another thread when the child was forked"
        assert results.get(timeout=600) is True


@pytest.mark.parametrize("rounds", [12, pytest.param(500, marks=pytest.mark.campaign)])
def test_threads_and_forked_processes_that_copy_large_batches_get_equal_rows(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.add_trajectories([witness(key) for key in range(200)])
    drawn = [buffer.draw(count) for count in (2, 200, 800)]
    plain = [dict(walk(buffer.read(rows), ())) for rows in drawn]
    # Every batch is large, and pieces are small, so that helpers start and end often.
    for name, value in {"_SPLIT_BYTES": 0, "_BYTES_PER_HELPER": 1, "_PIECE_BYTES": 4096}.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(plan, "_helper_count", lambda: 3)
    plan._helpers.clear()

    def read(count: int) -> None:
        for _ in range(count):
            for rows, expected in zip(drawn, plain, strict=True):
                batch = dict(walk(buffer.read(rows), ()))
                assert batch.keys() == expected.keys()
                assert all(torch.equal(batch[name], expected[name]) for name in expected)
        assert sum(thread.name == "trajstore-gather" and thread.is_alive() for thread in threading.enumerate()) >= 3

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(read, rounds) for _ in range(3)]
        for _ in range(rounds):
            child = context.Process(target=read, args=(3,))
            child.start()
            child.join()
            assert child.exitcode == 0
        for thread in threads:
            thread.result()
    assert plan._helpers["record"][kernels.HELPERS] == 3
    buffer.close()


def read_in_child(reader: TrajectoryReplayBuffer, gone: Any, results: Any) -> None:
    assert gone.wait(300)
    try:
        results.put(check_trajectory(reader.get(0)))
    except errors.CorruptStoreError as error:
        results.put(str(error))


def test_a_forked_child_is_told_that_its_parent_let_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gone, results = context.Event(), context.Queue()
    with opened(tmp_path) as writer:
        add_each(writer, range(2))
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            child = context.Process(target=read_in_child, args=(reader, gone, results), daemon=True)
            child.start()
            writer.evict([0])
            reader.refresh()
            wait_until(lambda: (writer.flush(), len(list((tmp_path / "shards").iterdir())))[1] == 1)
            gone.set()
            assert "this process was forked, and its parent may have let go of it since" in results.get(timeout=600)
            child.join(600)


# -- runs of ranks ----------------------------------------------------------------------------------

RANKS = 3
CLOCK = "trajstore._core.writing.commit_log.microseconds"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[TrajectoryReplayBuffer]]:
    """Yield the writers of a run in a folder, with a commit each."""
    writers = [writer_to(tmp_path / f"rank_{rank}", enable_cache=False) for rank in range(RANKS)]
    for rank, writer in enumerate(writers):
        add_each(writer, [rank])
    yield writers
    for writer in writers:
        writer.close()


def as_opened(reader: Reader, run: Path) -> list[int]:
    """Compare all that a reader of a run shows with what opening the run shows; return the keys."""
    with Reader.open(run) as fresh:
        assert reader.trajectory_ids.tolist() == fresh.trajectory_ids.tolist()
        assert reader.query().rows() == fresh.query().rows()
        assert list(keys_of(reader).values()) == list(keys_of(fresh).values())
        return list(keys_of(reader).values())


def test_a_run_is_followed_without_opening_its_stores_again(
    tmp_path: Path, ranks: list[TrajectoryReplayBuffer], openings: list[str]
) -> None:
    with Reader.open(tmp_path) as reader:
        contents, rows = reader._live.contents, [torch.ones(witness(1).rewards.shape[:2])]  # type: ignore[union-attr]
        openings.clear()
        add_each(ranks[1], range(3, 6))
        add_each(ranks[0], [6])
        assert reader.refresh()
        assert len(reader) == 7
        annotate(ranks[1], 0, {"score": 1, "tag": "good", "rows": rows})
        ranks[1].evict([1])
        ranks[1].compact()  # moves what stays of a shard
        add_each(ranks[2], [7])
        ranks[2].evict([1])  # seen neither before nor after
        assert reader.refresh()
        assert reader.trajectory_ids.tolist() == [*reader.trajectory_ids[:5], reader.trajectory_ids[5]]
        assert reader.get("1/0").notes["rows"].equal(rows[0])
        assert not reader.refresh()
        assert openings == []
        assert reader._live.contents is contents
        assert sorted(as_opened(reader, tmp_path)) == [0, 1, 2, 4, 5, 6]


def test_a_commit_of_a_run_that_is_seen_late_comes_before_younger_ones(
    tmp_path: Path, ranks: list[TrajectoryReplayBuffer], openings: list[str]
) -> None:
    sampler = EpochSampler()
    with Reader.open(tmp_path, seed=1) as reader:
        now = int(reader._live.contents.index["committed"].max())
        openings.clear()
        for rank, key, time in ((0, 3, 30), (2, 4, 10), (1, 5, 10), (1, 6, 20), (0, 7, 30), (2, 8, 31)):
            with patch(CLOCK, lambda time=time: now + time):
                add_each(ranks[rank], [key])
            assert reader.refresh()
            check_batch(reader.sample(4, sampler=sampler))
        assert openings == []
        assert as_opened(reader, tmp_path) == [0, 1, 2, 5, 4, 6, 3, 7, 8]


@pytest.mark.parametrize(
    "what", ["joins", "goes back", "is closed", "repeats", "drops one of two", "has a clock set back"]
)
def test_a_run_is_loaded_again_after_what_cannot_be_followed(
    what: str, tmp_path: Path, ranks: list[TrajectoryReplayBuffer], openings: list[str]
) -> None:
    def repeat() -> None:
        ranks[2]._sink.add_flattened(FlatTrajectories.runs([flatten(witness(0))]), ranks[0]._uuids[:1].tobytes())
        ranks[2].flush()

    ranks[0].points.save(1)
    add_each(ranks[0], [3])
    if what == "drops one of two":
        repeat()
    with Reader.open(tmp_path) as reader:
        openings.clear()
        if what == "joins":
            ranks.append(writer_to(tmp_path / f"rank_{RANKS}"))
        elif what == "goes back":
            ranks[0].points.go_to(1)
        elif what == "is closed":
            add_each(ranks[0], [4])
            ranks[0].close()
        elif what == "repeats":
            repeat()
        elif what == "drops one of two":
            ranks[0].evict([0])  # the other one is shown now
        else:
            ranks[0].evict([0, 1])
            with patch(CLOCK, lambda: 5):
                add_each(ranks[0], [4])
        assert reader.refresh()
        assert openings != []
        as_opened(reader, tmp_path)
        openings.clear()
        add_each(ranks[1], [5])
        assert reader.refresh()
        assert openings == [], "and followed afterwards"
        as_opened(reader, tmp_path)


def test_a_run_whose_points_name_more_ranks_is_refused_as_by_opening_it(
    tmp_path: Path, ranks: list[TrajectoryReplayBuffer]
) -> None:
    with Reader.open(tmp_path) as reader:
        ranks[0]._own_store.save(1, {}, RANKS + 1)
        add_each(ranks[0], [3])
        for refused in (reader.refresh, lambda: Reader.open(tmp_path)):
            with pytest.raises(errors.IncompleteCheckpointError, match=f"rank_{RANKS}"):
                refused()
        assert len(reader) == RANKS
        with writer_to(tmp_path / f"rank_{RANKS}"):
            assert reader.refresh()
            as_opened(reader, tmp_path)


def test_a_damaged_record_of_a_rank_changes_nothing(tmp_path: Path, ranks: list[TrajectoryReplayBuffer]) -> None:
    with Reader.open(tmp_path) as reader:
        add_each(ranks[0], [3])
        ranks[0].evict([0])
        (log,) = (tmp_path / "rank_2" / "log").iterdir()
        sound = log.read_bytes()
        body = b'{"generation":2,"operation":"evict","ids":[[5,1]]}'
        log.write_bytes(sound + b"%08x %b\n" % (zlib.crc32(body), body))
        before = reader.trajectory_ids.tolist()
        for _ in range(2):
            with pytest.raises(errors.CorruptStoreError, match="generation 2: not a list of id ranges"):
                reader.refresh()
            assert reader.trajectory_ids.tolist() == before
            assert sorted(keys_of(reader).values()) == [0, 1, 2], "files of what is shown are kept"
        log.write_bytes(sound)
        assert reader.refresh()
        assert sorted(as_opened(reader, tmp_path)) == [1, 2, 3]


def test_nothing_of_a_run_grows_with_what_has_come_and_gone(
    tmp_path: Path, ranks: list[TrajectoryReplayBuffer], openings: list[str]
) -> None:
    with Reader.open(tmp_path) as reader:
        for key in range(3, 90):
            writer = ranks[key % RANKS]
            add_each(writer, [key])
            writer.evict(writer.trajectory_ids[:-2].tolist())
            assert reader.refresh()
            check_batch(reader.sample(8))
        contents = reader._live.contents
        assert len(contents.index.before) <= 65
        assert len(contents.addresses.first) <= 64
        assert contents.addresses.mapped <= 2 * RANKS
        catalogs = [source.catalog for source in contents.sources]  # type: ignore[attr-defined]
        assert not any(catalog._live or len(catalog.pinned) for catalog in catalogs)
        as_opened(reader, tmp_path)
