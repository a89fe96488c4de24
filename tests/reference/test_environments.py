"""Tasks are solvable, and only by the required actions."""

from __future__ import annotations

from random import Random

import pytest

from trainer_hooks.reference.environments import (
    Environment,
    Episode,
    HouseholdEnvironment,
    SortEnvironment,
    make_environment,
)
from trainer_hooks.reference.tokenizer import WordTokenizer
from trajstore.errors import ConfigurationError

ENVIRONMENTS = [SortEnvironment(), HouseholdEnvironment()]


def play(episode: Episode, replies: list[str]) -> tuple[float, bool]:
    """Return the last reward, and whether the episode ended."""
    reward, done = 0.0, False
    for reply in replies:
        assert not done
        answer = episode.answer(reply)
        reward, done = answer.reward, answer.done
    return reward, done


def place_of(environment: HouseholdEnvironment, thing: str) -> str:
    """Find the object by looking into every room."""
    for room in ("kitchen", "bedroom", "bathroom", "garden", "garage", "attic"):
        episode = environment.begin(environment.tasks[0])
        if thing in episode.answer(f"go {room}").observation.split():
            return room
    raise AssertionError(f"{thing} is nowhere")


def test_sort_is_solved_by_ascending_digits_only() -> None:
    environment = SortEnvironment(lengths=(3,), tasks_per_length=5)
    for task in environment.tasks:
        right = sorted(task.words)
        assert play(environment.begin(task), [" ".join(right)]) == (1.0, True)
        for wrong in (right[::-1], right[:-1], [*right, right[-1]], list(task.words), []):
            assert play(environment.begin(task), [" ".join(wrong)]) == (0.0, True)


def test_every_household_task_is_solved_by_its_shortest_plan() -> None:
    environment = HouseholdEnvironment()
    for task in environment.tasks:
        thing, target = task.words
        plan = [f"go {place_of(environment, thing)}", f"take {thing}"]
        if task.level == 2:
            plan += [f"go {target}", f"drop {thing}"]
        assert play(environment.begin(task), plan) == (1.0, True)
        assert play(environment.begin(task), plan[:-1]) == (0.0, False)


def test_household_actions_that_are_impossible_change_nothing() -> None:
    environment = HouseholdEnvironment(things=3, max_turns=9)
    task = next(task for task in environment.tasks if task.level == 2)
    thing = task.words[0]
    episode = environment.begin(task)
    before = episode.answer("go kitchen").observation
    elsewhere = next(other for other in ("cup", "book", "soap") if other not in before.split())
    for nonsense in (f"take {elsewhere}", f"drop {thing}", "go nowhere", "take", "", "cup cup cup", "go garden garden"):
        assert episode.answer(nonsense).observation == before


def test_household_ends_after_its_turns_without_reward() -> None:
    environment = HouseholdEnvironment(max_turns=4)
    assert play(environment.begin(environment.tasks[0]), ["go attic"] * 4) == (0.0, True)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.name)
def test_tasks_are_graded_and_some_are_solved_by_chance(environment: Environment) -> None:
    random = Random(0)
    rates: dict[int, list[float]] = {}
    for task in environment.tasks:
        for _ in range(60):
            episode, done, reward = environment.begin(task), False, 0.0
            while not done:
                answer = episode.answer(episode.any_reply(random))
                done, reward = answer.done, answer.reward
            rates.setdefault(task.level, []).append(reward)
    means = [sum(held) / len(held) for _, held in sorted(rates.items())]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.05
    assert means[-1] < 0.1


def test_tasks_depend_on_the_seed_and_nothing_else() -> None:
    assert SortEnvironment(seed=3).tasks == SortEnvironment(seed=3).tasks
    assert HouseholdEnvironment(seed=3).tasks == HouseholdEnvironment(seed=3).tasks
    assert HouseholdEnvironment(seed=3).tasks != HouseholdEnvironment(seed=4).tasks
    for environment in ENVIRONMENTS:
        assert len({task.task_id for task in environment.tasks}) == len(environment.tasks)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: SortEnvironment(lengths=()), "lengths"),
        (lambda: SortEnvironment(lengths=(1,)), "lengths"),
        (lambda: SortEnvironment(tasks_per_length=0), "tasks_per_length"),
        (lambda: HouseholdEnvironment(rooms=2), "rooms"),
        (lambda: HouseholdEnvironment(things=0), "things"),
        (lambda: HouseholdEnvironment(max_turns=3), "max_turns"),
        (lambda: make_environment("chess"), "environment: 'chess'"),
        (lambda: WordTokenizer(["cup", "cup"]), "words"),
        (lambda: WordTokenizer(["cup"]).encode("cup saucer"), "saucer"),
    ],
)
def test_bad_arguments_are_named(build: object, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        build()  # type: ignore[operator]
