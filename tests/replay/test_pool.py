from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from tests.replay.conftest import build, rollouts, step
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AgentTrajectory


def pool(**values: object) -> ExperienceManager:
    return ExperienceManager(PoolRules(**({"n_rollout": 4} | values)))  # type: ignore[arg-type]


def numbers(trajectories: Sequence[AgentTrajectory]) -> list[int]:
    """Return the ``tokens`` numbers of built trajectories."""
    assert all(trajectory.input_ids is not None for trajectory in trajectories)
    return [int(trajectory.input_ids[-1]) // 1000 for trajectory in trajectories if trajectory.input_ids is not None]


def test_bounds_are_exclusive_and_the_filter_sets_copies() -> None:
    manager = pool(experience_lbound=1, experience_rbound=3)
    manager.global_steps = 7
    batch = [
        history
        for task, outcomes in {"one": [1, 0, 0, 0], "two": [1, 1, 0, 0], "three": [1, 1, 1, 0]}.items()
        for history in rollouts(task, outcomes)
    ]
    for history in batch:
        history.entropy = history.policy_version = None
        history.entropys = torch.full((4,), 2.5)
    manager.admit(batch)
    held = manager.task2trajectories["two"]
    assert [(history.rollout_id, history.entropy, history.policy_version) for history in held] == [
        ("two/0", 2.5, 7),
        ("two/1", 2.5, 7),
    ]
    assert len(manager) == 2
    assert all(history.entropy is None and history.policy_version is None for history in batch)


@pytest.mark.parametrize(("mode", "order"), [("argmin", [2, 3, 1]), ("argmax", [1, 3, 2])])
def test_the_k_best_come_out_in_order(mode: str, order: list[int]) -> None:
    for n in range(5):
        manager = pool(exp_select_mode=mode)
        manager.seed([build(tokens=t, entropy=e) for t, e in ((1, 3.0), (2, 1.0), (3, 2.0))])
        assert numbers(manager.get_offpolicy_batch(["a"], n)) == order[:n]
    assert manager.get_offpolicy_batch(["unknown"], 3) == []


def test_age_and_reward_filter_what_comes_out() -> None:
    manager = pool(max_policy_age=5, min_reward=0.5, save_filter="positive")
    manager.judge(rollouts("a", [1, 0]))
    histories = [(1.0, 4), (0.5, 5), (0.4, 9), (None, 9), (1.0, 9), (1.0, 30), (1.0, None)]
    manager.seed(
        [build(tokens=t, outcome=outcome, policy_version=version) for t, (outcome, version) in enumerate(histories)]
    )
    manager.global_steps = 10
    assert numbers(manager.get_offpolicy_batch(["a"], 9)) == [1, 4]
    assert manager.get_valid_replay_task_ids() == ["a"]
    manager.global_steps = 15
    assert manager.get_valid_replay_task_ids() == []
    assert manager.get_offpolicy_batch(["a"], 9) == []


def test_the_current_policys_entropy_decides_in_one_call() -> None:
    manager = pool()
    calls: list[list[int]] = []

    def current(batch: Sequence[AgentTrajectory]) -> list[float]:
        calls.append(numbers(batch))
        assert all(history.metadata["is_experience_replay"] for history in batch)
        return [-float(number) for number in numbers(batch)]

    manager.current_entropy = current
    manager.seed([build(task, tokens=t, entropy=t) for task in "ab" for t in (1, 2, 3)])
    manager.seed([build("c", tokens=t, entropy=t) for t in (1, 2)])  # both are always drawn
    for _ in range(2):
        histories = manager.get_offpolicy_batch([SimpleNamespace(task_id="a"), "b", "c"], 2)
        assert numbers(histories)[:4] == [3, 2, 3, 2], "by the policy's entropies, which are the other way round"
        assert len(histories) == 6
    assert calls == [[1, 2, 3, 1, 2, 3]] * 2


@pytest.mark.parametrize("answer", [None, [1.0], [float("nan")] * 3])
def test_a_failing_entropy_function_is_told_once_and_saved_entropy_used(
    answer: list[float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    manager = pool()

    def current(batch: Sequence[AgentTrajectory]) -> list[float]:
        if answer is None:
            raise RuntimeError("out of memory")
        return answer

    manager.current_entropy = current
    manager.seed([build(tokens=t, entropy=t) for t in (3, 1, 2)])
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        assert numbers(manager.get_offpolicy_batch(["a"], 3)) == [1, 2, 3]
        assert numbers(manager.get_offpolicy_batch(["a"], 1)) == [1]
    assert len(caplog.records) == 1


def test_what_comes_out_is_a_marked_copy() -> None:
    manager = pool()
    given = build(tokens=1)
    pristine = copy.deepcopy(given)
    manager.seed([given])
    assert given.metadata == pristine.metadata
    given.old_log_probs.zero_()  # type: ignore[union-attr]  # the pool holds copies
    given.metadata["note"].append("changed")
    for taken in (*manager.get_offpolicy_batch(["a"], 1), *manager.task2trajectories["a"]):
        assert torch.equal(taken.old_log_probs, pristine.old_log_probs)  # type: ignore[arg-type]
        marked = taken.metadata.pop("is_experience_replay", False)
        assert taken.metadata == pristine.metadata
        taken.input_ids.zero_()  # type: ignore[union-attr]
        taken.old_log_probs.zero_()  # type: ignore[union-attr]
        taken.messages[0]["content"] = "spoiled"
        taken.metadata["note"].append("spoiled")
    assert not marked  # task2trajectories exposes the pool's own objects
    (again,) = manager.get_offpolicy_batch(["a"], 1)
    assert again.metadata == {**pristine.metadata, "is_experience_replay": True}
    assert again.messages == pristine.messages
    assert torch.equal(again.input_ids, pristine.input_ids)  # type: ignore[arg-type]
    assert torch.equal(again.old_log_probs, pristine.old_log_probs)  # type: ignore[arg-type]
    for name in ("attention_mask", "loss_mask", "response_mask"):
        mask, given_mask = getattr(again, name), getattr(pristine, name)
        assert (mask.dtype, mask.tolist()) == (torch.int64, given_mask.tolist()), "as trainers have it"


def test_sampling_takes_valid_tasks_of_the_wanted_bucket() -> None:
    manager = pool(replay_difficulty=2)
    for name, outcomes in {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0], "c": [1, 0], "d": [0, 0]}.items():
        step(manager, rollouts(name, outcomes))
    assert sorted(manager.sample_tasks_from_replaypool(9)) == ["b", "c"]
    assert manager.sample_tasks_from_replaypool(9, difficulty=1, strategy="linear") == ["a"]
    assert manager.sample_tasks_from_replaypool(9, difficulty=0) == []
    assert manager.sample_tasks_from_replaypool(9, exclude={"b"}) == ["c"]


def test_a_rollout_that_did_not_come_back_is_unknown() -> None:
    manager = pool()
    step(manager, rollouts("a", [1, 1, 0, 0]))
    manager.judge(rollouts("a", [1, 1], first=10), {"a": 4})
    assert manager.skip_uid_set == set()
    assert manager.difficulty2task_dict == {3: ("a",)}
    assert numbers(manager.task2trajectories["a"]) == [0, 1]


@pytest.mark.parametrize("damage", [{"version": 9}, {"generator": {}}, {"refused": 3}, {"trajectories": {"a": [3]}}])
def test_a_damaged_state_dict_changes_nothing(damage: dict[str, object]) -> None:
    manager = pool()
    step(manager, rollouts("a", [1, 0]))
    with pytest.raises(CorruptStoreError):
        manager.load_state_dict(manager.state_dict() | damage)
    assert manager.difficulty2task_dict == {2: ("a",)}
    assert len(manager) == 1


def test_outcomes_that_are_no_numbers_are_refused_and_counted() -> None:
    manager = pool()
    outcomes = [1.0, float("nan"), float("inf"), 0.0]
    step(manager, [*rollouts("a", outcomes), build("a", 9, None)])
    assert numbers(manager.task2trajectories["a"]) == [0]
    assert manager.refused == {"outcome_not_finite": 2, "no_outcome": 1}
    assert manager.difficulty2task_dict == {2: ("a",)}, "of two known rollouts one succeeded"
    step(manager, rollouts("a", [float("nan")] * 4, first=20))
    assert manager.difficulty2task_dict == {2: ("a",)}, "nothing is known: it stays where it is"


def test_uses_survive_a_state_dict_and_a_restart() -> None:
    store = BufferStore()
    rules = PoolRules(n_rollout=4, in_turns=True)
    manager = ExperienceManager(rules, store=store)
    manager.seed([build(tokens=t, entropy=1.0 + t) for t in range(3)])
    manager.get_offpolicy_batch(["a"], 2)
    other = ExperienceManager(rules)
    other.load_state_dict(manager.state_dict())
    assert numbers(other.get_offpolicy_batch(["a"], 1)) == [2]
    manager.flush()
    assert numbers(ExperienceManager(rules, store=store).get_offpolicy_batch(["a"], 1)) == [2]


def test_a_count_of_steps_that_began_anew_is_told_and_old_entries_have_no_age(caplog: pytest.LogCaptureFixture) -> None:
    store = BufferStore()
    manager = ExperienceManager(PoolRules(n_rollout=4), store=store)
    manager.global_steps = 500
    step(manager, [build("a", t, o, policy_version=500) for t, o in ((1, 1.0), (2, 0.0))])
    manager.flush()
    again = ExperienceManager(PoolRules(n_rollout=4, max_policy_age=2), store=store)
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        for number in (1, 2, 1):
            again.global_steps = number
    assert [record.getMessage() for record in caplog.records if "up to 500, this is step 1" in record.getMessage()]
    assert len(caplog.records) == 1
    assert again.get_valid_replay_task_ids() == []
    assert again.get_offpolicy_batch(["a"], 1) == []
