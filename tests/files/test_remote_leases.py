"""Leases of readers in an object store: what they keep, what they say, when they end."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.stores import add_each, opened
from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.files.answers import ObjectInfo
from trajstore.files.object_store import ObjectStore
from trajstore.files.opening import open_directory
from trajstore.files.remote import RemoteDirectory
from trajstore.files.remote_leases import RemoteReaderLease
from trajstore.testing.waiting import wait_until
from trajstore.testing.witness import check_trajectory


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
    assert directory.names() == []  # nobody writes there in place
    directory.append("log/1", b"")
    lease = directory.announce_reader(3)

    def seen() -> tuple[int, bool]:
        (reader,) = directory.readers()
        return reader.generation, reader.settled

    assert seen() == (3, False)
    lease.settle(5)
    assert seen() == (3, False)  # that costs a request, and comes with the next heartbeat
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
        found = infos(self, below)
        return {name: replace(info, modified=(info.modified or 0) - passed) for name, info in found.items()}

    monkeypatch.setattr(ObjectStore, "infos", aged)
    with directory.lock_writer():  # the last sign of life
        passed = 99.0
        assert len(directory.readers(tidy=True)) == 1
        passed = 102.0
        assert directory.readers() == []
        assert len(directory.names("readers")) == 1
        assert directory.readers(tidy=True) == []
        assert directory.names("readers") == []
    lease.release()


def test_a_reader_that_may_not_write_says_that_it_is_not_announced(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RemoteDirectory(memory_url)
    directory.append("log/1", b"")

    def refused(self: ObjectStore, name: str, data: bytes) -> None:
        raise PermissionError(13, "not allowed", self.url_of(name))

    monkeypatch.setattr(ObjectStore, "put", refused)
    directory.announce_reader().release()
    assert "without an announcement, so its writer may delete shards that this reader shows" in caplog.text


def test_a_dropped_lease_ends_its_heartbeats(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lease_ttl=0.03)
    directory.append("log/1", b"")
    before = set(threading.enumerate())

    def beating() -> bool:
        return any("reader-lease" in thread.name for thread in set(threading.enumerate()) - before)

    lease = directory.announce_reader()
    wait_until(beating)
    del lease
    gc.collect()
    wait_until(lambda: not beating())
