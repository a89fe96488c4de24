"""What a sink of Ray Data leaves at each moment, and when it fails; without Ray's processes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stores import reader_of, stored
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreError
from trajstore.files.object_store import ObjectStore
from trajstore.files.opening import open_directory
from trajstore.inspection.verify import verify
from trajstore.testing.witness import check_trajectory, witness

pytest.importorskip("ray.data")

from ray.data.block import BlockAccessor

from trajstore.distributed import StoreDatasink, StoreDatasource
from trajstore.distributed.rows import trajectory_of

TASKS = 3


@pytest.fixture
def blocks(tmp_path: Path) -> list[Any]:
    """Return the rows of nine trajectories, as many blocks as there are tasks."""
    stored(tmp_path / "store", [witness(key) for key in range(9)])
    tasks = StoreDatasource(tmp_path / "store", unit="trajectory").get_read_tasks(TASKS)
    assert len(tasks) == TASKS
    return [list(task()) for task in tasks]


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else remote()


def remote() -> str:
    return f"memory://bucket-{uuid.uuid4()}/run"


def written(sink: StoreDatasink, blocks: list[Any]) -> SimpleNamespace:
    """Run the tasks, the first one twice; return what Ray tells at the end."""
    sink.on_write_start()
    sink.write(blocks[0], SimpleNamespace(task_idx=0))
    names = [sink.write(some, SimpleNamespace(task_idx=number)) for number, some in enumerate(blocks)]
    return SimpleNamespace(write_returns=[*names, None])


def shown(place: str) -> set[int] | None:
    """Return the keys that a reader sees; None if it is told that there is no run, or not all of it."""
    found = []
    for read in (by_buffer, by_ray):
        try:
            found.append(read(place))
        except StoreError:
            found.append(None)
    assert found[0] == found[1]
    return found[0]


def by_buffer(place: str) -> set[int]:
    reader = reader_of(place)
    return {check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()}


def by_ray(place: str) -> set[int]:
    found = set()
    for task in StoreDatasource(place, unit="trajectory").get_read_tasks(1):
        for block in task():
            rows = BlockAccessor.for_block(block).iter_rows(public_row_format=True)
            found |= {check_trajectory(trajectory_of(row)) for row in rows}
    return found


def test_readers_see_all_or_are_told(place: str, blocks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = StoreDatasink(place)
    result = written(sink, blocks)
    assert shown(place) is None
    mutex, moments = threading.Lock(), [0]

    def looking(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*given: Any) -> None:
            with mutex:
                assert shown(place) is None
                change(*given)
                moments[0] += 1

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "copy", looking(ObjectStore.copy))
        patch.setattr(Path, "rename", looking(Path.rename))
        sink.on_write_complete(result)
    assert moments[0] >= TASKS
    assert shown(place) == set(range(9))
    assert open_directory(place).listing() == ([], [f"rank_{rank}" for rank in range(TASKS)])
    assert verify(place).sound


def test_a_job_that_fails_at_the_end_leaves_nothing(
    place: str, blocks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = StoreDatasink(place)
    result = written(sink, blocks)
    left = [5]

    def failing(change: Callable[..., None], cost: int) -> Callable[..., None]:
        def changed(*given: Any) -> None:
            left[0] -= cost
            if left[0] < 0:
                raise OSError("the network is gone")
            change(*given)

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "copy", failing(ObjectStore.copy, 1))
        patch.setattr(Path, "rename", failing(Path.rename, 3))
        with pytest.raises(OSError, match="network is gone") as told:
            sink.on_write_complete(result)
    sink.on_write_failed(told.value)
    assert open_directory(place).listing() == ([], [])
    again = StoreDatasink(place)
    again.on_write_complete(written(again, blocks))
    assert shown(place) == set(range(9))


def test_two_jobs_do_not_share_a_place() -> None:
    place = remote()
    first, second = StoreDatasink(place), StoreDatasink(place)
    first.on_write_start()
    with pytest.raises(ConfigurationError, match="is not empty"):
        second.on_write_start()
    second.on_write_failed(ConfigurationError("as Ray does"))
    with pytest.raises(ConfigurationError, match="is not empty"):
        StoreDatasink(place)
    first.on_write_failed(ConfigurationError("as Ray does"))
    StoreDatasink(place)


def test_no_rows_are_told(place: str, caplog: pytest.LogCaptureFixture) -> None:
    StoreDatasink(place).on_write_complete(SimpleNamespace(write_returns=[]))
    assert "no rows" in caplog.text
    with TrajectoryReplayBuffer.open(place) as reader:
        assert len(reader) == 0
