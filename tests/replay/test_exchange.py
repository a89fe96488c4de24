"""``seed_pool``: the reported counts add up to the number read."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.replay.conftest import build
from trainer_hooks.replay import REPLAY_MARK, BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.exchange import Exchanged, seed_pool
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

ALL = PoolRules(n_rollout=4, max_trajectories_per_task=3)


def random_rollouts(generator: np.random.Generator, step: int) -> list[AgentTrajectory]:
    """Return a step's rollouts, covering everything that a pool treats specially."""
    made = []
    for task in ["a", "b", "c", "d", ""]:
        easy = generator.random() < 0.4
        for _ in range(4):
            metadata = {REPLAY_MARK: True} if generator.random() < 0.05 else {}
            outcome = [1.0, 0.5, 0.0, None][int(generator.choice(4, p=[1, 0, 0, 0] if easy else [0.4, 0.2, 0.3, 0.1]))]
            log_probs = {"old_log_probs": None} if generator.random() < 0.05 else {}
            number = int(generator.integers(100))
            entropy = float(generator.random())
            made.append(
                build(task, number, outcome, policy_version=step, entropy=entropy, metadata=metadata, **log_probs)
            )
    return made


def record(path: Path, made: list[AgentTrajectory]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path)) as buffer:
        buffer.add_trajectories(made)


def check_sums(done: Exchanged) -> None:
    never = sum(int(sentence.split()[0].replace(",", "")) for sentence in done.left_out)
    assert done.read == done.entered + done.refused.total() + never + done.unreadable
    assert done.trajectories == done.before + done.entered - done.left.total()


def pool_of(path: Path, rules: PoolRules = ALL) -> dict[str, list[AgentTrajectory]]:
    with closing(BufferStore.open(path)) as store:
        return ExperienceManager(rules, store=store).task2trajectories


def test_rollouts_of_an_earlier_run_have_no_age_on_this_runs_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [build("a", step, 1.0, policy_version=step) for step in (3, 40)]
    made += [build("a", 10 * step, 0.0, policy_version=step) for step in (3, 40)]
    record(tmp_path / "rollouts", made)
    for _ in range(2):  # the second time, everything is a duplicate
        done = seed_pool(tmp_path / "pool", tmp_path / "rollouts", ALL)
        check_sums(done)
    assert done.trajectories == 2
    rules = dataclasses.replace(ALL, max_policy_age=50)
    aged = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(ALL, store=aged)
    manager.global_steps = 1
    assert not caplog.records, "nothing is wrong"
    assert {history.policy_version for history in manager.get_offpolicy_batch(["a"], 8)} == {None}
    earlier_runs = [history.metadata["earlier_run"] for history in manager.task2trajectories["a"]]
    assert earlier_runs == [{"policy_version": 3}, {"policy_version": 40}]
    manager = ExperienceManager(rules, store=aged)
    manager.global_steps = 41
    assert manager.get_offpolicy_batch(["a"], 8) == []
    assert "2 trajectories without a policy version of this run" in caplog.text
    assert "max_policy_age: 50" in caplog.text
    manager.save_experience_pool_to_disk(tmp_path / "files")
    aged.close()
    # The run continues from the checkpoint of the run that made the rollouts.
    seed_pool(tmp_path / "same", tmp_path / "rollouts", ALL, same_run=True)
    assert [history.policy_version for history in pool_of(tmp_path / "same")["a"]] == [3, 40]
    seed_pool(tmp_path / "moved", tmp_path / "pool", ALL)
    assert [history.metadata["earlier_run"]["policy_version"] for history in pool_of(tmp_path / "moved")["a"]] == [
        3,
        40,
    ]


def test_files_of_an_earlier_run_have_no_age_and_what_is_told_adds_up(tmp_path: Path) -> None:
    manager = ExperienceManager(dataclasses.replace(ALL, max_trajectories_per_task=10))
    step = [build("a", number, 1.0, policy_version=5, entropy=1 - number / 10) for number in range(6)]
    manager.admit([*step, build("a", 7, 0.0)])
    manager.save_experience_pool_to_disk(tmp_path / "files")
    done = seed_pool(tmp_path / "pool", tmp_path / "files", ALL)
    assert (done.read, done.entered, done.trajectories, done.left) == (6, 6, 3, {"replaced": 3})
    check_sums(done)
    assert [history.policy_version for history in pool_of(tmp_path / "pool")["a"]] == [None] * 3
    with pytest.raises(ConfigurationError, match="the pool holds 3 trajectories"):
        seed_pool(tmp_path / "pool", tmp_path / "files", ALL)
    done = seed_pool(tmp_path / "same", tmp_path / "files", ALL, same_run=True)
    check_sums(done)
    assert [history.policy_version for history in pool_of(tmp_path / "same")["a"]] == [5] * 3


@pytest.mark.parametrize("mode", ["argmin", "random"])
def test_what_is_imported_again_ends_as_the_same_pool_and_is_told_as_the_guide_says(tmp_path: Path, mode: str) -> None:
    rules = PoolRules(n_rollout=4, max_trajectories_per_task=3, exp_select_mode=mode)  # type: ignore[arg-type]
    generator = np.random.default_rng(3)
    made = [history for step in range(1, 13) for history in random_rollouts(generator, step)]
    made += [build(task, 1000 + step, 0.0, policy_version=step) for step in range(1, 13) for task in "abcd"]
    record(tmp_path / "rollouts", made)
    first = seed_pool(tmp_path / "pool", tmp_path / "rollouts", rules)
    held = {
        task: [history.rollout_id for history in several] for task, several in pool_of(tmp_path / "pool", rules).items()
    }
    second = seed_pool(tmp_path / "pool", tmp_path / "rollouts", rules)
    again = {
        task: [history.rollout_id for history in several] for task, several in pool_of(tmp_path / "pool", rules).items()
    }
    assert again == held
    assert set(first.left) == {"replaced"}, "no task is solved: a failure was added to every step"
    for reason in ("no_outcome", "log_probs_mismatch"):
        assert second.refused[reason] == first.refused[reason] > 0
    if mode == "argmin":
        assert (second.entered, second.left) == (0, {})
        assert second.refused["not_better"] >= first.refused["not_better"] + first.left["replaced"]
        assert second.refused["duplicate"] >= first.trajectories
    else:
        assert second.entered == second.left["replaced"] > 0


def test_why_a_rollout_was_left_out_is_said_as_it_was_then(tmp_path: Path) -> None:
    """A task failed after it was solved; other outcomes pass every threshold."""
    made = [build("a", number, 1.0, policy_version=1) for number in range(2)]
    made += [build("a", 10 + number, 0.0, policy_version=2) for number in range(2)]
    record(tmp_path / "rollouts", made)
    rules = PoolRules(n_rollout=2, save_filter="positive")
    assert seed_pool(tmp_path / "pool", tmp_path / "rollouts", rules).left_out == (
        "2 are of tasks that were solved when they came: every rollout of that step, or of an earlier one without a"
        " failure since, is a success",
        "2 have no outcome above 0: the highest outcome is 0, save_filter positive",
    )


def test_rollouts_with_values_by_row_enter_without_them(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "rollouts")) as buffer:
        ids = buffer.add_trajectories([build("a", 1, 1.0), build("a", 2, 0.0)])
        annotate(buffer, ids[:1], {"advantages": [torch.ones(len(buffer.get(ids[0]).input_ids))]})
    done = seed_pool(tmp_path / "pool", tmp_path / "rollouts", ALL)
    assert (done.entered, done.refused) == (1, {})
    assert [history.notes for history in pool_of(tmp_path / "pool")["a"]] == [{}]
