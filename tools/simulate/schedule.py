"""Which task runs next: chosen by a seed, or as an earlier run chose. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """A task.

    Attributes:
        name: unique.
        doing: its last operation.
    """

    name: str
    doing: str


T = TypeVar("T", bound=Named)


class Choice(Protocol):
    """Chooses among tasks that can run."""

    def choose(self, step: int, ready: Sequence[T], current: T | None) -> T:
        """Return the task that runs next.

        Args:
            step: number of this choice.
            ready: tasks that can run, in the order in which they could.
            current: the running task if it can go on, else None.
        """


class Random:
    """Changes the task with one probability at every step, or at every step of a kind.

    Args:
        chance: random numbers.
        rate: probability of a change.
        at: the kind of step; empty for all.
    """

    def __init__(self, chance: random.Random, rate: float, at: str = "") -> None:
        self._chance, self._rate, self._at = chance, rate, at

    def choose(self, step: int, ready: Sequence[T], current: T | None) -> T:
        if current is not None and ((self._at and current.doing != self._at) or self._chance.random() >= self._rate):
            return current
        return self._chance.choice(ready)


class Priorities:
    """Runs the task of the highest priority; at a few steps the running one gets the lowest.

    Finds each bug that needs ``d`` changes with a known probability (PCT: Burckhardt et al., ASPLOS 2010).

    Args:
        chance: random numbers.
        steps: about how many steps there will be.
        changes: at how many of them the running task falls behind.
    """

    def __init__(self, chance: random.Random, steps: int, changes: int) -> None:
        self._chance = chance
        self._changes = {chance.randrange(steps) for _ in range(changes)}
        self._priorities: dict[str, float] = {}
        self._lowest = 0.0

    def choose(self, step: int, ready: Sequence[T], current: T | None) -> T:
        priorities = self._priorities
        for task in ready:
            if task.name not in priorities:
                priorities[task.name] = self._chance.random()
        if step in self._changes and current is not None:
            self._lowest -= 1.0
            priorities[current.name] = self._lowest
        those = [priorities[task.name] for task in ready]
        return ready[those.index(max(those))]


class Given:
    """Repeats the changes of an earlier run, or some of them.

    Args:
        changes: task by step.
    """

    def __init__(self, changes: Mapping[int, str]) -> None:
        self._changes = changes

    def choose(self, step: int, ready: Sequence[T], current: T | None) -> T:
        wanted = self._changes.get(step)
        return next((task for task in ready if task.name == wanted), current or ready[0])


def strategy(chance: random.Random) -> Choice:
    """Return a way to choose, itself chosen at random."""
    if chance.random() < 0.2:  # who takes the lock next
        return Random(chance, chance.choice((0.2, 0.5)), "release")
    if chance.random() < 0.5:
        return Random(chance, chance.choice((0.01, 0.05, 0.2, 0.6)))
    return Priorities(chance, chance.choice((500, 2000, 8000)), chance.choice((1, 3, 10, 30, 100, 300)))
