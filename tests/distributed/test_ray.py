"""Stores as actors of a real Ray cluster: adding, drawing, kills of actors and nodes."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from tests import rays
from tests.stores import reader_of
from tests.support.equality import same
from tests.support.waiting import freeze, wait_until
from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.columns.fields import unnest
from trajstore._core.sampling.weighted import WeightedSampler
from trajstore.errors import (
    ConfigurationError,
    EmptyBufferError,
    StoreNotFoundError,
    StoreUnreachableError,
    StoreWriteError,
    TrajectoryUnavailableError,
)
from trajstore.loader import ReplayLoader, TokenLoader
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.query import relations
from trajstore.samplers import EpochSampler, GroupSampler, Priorities

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trajstore._core.buffer.content_watch import flatten_all  # noqa: E402
from trajstore._core.columns.agents import DOCUMENT_FIELDS  # noqa: E402
from trajstore._core.columns.memory import Arena  # noqa: E402
from trajstore._core.store.run_ids import own_id  # noqa: E402
from trajstore.distributed import DistributedReplayBuffer, pending_request, reads, receipts, starting  # noqa: E402
from trajstore.distributed.actors import Stores  # noqa: E402
from trajstore.distributed.add_request import AddRequest, new_key, pack  # noqa: E402
from trajstore.distributed.options import HandleOptions  # noqa: E402
from trajstore.distributed.receipts import Outbox  # noqa: E402
from trajstore.distributed.routes import Routes  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return rays.running(rays.cluster)


def create(name: str, path: Path, **options: Any) -> DistributedReplayBuffer:
    given: dict[str, Any] = {"actor_options": {"num_cpus": 0.1}, "deadline": 600.0, "patience": 600.0}
    return DistributedReplayBuffer.create(name, path, **{**given, **options})


@pytest.fixture(scope="module")
def shared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start two stores named shared, for tests that only need running stores; return their path."""
    path = tmp_path_factory.mktemp("shared")
    with create("shared", path, stores=2) as handle:
        yield path
        handle.stop()


def emptied(**options: Any) -> DistributedReplayBuffer:
    """Return a handle of the shared stores after removing their trajectories and points."""
    handle = DistributedReplayBuffer.connect("shared", **{"deadline": 600.0, "patience": 600.0, **options})
    handle.clear()
    for point in handle.points.saved:
        handle.points.remove(point.step)
    return handle


def test_added_drawn_evicted_saved(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with create("whole", Path("run"), stores=2, refresh_interval=0.0) as handle:
        assert (tmp_path / "run" / "rank_0").is_dir()  # relative paths are resolved by the caller
        receipts = [handle.add_trajectories([witness(key), witness(key + 1)]) for key in range(0, 12, 2)]
        ids = [number for receipt in receipts for number in receipt.committed(120)]
        assert len(set(ids)) == 12
        handle.refresh()
        assert handle.size == 12
        assert handle.is_ready(12)
        assert {number % 1024 for number in ids} == {0, 1}  # both stores got some
        batch = handle.sample(64)
        check_batch(batch)
        out = {"curr_obs.tag": torch.zeros(64, dtype=torch.int64)}
        drawn = handle.draw(64)
        assert torch.equal(
            handle.read(drawn, columns=["curr_obs.tag"], out=out)["curr_obs"]["tag"], out["curr_obs.tag"]
        )
        assert torch.equal(handle.read(drawn)["curr_obs"]["tag"], out["curr_obs.tag"])
        for key, number in enumerate(ids):
            assert check_trajectory(handle.get(number)) == key
        assert len(handle.sample_trajectories(5)) == 5
        check_batch(handle.sample(32, sampler=WeightedSampler()))
        handle.evict(ids[:3])
        handle.evict(ids[:3])
        assert handle.size == 9
        assert handle.get_stats()["num_trajectories"] == 9
        assert DistributedReplayBuffer.connect("whole").stores == [0, 1]
        with pytest.raises(ConfigurationError, match="exists already"):
            create("whole", tmp_path / "elsewhere")
        handle.stop()
    with reader_of(tmp_path / "run") as buffer:
        # Ids in a run directory include the rank; without it, they are the handle's ids.
        assert sorted(own_id(buffer.trajectory_ids).tolist()) == sorted(ids[3:])
    for rank in range(2):
        assert verify(tmp_path / "run" / f"rank_{rank}").problems == []
    with pytest.raises(StoreNotFoundError):
        DistributedReplayBuffer.connect("whole")


def test_rows_evicted_before_they_are_read_are_drawn_again(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's directory is elsewhere, and it hears of evictions only when it misses a trajectory."""
    monkeypatch.setattr(reads, "_open", lambda about: None)
    with emptied() as producer, emptied(refresh_interval=3600.0) as learner:
        ids = producer.add_trajectories([witness(key) for key in range(12)]).committed(120)
        ids += producer.add_trajectories([witness(key) for key in range(12, 24)]).committed(120)
        learner.refresh()
        drawn = learner.draw(64)
        loader = ReplayLoader(learner, batch_size=64, prefetch=1)
        check_batch(next(loader))
        draws: list[Callable[[], Any]] = [
            lambda: check_batch(learner.sample(64)),
            lambda: check_batch(learner.sample(64, sampler=WeightedSampler())),
            lambda: [check_trajectory(trajectory) for trajectory in learner.sample_trajectories(24)],
            lambda: [check_batch(next(loader)) for _ in range(3)],
        ]
        for number, draw in enumerate(draws):
            gone = ids[5 * number : 5 * number + 5]
            producer.evict(gone)
            draw()
            assert learner.size == 24 - 5 * (number + 1)
            assert not set(learner.trajectory_ids.tolist()) & set(gone)
        groups = [AgentTrajectory(input_ids=torch.arange(3), task_id=f"t{n % 2}") for n in range(8)]
        of_groups = producer.add_trajectories(groups).committed(120)
        learner.refresh()
        producer.evict(of_groups[:2])
        sampled = learner.sample_trajectories(2, sampler=GroupSampler())
        assert sorted(item.task_id for item in sampled if isinstance(item, AgentTrajectory)) == ["t0"] * 3 + ["t1"] * 3
        producer.evict(of_groups[2:])
        producer.evict(ids[20:])
        with pytest.raises(TrajectoryUnavailableError, match="were evicted since") as raised:
            learner.read(drawn)
        assert raised.type is TrajectoryUnavailableError  # not an error of Ray
        for empty in (lambda: learner.sample(64), lambda: learner.sample_trajectories(2)):
            with pytest.raises(EmptyBufferError):
                empty()
        with pytest.raises(TrajectoryUnavailableError, match=f"has the id {ids[0]}, or it was evicted"):
            learner.get(ids[0])
        loader.close()


def test_sessions_through_a_handle(shared: Path) -> None:
    with emptied() as handle:
        sessions = [handle.session("task", str(number)) for number in range(2)]
        for session in sessions:
            session.add_call([1, 2], [3], [-0.5])
            session.add_call([1, 2, 3, 4], [5], [-0.25])
        ids = [number for session in sessions for number in session.finish()]
        assert len({number % 1024 for number in ids}) == 1  # a group is in one store
        handle.refresh()
        assert handle.query().where("session_calls = 2").ids().tolist() == ids
        assert [call.id for call in handle.session("task", "0").calls()] == []


def test_late_values_through_a_handle(shared: Path) -> None:
    with emptied() as handle, emptied() as learner:
        assert not len(learner)
        receipts = [handle.add_trajectories([witness(key)]) for key in range(6)]
        ids = [receipt.committed(120)[0] for receipt in receipts]
        assert {number % 1024 for number in ids} == {0, 1}
        learner.refresh()
        check_batch(learner.sample(32))  # opens readers of the directories
        annotate(handle, ids, {"judge": [number / 8 for number in range(6)], "tag": "kept"}, who="judge 1")
        advantages = {number: torch.full(witness(key).rewards.shape[:2], float(key)) for key, number in enumerate(ids)}  # type: ignore[union-attr]
        annotate(handle, ids, {"advantage": list(advantages.values())})
        assert [(note.name, note.value, note.who) for note in notes_of(learner, ids[3])][:2] == [
            ("judge", 0.375, "judge 1"),
            ("tag", "kept", "judge 1"),
        ]
        learner.refresh()
        assert handle.query().where("judge > 0.3 and tag = 'kept'").ids().tolist() == ids[3:]
        drawn = learner.draw(64)
        rows = learner.read(drawn, columns=["curr_obs.tag", "notes.advantage"])
        assert torch.equal(rows["notes"]["advantage"].flatten(), (rows["curr_obs"]["tag"].flatten() >> 20).float())
        assert torch.equal(learner.get(ids[2]).notes["advantage"], advantages[ids[2]])
        with pytest.raises(ConfigurationError, match="judge"):
            annotate(handle, ids[:1], {"judge": "good"})
        with pytest.raises(TrajectoryUnavailableError):
            annotate(handle, [ids[0], ids[1] + 1024 * 1000], {"judge": 1.0})
        with pytest.raises(TrajectoryUnavailableError, match="has the id 7"):
            notes_of(handle, 7)
        assert len(notes_of(handle, ids[0])) == 3
        with pytest.raises(ConfigurationError, match="for stores of Ray open the path of the run"):
            TokenLoader(handle, 64)  # type: ignore[arg-type]
        (again,) = handle.add_trajectories([learner.get(ids[2])]).committed(120)
        assert torch.equal(learner.get(again).notes["advantage"], advantages[ids[2]])
        handle.clear()


def test_rows_of_all_stores_are_asked(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    with emptied() as handle:
        monkeypatch.setattr(relations, "TOGETHER", 3)
        assert handle.query("messages").rows() == []
        messages = [{"role": "user", "content": "Sort."}, {"role": "assistant", "content": "3"}, {"role": "tool"}]
        ids = []
        for n in range(12):
            rollout = AgentTrajectory(
                input_ids=torch.arange(n + 1),
                messages=messages[: 1 + n % 3],
                task_id=f"t{n % 3}",
                reward=Reward(outcome=float(n % 2), metadata={"judge": n / 16} if n > 9 else {}),
                metadata={"tool": {"number": n}},
            )
            if n % 4 == 1:
                document = {name: value for name, value in vars(rollout).items() if name in DOCUMENT_FIELDS and value}
                added = handle.add_rollouts({"input_ids": rollout.input_ids}, [n + 1], [document])
            else:
                added = handle.add_trajectories([rollout, witness(n)] if n % 4 == 0 else [rollout])
            ids.append(added.committed(120)[0])
        assert {number % 1024 for number in ids} == {0, 1}
        assert handle.query().where("reward_judge > 0.6").select("task").rows() == [{"task": "t1"}, {"task": "t2"}]
        numbered = handle.query().where("metadata.tool.number >= 10").order_by("metadata.tool.number").ids()
        assert numbered.tolist() == ids[10:]
        for only in ({"where": "metadata.tool.number >= 10"}, {"ids": ids[10:]}):
            tasks = [
                item.task_id for item in handle.sample_trajectories(9, **only) if isinstance(item, AgentTrajectory)
            ]
            assert sorted(tasks) == ["t1", "t2"]
            assert set(handle.draw(64, **only).ids.tolist()) == set(ids[10:])
        text = "select rank, count(*) as n from trajectories where task is not null group by rank order by rank"
        assert handle.query().sql(text).rows() == sorted(Counter(number % 1024 for number in ids).items())
        asked = handle.query("messages").where("outcome > 0").where("role != 'user' or task = 't0'")
        expected = [
            (ids[n], f"t{n % 3}", at, messages[at]["role"])
            for n in range(1, 12, 2)
            for at in range(1 + n % 3)
            if at or n % 3 == 0
        ]
        columns = ("trajectory_id", "task", "message", "role")
        assert [tuple(row.values()) for row in asked.select(*columns).rows()] == expected
        assert pl.DataFrame(asked.select(*columns).stream()).rows() == expected
        assert asked.limit(2).ids().tolist() == list(dict.fromkeys(row[0] for row in expected[:2]))
        text = "select task, count(*) as n from tokens where input_ids > 0 group by task order by task"
        assert handle.query().sql(text).rows() == [("t0", 18), ("t1", 22), ("t2", 26)]
        steps = handle.query("steps").select("count(*) as n", "count(distinct trajectory_id) as of").rows()
        assert steps == [{"n": sum(int(witness(n).rewards.shape[:2].numel()) for n in (0, 4, 8)), "of": 3}]
        stream = handle.query("tokens").select("trajectory_id").stream()
        handle.evict(ids[:2])
        assert sum(len(part) for part in stream) == sum(range(3, 13))
        assert "2 trajectories cannot be read, so the answer lacks tokens: " in caplog.text
        with pytest.raises(ConfigurationError, match="did you mean 'role'"):
            handle.query("messages").where("rol = 'user'").rows()
        stream = handle.query("tokens").stream()
        handle.close()
        with pytest.raises(ConfigurationError, match="closed"):
            list(stream)


def test_values_by_row_that_one_store_has_are_asked(shared: Path) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    with emptied() as handle:
        ids = handle.add_trajectories([AgentTrajectory(input_ids=torch.arange(3))]).committed(120)
        annotate(handle, ids, {"advantages": [torch.tensor([1, 2, 3])]})
        receipts = [handle.add_trajectories([AgentTrajectory(input_ids=torch.arange(2))]) for _ in range(4)]
        assert len({number % 1024 for receipt in receipts for number in receipt.committed(120)}) == 2
        asked = handle.query("tokens").where("advantages > 1").select("position", "advantages")
        assert asked.rows() == [{"position": 1, "advantages": 2.0}, {"position": 2, "advantages": 3.0}]
        assert handle.query("tokens").where("advantages is null").count() == 8


def test_the_same_seed_draws_the_same(shared: Path) -> None:
    with emptied(seed=5) as handle:
        handle.add_trajectories([witness(key) for key in range(6)]).committed(120)
        first = handle.draw(100)
        state = handle.state_dict()
        second = handle.draw(100)
        other = DistributedReplayBuffer.connect("shared", seed=5)
        assert torch.equal(torch.from_numpy(other.draw(100).ids), torch.from_numpy(first.ids))
        other.load_state_dict(state)
        assert torch.equal(torch.from_numpy(other.draw(100).samples), torch.from_numpy(second.samples))


def test_steps_that_are_not_valid_are_in_no_draw(shared: Path) -> None:
    handle = emptied()
    codes, blocks = set(), []
    for at in range(6):
        valid = torch.rand(4, 3, generator=torch.Generator().manual_seed(at)) < 0.6
        code = 100 * at + torch.arange(12).reshape(4, 3)
        codes |= set(code[valid].tolist())
        blocks.append(Trajectory(rewards=code.unsqueeze(-1).float(), valid=valid))
    for block in blocks:
        handle.add_trajectories([block]).committed(120)
    handle.refresh()
    assert handle.total_samples == len(codes)
    assert {int(code) for _ in range(20) for code in handle.sample(len(codes))["rewards"].flatten()} == codes
    epoch = handle.sample(len(codes), sampler=EpochSampler())
    assert sorted(map(int, epoch["rewards"].flatten())) == sorted(codes)
    sampler = WeightedSampler(priorities=Priorities(alpha=1, eps=0))
    sampler.follow(handle)
    handle.update_priorities(sampler, epoch.drawn, epoch["rewards"].flatten() % 2)  # type: ignore[attr-defined]
    drawn = {int(code) for code in handle.sample(1000, sampler=sampler)["rewards"].flatten()}
    assert drawn == {code for code in codes if code % 2}


def test_what_is_added_together_is_sent_together(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with emptied(refresh_interval=0.0) as handle:
        monkeypatch.setattr("trajstore.distributed.receipts._TOGETHER", 3600.0)
        handle.add_trajectories([witness(0)])  # sent at once, as nothing else is in flight
        receipts = [handle.add_trajectories([witness(key), witness(key + 1)]) for key in (1, 3, 5)]
        assert handle.get_stats()["pending_requests"] == 2
        assert not any(receipt.done for receipt in receipts)
        ids = receipts[1].committed(120)  # waiting on a receipt sends its request without further additions
        assert [check_trajectory(handle.get(number)) for number in ids] == [3, 4]
        assert all(receipt.done for receipt in receipts)
        assert len({number for receipt in receipts for number in receipt.committed(120)}) == 6
        handle.add_trajectories([witness(7)])
        handle.flush(120)
        handle.refresh()
        assert handle.size == 8


def test_what_is_added_arrives_without_another_call(shared: Path) -> None:
    with emptied() as handle:
        for key in range(5):
            handle.add_trajectories([witness(key)])
        learner = DistributedReplayBuffer.connect("shared", refresh_interval=0.0)
        wait_until(lambda: learner.is_ready(5))
        assert learner.size == 5


def test_options_are_checked(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="patiense"):
        create("wrong", tmp_path, patiense=1)
    with pytest.raises(ConfigurationError, match="deadline"):
        create("wrong", tmp_path, deadline=0)
    with pytest.raises(ConfigurationError, match="stores"):
        create("wrong", tmp_path, stores=0)
    with pytest.raises(StoreNotFoundError, match="wrong"):
        DistributedReplayBuffer.connect("wrong")


def kill(rank: int) -> None:
    """Kill the actor of a shared store; Ray restarts it."""
    ray.kill(ray.get_actor(f"shared/rank_{rank}", namespace="trajstore"), no_restart=False)


def test_nothing_acknowledged_is_lost_when_an_actor_is_killed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_open", lambda about: None)  # as on a machine that has none of the directories
    with emptied(refresh_interval=0.0) as handle:
        receipts = []
        for key in range(24):
            receipts.append(handle.add_trajectories([witness(key)]))
            if key == 11:
                kill(0)
        ids = [number for receipt in receipts for number in receipt.committed(120)]
        assert len(set(ids)) == 24
        for key, number in enumerate(ids):
            assert check_trajectory(handle.get(number)) == key
        handle.refresh()
        assert handle.size == 24  # no duplicates
        drawn = handle.draw(64)
        kill(1)
        check_batch(handle.read(drawn))
    for rank in range(2):
        assert verify(shared / f"rank_{rank}").problems == []


def lose(name: str, rank: int) -> None:
    """End a store permanently, like the loss of its node."""
    ray.kill(ray.get_actor(f"{name}/rank_{rank}", namespace="trajstore"))
    wait_until(lambda: f"{name}/rank_{rank}" not in [actor["name"] for actor in ray.util.list_named_actors(True)])


def test_a_draw_waits_for_the_only_store_that_has_something(cluster: Cluster, tmp_path: Path) -> None:
    handle = create("only", tmp_path, refresh_interval=0.0)
    handle.add_trajectories([witness(3)]).committed(120)
    learner = DistributedReplayBuffer.connect("only", refresh_interval=0.0, deadline=120.0)
    impatient = DistributedReplayBuffer.connect("only", refresh_interval=0.0, deadline=0.3)
    lose("only", 0)
    with pytest.raises(StoreUnreachableError, match="no answer from rank_0 of 'only'"):
        impatient.sample(4)
    with ThreadPoolExecutor(2) as pool:
        sampled, whole = pool.submit(learner.sample, 4), pool.submit(learner.sample_trajectories, 1)
        wait_until(lambda: learner.get_stats()["absent_stores"] == 1)
        assert not sampled.done()
        assert not whole.done()
        create("only", tmp_path)
        check_batch(sampled.result(120))
        assert [check_trajectory(trajectory) for trajectory in whole.result(120)] == [3]
    learner.clear()
    with pytest.raises(EmptyBufferError, match="no store that answers has trajectories"):
        learner.sample(4)
    handle.stop()


def test_rows_of_stores_elsewhere_are_those_of_the_directory(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = emptied(refresh_interval=3600.0)
    ids = [handle.add_trajectories([witness(key, scale=200)]).committed(120)[0] for key in range(8)]
    handle.refresh()
    near = handle.draw(3001)
    expected = handle.read(near)
    monkeypatch.setattr(reads, "_open", lambda about: None)  # as on a machine that has none of the directories
    learner = DistributedReplayBuffer.connect("shared", refresh_interval=3600.0, patience=30.0)
    for count in (3001, 17):
        batch = learner.read(near.at(slice(count)))
        assert same(unnest(batch), {name: values[:count] for name, values in unnest(expected).items()})
    out = {"forward_inputs.mask": torch.zeros(3100, 2, dtype=torch.bfloat16)}
    for _ in range(2):
        batch = learner.read(near, columns=["forward_inputs.mask"], out=out)
        assert torch.equal(batch["forward_inputs"]["mask"], expected["forward_inputs"]["mask"])
        assert batch["forward_inputs"]["mask"].data_ptr() == out["forward_inputs.mask"].data_ptr()
    with pytest.raises(ConfigurationError, match="columns: 'rewards' is one text"):
        learner.read(near, columns="rewards")
    address = learner._stores.call(0, "rows_at")
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(bytes(len(address.secret)) + b"more")
        with suppress(ConnectionResetError):
            assert not stranger.recv(1)
    learner.refresh()
    handle.evict(ids[:1])
    with pytest.raises(TrajectoryUnavailableError):
        learner.read(near)
    check_batch(learner.read(near.at(near.ids != ids[0])))


def test_threads_read_while_actors_are_killed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_open", lambda about: None)  # as on a machine that has none of the directories
    with emptied(refresh_interval=3600.0) as handle, ThreadPoolExecutor(2) as pool:
        for key in range(8):
            handle.add_trajectories([witness(key, scale=200)]).committed(120)
        handle.refresh()
        drawn = handle.draw(3001)
        assert set((drawn.ids % 1024).tolist()) == {0, 1}
        expected, ended = handle.read(drawn), Event()

        def read() -> int:
            count = 0
            while not ended.is_set():
                assert same(handle.read(drawn), expected)
                count += 1
            return count

        reading = [pool.submit(read) for _ in range(2)]
        for rank in (0, 1, 0):
            before = Stores("shared", "trajstore", 600.0).describe(rank).began
            kill(rank)
            wait_until(lambda rank=rank, before=before: handle._stores.call(rank, "describe").began != before)  # type: ignore[misc]
        ended.set()
        assert min(item.result(600) for item in reading)


@pytest.mark.parametrize("how", ["frozen", pytest.param("gone", marks=pytest.mark.campaign)])
def test_rows_of_a_store_that_falls_silent_are_drawn_again_elsewhere(
    shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with emptied() as handle:
        keys = {handle.add_trajectories([witness(key)]).committed(120)[0]: key for key in range(8)}
    actor = ray.get_actor("shared/rank_1", namespace="trajstore")
    pid = ray.get(actor.__ray_call__.remote(lambda server: os.getpid()))
    learner, second, third = (
        DistributedReplayBuffer.connect("shared", patience=10.0, refresh_interval=3600.0) for _ in range(3)
    )
    impatient = DistributedReplayBuffer.connect("shared", patience=1.0)
    monkeypatch.setattr(reads, "_open", lambda about: None)  # as on a machine that has none of the directories
    for item in (learner, second, third):
        item.refresh()
    first = learner.trajectory_ids.tolist()
    check_batch(learner.sample(32))
    loader = ReplayLoader(third, batch_size=32)
    if how == "frozen":
        freeze(pid)
    else:
        lose("shared", 1)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())  # until then it answers on connections
    try:
        with ThreadPoolExecutor(3) as pool:  # each waits for its own patience
            rows = pool.submit(learner.sample, 64)
            drawn = pool.submit(second.sample, 64, sampler=WeightedSampler())
            loaded = pool.submit(next, loader)
            for batch in (rows.result(), drawn.result(), loaded.result()):
                check_batch(batch)
            assert len(drawn.result().drawn) == 64
        assert loader.figures()["batches_redrawn"] == 1
        loader.close()
        left = [number for number in first if number % 1024 == 0]
        assert learner.trajectory_ids.tolist() == left
        assert caplog.text.count("until it does, draws omit its 4 trajectories") == 3  # once per handle
        assert {check_trajectory(item) for item in learner.sample_trajectories(8)} == {keys[number] for number in left}
        why = r"rank_1 of .* has not answered for [0-5]?\d s" if how == "frozen" else "rank_1 of .* is lost"
        with pytest.raises(StoreUnreachableError, match=why):  # not for ``deadline``
            impatient.points.pin("now")
    finally:
        if how == "frozen":
            os.kill(pid, signal.SIGCONT)
        else:
            create("shared", shared, stores=2)
    wait_until(lambda: (learner.refresh(), learner.size)[1] == 8)


def test_a_silent_store_costs_only_itself_and_what_it_has_twice_is_one(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    with emptied() as handle:
        ids = [handle.add_trajectories([agent(number)]).committed(120)[0] for number in range(8)]
    left = [number for number in ids if number % 1024 == 0]
    actor = ray.get_actor("shared/rank_1", namespace="trajstore")
    pid = ray.get(actor.__ray_call__.remote(lambda server: os.getpid()))
    other = DistributedReplayBuffer.connect("shared", deadline=600.0, patience=600.0)
    with DistributedReplayBuffer.connect("shared", deadline=20.0, patience=10.0, refresh_interval=0.0) as learner:
        learner.refresh()
        freeze(pid)
        try:
            assert sorted(learner.query().where("outcome >= 0").ids().tolist()) == left
            assert "query of 'shared': without rank_1, which did not answer" in caplog.text
            assert learner.absent == [1]
            drawn = learner.sample_trajectories(8, where="outcome >= 0")
            assert len(drawn) == len(left)
            annotate(learner, left, {"judge": 1.0})
            assert learner.query("messages").where("judge = 1").table().height == len(left)
            assert learner.get_stats()["absent_stores"] == 1
            with pytest.raises(StoreUnreachableError, match="rank_1"):
                annotate(learner, [*left, *set(ids) - set(left)], {"other": 1.0})
            receipts = [learner.add_trajectories([agent(number)]) for number in range(10, 16)]
            more = [receipt.committed(120)[0] for receipt in receipts]
            assert {number % 1024 for number in more} == {0}
            annotate(learner, more, {"judge": 2.0})
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: (learner.refresh(), learner.absent)[1] == [])
        learner.flush()
        wait_until(lambda: sum(stats["num_trajectories"] for stats in stats_of(learner)) == 14)
        assert sorted(learner.query().where("judge = 2").ids().tolist()) == sorted(more)
        wait_until(lambda: learner.get_stats()["num_trajectories"] == other.get_stats()["num_trajectories"] == 14)
        learner.evict(more)
        other.refresh()
        assert sorted(other.trajectory_ids.tolist()) == sorted(ids)


def agent(number: int) -> AgentTrajectory:
    messages = [{"role": "user", "content": f"task {number}"}]
    return AgentTrajectory(input_ids=torch.arange(4), messages=messages, reward=Reward(outcome=float(number)))


def stats_of(handle: DistributedReplayBuffer) -> list[dict[str, float]]:
    return list(handle._stores.call_all(dict.fromkeys(handle.stores, ()), "stats").values())


def test_copies_in_two_stores_are_one(shared: Path, tmp_path: Path) -> None:
    """The producer that sent a request twice has ended before the silent store answered."""
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    with emptied() as handle:
        request = AddRequest(new_key(), [pack(flatten_all([agent(key) for key in range(6)]), Arena(1 << 20))[0]])
        first, second = (handle._stores.call(rank, "add", request, 6) for rank in (0, 1))
        annotate(handle, first[:3], {"judge": 1.0})
        annotate(handle, second[3:], {"judge": 2.0})
        assert len(handle.query().where("judge > 0").ids()) == 6
        assert [note.value for number in (first[4], second[4]) for note in notes_of(handle, number)] == [2.0, 2.0]
        assert handle.get_stats()["num_trajectories"] == handle.size == 6
        handle.evict([first[0], second[1]])
        assert handle.size == 4
        assert all(stats["num_trajectories"] == 4 for stats in stats_of(handle))


def test_a_store_for_which_ray_has_no_room_says_so(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachableError, match=r"Ray has too little CPU\. A store reserves CPU 1000 on"):
        create("large", tmp_path, actor_options={"num_cpus": 1000}, deadline=0.5)
    lose("large", 0)
    create("large", tmp_path).stop()


def test_a_store_that_cannot_start_says_why(cluster: Cluster, tmp_path: Path) -> None:
    """The others start, and can be used without it."""
    with pytest.raises(StoreUnreachableError, match=r"rank_0: .*sample_window_size: set by the handle or the server"):
        create("wrong", tmp_path, options={"sample_window_size": 3})
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "rank_1"):
        with pytest.raises(StoreUnreachableError, match=r"rank_1: .*StoreLockedError.*; connect\(\) goes on"):
            create("locked", tmp_path, stores=2)
        with DistributedReplayBuffer.connect("locked") as handle:
            assert handle.stores == [0]
    with create("locked", tmp_path, stores=2) as handle:
        assert handle.stores == [0, 1]
        handle.stop()


def test_who_connects_after_a_loss_knows_of_it(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    here = NodeAffinitySchedulingStrategy(
        cluster.head_node.node_id, soft=False
    )  # both stores are local: each gets some
    old = create("lossy", run, stores=2, refresh_interval=0.0, scheduling_strategy=here)
    ids = [old.add_trajectories([witness(key)]).committed(120)[0] for key in range(4)]
    assert sorted(number % 1024 for number in ids) == [0, 0, 1, 1]
    old.points.save(1)
    lose("lossy", 1)
    new = DistributedReplayBuffer.connect("lossy", deadline=120.0, refresh_interval=0.0)
    assert "store rank_1 of 'lossy' is lost" in caplog.text
    caplog.clear()
    new.refresh()
    new.refresh()
    assert caplog.text.count("draws omit its trajectories (number unknown)") == 1
    for handle in (old, new):
        assert [handle.get_stats()[name] for name in ("stores", "absent_stores")] == [2, 1]
        assert (handle.stores, handle.size) == ([0, 1], 2)
        for whole in (
            lambda handle=handle: handle.points.save(2),
            lambda handle=handle: handle.points.pin("some"),
            lambda handle=handle: handle.points.rollback(1),
            lambda handle=handle: handle.points.saved,
        ):
            with pytest.raises(StoreUnreachableError, match="store rank_1 of 'lossy' is lost"):
                whole()
    create("lossy", run, stores=2, scheduling_strategy=here)
    wait_until(lambda: (new.refresh(), new.size)[1] == 4)
    assert [(point.step, point.is_complete) for point in new.points.saved] == [(1, True)]
    new.points.save(2)
    lose("lossy", 0)
    lose("lossy", 1)
    with pytest.raises(StoreUnreachableError, match="stores rank_0, rank_1 of 'lossy' are lost"):
        DistributedReplayBuffer.connect("lossy")
    new.stop()  # the next run starts exactly its own number of stores
    assert create("lossy", run, stores=1).stores == [0]
    assert "rank_1 on" in caplog.text
    assert "is not served by any store of 'lossy', so it is never drawn. It has 2 trajectories" in caplog.text
    DistributedReplayBuffer.connect("lossy").stop()


def test_windows_loader_and_a_point_to_which_all_go_back(shared: Path) -> None:
    handle = emptied(refresh_interval=0.0, seed=3, sample_window_size=4)
    assert handle.points.saved == []
    for key in range(8):
        handle.add_trajectories([witness(key)]).committed(120)
    handle.refresh()
    ids = handle.trajectory_ids
    assert [check_trajectory(handle.get(number)) for number in ids.tolist()] == list(range(8))  # the oldest first
    assert set(handle.draw(64).ids.tolist()) == set(ids[-4:].tolist())
    assert {check_trajectory(trajectory) for trajectory in handle.sample_trajectories(9)} == set(range(4, 8))
    sampler = WeightedSampler(priorities=Priorities())
    batch = handle.sample(64, sampler=sampler)
    assert set(batch.drawn.ids.tolist()) <= set(ids[-4:].tolist())
    assert handle.update_priorities(sampler, batch.drawn, np.arange(len(batch.drawn))) == 0
    assert handle._sampling.extents(ids)[0].tolist() == [handle.get(number).rewards.shape[0] for number in ids.tolist()]
    loader = ReplayLoader(handle, batch_size=16, sampler=sampler)
    check_batch(next(loader))
    point = handle.points.save(10, {"loader": loader, "note": "ten"})
    assert (point.step, point.trajectories, point.is_complete, point.ranks) == (10, 8, True, 2)
    with pytest.raises(ConfigurationError, match="remove it first"):
        handle.points.save(10)
    expected = [next(loader) for _ in range(6)]
    loader.close()
    handle.evict(ids[5:].tolist())
    handle.add_trajectories([witness(key) for key in range(20, 26)]).committed(120)
    handle.points.pin("later")
    handle.close()

    handle = DistributedReplayBuffer.connect("shared", refresh_interval=0.0, sample_window_size=4)
    with pytest.raises(StoreNotFoundError, match="step 9; complete are: 10"):
        handle.points.rollback(9)
    state = handle.points.rollback(10)
    assert state["note"] == "ten"
    assert handle.trajectory_ids.tolist() == ids.tolist()
    loader = ReplayLoader(handle, batch_size=16, sampler=WeightedSampler(priorities=Priorities()))
    loader.load_state_dict(state["loader"])
    for trajectory in expected:
        assert torch.equal(trajectory["curr_obs"]["tag"], next(loader)["curr_obs"]["tag"])
    loader.close()
    newest = handle.add_trajectories([witness(30)]).committed(120)[0]
    handle.refresh()
    assert handle.trajectory_ids[-1] == newest
    for step in (20, 30, 40, 50):
        handle.points.save(step, keep=2)
    assert [point.step for point in handle.points.saved] == [40, 50]
    handle.clear()
    assert (handle.size, handle.is_ready(1)) == (0, False)
    with TrajectoryReplayBuffer.open(shared, pin="step-50") as reader:
        assert len(reader) == 9
    assert [point.is_complete for point in points_at(shared).saved] == [True, True]


def test_a_store_that_is_killed_while_all_are_saved_leaves_the_earlier_state_whole(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = emptied(refresh_interval=0.0)
    handle.add_trajectories([witness(key) for key in range(4)]).committed(120)
    handle.points.save(1, {"step": 1})
    handle.add_trajectories([witness(key) for key in range(4, 9)]).committed(120)
    kill_before: list[str] = []
    call_all = handle._stores.call_all

    def killing(arguments: Any, method: str, seconds: float | None = None) -> Any:
        if method in kill_before:
            kill_before.remove(method)
            before = handle._stores.call(1, "describe").began
            kill(1)
            wait_until(lambda: handle._stores.call(1, "describe").began != before)
        return call_all(arguments, method, seconds)

    monkeypatch.setattr(handle._stores, "call_all", killing)
    kill_before.append("save_point")
    with pytest.raises(StoreWriteError, match=r"^store rank_1 of 'shared': .*released"):
        handle.points.save(2, {"step": 2})
    assert [(point.step, point.lacking) for point in handle.points.saved] == [(1, ()), (2, (1,))]
    with pytest.raises(StoreNotFoundError, match=r"step 2 is incomplete.*rank_1; complete are: 1"):
        handle.points.rollback(2)
    handle.points.save(2, {"step": 2})
    assert handle.points.saved[-1].is_complete
    handle.points.pin("both")
    for rank in handle.stores:
        with TrajectoryReplayBuffer.open(shared / f"rank_{rank}", pin="both") as reader:
            reader.save_checkpoint(tmp_path / "saved" / f"rank_{rank}")
    with TrajectoryReplayBuffer.open(tmp_path / "saved") as reader:
        assert len(reader) == 9


class Silent:
    """Three stores, one missing, one silent, one with half a second per answer; Ray for them, and its clock."""

    deadline = 60.0
    clock = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.back = False
        self.now = 0.0

    def submit(self, rank: int, method: str, *given: Any) -> float:
        """Return the time of the answer."""
        self.asked.append((rank, method))
        if rank == 0 and not self.back:
            raise StoreUnreachableError("rank_0 is not there")
        return self.now + (0.0, math.inf, 0.5)[rank]

    def forget(self, rank: int) -> None:
        """Do nothing."""

    def note(self, next_id: int) -> None:
        """Do nothing."""

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        return StoreUnreachableError(f"rank_{rank}: {error}")

    def put(self, value: Any) -> Any:
        return value

    def wait(self, answers: list[float], *, timeout: float, num_returns: int = 1) -> tuple[list[float], list[float]]:
        self.now = min(self.now + timeout, max(self.now, *answers))
        return [at for at in answers if at <= self.now], [at for at in answers if at > self.now]

    def get(self, answer: float) -> list[int]:
        assert answer <= self.now
        return [2]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_each_store_has_its_own_patience_and_a_silent_one_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Silent()
    for where in (receipts, pending_request):
        monkeypatch.setattr(where, "time", stores)
        monkeypatch.setattr(where, "ray", lambda: stores)
    routes = Routes([], [0, 1, 2], patience=3.0)
    outbox = Outbox(stores, routes, HandleOptions())  # type: ignore[arg-type]
    assert outbox.send(flatten_all([witness(1)])).committed(40.0) == [2]
    assert stores.now == 3.5, "the second store was waited for, and then the third one"
    assert [rank for rank, _ in stores.asked][:2] == [0, 1], "the first one, which was sent nothing, was not"
    assert {rank for rank, _ in stores.asked} == {0, 1, 2}
    stores.asked.clear()
    for _ in range(3):
        outbox.send(flatten_all([witness(1)])).committed(40.0)
    assert {rank for rank, method in stores.asked if method == "add"} == {2}
    assert {rank for rank, method in stores.asked if method == "disown"} <= {1}, "only it may have the first request"
    monkeypatch.setattr(receipts, "_HOPE", 0.0)
    stores.back = True
    stores.asked.clear()
    while (0, "add") not in stores.asked:
        outbox.send(flatten_all([witness(1)])).committed(40.0)
    probes = [asked for asked in stores.asked if asked[1] != "disown"]
    assert probes[:2] == [(0, "describe"), (1, "describe")], "asked by what costs nothing"
    assert (1, "add") not in stores.asked


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster; remove the nodes that tests add."""
    yield cluster
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)


def returned(cluster: Cluster) -> None:
    """Let the cluster have two nodes, if a test has not already."""
    if not cluster.worker_nodes:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()


def _add_there(name: str, first: int, count: int) -> dict[int, int]:
    with DistributedReplayBuffer.connect(name) as handle:
        return {handle.add_trajectories([witness(key)]).committed(120)[0]: key for key in range(first, first + count)}


def test_a_node_that_is_lost_is_left_out_and_comes_back(
    nodes: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One node has no CPU for Ray, like many head nodes; another one is lost, unnoticed by Ray at first."""
    small, node = nodes.add_node(num_cpus=0), nodes.add_node(num_cpus=1, resources={"lost": 1})
    nodes.wait_for_nodes()
    handle = create("nodes", tmp_path / "run", stores="per_node", refresh_interval=0.0)
    assert f"node {small.node_id}" in caplog.text
    assert "gets no store: it has CPU 0, and a store reserves CPU 0.1" in caplog.text
    assert handle.stores == [0, 1]
    far = next(rank for rank, where in handle.nodes().items() if where == node.node_id)
    near = 1 - far
    keys = {number: key for key in range(8) for number in handle.add_trajectories([witness(key)]).committed(120)}
    assert {number % 1024 for number in keys} == {near}  # the local store is preferred
    on_far = ray.remote(_add_there).options(resources={"lost": 0.1}, num_cpus=0)
    keys.update(ray.get(on_far.remote("nodes", 100, 8)))
    learner = DistributedReplayBuffer.connect("nodes", deadline=120.0, patience=2.0, refresh_interval=0.0)
    wait_until(lambda: (learner.refresh(), learner.size)[1] == 16)
    nodes.remove_node(node, allow_graceful=False)
    able = create("able", tmp_path / "able", stores="per_node")
    assert list(able.nodes().values()) == [nodes.head_node.node_id]
    assert able.points.save(1).is_complete
    able.stop()
    with pytest.raises(StoreUnreachableError, match="no node can start a store"):
        create("unable", tmp_path / "no", stores="per_node", actor_options={"num_cpus": 1000})
    nodes.remove_node(small)
    wait_until(lambda: (learner.refresh(), learner.size)[1] == 8)
    assert "draws omit its 8 trajectories" in caplog.text
    wait_until(lambda: learner.get_stats()["absent_stores"] == 1)
    late = DistributedReplayBuffer.connect("nodes", deadline=10.0)
    assert [late.get_stats()[name] for name in ("stores", "absent_stores")] == [2, 1]
    check_batch(learner.sample(32))
    more = handle.add_trajectories([witness(50)]).committed(120)
    keys[more[0]] = 50
    with pytest.raises(StoreUnreachableError, match=f"rank_{far}"):
        DistributedReplayBuffer.connect("nodes", deadline=1.0).get(next(n for n in keys if n % 1024 == far))
    returned(nodes)  # the machine, with its disk
    handle = create("nodes", tmp_path / "run", stores="per_node", refresh_interval=0.0)
    wait_until(lambda: (handle.refresh(), handle.size)[1] == 17)
    for number, key in keys.items():
        assert check_trajectory(handle.get(number)) == key
    handle.stop()


def test_a_node_starts_the_store_whose_directory_it_has(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes with separate disks after a restart of Ray, which changes node ids."""
    returned(nodes)
    ids = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    own = {node: {len(ids) - 1 - place} for place, node in enumerate(ids)}
    ask = starting._ask_nodes

    def asked(given: Any, task: Any, *arguments: Any, seconds: float) -> Any:
        answer = ask(given, task, *arguments, seconds=seconds)
        return {node: own[node] for node in answer} if task is starting._ranks_below else answer

    monkeypatch.setattr(starting, "_ask_nodes", asked)
    handle = create("homes", tmp_path, stores="per_node")
    assert handle.nodes() == {next(iter(ranks)): node for node, ranks in own.items()}
    lose("homes", 0)
    own[ids[-1]] = set()  # its disk is new
    create("homes", tmp_path, stores="per_node")
    assert f"store rank_0 of 'homes' starts empty on node {ids[-1]}" in caplog.text
    handle.stop()
