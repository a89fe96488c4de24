from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import build, rollouts, step
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.replay import ExperienceManager, ExperienceMixCollateFn, PoolRules, RatioSchedule
from trainer_hooks.replay.mixing import SimilarTasks
from trainer_hooks.replay.prompts import RowPrompts
from trajstore.errors import ConfigurationError


@dataclass(frozen=True)
class Task:
    task_id: str


def manager_with(replayable: list[str], skipped: list[str], *, histories: int = 1) -> ExperienceManager:
    manager = ExperienceManager(PoolRules(n_rollout=4))
    outcomes = {task: [1.0] * histories + [0.0] for task in replayable} | {task: [1.0] * 4 for task in skipped}
    step(manager, [rollout for task, task_outcomes in outcomes.items() for rollout in rollouts(task, task_outcomes)])
    return manager


names = st.sampled_from([f"t{i}" for i in range(12)])


@settings(deadline=None, max_examples=30)
@given(
    batch=st.lists(names, unique=True, max_size=8),
    replayable=st.lists(names, unique=True, max_size=8),
    skipped=st.lists(names, unique=True, max_size=4),
    unknown=st.sets(names, max_size=3),
    ratio=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
)
def test_a_mixed_batch_is_whole_and_has_no_task_twice(
    batch: list[str], replayable: list[str], skipped: list[str], unknown: set[str], ratio: float
) -> None:
    replayable = [task for task in replayable if task not in skipped]
    unknown = set() if set(replayable) <= unknown else unknown  # an error if no task is known
    manager = manager_with(replayable, skipped)
    mix = ExperienceMixCollateFn(
        manager, lambda name: None if name in unknown else Task(name), exp_ratio=ratio, replay_start_ratio=0.5
    )
    tasks = [Task(name) for name in batch]
    experience, fresh = mix(tasks, 0.5)

    chosen = [task.task_id for task in experience]
    rest = [task.task_id for task in fresh]
    assert len(chosen) + len(rest) == len(batch)
    assert len(set(chosen + rest)) == len(batch)
    available = set(replayable) - unknown
    assert set(chosen) <= available
    assert len(chosen) == min(int(len(batch) * ratio), len(available))

    candidates = [name for name in batch if name not in chosen]
    wanted = [n for n in candidates if n not in skipped] + [n for n in candidates if n in skipped]
    assert rest == wanted[: len(batch) - len(chosen)]
    assert mix.metrics["experience_replay/experience_tasks"] == len(chosen)
    assert mix.metrics["experience_replay/nothing_to_replay"] == float(not chosen)
    displaced = [name for name in candidates if name not in skipped and name not in rest]
    assert list(manager.waiting_tasks) == displaced


def test_nothing_is_replayed_before_the_start_or_switched_off() -> None:
    mix = ExperienceMixCollateFn(manager_with(["a"], ["b"]), Task, replay_start_ratio=0.35)
    tasks = [Task(name) for name in "bcd"]
    assert mix(tasks, 0.34) == ([], tasks)
    assert mix(tasks, 0.9, enable_replay=False) == ([], tasks)
    assert mix.metrics["experience_replay/nothing_to_replay"] == 0.0
    assert mix(tasks, 0.35) == ([Task("a")], [Task("c"), Task("d")])


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_plan_names_no_task_more_often_than_its_batch(ratio: float) -> None:
    """Trainers look up the plan's tasks in the batch; tasks outside the batch appear once in the plan."""
    for batch in map(list, itertools.product("ABC", repeat=4)):
        mix = ExperienceMixCollateFn(manager_with(["A", "B", "E"], ["C"]), str, exp_ratio=ratio)
        for tasks in (batch, batch[::-1]):  # the second time, some tasks have waited
            planned = Counter(itertools.chain(*mix(tasks, 1.0)))
            assert planned.total() == len(tasks)
            given = Counter(tasks)
            assert all(count <= max(1, given[task]) for task, count in planned.items()), (tasks, planned)


def test_a_task_given_twice_fills_up_only_where_nothing_else_is_left() -> None:
    assert ExperienceMixCollateFn(manager_with([], []), str)(["a", "a", "b"], 1.0) == ([], ["a", "b", "a"])


@pytest.mark.parametrize(
    ("wanted", "n_rollout", "kept", "histories"),
    [(None, 8, 10, 4), (None, 5, 10, 2), (None, 2, 10, 1), (None, 64, 10, 10), (None, 8, 2, 2), (1, 8, 10, 1)],
)
def test_half_of_a_group_is_replayed_by_default(wanted: int | None, n_rollout: int, kept: int, histories: int) -> None:
    config = ExperienceReplayConfig(
        enable=True, exp_ratio=1.0, offpolicy_trajectories_per_task=wanted, max_trajectories_per_task=kept
    )
    with ReplayHook(config, n_rollout=n_rollout, get_task=str) as hook:
        step(hook.manager, rollouts("a", [1.0] * (n_rollout - 1) + [0.0]))
        hook.manager.seed([build("a", number) for number in range(100, 120)])
        (planned,) = hook.before_rollout(hook.tasks_chosen(["a"], 0.5, 1))
    assert (len(planned.histories), planned.fresh_rollouts) == (histories, n_rollout - histories)


def test_the_ratio_may_follow_training_progress() -> None:
    manager = manager_with([f"r{i}" for i in range(9)], [])
    schedule = RatioSchedule(((0.2, 0.0), (0.6, 1.0)))
    mix = ExperienceMixCollateFn(manager, str, exp_ratio=schedule)
    batch = [f"t{i}" for i in range(8)]
    assert [len(mix(batch, progress)[0]) for progress in (0.0, 0.2, 0.4, 0.5, 0.6, 1.0)] == [0, 0, 4, 6, 8, 8]


def test_a_ratio_out_of_range_is_refused_in_its_step() -> None:
    with pytest.raises(ConfigurationError, match="exp_ratio: -1"):
        ExperienceMixCollateFn(manager_with([], []), str, exp_ratio=lambda progress: -1)(["a"], 1.0)


def test_waiting_tasks_go_with_the_pool_into_a_checkpoint() -> None:
    manager = manager_with(["a", "b"], [])
    mix = ExperienceMixCollateFn(manager, str)
    mix(["c", "d", "e", "f"], 0.5)
    assert list(manager.waiting_tasks) == ["e", "f"]
    other = ExperienceManager(PoolRules(n_rollout=4))
    other.load_state_dict(manager.state_dict())
    resumed = ExperienceMixCollateFn(other, str, exp_ratio=0.0)
    assert resumed(["g", "h"], 0.5) == ([], ["e", "f"])
    assert resumed(["c"], 0.5) == ([], ["g"])


def test_tasks_that_the_data_lack_are_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_with(["a", "b", "c"], [])
    mix = ExperienceMixCollateFn(manager, lambda name: name if name != "b" else None)
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        for _ in range(10):
            experience, _ = mix([f"t{i}" for i in range(8)], 0.5)
            assert set(experience) == {"a", "c"}
    assert caplog.text.count("no task 'b'") == 1
    assert mix.metrics["experience_replay/unknown_tasks"] == 1.0


def test_tasks_that_the_data_lack_change_no_draw_of_a_resumed_run() -> None:
    manager = manager_with([f"t{i}" for i in range(40)], [])

    def get_task(name: str) -> str | None:
        return None if name[0] == "t" and int(name[1:]) % 2 else name

    batch = [f"b{i}" for i in range(6)]
    mix = ExperienceMixCollateFn(manager, get_task)
    for _ in range(2):
        mix(batch, 0.5)
    other = ExperienceManager(PoolRules(n_rollout=4))
    other.load_state_dict(manager.state_dict())
    resumed = ExperienceMixCollateFn(other, get_task)
    for _ in range(4):
        assert resumed(batch, 0.5) == mix(batch, 0.5)
        assert resumed.metrics == mix.metrics


def test_a_pool_of_another_dataset_is_an_error_before_training() -> None:
    manager = manager_with(["a", "b"], [])
    with pytest.raises(ConfigurationError, match="another dataset"):
        ExperienceMixCollateFn(manager, lambda name: None)
    empty = ExperienceManager(PoolRules(n_rollout=4))
    mix: ExperienceMixCollateFn[str] = ExperienceMixCollateFn(empty, lambda name: None)
    empty.load_state_dict(manager.state_dict())
    with pytest.raises(ConfigurationError, match="another dataset"):
        mix.check_tasks()


@pytest.mark.parametrize("by_messages", [True, False])
def test_a_history_of_another_prompt_is_counted_and_does_not_come_out(
    by_messages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three task names now have another prompt; tested with the pool and a resumed pool."""
    asked = {"a": torch.tensor([0, 1]), "b": torch.tensor([0, 7]), "c": torch.tensor([5, 1])}
    if by_messages:
        asked = {task: [{"role": "user", "content": "go" if task == "a" else task}] for task in asked}
    rows = RowPrompts(lambda name: name, lambda name: asked[name])
    manager = ExperienceManager(PoolRules(n_rollout=4), rows=rows)
    manager.load_state_dict(manager_with(["a", "b", "c"], []).state_dict())
    mix = ExperienceMixCollateFn(manager, str, exp_ratio=1.0)
    experience, fresh = mix(["a", "b", "c"], 0.5)
    assert (experience, fresh) == (["a"], ["b", "c"])
    assert set(mix.get_histories(["a", "b", "c"])) == {"a"}
    assert mix.metrics["experience_replay/other_prompts"] == 2
    mix(["a", "b", "c"], 0.5)
    assert caplog.text.count("histories not replayed") == 1


def test_a_rollout_takes_the_place_of_a_history_of_another_prompt() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=2))
    ids = torch.arange(6) + 50
    manager.seed([build(tokens=1, entropy=0.1, input_ids=ids), build(tokens=2, entropy=0.5)])
    manager.seed([build(tokens=3, entropy=0.9)])
    assert [history.rollout_id for history in manager.task2trajectories["a"]] == ["a/2", "a/3"]
    assert manager.seed([build(tokens=4, entropy=0.95)]) == {"not_better": 1}, "no better than its own kind"


def test_a_task_without_a_success_does_not_give_way() -> None:
    tasks = list("efgh")
    manager = manager_with(["a", "b", "g"], ["h"])
    manager.judge([build("e", 0, 0.0), build("e", 1, 0.0)])  # "e" was rolled out, "f" was not
    mix = ExperienceMixCollateFn(manager, str, exp_ratio=1.0, unsolved_first=True)
    experience, fresh = mix(tasks, 0.0)
    assert len(experience) == 2
    assert fresh == ["e", "f"]
    assert mix.asked_share == 2 * 2 / 16
    assert set(manager.waiting_tasks) <= {"g"}

    usual = ExperienceMixCollateFn(manager_with(["a", "b", "g"], ["h"]), str, exp_ratio=1.0)
    assert len(usual(tasks, 1.0)[0]) == 3


def test_a_task_without_a_success_that_waits_comes_before_others() -> None:
    manager = manager_with(["a", "b", "c"], [])
    manager.waiting_tasks.update(dict.fromkeys(["b", "new"]))
    mix = ExperienceMixCollateFn(manager, str, exp_ratio=0.0, unsolved_first=True)
    assert mix(["a", "c"], 0.0) == ([], ["new", "b"])
    assert list(manager.waiting_tasks) == ["a", "c"]


def test_unsolved_tasks_of_earlier_batches_come_before_solved_ones() -> None:
    def mixed(*, unsolved_first: bool, lacking: str = "") -> list[str]:
        manager = manager_with(["a", "b"], ["s", "t", "u"])
        mix = ExperienceMixCollateFn(
            manager, lambda name: None if name == lacking else name, exp_ratio=0.0, unsolved_first=unsolved_first
        )
        experience, fresh = mix(["s", "t", "u"], 0.0)
        assert not experience
        return fresh

    assert mixed(unsolved_first=False) == ["s", "t", "u"]
    tasks = mixed(unsolved_first=True)
    assert sorted(tasks[:2]) == ["a", "b"]
    assert tasks[2] == "s"
    assert mixed(unsolved_first=True, lacking="b") == ["a", "s", "t"]


# -- Experience tasks most similar to the batch's tasks --


TEXTS = {
    "cup": "bring the cup to the kitchen",
    "mug": "bring the mug to the kitchen",
    "sum": "what is 7 plus 5",
    "difference": "what is 7 minus 5",
    "poem": "write a poem",
    "novel": "invent some tale",
}


def similar(held: list[str], **rules: object) -> ExperienceMixCollateFn[str]:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling="similar", **rules))  # type: ignore[arg-type]
    manager.admit([build(task, number, float(number == 0)) for task in held for number in range(4)])
    return ExperienceMixCollateFn(
        manager, lambda name: name if name in TEXTS else None, exp_ratio=0.5, text_of=TEXTS.get
    )  # type: ignore[arg-type]


def test_each_task_of_the_batch_names_the_one_most_like_it() -> None:
    collate = similar(["poem", "mug", "difference", "gone"])
    experience, fresh = collate(["cup", "sum", "novel", "poem"], 0.5)
    assert experience == ["mug", "difference"]
    assert fresh == ["cup", "sum"]
    assert collate.metrics["experience_replay/similar_tasks"] == 2
    assert collate.metrics["experience_replay/unknown_tasks"] == 1, "drawn or not"
    experience, _ = collate(["poem", "cup"], 0.5)
    assert experience == ["poem"], "a task's own history before those of others"


def test_what_has_no_word_in_common_comes_by_chance() -> None:
    collate = similar(["mug", "poem"])
    experience, _ = collate(["novel", "sum", "difference", "novel"], 0.5)
    assert sorted(experience) == ["mug", "poem"]
    assert collate.metrics["experience_replay/similar_tasks"] == 0


def test_only_tasks_that_may_be_drawn_are_compared() -> None:
    collate = similar(["mug", "difference"], min_reward=2.0)
    assert collate(["cup", "sum"], 0.5)[0] == []
    collate = similar(["mug", "difference"], replay_difficulty=3)
    assert collate(["cup", "sum"], 0.5)[0] == []


def test_it_needs_to_know_what_a_task_asks_for() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling="similar"))
    with pytest.raises(ConfigurationError, match="needs the tasks' texts"):
        ExperienceMixCollateFn(manager, str)
    manager.admit([build("a", number, float(number == 0)) for number in range(4)])
    with pytest.raises(ConfigurationError, match="compares with the tasks of a batch"):
        manager.sample_tasks_from_replaypool(1)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.sampled_from([*TEXTS, "gone"]), unique=True), min_size=1, max_size=6),
    st.lists(st.sampled_from(list(TEXTS)), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_what_was_there_before_changes_nothing(steps: list[list[str]], near: list[str], n: int) -> None:
    texts = {**TEXTS, "novel": TEXTS["poem"]}  # ties are broken by order

    def make_index() -> SimilarTasks[str]:
        return SimilarTasks(lambda name: name if name in texts else None, texts.__getitem__)

    long, new = make_index(), make_index()
    for names in steps:
        long.follow(names)
    new.follow(steps[-1])
    nearest = long.nearest(near, steps[-1], n)
    assert nearest == new.nearest(near, steps[-1], n)
    assert len(set(nearest)) == len(nearest) <= n
    assert set(nearest) <= set(steps[-1]) - {"gone"}
