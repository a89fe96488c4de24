"""The pool in a real trajectory buffer, also after its process is killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay.conftest import build, rollouts, step, view
from tools.crash.forked import forking
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.store import Recorded, newest_point
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.catalog import Catalog
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.operations.inspect import inspect
from trajstore.trajectory import AgentTrajectory

RULES = PoolRules(n_rollout=4, max_trajectories_per_task=2)


def train(manager: ExperienceManager, number: int, record: Callable[[list[AgentTrajectory]], object] = len) -> None:
    """Run one step on one of five tasks, whose rollouts are recorded first; every tenth step solves its task."""
    manager.global_steps = number
    outcomes = [1.0, 1.0, float(number % 10 == 9)]
    batch = rollouts(f"t{number % 5}", outcomes, first=10 * number)
    record(batch)
    step(manager, batch, [float((7 * number + i) % 11) for i in range(3)])


def finding(ids: Mapping[tuple[str, str], int]) -> Recorded:
    """Return a function that finds recorded rollouts by their names."""
    return lambda made: [ids.get((one.task_id, one.rollout_id)) for one in made]


def train_until_killed(path: Path, is_recorded: bool, pipe: Connection) -> None:
    buffer, ids = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path), {}

    def record(made: list[AgentTrajectory]) -> None:
        names = [(one.task_id, one.rollout_id) for one in made]
        ids.update(zip(names, buffer.add_trajectories(made), strict=True))

    manager = ExperienceManager(RULES, store=BufferStore(buffer, finding(ids) if is_recorded else None))
    for number in range(10**6):
        train(manager, number, record if is_recorded else len)
        if number % 7 == 0:
            manager.flush()
            pipe.send(number)


@pytest.mark.parametrize(("promised", "is_recorded"), [(1, False), (19, False), (7, True)])
def test_a_killed_process_leaves_at_least_what_it_flushed(tmp_path: Path, promised: int, is_recorded: bool) -> None:
    path = tmp_path / "pool"
    heard, sender = multiprocessing.Pipe(duplex=False)
    child = forking().Process(target=train_until_killed, args=(path, is_recorded, sender))
    child.start()
    flushed = [heard.recv() for _ in range(promised)][-1]
    child.kill()
    child.join()
    store = BufferStore.open(path)
    manager = ExperienceManager(RULES, store=store)
    state = view(manager)
    reached = manager.global_steps
    recorded = {store.get(number).rollout_id for number in store.ids()}
    for number in range(flushed + 1) if is_recorded else ():
        assert {f"t{number % 5}/{10 * number + place}" for place in range(3)} <= recorded

    # Steps are deterministic: the pool found must be one seen at or after the last flush, or within the next step.
    reference = ExperienceManager(RULES)
    number = -1
    seen = []
    while number < max(reached, flushed) + 20:
        number += 1
        train(reference, number)
        if number >= flushed:
            seen.append(view(reference))
    if state not in seen:
        assert state["buckets"] in [earlier["buckets"] for earlier in seen]
        known = {name for earlier in seen for held in earlier["entries"].values() for name in held}
        assert {name for held in state["entries"].values() for name in held} <= known
    train(manager, reached + 1)
    manager.flush()
    assert view(manager)["buckets"]
    store.close()


def test_a_buffer_that_cannot_keep_a_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="auto_save"):
        BufferStore(TrajectoryReplayBuffer())
    with pytest.raises(ConfigurationError, match="max_trajectories"):
        BufferStore.open(tmp_path / "pool", capacity=0)
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_pool_goes_back_to_its_checkpoints_and_forward_again(tmp_path: Path, reopened: bool) -> None:
    """A point keeps its trajectories after all of them were replaced."""
    store = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(RULES, store=store)
    states, seen = [], []
    for number in range(60):
        train(manager, number)
        if number % 5 == 3:
            manager.flush()
        if number in (7, 30, 59):
            states.append(manager.state_dict())
            seen.append((view(manager), manager.global_steps, store.ids()))
            manager.hold(states)
    if reopened:
        train(manager, 60)
        store.close()
        store = BufferStore.open(tmp_path / "pool")
        manager = ExperienceManager(RULES, store=store)
        manager.hold(states)
    for at in (0, 2, 1):
        manager.load_state_dict(states[at])
        assert (view(manager), manager.global_steps) == seen[at][:2]
        manager.hold(states)
    for number in range(31, 45):
        train(manager, number)
    manager.flush()
    manager.hold([manager.state_dict()])
    assert [point.kind for point in store._buffer.points.snapshots] == ["point"]
    assert len(store.ids()) == len(manager)
    with pytest.raises(StoreNotFoundError, match=states[0]["point"]):
        manager.load_state_dict(states[0])
    assert len(manager) == len(store.ids())
    store.close()


def test_a_point_of_another_store_is_not_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Points have the same names in every store."""
    store = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(RULES, store=store)
    other = BufferStore.open(tmp_path / "other")
    stranger = ExperienceManager(RULES, store=other)
    for number in range(8):
        train(manager, number)
        train(stranger, number + 3)
    before = view(stranger)
    stranger.load_state_dict(manager.state_dict())
    assert view(stranger) == before
    assert "of another store" in caplog.text
    store.close()
    other.close()


def test_a_pool_that_is_begun_among_other_trajectories_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([build("a", 1), build("a", 2)])
    for expected_count in (1, 1):  # the second time there is a pool, so no new warning
        store = BufferStore.open(tmp_path)
        manager = ExperienceManager(RULES, store=store)
        train(manager, 1)
        store.close()
        assert caplog.text.count("its store holds trajectories of no pool, up to id 1") == expected_count


def test_a_pool_is_asked(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    assert ExperienceManager(RULES).query().rows() == []
    store = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(RULES, store=store)
    assert manager.query().rows() == []
    for number in range(37):
        train(manager, number)
    manager.get_offpolicy_batch(["t1"], 1)
    held = manager.task2trajectories
    rows = manager.query().rows()
    assert sorted(row["rollout_id"] for row in rows) == sorted(
        history.rollout_id for kept in held.values() for history in kept
    )
    difficulties = {task: number for number, tasks in manager.difficulty2task_dict.items() for task in tasks}
    assert {row["task"]: row["difficulty"] for row in rows} == {task: difficulties.get(task) for task in held}
    entropies = {history.rollout_id: history.entropy for kept in held.values() for history in kept}
    assert {row["rollout_id"]: row["pool_entropy"] for row in rows} == entropies
    assert manager.query().where("uses > 0").select("task", "uses", "demonstration").rows() == [
        {"task": "t1", "uses": 1, "demonstration": False}
    ]
    contents = manager.query("messages").where("role = 'assistant' and task = 't2'").select("content")
    assert sorted(contents.table()["content"]) == sorted(history.messages[1]["content"] for history in held["t2"])
    scored = manager.query().sql("select count(*) from tokens where old_log_probs < -0.7 and response_mask = 1").item()
    assert scored == len(rows)  # one of -1.0 in each
    store.close()
    reader = TrajectoryReplayBuffer.open(tmp_path / "pool")
    assert reader.query().count() == len(rows)
    assert isinstance(reader.query().table(), pl.DataFrame)


def test_a_pin_shows_the_pool_as_it_was(tmp_path: Path) -> None:
    """Also after later points and :meth:`hold`."""
    path = tmp_path / "pool"

    def run(first: int, last: int) -> None:
        store = BufferStore.open(path)
        manager = ExperienceManager(RULES, store=store)
        for number in range(first, last):
            train(manager, number)
            manager.flush()
        manager.hold([])
        store.close()

    def document(pin: str | None = None) -> dict[str, Any]:
        point = newest_point(Catalog.open(LocalDirectory(path)), pin)
        assert point is not None
        return point.document

    run(0, 12)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.points.pin("before")
    before = document()
    run(12, 40)
    assert document("before") == before != document()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        assert len(buffer.points.saved) == 2, "one for the pin, and the newest"


def test_a_pool_chooses_among_recorded_rollouts(tmp_path: Path) -> None:
    """What was recorded otherwise, or not at all, is added; what leaves the pool stays, and so does what came later."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        recorded = [build("a", number, entropy=None) for number in range(3)]
        names = [(one.task_id, one.rollout_id) for one in recorded]
        ids = dict(zip(names, buffer.add_trajectories(recorded), strict=True))
        ids["b", "b/7"] = 99  # evicted
        manager = ExperienceManager(RULES, store=BufferStore(buffer, finding(ids)))
        assert not manager.seed([replace(recorded[0], entropy=2.0), build("b", 7)])
        other = build("a", 1, entropy=3.0, old_log_probs=torch.tensor([-0.5, -9.0, -0.25, -2.0]))
        assert not manager.seed([other])
        assert manager._ledger.to_save()["entries"] == {"a": [0, 4], "b": [3]}
        state, before = manager.state_dict(), view(manager)
        assert not manager.seed([replace(recorded[2], entropy=1.0)])
        manager.flush()
        assert [one.entropy for one in manager.task2trajectories["a"]] == [2.0, 1.0]
        assert buffer.trajectory_ids.tolist() == [0, 1, 2, 3, 4]
        manager.load_state_dict(state)
        assert view(manager) == before
        assert len(buffer.trajectory_ids) == 5
        manager.flush()
        again = ExperienceManager(RULES, store=BufferStore(buffer, finding(ids)))
        assert view(again) == before
        report = inspect(tmp_path)
        pool = {name: report["pool"][name] for name in ("trajectories", "tasks", "others", "recorded")}
        assert pool == {"trajectories": 3, "tasks": 2, "others": 2, "recorded": True}
        assert (report["kind"], report["trajectories"], report["agents"]["rollouts"]) == ("store", 5, 5)
        buffer.points.save(1000, {})
        with pytest.raises(StoreNotFoundError, match="without an experience pool"):
            again.load_state_dict({**state, "point": buffer.points.saved[-1].name})
    empty = tmp_path.with_name("empty")
    ExperienceManager(RULES).save_experience_pool_to_disk(empty)
    with closing(BufferStore.open(tmp_path)) as opened:  # as an import does
        manager = ExperienceManager(RULES, store=opened)
        manager.load_experience_pool_from_disk(empty)
        assert len(manager) == 0
        manager.flush()
        assert opened.ids() == [0, 1, 2, 3, 4], "rollouts that are recorded are not evicted"


def test_retention_keeps_what_the_pool_and_its_checkpoints_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, enable_cache=False)

    ids: dict[tuple[str, str], int] = {}
    with opened() as buffer:
        manager = ExperienceManager(RULES, store=BufferStore(buffer, finding(ids), capacity=4))
        for number in range(4):
            made = [build("a", number, entropy=4.0 - number), build("b", 100 + number)]
            ids |= zip([(one.task_id, one.rollout_id) for one in made], buffer.add_trajectories(made), strict=True)
            manager.seed(made[:1])
            if number == 1:
                state, before = manager.state_dict(), view(manager)
            manager.flush()
        assert caplog.text.count("beyond its limits stay, as they are in use") == 1
    with opened() as buffer:
        manager = ExperienceManager(RULES, store=BufferStore(buffer, finding(ids), capacity=4))
        buffer.add_trajectories([build("c", number) for number in range(9)])
        buffer.flush()
        assert buffer.trajectory_ids.tolist() == [0, 2, 4, 6, 13, 14, 15, 16], "of two points, and the newest"
        manager.load_state_dict(state)
        assert view(manager) == before
        manager.flush()
        manager.hold([])
        buffer.add_trajectories([build("d", 0)])
        buffer.flush()
        assert buffer.trajectory_ids.tolist() == [0, 2, 14, 15, 16, 17]
