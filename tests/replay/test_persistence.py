from __future__ import annotations

import json
import logging
import math
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.replay.conftest import build, rollouts, step
from tests.support.faults import FaultPlan, failing_disk
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules, newest_pool
from trainer_hooks.replay.persistence import read_pool, write_pool
from trainer_hooks.replay.rows import with_small_columns
from trajstore._core.reading.places import POOL_FILES
from trajstore.errors import (
    CorruptStoreError,
    IncompleteCheckpointError,
    StoreNotFoundError,
    StoreWriteError,
    UnsafeContentError,
)
from trajstore.interop.rollouts import row_of
from trajstore.trajectory import AgentTrajectory

RULES = PoolRules(n_rollout=8)


def filled() -> ExperienceManager:
    manager = ExperienceManager(RULES)
    partly = [0.0, 1.0] * 4
    step(manager, [*rollouts("a", partly), *rollouts("b", partly), *rollouts("solved", [1.0] * 4)])
    return manager


def plain(manager: ExperienceManager) -> dict[str, list[dict[str, object]]]:
    return {task: [row_of(history, {}) for history in held] for task, held in manager.task2trajectories.items()}


def test_a_pool_goes_to_disk_and_back(tmp_path: Path) -> None:
    manager = filled()
    folder = tmp_path / "experience_pool" / "step_10"
    manager.save_experience_pool_to_disk(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(POOL_FILES)
    assert json.loads((folder / "difficulty2task_dict.json").read_text()) == {"4": ["a", "b"]}
    assert json.loads((folder / "skip_uid_set.json").read_text()) == ["solved"]

    other = ExperienceManager(RULES)
    other.seed([build("stale")])
    other.load_experience_pool_from_disk(folder)
    assert other.difficulty2task_dict == manager.difficulty2task_dict
    assert other.skip_uid_set == manager.skip_uid_set
    assert plain(other) == plain(manager)


def test_the_pickle_is_read_by_a_python_without_trajstore(tmp_path: Path) -> None:
    filled().save_experience_pool_to_disk(tmp_path / "step_1")
    program = (
        "import pickle, sys\n"
        "pool = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert not {'torch', 'numpy', 'trajstore'} & set(sys.modules)\n"
        "assert sorted(pool) == ['a', 'b'] and pool['a'][0]['input_ids'][:3] == [0, 1, 1002]\n"
    )
    path = tmp_path / "step_1" / "task2trajectories.pkl"
    subprocess.run([sys.executable, "-I", "-c", program, str(path)], check=True, cwd=tmp_path)


def test_saving_again_replaces_and_a_failure_leaves_what_was(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    ExperienceManager(RULES).save_experience_pool_to_disk(folder)
    filled().save_experience_pool_to_disk(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert b'"a"' in before["difficulty2task_dict.json"]

    dry = FaultPlan()
    ExperienceManager(RULES).save_experience_pool_to_disk(tmp_path / "dry")
    with failing_disk(dry):
        ExperienceManager(RULES).save_experience_pool_to_disk(tmp_path / "dry")
    assert dry.calls.count("rename") == 3
    for at in range(len(dry.calls)):
        with failing_disk(FaultPlan(at, "ENOSPC")), pytest.raises(StoreWriteError, match="step_3"):
            ExperienceManager(RULES).save_experience_pool_to_disk(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dry", "step_3"]


def test_the_newest_whole_step_is_found(tmp_path: Path) -> None:
    manager = ExperienceManager(RULES)
    for number in (9, 10, 100):
        manager.save_experience_pool_to_disk(tmp_path / f"step_{number}")
    (tmp_path / "step_500").mkdir()
    (tmp_path / "step_500" / "skip_uid_set.json").write_text("[]")
    (tmp_path / "step_600.123.tmp").mkdir()
    assert newest_pool(tmp_path) == tmp_path / "step_100"
    assert newest_pool(tmp_path / "absent") is None


def test_a_pool_of_agentevolver_is_read_and_goes_round_in_our_files(shared_fixtures: Path, tmp_path: Path) -> None:
    base = shared_fixtures / "experience_pool"
    folder = newest_pool(base)
    assert folder.name == "step_120"
    contents = read_pool(folder)
    assert contents.difficulty2task_dict == {1: ["task_0"], 3: ["task_1", "task_4"], 5: ["task_2", "task_3"]}
    assert set(contents.skip_uid_set) == {"task_77", "task_9"}
    assert set(contents.task2trajectories) == {f"task_{i}" for i in range(5)}

    first = contents.task2trajectories["task_0"][0]
    assert first.policy_version == 100
    assert first.entropy == 0.5926
    assert first.messages[2] == {"author": "llm", "role": "assistant", "content": "go to cabinet 0"}
    assert (first.reward.outcome, first.query) == (1.0, "Task task_0")
    assert first.old_log_probs.shape == first.response_mask.shape
    assert math.isclose(first.old_log_probs[0].item(), -0.12058648968378793, rel_tol=1e-6)
    assert "old_log_probs" not in first.metadata
    write_pool(tmp_path / "step_120", contents)
    again = read_pool(tmp_path / "step_120").task2trajectories
    for task, held in contents.task2trajectories.items():
        assert [row_of(history, {}) for history in again[task]] == [row_of(history, {}) for history in held]


class Hostile:
    """Writes a file when unpickled the ordinary way."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: {"a": [bad]}, lambda bad: {"a": [{"metadata": bad}]}])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    manager = filled()
    before = plain(manager)
    manager.save_experience_pool_to_disk(tmp_path / "step_1")
    trap = tmp_path / "trap"
    data = pickle.dumps(wrap(Hostile(trap)))
    (tmp_path / "step_1" / "task2trajectories.pkl").write_bytes(data)
    with pytest.raises(UnsafeContentError, match=r"task2trajectories\.pkl"):
        manager.load_experience_pool_from_disk(tmp_path / "step_1")
    assert not trap.exists()
    assert plain(manager) == before
    pickle.loads(data)  # proves that the payload works
    assert trap.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("difficulty2task_dict.json", b"{", "truncated"),
        ("difficulty2task_dict.json", b"[]", "Expected `object`"),
        ("difficulty2task_dict.json", b'{"one": ["a"]}', "Expected `int`"),
        ("difficulty2task_dict.json", b'{"1": ["a", 2]}', r"Expected `str`, got `int` - at `\$\[\.\.\.\]\[1\]`"),
        ("skip_uid_set.json", b'{"a": 1}', "Expected `array`"),
        ("task2trajectories.pkl", b"garbage", "pickle"),
        ("task2trajectories.pkl", pickle.dumps([1]), "dict of task ids"),
        ("task2trajectories.pkl", pickle.dumps({"a": 3}), "task 'a'"),
        ("task2trajectories.pkl", pickle.dumps({"a": [3]}), "task 'a'"),
        ("task2trajectories.pkl", pickle.dumps({"": [{}]}), "task '' must be a name"),
        ("task2trajectories.pkl", pickle.dumps({"a": [{"task_id": "b"}]}), "another task"),
    ],
)
def test_damaged_files_are_named_and_change_nothing(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    manager = filled()
    before = plain(manager)
    manager.save_experience_pool_to_disk(tmp_path / "step_1")
    (tmp_path / "step_1" / name).write_bytes(content)
    with pytest.raises(CorruptStoreError, match=message) as caught:
        manager.load_experience_pool_from_disk(tmp_path / "step_1")
    assert name in str(caught.value)
    assert plain(manager) == before


def test_absent_files_are_named(tmp_path: Path) -> None:
    manager = filled()
    with pytest.raises(StoreNotFoundError, match="nowhere"):
        manager.load_experience_pool_from_disk(tmp_path / "nowhere")
    manager.save_experience_pool_to_disk(tmp_path / "step_1")
    (tmp_path / "step_1" / "skip_uid_set.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"skip_uid_set\.json"):
        manager.load_experience_pool_from_disk(tmp_path / "step_1")


def test_a_task_both_skipped_and_in_a_bucket_is_not_replayed(tmp_path: Path) -> None:
    filled().save_experience_pool_to_disk(tmp_path / "step_1")
    (tmp_path / "step_1" / "skip_uid_set.json").write_text('["a"]')
    manager = ExperienceManager(RULES)
    manager.load_experience_pool_from_disk(tmp_path / "step_1")
    assert manager.get_valid_replay_task_ids() == ["b"]
    assert manager.sample_tasks_from_replaypool(9) == ["b"]


# -- Files in foreign formats --


def write_files(folder: Path, pool: object, buckets: str = '{"1": ["a"]}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "difficulty2task_dict.json").write_text(buckets)
    (folder / "skip_uid_set.json").write_text("[]")
    (folder / "task2trajectories.pkl").write_bytes(pickle.dumps(pool))
    return folder


def test_a_defaultdict_of_ours_is_read(tmp_path: Path) -> None:
    pool = defaultdict(
        list, {"a": [row_of(AgentTrajectory(task_id="a", metadata={"deep": {"er": [1, {"x": None}]}}), {})]}
    )
    contents = read_pool(write_files(tmp_path / "step_1", pool))
    assert contents.task2trajectories["a"][0].metadata == {"deep": {"er": [1, {"x": None}]}}


def test_a_task_in_two_buckets_is_told_and_the_later_one_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_files(tmp_path / "step_1", {}, buckets='{"3": ["a", "b"], "5": ["a", "a"], "1": ["c"]}')
    manager = ExperienceManager(RULES)
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        manager.load_experience_pool_from_disk(folder)
    assert manager.difficulty2task_dict == {3: ("b",), 5: ("a",), 1: ("c",)}
    assert "1 task is in two buckets" in caplog.text


# -- Stored entries are compact --


def test_small_values_take_few_bytes_and_what_has_other_values_stays() -> None:
    compact = with_small_columns(AgentTrajectory(input_ids=torch.tensor([7]), loss_mask=torch.tensor([0, 1])))
    assert (compact.input_ids.dtype, compact.loss_mask.dtype) == (torch.int32, torch.uint8)
    ids = torch.tensor([-1, 2**40])
    small = with_small_columns(AgentTrajectory(input_ids=ids, loss_mask=torch.tensor([0, 2])))
    assert small.input_ids is ids
    assert small.loss_mask.tolist() == [0, 2]


def test_a_pool_in_memory_has_copies_of_its_own_and_not_the_batch_of_which_they_are_slices() -> None:
    whole = -torch.rand(8, 1000)
    trajectory = AgentTrajectory(old_log_probs=whole[3, :5], entropys=whole[3, :5], metadata={"a": [1]})
    store = BufferStore()
    (number,) = store.add_trajectories([trajectory])
    expected = whole[3, :5].clone()
    whole.zero_()
    trajectory.metadata["a"].append(2)
    kept = store.get(number)
    assert kept.metadata == {"a": [1]}
    for column in (kept.old_log_probs, kept.entropys):
        assert column.equal(expected)
        assert column.untyped_storage().nbytes() == 5 * 4
