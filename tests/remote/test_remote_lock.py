"""The writer's lock and readers' leases in an object store: heartbeats, takeover and messages."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import orjson
import pytest
import torch

from tests.stores import add_each, contents_of, keys_at, opened
from tests.support.directory import publish
from tests.support.waiting import wait_until
from tests.support.witness import check_trajectory, witness
from trajstore import annotate
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.holder import LOCK_NAME, holder_document
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.writing import commit_log, opening
from trajstore._core.writing.fencing import fence
from trajstore._core.writing.unattended import held_log
from trajstore.errors import CorruptStoreError, StoreError, StoreLockedError, StoreWriteError, WriterFencedError
from trajstore.operations.verify import verify
from trajstore.remote import object_store
from trajstore.remote.answers import ObjectInfo
from trajstore.remote.directory import RemoteDirectory
from trajstore.remote.leases import RemoteReaderLease
from trajstore.remote.object_store import ObjectStore
from trajstore.remote.uploads import upload


def lock_text(**changes: Any) -> bytes:
    return orjson.dumps({**holder_document(), "token": "other", "ttl": 60.0, "heartbeat": time.time(), **changes})


def write_lock(directory: Directory, text: bytes) -> None:
    directory.publish([EncodedFile(LOCK_NAME, [text])])


def is_refused(call: Callable[[], object], message: str = "") -> bool:
    """Return whether a call is refused because of the lock, with ``message`` in the error."""
    try:
        call()
    except StoreLockedError as error:
        return message in str(error)
    return False


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_live_lock_of_another_machine_is_respected(memory_url: str) -> None:
    directory = open_directory(memory_url)
    write_lock(directory, lock_text(host="elsewhere", pid=dead_process()))
    with pytest.raises(StoreLockedError, match=r"on elsewhere since \d{4}-"):
        directory.lock_writer()
    assert b"elsewhere" in directory.read(LOCK_NAME)


def test_lock_without_heartbeat_is_taken_over(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=4)
    write_lock(directory, lock_text(host="elsewhere", heartbeat=time.time() - 61))
    with directory.lock_writer():
        assert b"elsewhere" not in directory.read(LOCK_NAME)
        with pytest.raises(StoreLockedError):
            open_directory(memory_url).lock_writer()
    assert directory.names() == []


def test_lock_of_a_dead_process_of_this_machine_is_taken_over(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=0.2)
    with directory.lock_writer():
        mine = orjson.loads(directory.read(LOCK_NAME))
    write_lock(directory, orjson.dumps({**mine, "token": "other", "ttl": 3600, "pid": dead_process()}))
    directory.lock_writer().release()
    in_another_container = {**mine, "token": "other", "ttl": 3600, "pid": dead_process(), "pid_namespace": 1}
    write_lock(directory, orjson.dumps(in_another_container))
    with pytest.raises(StoreLockedError):
        directory.lock_writer()


def test_the_lock_of_an_uploaded_store_holds_only_while_its_process_lives(memory_url: str) -> None:
    directory, local = open_directory(memory_url), orjson.dumps(holder_document())
    for text in (b"", orjson.dumps({**holder_document(), "pid": dead_process()})):
        write_lock(directory, text)
        directory.lock_writer().release()
    write_lock(directory, local)
    assert is_refused(directory.lock_writer, "(if no such process runs, delete writer.lock)")


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"heartbeat": "x", "ttl": 1}', b'{"heartbeat": 0}'])
def test_unreadable_lock_is_left_to_people(memory_url: str, text: bytes) -> None:
    directory = open_directory(memory_url)
    write_lock(directory, text)
    with pytest.raises(StoreLockedError, match=r"another process.*delete writer\.lock"):
        directory.lock_writer()
    assert directory.read(LOCK_NAME) == text


def test_heartbeat_goes_on(s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = RemoteDirectory(s3_url, lock_ttl=6, **s3_options)
    with directory.lock_writer():
        first = orjson.loads(directory.read(LOCK_NAME))["heartbeat"]
        wait_until(lambda: orjson.loads(directory.read(LOCK_NAME))["heartbeat"] > first)
        publish(directory, a=b"1")
        with pytest.raises(StoreLockedError):
            open_directory(s3_url, **s3_options).lock_writer()


def test_writer_that_lost_its_lock_cannot_write(memory_url: str) -> None:
    directory, other = RemoteDirectory(memory_url, lock_ttl=0.1), open_directory(memory_url)
    lock = directory.lock_writer()

    def lost() -> bool:
        write_lock(other, lock_text(host="elsewhere", pid=1))  # a heartbeat in flight may overwrite it
        return is_refused(lambda: publish(directory, a=b"1"))

    wait_until(lost)
    for call in (
        lambda: publish(directory, a=b"1"),
        lambda: directory.append("log/1", b"x"),
        lambda: directory.remove(["a"]),
    ):
        with pytest.raises(StoreLockedError, match=r"taken over.*process 1 on elsewhere"):
            call()
    lock.release()
    assert b"elsewhere" in other.read(LOCK_NAME), "the lock of the other writer must stay"


def test_a_writer_that_lost_its_lock_is_told_so_when_it_gives_values_by_row(memory_url: str) -> None:
    other = open_directory(memory_url)
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, storage_options={"lock_ttl": 0.1})
    add_each(buffer, [0])
    rows = torch.zeros(buffer.get(0).rewards.shape[:2])

    def lost() -> bool:
        write_lock(other, lock_text(host="elsewhere", pid=1))
        return is_refused(lambda: annotate(buffer, 0, {"rows": [rows]}), "was taken over")

    wait_until(lost)
    with suppress(StoreError):
        buffer.close()
    assert b"elsewhere" in other.read(LOCK_NAME), "the lock of the other writer must stay"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_point_that_another_process_removed_while_it_was_saved_is_not_reported_as_saved(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Also where the lock was lost after the point's file was written and confirmed."""
    other, load = open_directory(memory_url), Catalog.load_pins

    def removed_first(catalog: Catalog) -> None:
        if is_lost:
            write_lock(other, lock_text(host="elsewhere", pid=1))
        other.remove(["pins/step-1.0.json"])
        load(catalog)

    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url)
    add_each(buffer, [0])
    monkeypatch.setattr(Catalog, "load_pins", removed_first)
    error = WriterFencedError if is_lost else StoreWriteError
    with pytest.raises(error, match="was taken over" if is_lost else r"'step-1\.0' was removed while it was saved"):
        buffer.points.save(1)
    monkeypatch.undo()
    with suppress(StoreError):
        buffer.close()


def test_going_to_a_point_that_an_heir_removed_names_the_heir(memory_url: str) -> None:
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url)
    add_each(buffer, [0])
    buffer.points.save(1, {"step": 1})
    other = open_directory(memory_url)
    other.remove([name for name in other.listing("pins")[0] if name.endswith(".state")])
    with pytest.raises(CorruptStoreError, match="missing; restore it from a copy"):
        buffer.points.go_to(1)
    write_lock(other, lock_text(host="elsewhere", pid=1))
    with pytest.raises(WriterFencedError, match="was taken over"):
        buffer.points.go_to(1)
    with suppress(StoreError):
        buffer.close()


def test_writer_that_cannot_renew_its_lock_pauses(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=0.1)
    lock = directory.lock_writer()

    def stopped() -> bool:
        return is_refused(lambda: publish(directory, a=b"1"), "could not be renewed")

    with mock.patch.object(ObjectStore, "read", side_effect=OSError(5, "unreachable", "writer.lock")):
        wait_until(stopped)
    wait_until(lambda: not stopped())
    lock.release()
    assert directory.names() == ["a"]
    publish(directory, b=b"2")  # the lock is free, so nothing is refused


def test_one_of_many_gets_the_lock(s3_url: str, s3_options: dict[str, Any]) -> None:
    with ThreadPoolExecutor(8) as pool, ExitStack() as locks:
        calls = [lambda: locks.enter_context(open_directory(s3_url, **s3_options).lock_writer())] * 16
        assert sum(pool.map(is_refused, calls)) == 15


# -- writers after a takeover ------------------------------------------------------------------------


@pytest.fixture
def s3_url_soon_lost(s3_url: str, s3_options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a store URL, and options with which its lock expires soon."""
    return s3_url, {**s3_options, "lock_ttl": 0.5}


@pytest.fixture
def take_over() -> Iterator[Callable[[str, dict[str, Any]], Directory]]:
    """Yield a function that takes the lock from a writer without heartbeats and returns the new holder's directory."""
    with ExitStack() as locks:

        def taken(url: str, options: dict[str, Any]) -> Directory:
            directory = RemoteDirectory(url, **options)
            wait_until(lambda: not is_refused(lambda: locks.enter_context(directory.lock_writer())), pause=0.1)
            return directory

        yield taken


class Frozen:
    """Blocks all requests of one directory until it is thawed, as if its process was stopped."""

    def __init__(self, directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        self.reached, self.thawed = threading.Event(), threading.Event()
        objects, at_last = directory._objects, at
        for name in ("create", "put", "put_if", "delete", "delete_if", "stamped", "version", "read"):
            monkeypatch.setattr(objects, name, self._stopping(name, getattr(objects, name), at_last))

    def _stopping(self, request: str, real: Callable[..., Any], at: str) -> Callable[..., Any]:
        def call(name: str, *arguments: Any) -> Any:
            if f"{request} {name}".startswith(at):
                self.reached.set()
            if self.reached.is_set():
                assert self.thawed.wait(600)
            return real(name, *arguments)

        return call


@pytest.mark.parametrize(
    ("request_", "change"),
    [
        ("put_if metadata.json", lambda directory: publish(directory, **{"metadata.json": b"late"})),
        ("create log/1", lambda directory: directory.append("log/1", b"late")),
        ("put_if pins/a", lambda directory: publish(directory, pins__a=b"late")),
        ("version pins/b", lambda directory: publish(directory, pins__b=b"late")),
        ("delete_if pins/a", lambda directory: directory.remove(["pins/a"])),
        ("create shards/1", lambda directory: publish(directory, shards__1=b"late")),
    ],
)
def test_what_a_frozen_writer_was_sending_changes_nothing_of_its_heirs(
    request_: str,
    change: Callable[[Directory], None],
    s3_url_soon_lost: tuple[str, dict[str, Any]],
    take_over: Callable[[str, dict[str, Any]], Directory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = s3_url_soon_lost
    directory = RemoteDirectory(url, **options)
    lock = directory.lock_writer()
    publish(directory, **{"metadata.json": b"1"}, pins__a=b"1")
    frozen = Frozen(directory, monkeypatch, request_)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(change, directory)
        assert frozen.reached.wait(600)
        heir = take_over(url, options)
        publish(heir, **{"metadata.json": b"2"}, pins__a=b"2", pins__b=b"2", shards__1=b"2")
        heir.append("log/1", b"2")
        frozen.thawed.set()
        with pytest.raises(WriterFencedError, match=r"was taken over .* process \d+ on .* can no longer write"):
            late.result(600)
    for name in ("metadata.json", "pins/a", "pins/b", "log/1", "shards/1"):
        assert heir.read(name) == b"2"
    lock.release()
    publish(heir, pins__b=b"3")  # the heir still holds the lock


def test_heirs_replace_what_came_late(
    s3_url_soon_lost: tuple[str, dict[str, Any]], take_over: Callable[[str, dict[str, Any]], Directory]
) -> None:
    url, options = s3_url_soon_lost
    with RemoteDirectory(url, **options).lock_writer():
        pass
    heir = take_over(url, options)
    publish(heir, pins__a=b"1")
    publish(RemoteDirectory(url, **options), pins__a=b"late", shards__1=b"late")  # no lock, like a request in flight
    publish(heir, pins__a=b"2", shards__1=b"2")
    assert heir.read("pins/a") == heir.read("shards/1") == b"2"


def test_a_released_lock_stays_and_says_so(s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = open_directory(s3_url, **s3_options)
    directory.lock_writer().release()
    assert orjson.loads(directory.read(LOCK_NAME))["released"] is True
    with directory.lock_writer(), pytest.raises(StoreLockedError):
        open_directory(s3_url, **s3_options).lock_writer()


def test_each_writer_has_shard_numbers_of_its_own(memory_url: str) -> None:
    for number in range(3):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
            if number != 1:  # a writer uses up its numbers even without a commit
                buffer.add_trajectories([witness(number)])
    names = open_directory(memory_url).names("shards")
    assert names == sorted(f"shards/shard_{block << 32}.pt" for block in (1, 3))


def test_a_writer_steps_over_the_fence_of_one_that_lost_the_store_while_it_opened_it(memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
        for change in (lambda: buffer.add_trajectories([witness(1)]), lambda: buffer.evict([0]), buffer.compact):
            late = Catalog.open(open_directory(memory_url))
            fence(late.directory, late)  # without a lock
            add_each(buffer, [0])
            late.refresh()
            fence(late.directory, late)
            change()
    assert keys_at(memory_url) == {1: 1, 2: 0, 3: 0}


def test_a_server_that_keeps_no_conditions_is_told_by_name(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forgetful(filesystem: Any, path: str, data: bytes, **condition: str) -> str:
        condition.pop("IfMatch", None)
        return upload(filesystem, path, data, **condition)

    monkeypatch.setattr(object_store, "upload", forgetful)
    with open_directory(s3_url, **s3_options).lock_writer():
        (warning,) = [record.getMessage() for record in caplog.records if "If-Match" in record.getMessage()]
    assert "is not stopped when it wakes: it can replace their index, metadata, pins and lock" in warning


def test_a_writer_that_lost_the_store_while_it_opened_it_is_told_so(
    s3_url_soon_lost: tuple[str, dict[str, Any]],
    take_over: Callable[[str, dict[str, Any]], Directory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sees its heir's unfinished store, which is not damage."""
    url, options = s3_url_soon_lost

    def frozen_in(directory: RemoteDirectory, *_: object) -> None:
        frozen = Frozen(directory, monkeypatch, "put_if writer.lock")
        frozen.reached.set()
        take_over(url, options)
        frozen.thawed.set()
        raise CorruptStoreError("the rest of a store")

    monkeypatch.setattr(commit_log, "open_store", frozen_in)
    with pytest.raises(WriterFencedError, match="was taken over"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=url, storage_options=options)


@pytest.mark.parametrize("offset", [0, 12, -1])
def test_a_damaged_fence_is_told_and_costs_nothing(memory_url: str, tmp_path: Path, offset: int) -> None:
    for key in range(3):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
            buffer.add_trajectories([witness(key)])
    remote = open_directory(memory_url)
    copy = tmp_path / "copy"
    for name in remote.names():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(remote.read(name))
    fences = sorted((copy / "log").iterdir())
    assert len(fences) == 3
    for file in fences:
        data = bytearray(file.read_bytes())
        data[offset] ^= 1
        file.write_bytes(data)
    expected = [(f"log/{file.name}", "the record is damaged; nothing is lost, for the index has it") for file in fences]
    for _ in range(2):
        result = verify(copy)
        assert [(problem.file, problem.message) for problem in result.problems] == expected
        assert not any(problem.lost or problem.uncounted for problem in result.problems)
        opened(copy).close()
        assert contents_of(copy) == [0, 1, 2]


# -- Readers' leases in an object store: retention, contents and expiry --


def test_a_reader_keeps_what_it_shows(s3_url: str, s3_options: dict[str, Any]) -> None:
    with opened(s3_url, storage_options=s3_options) as buffer:
        add_each(buffer, range(3))
        reader = TrajectoryReplayBuffer(sample_window_size=0, storage_options=s3_options)
        reader.load_checkpoint(s3_url)
        buffer.evict([0])
        assert check_trajectory(reader.get(0)) == 0
        assert reader.refresh()
        reader.close()
        buffer.evict([1])
        assert len(open_directory(s3_url, **s3_options).names("shards")) == 1


def test_what_a_lease_says(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url)
    assert directory.announce_reader().release() is None
    assert directory.names() == []  # readers are announced only after a first writer
    directory.append("log/1", b"")
    lease = directory.announce_reader(3)

    def seen() -> tuple[int, bool]:
        (reader,) = directory.readers()
        return reader.generation, reader.settled

    assert seen() == (3, False)
    lease.settle(5)
    assert seen() == (3, False)  # renewing costs a request and waits for the next heartbeat
    assert isinstance(lease, RemoteReaderLease)
    lease.beat()
    assert seen() == (5, False)
    lease.beat()
    assert seen() == (5, True)
    lease.look()
    assert seen() == (5, False)
    lease.release()
    lease.release()
    lease.look()
    lease.beat()
    assert directory.readers() == []


def test_leases_end_by_the_clock_of_the_store(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=3600, lease_ttl=100)
    directory.append("log/1", b"")
    lease = directory.announce_reader()
    infos = ObjectStore.infos
    passed = 0.0

    def aged(self: ObjectStore, below: str) -> dict[str, ObjectInfo]:
        objects = infos(self, below)
        return {name: replace(info, modified=(info.modified or 0) - passed) for name, info in objects.items()}

    monkeypatch.setattr(ObjectStore, "infos", aged)
    with directory.lock_writer():  # the last heartbeat
        passed = 99.0
        assert len(directory.readers(tidy=True)) == 1
        passed = 102.0
        assert directory.readers() == []
        assert len(directory.names("readers")) == 1
        assert directory.readers(tidy=True) == []
        assert directory.names("readers") == []
    lease.release()


def test_a_reader_that_may_not_write_says_so(memory_url: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = RemoteDirectory(memory_url)
    directory.append("log/1", b"")
    with mock.patch.object(ObjectStore, "put", side_effect=PermissionError(13, "not allowed", "readers")):
        directory.announce_reader().release()
    assert "without a lease, so its writer may delete shards that this reader shows" in caplog.text


def test_a_dropped_lease_ends_its_heartbeats(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lease_ttl=0.03)
    directory.append("log/1", b"")
    before = set(threading.enumerate())

    def beating() -> bool:
        return any("reader-lease" in thread.name for thread in set(threading.enumerate()) - before)

    lease = directory.announce_reader()
    wait_until(beating)
    lease_of = weakref.ref(lease)
    del lease
    gc.collect()
    wait_until(lambda: not beating())
    assert lease_of() is None


@pytest.mark.parametrize("remote", [False, True])
def test_a_writer_waits_for_a_tool_that_holds_the_lock_for_a_moment(
    remote: bool, tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory_url if remote else tmp_path / "store"
    with opened(url) as writer, monkeypatch.context() as patch:
        add_each(writer, [1])
        patch.setattr(opening, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pytest.fail))
        assert is_refused(lambda: opened(url))  # at once: this one writes for long
    with ExitStack() as tool:
        tool.enter_context(held_log(open_directory(url)))
        monkeypatch.setattr(opening, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: tool.close()))
        with opened(url) as writer:
            assert len(writer) == 1
    with held_log(open_directory(url)):
        times = iter(range(1000))
        monkeypatch.setattr(opening, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=lambda _: None))
        assert is_refused(lambda: opened(url))
        assert next(times) < 10
