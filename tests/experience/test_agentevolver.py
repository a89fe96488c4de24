"""Pools as AgentEvolver's own classes pickle them, and what its code makes of the same conversations."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from trajstore.experience import ExperienceManager, PoolRules
from trajstore.experience.persistence import read_pool, to_plain
from trajstore.experience.rows import row_count, rows_of
from trajstore.trajectory import AgentTrajectory

RULES = PoolRules(n_rollout=8, max_trajectories_per_task=20)
KINDS = ("linear", "linear_think")


def plain(manager: ExperienceManager) -> dict[str, list[dict[str, object]]]:
    return {task: [to_plain(one) for one in held] for task, held in manager.task2trajectories.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_agentevolvers_own_code(shared_fixtures: Path, kind: str) -> None:
    base = shared_fixtures / "experience_pool_cmt" / kind
    expected = {(one["task_id"], one["rollout_id"]): one for one in json.loads((base / "expected.json").read_text())}
    before = set(sys.modules)
    pool = read_pool(base / "step_40")
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"agentevolver", "omegaconf", "tokenizers"}
    rows: dict[tuple[str, str], list[AgentTrajectory]] = defaultdict(list)
    for task, held in pool.task2trajectories.items():
        for one in held:
            rows[task, one.rollout_id] += rows_of(one)
            assert len(rows[task, one.rollout_id]) == row_count(one), "one trajectory for each rollout"
    assert len(rows) == 14
    for key, found in rows.items():
        known = expected[key]
        said = [{name: message[name] for name in ("role", "content")} for message in found[0].messages]
        assert said == known["messages"]
        assert len(found) == len(known["samples"])
        for one, sample in zip(found, known["samples"], strict=True):
            assert one.input_ids.tolist() == sample["input_ids"]
            assert one.loss_mask.tolist() == sample["loss_mask"]
            assert one.response_start == sample["response_start"]
            assert one.old_log_probs.numel() == len(sample["input_ids"]) - sample["response_start"]
            assert one.reward.outcome == known["outcome"]


@pytest.mark.parametrize("kind", KINDS)
def test_both_pools_are_loaded_saved_and_loaded(shared_fixtures: Path, tmp_path: Path, kind: str) -> None:
    manager = ExperienceManager(RULES)
    manager.load_experience_pool_from_disk(shared_fixtures / "experience_pool_cmt" / kind / "step_40")
    assert set(manager.refused) <= {"duplicate"}, "the same tokens twice are kept once"
    assert manager.skip_uid_set == {"task-99"}
    assert len(manager.get_valid_replay_task_ids()) == 6
    manager.save_experience_pool_to_disk(tmp_path / "step_40")
    other = ExperienceManager(RULES)
    other.load_experience_pool_from_disk(tmp_path / "step_40")
    assert plain(other) == plain(manager)
    assert other.difficulty2task_dict == manager.difficulty2task_dict
    for task in manager.get_valid_replay_task_ids():
        (history,) = other.get_offpolicy_trajectories_from_memory(task, 1)
        assert history.metadata["is_experience_replay"]


def write(folder: Path, pool: object, buckets: str = '{"1": ["a"]}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "difficulty2task_dict.json").write_text(buckets)
    (folder / "skip_uid_set.json").write_text("[]")
    (folder / "task2trajectories.pkl").write_bytes(pickle.dumps(pool))
    return folder


def test_a_defaultdict_of_ours_is_read(tmp_path: Path) -> None:
    pool = defaultdict(
        list, {"a": [to_plain(AgentTrajectory(task_id="a", metadata={"deep": {"er": [1, {"x": None}]}}))]}
    )
    contents = read_pool(write(tmp_path / "step_1", pool))
    assert contents.task2trajectories["a"][0].metadata == {"deep": {"er": [1, {"x": None}]}}


def test_log_probs_without_a_mask_are_told_by_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = to_plain(AgentTrajectory(task_id="a", entropy=0.5, metadata={}, input_ids=torch.tensor([1, 2])))
    one["old_log_probs"] = [-0.5, -0.25]
    one["dtypes"]["old_log_probs"] = "float32"
    manager = ExperienceManager(RULES)
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        manager.load_experience_pool_from_disk(write(tmp_path / "step_1", {"a": [one]}))
    assert manager.refused == {"no_response_mask": 1}
    assert "1 of 1 trajectories were not taken: no_response_mask 1" in caplog.text


def test_a_task_in_two_buckets_is_told_and_the_later_one_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "step_1", {}, buckets='{"3": ["a", "b"], "5": ["a", "a"], "1": ["c"]}')
    manager = ExperienceManager(RULES)
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        manager.load_experience_pool_from_disk(folder)
    assert manager.difficulty2task_dict == {3: ["b"], 5: ["a"], 1: ["c"]}
    assert "1 tasks are in two buckets" in caplog.text
