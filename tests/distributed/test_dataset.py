"""A store as a Ray Data source, on a real Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from tests.support.witness import check_trajectory, rows_of, witness
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.columns.fields import join_name, walk
from trajstore.errors import ConfigurationError, StoreNotFoundError, TrajectoryUnavailableError

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from trajstore.distributed import StoreDatasource, dataset, read_store  # noqa: E402
from trajstore.distributed.rows import row_of  # noqa: E402

SMALL = WriterOptions(shard_bytes=4096)
AGENT = AgentTrajectory(
    messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "author": "llm"}],
    input_ids=torch.arange(7),
    response_start=4,
    old_log_probs=torch.randn(3, dtype=torch.float64).to(torch.bfloat16),
    reward=Reward(outcome=1.0, metadata={"a": [1, {"b.c": None}]}),
    task_id="t",
    metadata={"x.y": {"z": 1}},
)


def store(path: Path, keys: range) -> Path:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, writer=SMALL) as buffer:
        for key in keys:
            buffer.add_trajectories([witness(key)])
            buffer.flush()
    return path


def check_rows(rows: list[dict[str, Any]]) -> set[int]:
    """Compare each row with its tag; return the keys."""
    tags = torch.tensor([row["curr_obs.tag"] for row in rows])
    expected = rows_of(tags)
    for name in rows[0].keys() & expected.keys():
        values = torch.from_numpy(np.stack([row[name] for row in rows]))
        assert torch.equal(values.reshape(expected[name].shape), expected[name].to(values.dtype)), name
    return set((tags >> 20).tolist())


@pytest.mark.parametrize("trajectory", [witness(1), AGENT, Trajectory(rewards=torch.ones(2, 1, 1))])
def test_a_row_has_the_whole_trajectory(trajectory: Any) -> None:
    row = row_of(trajectory)
    document = orjson.loads(row.pop("document"))
    assert document["kind"] == ("agent" if trajectory is AGENT else "step")
    for path, leaf in walk({item.name: getattr(trajectory, item.name) for item in fields(trajectory)}):
        name = join_name(path)
        if isinstance(leaf, torch.Tensor):
            read = torch.from_numpy(row[name])
            assert torch.equal(read, leaf.to(read.dtype)), name
            assert document["dtypes"].get(name, str(read.dtype)[6:]) == str(leaf.dtype)[6:]
        else:
            assert document["values"][name] == (asdict(leaf) if isinstance(leaf, Reward) else leaf), name


def test_columns_that_nobody_wants_are_not_read(tmp_path: Path) -> None:
    path = store(tmp_path / "store", range(6))
    source = StoreDatasource(path)
    tasks = source.get_read_tasks(3)
    assert 2 <= len(tasks) <= 4
    rows = sum(witness(key).rewards.shape[:2].numel() for key in range(6))  # type: ignore[union-attr]
    assert sum(task.metadata.num_rows for task in tasks) == rows
    assert source.supports_projection_pushdown()
    narrow = source.apply_projection({"rewards": "rewards", "trajectory_id": "trajectory_id"})
    blocks = [block for task in narrow.get_read_tasks(1) for block in task()]
    assert {name for block in blocks for name in block.column_names} == {"rewards", "trajectory_id"}
    both = StoreDatasource(path, columns=["rewards", "dones"]).apply_projection({"dones": "dones"})
    assert {name for task in both.get_read_tasks(1) for block in task() for name in block.column_names} == {"dones"}
    none = source.apply_projection({})  # as requested by count()
    assert sum(block.num_rows for task in none.get_read_tasks(2) for block in task()) == rows
    with pytest.raises(ConfigurationError, match="no column rewardz"):
        StoreDatasource(path, columns=["rewardz"])
    with pytest.raises(ConfigurationError, match="unit"):
        StoreDatasource(path, unit="episode")  # type: ignore[arg-type]
    with pytest.raises(StoreNotFoundError):
        StoreDatasource(tmp_path / "nowhere")


def test_steps_that_are_not_valid_are_no_rows(tmp_path: Path) -> None:
    valid = torch.tensor([[True, False], [False, True], [True, True]])
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, writer=SMALL) as buffer:
        for block in (None, valid):
            rewards = torch.arange(6.0).reshape(3, 2, 1)
            buffer.add_trajectories([Trajectory(rewards=rewards, valid=block)])
    source = StoreDatasource(tmp_path)
    rows = [row for task in source.get_read_tasks(2) for block in task() for row in block.to_pylist()]
    assert sum(task.metadata.num_rows for task in source.get_read_tasks(2)) == len(rows)
    drawn = [(row["trajectory_id"], row["sample"], row["rewards"][0]) for row in rows]
    assert sorted(drawn) == [
        (number, at, float(at)) for number in range(2) for at in range(6) if not number or valid.reshape(-1)[at]
    ]
    with pytest.raises(ConfigurationError, match="no column valid"):
        StoreDatasource(tmp_path, columns=["valid"])


def test_transitions_of_a_run(small_ray: None, tmp_path: Path) -> None:
    store(tmp_path / "run" / "rank_0", range(6))
    store(tmp_path / "run" / "rank_1", range(10, 14))
    dataset = read_store(tmp_path / "run", override_num_blocks=4)
    rows = dataset.take_all()
    assert check_rows(rows) == {*range(6), *range(10, 14)}
    expected = sum(witness(key).rewards.shape[:2].numel() for key in (*range(6), *range(10, 14)))  # type: ignore[union-attr]
    assert len(rows) == dataset.count() == expected
    narrow = dataset.select_columns(["rewards", "curr_obs.tag"]).take_all()
    assert narrow[0].keys() == {"rewards", "curr_obs.tag"}
    check_rows(narrow)
    with TrajectoryReplayBuffer.open(tmp_path / "run") as reader:
        ids = {number: check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()}
    tags = {int(row["trajectory_id"]): int(row["curr_obs.tag"]) for row in rows}
    assert {number: tag >> 20 for number, tag in tags.items()} == ids  # id 0 exists in both ranks
    with pytest.raises(ConfigurationError, match="no column rewardz"):
        dataset.select_columns(["rewardz"]).take_all()


def test_whole_trajectories_of_a_pin_and_of_now(small_ray: None, tmp_path: Path) -> None:
    path = store(tmp_path / "store", range(5))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.points.pin("five")
        buffer.add_trajectories([AGENT, AGENT, witness(9)])
        buffer.evict([0])
    with pytest.raises(ConfigurationError, match="unit='trajectory'"):
        StoreDatasource(path, unit="sample")
    pinned = read_store(path, pin="five", unit="trajectory")
    assert sorted(row["trajectory_id"] for row in pinned.take_all()) == [0, 1, 2, 3, 4]
    rows = read_store(path, unit="trajectory", override_num_blocks=3).take_all()
    documents = {row["trajectory_id"]: orjson.loads(row["document"]) for row in rows}
    assert {number: document["kind"] for number, document in documents.items()} == {
        **dict.fromkeys((1, 2, 3, 4, 7), "step"),
        **dict.fromkeys((5, 6), "agent"),
    }
    assert documents[5]["values"]["messages"] == AGENT.messages
    annotate(path, [5, 6], {"outcome": 0.125})
    rows = read_store(path, unit="trajectory").take_all()
    assert outcomes(rows) == {5: 0.125, 6: 0.125}


def outcomes(rows: Iterable[Any]) -> dict[int, float]:
    """Return the outcomes of agent trajectories, by id."""
    documents = {int(row["trajectory_id"]): orjson.loads(row["document"]) for row in rows}
    return {
        number: document["values"]["reward"]["outcome"]
        for number, document in documents.items()
        if document["kind"] == "agent"
    }


def test_later_tasks_of_a_process_read_the_present_state(tmp_path: Path) -> None:
    def read(**pin: str) -> dict[int, float]:
        tasks = StoreDatasource(path, unit="trajectory", **pin).get_read_tasks(1)
        return outcomes(row for task in tasks for block in task() for row in block.to_pylist())

    path = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([AGENT, AGENT])
        buffer.points.save(1)
        assert read() == {0: 1.0, 1: 1.0}
        annotate(buffer, [0], {"outcome": 0.5})
        buffer.points.pin("named")
        assert read() == read(pin="named") == {0: 0.5, 1: 1.0}
        buffer.add_trajectories([AGENT])
        buffer.evict([1])
        buffer.flush()
        assert read() == {0: 0.5, 2: 1.0}
        buffer.points.remove("named")
        buffer.points.pin("named")
        assert read(pin="named") == {0: 0.5, 2: 1.0}
        buffer.points.rollback(1)
        assert read() == {0: 1.0, 1: 1.0}
    (task,) = StoreDatasource(path).get_read_tasks(1)
    shutil.rmtree(path)
    store(path, range(2))
    for found in ("replaced while it was open", "was replaced by"):
        with pytest.raises(StoreNotFoundError, match=found):
            list(task())
        dataset._opened.cache_clear()  # as in another process
    assert read() == {}


def test_a_run_in_an_object_store(small_ray: None, s3_url: str, s3_options: dict[str, Any]) -> None:
    for rank in range(2):
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=f"{s3_url}/rank_{rank}", storage_options=s3_options, writer=SMALL
        ) as buffer:
            buffer.add_trajectories([witness(key) for key in range(6 * rank, 6 * rank + 6)])
    rows = read_store(s3_url, storage_options=s3_options, columns=["curr_obs.tag", "rewards"]).take_all()
    assert check_rows(rows) == set(range(12))


def test_an_empty_store_has_no_rows(small_ray: None, tmp_path: Path) -> None:
    assert read_store(store(tmp_path / "store", range(0)), columns=["rewards"]).take_all() == []


def test_what_was_evicted_meanwhile_is_told(tmp_path: Path) -> None:
    path = store(tmp_path / "store", range(4))
    (task,) = StoreDatasource(path).get_read_tasks(1)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.evict([1])
    with pytest.raises(TrajectoryUnavailableError, match=r"1 trajectory was evicted after .* \(1\); pin"):
        list(task())
