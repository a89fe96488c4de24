"""Experience tasks that are most like the batch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.errors import ConfigurationError
from trajstore.experience import ExperienceManager, ExperienceMixCollateFn, PoolRules
from trajstore.experience.mixing import SimilarTasks
from trajstore.trajectory import AgentTrajectory

Make = Callable[..., AgentTrajectory]
TEXTS = {
    "cup": "bring the cup to the kitchen",
    "mug": "bring the mug to the kitchen",
    "sum": "what is 7 plus 5",
    "difference": "what is 7 minus 5",
    "poem": "write a poem",
    "novel": "invent some tale",
}


def mix(make: Make, held: list[str], **rules: object) -> ExperienceMixCollateFn[str]:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling="similar", **rules))  # type: ignore[arg-type]
    manager.admit([make(task, number, float(number == 0)) for task in held for number in range(4)])
    return ExperienceMixCollateFn(
        manager, lambda name: name if name in TEXTS else None, exp_ratio=0.5, replay_start_ratio=0.0, text_of=TEXTS.get
    )  # type: ignore[arg-type]


def test_each_task_of_the_batch_names_the_one_most_like_it(make: Make) -> None:
    collate = mix(make, ["poem", "mug", "difference", "gone"])
    experience, fresh = collate(["cup", "sum", "novel", "poem"], 0.5)
    assert experience == ["mug", "difference"]
    assert fresh == ["cup", "sum"]
    assert collate.metrics["experience_replay/similar_tasks"] == 2
    assert collate.metrics["experience_replay/unknown_tasks"] == 1, "drawn or not"
    experience, _ = collate(["poem", "cup"], 0.5)
    assert experience == ["poem"], "a task's own history before those of others"


def test_what_has_no_word_in_common_comes_by_chance(make: Make) -> None:
    collate = mix(make, ["mug", "poem"])
    experience, _ = collate(["novel", "sum", "difference", "novel"], 0.5)
    assert sorted(experience) == ["mug", "poem"]
    assert collate.metrics["experience_replay/similar_tasks"] == 0


def test_only_tasks_that_may_be_drawn_are_compared(make: Make) -> None:
    collate = mix(make, ["mug", "difference"], min_reward=2.0)
    assert collate(["cup", "sum"], 0.5)[0] == []
    collate = mix(make, ["mug", "difference"], replay_difficulty=3)
    assert collate(["cup", "sum"], 0.5)[0] == []


def test_it_needs_to_know_what_a_task_asks_for(make: Make) -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling="similar"))
    with pytest.raises(ConfigurationError, match="nothing says what a task asks for"):
        ExperienceMixCollateFn(manager, str)
    manager.admit([make("a", number, float(number == 0)) for number in range(4)])
    with pytest.raises(ConfigurationError, match="compares with the tasks of a batch"):
        manager.sample_tasks_from_replaypool(1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([*TEXTS, "gone"]), unique=True), min_size=1, max_size=6),
    st.lists(st.sampled_from(list(TEXTS)), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_what_was_there_before_changes_nothing(steps: list[list[str]], near: list[str], n: int) -> None:
    texts = {**TEXTS, "novel": TEXTS["poem"]}  # equals, told apart by their order

    def make_index() -> SimilarTasks[str]:
        return SimilarTasks(lambda name: name if name in texts else None, texts.__getitem__)

    long, new = make_index(), make_index()
    for names in steps:
        long.follow(names)
    new.follow(steps[-1])
    found = long.nearest(near, steps[-1], n)
    assert found == new.nearest(near, steps[-1], n)
    assert len(set(found)) == len(found) <= n
    assert set(found) <= set(steps[-1]) - {"gone"}
