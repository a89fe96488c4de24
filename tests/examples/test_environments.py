"""Tasks are solvable, and only by the required actions."""

from __future__ import annotations

from random import Random

import pytest

from examples.grpo.environments import Environment, Episode, HouseholdEnvironment, SortEnvironment, make_environment
from examples.grpo.tokenizer import WordTokenizer
from examples.grpo.treasure import TreasureEnvironment
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


def test_treasure_is_solved_by_the_quest_of_its_generator_and_lost_by_the_other_thing() -> None:
    pytest.importorskip("textworld")
    from textworld.challenges.tw_treasure_hunter.treasure_hunter import KB_PATH, make_game
    from textworld.generator.data import KnowledgeBase
    from textworld.generator.game import GameOptions

    environment = TreasureEnvironment(houses=1, rooms=5, quest_lengths=(2, 3), max_turns=4)
    tokenizer = WordTokenizer(environment.words)
    lost = set()
    for task in environment.tasks:
        options = GameOptions()
        options.kb, options.seeds = KnowledgeBase.load(KB_PATH), 0
        options.nb_rooms, options.quest_length = 5, task.level + 1
        quest = list(make_game("easy", options).quests[0].commands)
        assert task.words == tuple(quest[-1].split())
        assert play(environment.begin(task), quest) == (1.0, True)
        assert play(environment.begin(task), quest[:-1]) == (0.0, False)
        assert play(environment.begin(task), ["look", "dance", "take", *quest[:1]]) == (0.0, True)
        endings, random = set(), Random(0)
        for _ in range(25):
            episode, done, turns = environment.begin(task), False, 0
            view, reply, reward = episode.first_message, "", 0.0
            while not done:
                assert tokenizer.encode(view)
                reply, turns = episode.any_reply(random), turns + 1
                assert reply in view
                answer = episode.answer(reply)
                view, done, reward = answer.observation, answer.done, answer.reward
            endings.add((reply == quest[-1], reply.startswith("take"), reward, turns < environment.max_turns))
        assert (True, True, 1.0, True) in endings
        assert all(reward == float(took) for took, _, reward, _ in endings)
        lost.add((False, True, 0.0, True) in endings)
    assert any(lost), "the other thing ends some game"


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
        (lambda: TreasureEnvironment(houses=0), "houses"),
        (lambda: TreasureEnvironment(quest_lengths=(2, 6)), "quest_lengths"),
        (lambda: make_environment("chess"), "environment: 'chess'"),
        (lambda: WordTokenizer(["cup", "cup"]), "words"),
        (lambda: WordTokenizer(["cup"]).encode("cup saucer"), "saucer"),
    ],
)
def test_bad_arguments_are_named(build: object, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        build()  # type: ignore[operator]
