"""Points of one store, of the ranks of a run, and of a handle: the same calls, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.saved_points.stores import block, make
from tests.stateful.places import Ranks
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.points import Points, SavedPoint, points_at, run_points

Call = Callable[[Callable[[Points], Any]], Any]
Add = Callable[[int], Any]


@contextmanager
def one_store(path: Path) -> Iterator[tuple[Call, Add, Callable[[], list[int]]]]:
    with make(path) as buffer:

        def add(key: int) -> None:
            buffer.add_trajectories([block(2 * key), block(2 * key + 1)])

        yield lambda do: do(buffer.points), add, lambda: sorted(map(key_of, map(buffer.get, buffer.trajectory_ids)))


@contextmanager
def ranks_of_a_run(path: Path) -> Iterator[tuple[Call, Add, Callable[[], list[int]]]]:
    with ExitStack() as stack:
        buffers = [stack.enter_context(make(path / f"rank_{rank}")) for rank in range(2)]

        def call(do: Callable[[Points], Any]) -> Any:
            results = Ranks(2, None, lambda *_: None).call(lambda rank: do(run_points(buffers[rank])))
            if isinstance(results[0], Exception):
                raise results[0]
            assert results[0] == results[1]
            return results[0]

        def add(key: int) -> None:
            for rank, buffer in enumerate(buffers):
                buffer.add_trajectories([block(2 * key + rank)])

        def keys() -> list[int]:
            return sorted(key_of(buffer.get(number)) for buffer in buffers for number in buffer.trajectory_ids)

        yield call, add, keys


@contextmanager
def handle(path: Path) -> Iterator[tuple[Call, Add, Callable[[], list[int]]]]:
    from trajstore.distributed import DistributedReplayBuffer

    options: dict[str, Any] = {"actor_options": {"num_cpus": 0.1}, "deadline": 600.0, "patience": 600.0}
    with DistributedReplayBuffer.create("points", path, stores=2, refresh_interval=0.0, **options) as stores:

        def add(key: int) -> None:
            for each in (2 * key, 2 * key + 1):
                stores.add_trajectories([block(each)]).committed(120)

        def keys() -> list[int]:
            stores.refresh()
            return sorted(key_of(stores.get(number)) for number in stores.trajectory_ids.tolist())

        yield lambda do: do(stores.points), add, keys
        stores.stop()


def key_of(trajectory: Any) -> int:
    return int(trajectory.rewards[0, 0, 0]) // 1000


def facts(points: list[SavedPoint]) -> list[tuple[Any, ...]]:
    return [(point.step, point.kind, point.trajectories, point.is_complete, point.on_line) for point in points]


def check(call: Call, add: Add, keys: Callable[[], list[int]], path: Path) -> None:
    """Save, list, go back and forth, and remove; refuse what does not fit."""
    assert call(lambda points: (points.saved, points.snapshots, points.newest())) == ([], [], None)
    add(0)
    first = call(lambda points: points.save(1, {"note": "one"}))
    assert facts([first]) == [(1, "point", 2, True, True)]
    add(1)
    assert facts([call(lambda points: points.pin("named"))]) == [(0, "pin", 4, True, False)]
    call(lambda points: points.save(2, {"note": "two"}))
    add(2)
    assert facts(call(lambda points: points.saved)) == [(1, "point", 2, True, True), (2, "point", 4, True, True)]
    assert [point.name for point in call(lambda points: points.snapshots) if not point.on_line] == ["named"]
    assert call(lambda points: (points.newest(), points.state(1))) == (2, {"note": "one"})
    changes = call(lambda points: points.changes(1))
    assert sum(change.leaving for change in changes) == 4
    assert {change.later_steps for change in changes} == {(2,)}
    assert keys() == [0, 1, 2, 3, 4, 5]

    assert call(lambda points: points.go_to(1)) == {"note": "one"}
    assert keys() == [0, 1]
    assert [point.step for point in call(lambda points: points.saved)] == [1]
    assert {point.kind for point in call(lambda points: points.snapshots)} == {"point", "pin", "aside"}
    assert call(lambda points: points.go_to("named", aside=False)) == {}
    assert keys() == [0, 1, 2, 3]
    for step in (3, 4, 5):
        call(lambda points, step=step: points.save(step, keep=2))
    assert [point.step for point in call(lambda points: points.saved)] == [4, 5]
    assert facts(points_at(path).saved) == [(4, "point", 4, True, True), (5, "point", 4, True, True)]

    with pytest.raises(ConfigurationError, match="saved point of step 5"):
        call(lambda points: points.save(4))
    for lacking in (9, "absent"):
        with pytest.raises(StoreNotFoundError, match=str(lacking)):
            call(lambda points, lacking=lacking: points.go_to(lacking))
        with pytest.raises(StoreNotFoundError, match=rf"points\.remove: .*{lacking}.*there are"):
            call(lambda points, lacking=lacking: points.remove(lacking))
    with pytest.raises(ConfigurationError, match="a set cannot be saved"):
        call(lambda points: points.save(6, {"odd": {1}}))
    call(lambda points: points.remove("named"))
    assert "named" not in [point.name for point in call(lambda points: points.snapshots)]


@pytest.mark.parametrize("kind", [one_store, ranks_of_a_run])
def test_all_points_have_the_same_calls_and_results(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path / "stores") as stores:
        check(*stores, tmp_path / "stores")


def test_those_of_a_handle_as_well(small_ray: Any, tmp_path: Path) -> None:
    with handle(tmp_path / "stores") as stores:
        check(*stores, tmp_path / "stores")
