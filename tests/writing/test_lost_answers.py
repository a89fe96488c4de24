"""Commits to an object store whose answer is lost or which arrive late: reported as failed, yet present."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

from tests.stores import add_each
from tests.support.witness import check_trajectory, witness
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.writing.options import WriterOptions
from trajstore.errors import StoreWriteError, TrajectoryUnavailableError
from trajstore.operations.verify import verify
from trajstore.remote.object_store import ObjectStore


class Network:
    """Creates log segments for a client that may not receive the answer."""

    def __init__(self, create: Callable[[ObjectStore, str, bytes], bool]) -> None:
        self._create = create
        self._late: list[tuple[ObjectStore, str, bytes]] = []
        self.losing: Callable[[], str | None] = lambda: None
        """Returns the fate of a request: ``answer`` or ``request`` lost, ``late``, or None for a normal one."""

    def create(self, objects: ObjectStore, name: str, data: bytes) -> bool:
        if not name.startswith("log/"):
            return self._create(objects, name, data)
        for late in self._late:
            self._create(*late)
        self._late.clear()
        lost = self.losing()
        created = self._create(objects, name, data) if lost in (None, "answer") else False
        if lost == "late":
            self._late.append((objects, name, data))
        if lost is not None:
            raise OSError(errno.EIO, f"nothing was heard ({lost})", name)
        return created


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    unreliable = Network(ObjectStore.create)
    monkeypatch.setattr(ObjectStore, "create", lambda *given: unreliable.create(*given))
    yield unreliable
    unreliable.losing = lambda: None


def keys_of(buffer: TrajectoryReplayBuffer) -> list[int]:
    return sorted(check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist())


def test_an_eviction_that_was_said_to_have_failed_keeps_no_other_commit_out(network: Network, memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
        ids = buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        network.losing = lambda: "answer"
        with pytest.raises(StoreWriteError, match="nothing was heard"):
            buffer.evict([ids[0]])
        assert keys_of(buffer) == [0, 1, 2]
        network.losing = lambda: None
        add_each(buffer, [3])
        assert keys_of(buffer) == [1, 2, 3]
        network.losing = lambda: "answer"
        with pytest.raises(StoreWriteError, match="nothing was heard"):
            buffer.evict([ids[1]])
        network.losing = lambda: None
        buffer.flush()
        assert keys_of(buffer) == [2, 3], "flush() is what the error says"
    with TrajectoryReplayBuffer.open(memory_url) as reader:
        assert keys_of(reader) == [2, 3]


@pytest.mark.parametrize("seed", range(2))
@patch("trajstore._core.writing.commit_log.LOG_BYTES", 2048)
def test_whatever_is_not_heard_of_nothing_is_there_twice_and_nothing_lost(
    network: Network, memory_url: str, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = [None, None, "answer", "request", "late"]
    options: dict[str, Any] = {"writer": WriterOptions(shard_bytes=4096)}
    added, certain, tried = set(), set(), set()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, **options) as buffer:
        follower = TrajectoryReplayBuffer.open(memory_url)
        of_id = {}
        for key in range(30):
            network.losing = lambda: chance.choice(kinds)
            try:
                for number in buffer.add_trajectories([witness(key)]):
                    of_id[number] = key
                    added.add(key)
            except StoreWriteError:  # an earlier commit failed; this trajectory was not added
                pass
            try:
                doing = chance.randrange(5)
                if doing < 2:
                    buffer.flush()
                elif doing == 2 and len(buffer) > 3:
                    number = chance.choice(buffer.trajectory_ids.tolist()[:-2])
                    tried.add(of_id[number])
                    buffer.evict([number])
                    certain.add(of_id[number])
                elif doing == 3:
                    buffer.compact()
                elif key % 7 == 0:
                    buffer.points.save(key)
            except (StoreWriteError, TrajectoryUnavailableError):
                pass
            follower.refresh()
            shown = keys_of(follower)
            assert len(set(shown)) == len(shown)
            assert not set(shown) & certain
        network.losing = lambda: None
        with suppress(StoreWriteError):  # reports a request that was in flight
            buffer.flush()
        buffer.flush()
        keys = keys_of(buffer)
        assert len(set(keys)) == len(keys)
        assert added - tried <= set(keys) <= added - certain
        follower.refresh()
        assert keys_of(follower) == keys
        follower.close()
    assert verify(memory_url).sound
    with TrajectoryReplayBuffer.open(memory_url) as reader:
        assert keys_of(reader) == keys
