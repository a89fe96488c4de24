"""Small text environments with verifiable rewards. Pure; no torch, no global randomness.

An :class:`Environment` is a fixed set of tasks; an :class:`Episode` is one attempt at one of them: the model writes a
reply, the environment answers, until the episode is over. The reward is 1.0 for a solved task and 0.0 otherwise. Every
environment has levels of difficulty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from trajstore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TextTask:
    """One task: its id, how hard it is (1 = easiest), and the words that define it."""

    task_id: str
    level: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The environment's answer to a reply. ``reward`` is 0.0 until the task is solved."""

    observation: str
    done: bool
    reward: float


class Episode(ABC):
    """One attempt at one task."""

    first_message: str
    """First message to the model: the goal, and the observation."""

    @abstractmethod
    def answer(self, reply: str) -> Answer:
        """Return the environment's answer to the model's reply. Must not be called after ``done``."""

    @abstractmethod
    def any_reply(self, random: Random) -> str:
        """Return a well-formed reply that is drawn without looking at the goal."""


class Environment(ABC):
    """A set of tasks over one vocabulary."""

    name: str
    """Name in configuration files."""

    max_turns: int
    """Maximum number of replies per episode."""

    max_reply_tokens: int
    """Maximum number of words per reply, including the end mark."""

    tasks: tuple[TextTask, ...]
    """All tasks, easiest first."""

    words: tuple[str, ...]
    """Vocabulary of the environment's messages and of well-formed replies."""

    @abstractmethod
    def begin(self, task: TextTask) -> Episode:
        """Begin a task."""


class SortEnvironment(Environment):
    """Single turn: write the given digits in ascending order.

    Task ``sort 7 2 5`` is solved by ``2 5 7``. The level is the number of digits less one. Someone who writes
    the digits in any order is right once in n! times.
    """

    name = "sort"
    max_turns = 1

    def __init__(self, lengths: Sequence[int] = (2, 3, 4), tasks_per_length: int = 12, seed: int = 0) -> None:
        if not lengths or min(lengths) < 2 or max(lengths) > 9:
            raise ConfigurationError(f"lengths: {list(lengths)}, each must be in [2, 9]")
        if tasks_per_length < 1:
            raise ConfigurationError(f"tasks_per_length: {tasks_per_length}, must be at least 1")
        random = Random(seed)
        tasks: dict[tuple[str, ...], TextTask] = {}
        for length in sorted(lengths):
            unsorted = [digits for digits in permutations("0123456789", length) if list(digits) != sorted(digits)]
            for digits in random.sample(unsorted, min(tasks_per_length, len(unsorted))):
                tasks[digits] = TextTask("sort-" + "".join(digits), length - 1, digits)
        self.tasks = tuple(tasks.values())
        self.words = ("sort", *"0123456789")
        self.max_reply_tokens = max(lengths) + 1

    def begin(self, task: TextTask) -> Episode:
        return _SortEpisode(task)


class _SortEpisode(Episode):
    def __init__(self, task: TextTask) -> None:
        self._digits = task.words
        self.first_message = " ".join(("sort", *task.words))

    def answer(self, reply: str) -> Answer:
        return Answer("", done=True, reward=float(reply.split() == sorted(self._digits)))

    def any_reply(self, random: Random) -> str:
        return " ".join(random.sample(self._digits, len(self._digits)))


ROOMS = ("kitchen", "bedroom", "bathroom", "garden", "garage", "attic")
THINGS = ("cup", "book", "soap", "rake", "key", "hat", "lamp", "ball", "pen", "coin", "shoe", "map")
_HOUSEHOLD_WORDS = ("bring", "to", "hand", "hall", "in", "see", "holding", "nothing", "go", "take", "drop")


class HouseholdEnvironment(Environment):
    """Multi-turn: find a thing in a house and, on the harder level, carry it to another room.

    Each thing lies in the same room in every episode, but no message says where: it has to be found out, and
    remembered in the weights. Replies are ``go ROOM``, ``take THING`` and ``drop THING``. Level 1 is solved by
    holding the thing (two replies at the least), level 2 by dropping it where it is wanted (four).
    """

    name = "household"
    max_reply_tokens = 3

    def __init__(self, rooms: int = 5, things: int = 6, max_turns: int = 8, seed: int = 0) -> None:
        if not 3 <= rooms <= len(ROOMS):
            raise ConfigurationError(f"rooms: {rooms}, must be in [3, {len(ROOMS)}]: two are wanted for each thing")
        if not 1 <= things <= len(THINGS):
            raise ConfigurationError(f"things: {things}, must be in [1, {len(THINGS)}]")
        if max_turns < 4:
            raise ConfigurationError(f"max_turns: {max_turns}, must be at least 4: the hard tasks need four replies")
        self.max_turns = max_turns
        random = Random(seed)
        self._rooms = ROOMS[:rooms]
        self._places = {thing: random.choice(self._rooms) for thing in THINGS[:things]}
        find = [TextTask(f"find-{thing}", 1, (thing, "hand")) for thing in self._places]
        bring = [
            TextTask(f"bring-{thing}-{room}", 2, (thing, room))
            for thing, place in self._places.items()
            for room in random.sample([room for room in self._rooms if room != place], 2)
        ]
        self.tasks = (*find, *bring)
        self.words = (*_HOUSEHOLD_WORDS, *self._rooms, *self._places)

    def begin(self, task: TextTask) -> Episode:
        return _HouseholdEpisode(task, self._rooms, dict(self._places), self.max_turns)


class _HouseholdEpisode(Episode):
    def __init__(self, task: TextTask, rooms: tuple[str, ...], places: dict[str, str], turns: int) -> None:
        self._thing, self._target = task.words
        self._rooms = rooms
        self._places = places
        self._turns = turns
        self._room = "hall"
        self._held: str | None = None
        self.first_message = f"bring {self._thing} to {self._target} {self._view()}"

    def answer(self, reply: str) -> Answer:
        match reply.split():
            case ["go", room] if room in self._rooms:
                self._room = room
            case ["take", thing] if thing in self._seen() and self._held is None:
                self._held = thing
                self._places[thing] = "hand"
            case ["drop", thing] if thing == self._held:
                self._held = None
                self._places[thing] = self._room
        self._turns -= 1
        solved = self._places[self._thing] == self._target
        return Answer(self._view(), done=solved or self._turns == 0, reward=float(solved))

    def any_reply(self, random: Random) -> str:
        replies = [f"go {random.choice(self._rooms)}"]
        if self._held is not None:
            replies.append(f"drop {self._held}")
        elif seen := self._seen():
            replies.append(f"take {random.choice(seen)}")
        return random.choice(replies)

    def _seen(self) -> list[str]:
        return [thing for thing, place in self._places.items() if place == self._room]

    def _view(self) -> str:
        held = f" holding {self._held}" if self._held else ""
        return f"in {self._room} see {' '.join(self._seen() or ['nothing'])}{held}"


def make_environment(name: str) -> Environment:
    """Return the environment called ``name`` (``sort``, ``household`` or ``treasure``) in its default size.

    Raises:
        ConfigurationError: no environment has this name.
        MissingDependencyError: ``treasure`` needs textworld.
    """
    from examples.grpo.treasure import TreasureEnvironment

    for kind in (SortEnvironment, HouseholdEnvironment, TreasureEnvironment):
        if name == kind.name:
            return kind()
    raise ConfigurationError(f"environment: {name!r} is unknown; use 'sort', 'household' or 'treasure'")
