"""The write path: no hang, no poisoned queue, and no failure after a durable commit."""

from __future__ import annotations

import errno
import gc
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import programs
from tests.stores import add_each, contents_of, opened
from tests.support.waiting import wait_until
from tests.support.witness import check_trajectory, witness
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats import FORMATS
from trajstore._core.reading.contents import Contents
from trajstore._core.store.additions import NewEntries
from trajstore._core.writing.queue import WriteQueue
from trajstore.errors import PartlyAddedError, StoreWriteError, UnwritableTrajectoryError
from trajstore.operations.verify import verify

# -- a failing add releases its resources ------------------------------------------------------------

STEPS = [
    "trajstore._core.writing.queue.WriteQueue.reserve",
    "trajstore._core.writing.queue.WriteQueue.take_ids",
    "trajstore._core.reading.contents.Contents.add",
    "trajstore._core.reading.contents.Contents._trim",
    "trajstore._core.writing.queue.WriteQueue.submit",
    "trajstore._core.buffer.sink.copied",
    "trajstore._core.store.additions.columns_of",
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split(".")[-1])
def test_whatever_a_step_of_add_raises_the_store_goes_on(tmp_path: Path, step: str) -> None:
    with opened(tmp_path / "store") as buffer:
        for number, error in enumerate((MemoryError(), KeyboardInterrupt(), OverflowError("too large"))):
            with mock.patch(step, side_effect=error), pytest.raises(type(error)):
                buffer.add_trajectories([witness(7)])
            assert len(buffer) == number
            ids = buffer.add_trajectories([witness(number)])
            buffer.flush(timeout=600)
            assert buffer.get_stats()["pending_bytes"] == 0
            assert buffer.wait(ids) is True
    assert contents_of(tmp_path / "store") == [0, 1, 2]


# -- trajectories that cannot be written -------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[int], error: Exception) -> None:
    """Make the format refuse the trajectories with these ids."""
    from trajstore._core.writing import publishing

    real = publishing.entries_to_json

    def entries(some: NewEntries) -> Any:
        if bad.intersection(some.ids):
            raise error
        return real(some)

    monkeypatch.setattr(publishing, "entries_to_json", entries)


def test_one_that_cannot_be_written_is_set_aside_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {3, 9}, UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"))
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=30.0)) as buffer:
        buffer.add_trajectories([witness(key) for key in range(12)])
        with pytest.raises(UnwritableTrajectoryError, match=r"trajectories \[.*3.*surrogates not allowed") as error:
            buffer.flush()
        assert sorted(error.value.ids) == [3, 9]
        assert buffer.get_stats()["set_aside"] == 2
        assert buffer.get_stats()["pending_bytes"] == 0
        buffer.flush()  # reported once
        assert buffer.trajectory_ids.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 10, 11]
        assert buffer.add_trajectories([witness(12)]) == [12]
    assert contents_of(tmp_path / "store") == [0, 1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    assert verify(tmp_path / "store").sound


def test_the_next_add_and_close_tell_of_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0, 2}, ValueError("no such value"))
    buffer = opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0))
    buffer.add_trajectories([witness(0)])
    wait_until(lambda: buffer.get_stats()["set_aside"] == 1)
    with pytest.raises(UnwritableTrajectoryError, match="no such value"):
        buffer.add_trajectories([witness(1)])
    buffer.add_trajectories([witness(1)])
    buffer.add_trajectories([witness(2)])
    with pytest.raises(UnwritableTrajectoryError, match="no such value"):
        buffer.close()
    assert contents_of(tmp_path / "store") == [1]


def test_an_error_that_may_be_anybodys_is_taken_for_the_trajectorys_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1}, RuntimeError("odd"))
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=30.0)) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        failures: list[StoreWriteError] = []
        while not failures or not isinstance(failures[-1], UnwritableTrajectoryError):
            with pytest.raises(StoreWriteError, match="odd") as error:
                buffer.flush()
            failures.append(error.value)
        assert failures[-1].ids == [1]
    assert contents_of(tmp_path / "store") == [0, 2]


def test_a_name_that_the_disk_never_takes_is_the_trajectorys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalDirectory.publish
    seen: list[int] = []

    def publish(self: LocalDirectory, files: Sequence[Any]) -> None:
        if any(file.name.startswith("shards/") for file in files) and not seen:
            seen.append(1)
            raise OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300)
        real(self, files)

    monkeypatch.setattr(LocalDirectory, "publish", publish)
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(0)])
        with pytest.raises(UnwritableTrajectoryError, match="File name too long"):
            buffer.flush()
    assert contents_of(tmp_path / "store") == []


# -- no failure after a durable commit ---------------------------------------------------------------


def test_a_listener_that_fails_makes_no_append_happen_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "store") as buffer:
        with mock.patch.object(Contents, "committed", side_effect=RuntimeError("the view is broken")):
            add_each(buffer, [0])
        buffer.flush()
        add_each(buffer, [1])
        assert [check_trajectory(buffer.get(number)) for number in (0, 1)] == [0, 1]
    assert contents_of(tmp_path / "store") == [0, 1]
    assert verify(tmp_path / "store").sound
    assert "could not be shown" in caplog.text


def test_what_is_on_disk_and_not_in_memory_is_never_written_over(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store")
    with mock.patch("trajstore._core.store.catalog.Catalog.add", side_effect=MemoryError):
        add_each(buffer, [0])
    buffer.add_trajectories([witness(1)])
    with pytest.raises(StoreWriteError, match="open it again"):
        buffer.flush()
    with pytest.raises(StoreWriteError, match="loses 1 trajectory from id 1 on"):
        buffer.close()
    assert contents_of(tmp_path / "store") == [0]
    with opened(tmp_path / "store") as buffer:
        assert buffer.add_trajectories([witness(2)]) == [1]
    assert contents_of(tmp_path / "store") == [0, 2]


# -- metadata for tools ------------------------------------------------------------------------------


def test_metadata_of_a_live_store_tells_what_is_flushed(tmp_path: Path) -> None:
    def said() -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads((tmp_path / "store" / "metadata.json").read_text())
        return metadata

    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(key) for key in range(5)])
        buffer.flush()
        wait_until(lambda: said()["size"] == said()["trajectory_counter"] == 5)  # renewed at most once a second
        assert said()["generation"] == 0  # the snapshot's generation, on which readers rely
        buffer.add_trajectories([witness(5)])
        wait_until(lambda: said()["size"] == 6)
        assert contents_of(tmp_path / "store") == list(range(6))
    assert said()["size"] == 6


# -- interpreter exit --------------------------------------------------------------------------------

EXIT = """
import sys, threading
from trajstore import TrajectoryReplayBuffer
from trajstore._core.formats import FORMATS
from trajstore._core.store.additions import NewEntries
from tests.support.witness import witness
path, how = sys.argv[1:]
kinds = {name: {} for name in FORMATS}
if how == "thread":
    kinds["pt"] = {"mirror": path + "mirror"}
else:
    kinds["zstd"] = {"trajectory_format": "zarr", "format_options": {"codec": "zstd"}}
buffers = [
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=path + kind, **{"trajectory_format": kind, **options})
    for kind, options in kinds.items()
]
def add(first):
    for key in range(first, first + 10):
        for buffer in buffers:
            buffer.add_trajectories([witness(key)])
add(0)
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise ValueError("of the user")
if how == "thread":
    def late():
        threading.main_thread().join()
        for thread in threading.enumerate():
            if thread.name == "trajstore-mirror":
                thread.join()
        add(10)
    threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    "how", ["thread", *(pytest.param(how, marks=pytest.mark.campaign) for how in ("exit", "raise", "end"))]
)
def test_what_nobody_closed_is_written_at_exit(tmp_path: Path, how: str) -> None:
    ended = programs.run(tmp_path, EXIT, f"{tmp_path}/", how)
    assert ended.returncode == {"exit": 3, "raise": 1}.get(how, 0)
    for kind in (*FORMATS, *(["zstd"] if how != "thread" else [])):
        assert contents_of(tmp_path / kind) == list(range(20 if how == "thread" else 10)), ended.stderr
    assert "Traceback" not in ended.stderr or how == "raise"
    if how == "thread":
        assert contents_of(tmp_path / "mirror") == list(range(10))
        assert "pt: closed with 10 trajectories that are not on the mirror" in ended.stderr
        assert ended.stderr.count("not on the mirror") == 1, "those added before the end are"


# -- lists larger than a shard -----------------------------------------------------------------------


def test_the_ids_of_what_was_added_before_a_later_part_failed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = WriteQueue.submit
    calls: list[int] = []

    def submit(self: WriteQueue, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        real(self, *arguments)

    with opened(tmp_path / "store", writer=WriterOptions(shard_bytes=1)) as buffer:
        with monkeypatch.context() as patched:
            patched.setattr(WriteQueue, "submit", submit)
            with pytest.raises(PartlyAddedError, match=r"no room; the first 2 of 5 trajectories were added") as error:
                buffer.add_trajectories([witness(key) for key in range(5)])
        assert error.value.ids == [0, 1] == buffer.trajectory_ids.tolist()
        assert isinstance(error.value.__cause__, MemoryError)
        buffer.add_trajectories([witness(key) for key in range(2, 5)])
    assert contents_of(tmp_path / "store") == [0, 1, 2, 3, 4]


# -- ``on_commit``: permitted calls, and that no operation waits for it --


def test_on_commit_may_call_the_buffer(tmp_path: Path) -> None:
    committed: list[int] = []
    done = threading.Event()

    def on_commit(ids: Sequence[int]) -> None:
        assert threading.current_thread().name == "trajstore-on-commit"
        committed.extend(ids)
        if 0 in ids:
            buffer.evict([0])
            add_each(buffer, [5])
            buffer.sample(2)
            buffer.save_checkpoint(tmp_path / "checkpoint")
        if 3 in ids:
            done.set()

    with opened(tmp_path / "store", on_commit=on_commit) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        assert done.wait(600)
    assert committed == [0, 1, 2, 3]
    assert contents_of(tmp_path / "store") == [1, 2, 5]
    assert contents_of(tmp_path / "checkpoint") == [1, 2, 5]


def test_flush_does_not_wait_for_a_callback_that_waits_for_the_caller(tmp_path: Path) -> None:
    mine = threading.Lock()
    committed: list[int] = []

    def on_commit(ids: Sequence[int]) -> None:
        with mine:
            committed.extend(ids)

    with opened(tmp_path / "store", on_commit=on_commit) as buffer, mine:
        add_each(buffer, [0])
        assert committed == []
    assert committed == [0]


def test_a_callback_may_close_the_buffer_and_does_not_keep_it_alive(tmp_path: Path) -> None:
    closed = threading.Event()

    def on_commit(ids: Sequence[int]) -> None:
        buffer.close()
        closed.set()

    buffer = opened(tmp_path / "store", on_commit=on_commit)
    buffer.add_trajectories([witness(0)])
    assert closed.wait(600)
    assert contents_of(tmp_path / "store") == [0]

    class Holder:
        buffer: TrajectoryReplayBuffer

        def on_commit(self, ids: Sequence[int]) -> None:
            pass

    holder = Holder()
    holder.buffer = opened(tmp_path / "other", on_commit=holder.on_commit)
    del holder
    gc.collect()
    with opened(tmp_path / "other"):  # the lock is free
        pass
