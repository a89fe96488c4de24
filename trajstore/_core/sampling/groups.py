"""Samples all rollouts of a task together, for group-relative advantages.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import isqrt
from typing import Any

import numpy as np
import torch

from trajstore._core.base.arguments import texts, whole, whole_or_none
from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler, Unit, uniform
from trajstore._core.sampling.states import OF_WHOM, check_sampler_state, described, whole_in
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, EmptyBufferError, counted

logger = logging.getLogger(__name__)


class GroupSampler(Sampler):
    """Draws distinct tasks uniformly, each with all (or its newest) rollouts.

    ``count`` counts tasks, also in ``sample_trajectories``. If fewer are available, all are drawn, with one warning.
    Rollouts without a task are not drawn; the first triggers a warning. The rows of an agent session are one rollout,
    and are drawn together or not at all: not if one of them was evicted, is older than the window, or too old.

    Args:
        least: minimum rollouts; tasks with fewer are skipped.
        most: maximum rollouts per task, the newest ones; None = no limit.
        max_age: maximum number of policy versions behind the newest of all; None = no limit.
    """

    unit: Unit = "trajectory"
    needs_tasks = in_groups = True

    def __init__(self, least: int = 1, most: int | None = None, max_age: int | None = None) -> None:
        self._least = whole("groups: least", least, 1)
        self._most = whole_or_none("groups: most", most, self._least)
        self._max_age = whole_or_none("groups: max_age", max_age, 0)
        self._rollouts: dict[str, dict[int, int]] = {}
        """Version of each rollout, by task and id, in order of addition."""
        self._tasks: list[str] = []
        """Tasks with rollouts; draws depend on the order."""
        self._place: dict[str, int] = {}
        self._task: dict[int, str] = {}
        self._session: dict[int, tuple[str, int]] = {}
        """Session and its number of rows, by id, for sessions of several rows."""
        self._order: dict[int, int] = {}
        self._added = 0
        self._newest = UNKNOWN_VERSION
        self._inside: tuple[int, list[int]] | None = None
        """For a narrow window: order of its oldest trajectory, and places of its tasks; None after a change."""
        self._told = self._told_few = False

    @property
    def ids(self) -> IntArray:
        return np.array(list(self._order), np.int64)

    def added(self, additions: Additions) -> None:
        if additions.tasks is None:
            raise ConfigurationError("groups need to know the task of every trajectory")
        self._inside = None
        pairs = zip(additions.ids.tolist(), additions.sessions or (), strict=False)
        self._session.update((number, session) for number, session in pairs if session[0] and session[1] > 1)
        rows = zip(additions.ids.tolist(), additions.versions.tolist(), additions.tasks, strict=True)
        for number, version, task in rows:
            self._order[number] = self._added
            self._added += 1
            self._newest = max(self._newest, version)
            if task:
                self._task[number] = task
                if task not in self._rollouts:
                    self._rollouts[task] = {}
                    self._place[task] = len(self._tasks)
                    self._tasks.append(task)
                self._rollouts[task][number] = version
            elif not self._told:
                self._told = True
                logger.warning("groups: trajectory %s has no task, so it is in no group", shown_id(number))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        self._inside = None
        for number in np.asarray(ids).tolist():
            self._order.pop(number, None)
            self._session.pop(number, None)
            task = self._task.pop(number, None)
            if task is not None:
                del self._rollouts[task][number]
                if not self._rollouts[task]:
                    del self._rollouts[task]
                    self._leave(task)

    def _leave(self, task: str) -> None:
        """Remove a task from the list; the last one takes its place."""
        at, last = self._place.pop(task), self._tasks.pop()
        if last != task:
            self._tasks[at] = last
            self._place[last] = at

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        count = whole("count", count, 1)
        oldest = -1 if first is None else self._order[first]
        groups: list[list[int]] = []
        places = self._places(count, oldest)
        for at in _shuffled(len(places), generator):
            numbers = [
                number
                for number, version in self._rollouts[self._tasks[places[at]]].items()
                if self._order[number] >= oldest
                and (self._max_age is None or (version != UNKNOWN_VERSION and version >= self._newest - self._max_age))
            ]
            if rows := self._newest_rollouts(numbers):
                groups.append(rows)
                if len(groups) == count:
                    break
        if not groups:
            raise EmptyBufferError(
                f"cannot sample: none of {counted(len(self._tasks), 'task')} has {counted(self._least, 'rollout')} to "
                "draw"
            )
        if len(groups) < count and not self._told_few:
            self._told_few = True
            logger.warning(
                "groups: %s requested, but only %d of %d have %s to draw",
                counted(count, "task"),
                len(groups),
                len(self._tasks),
                counted(self._least, "rollout"),
            )
        ids = np.array([number for group in groups for number in group], np.int64)
        return Drawn(ids, np.zeros(len(ids), np.int64))

    def _newest_rollouts(self, numbers: list[int]) -> list[int]:
        """Return the ids of a task's newest rollouts; empty if too few. Sessions that lack a row are left out."""
        if not self._session:
            return [] if len(numbers) < self._least else numbers[-self._most :] if self._most else numbers
        rows: dict[int | tuple[str, int], list[int]] = {}
        for number in numbers:
            rows.setdefault(self._session.get(number, number), []).append(number)
        rollouts = [ids for key, ids in rows.items() if isinstance(key, int) or len(ids) == key[1]]
        newest = rollouts[-self._most :] if self._most else rollouts
        return [number for ids in newest for number in ids] if len(rollouts) >= self._least else []

    def _places(self, count: int, oldest: int) -> Sequence[int]:
        """Return the places of candidate tasks; only the window's tasks if it is narrow.

        For a wide window it is faster to draw any task and reject those outside: the expected tries per group are all
        trajectories divided by those in the window. The choice depends only on saved state.
        """
        alive, tasks = len(self._order), len(self._tasks)
        most = isqrt(count * alive * alive // max(tasks, 1))
        if oldest < 0 or next(islice(reversed(self._order.values()), most, None), -1) >= oldest:
            return range(tasks)
        if self._inside is None or self._inside[0] != oldest:
            window_places = set()
            for number, order in reversed(self._order.items()):
                if order < oldest:
                    break
                if number in self._task:
                    window_places.add(self._place[self._task[number]])
            self._inside = oldest, sorted(window_places)
        return self._inside[1]

    def reached(self, version: int) -> None:
        self._newest = max(self._newest, version)

    def state_dict(self) -> dict[str, Any]:
        return {OF_WHOM: self._described(), "tasks": list(self._tasks), "newest": self._newest}

    def _described(self) -> dict[str, Any]:
        return described("groups", {}, {"least": self._least, "most": self._most, "max_age": self._max_age})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_sampler_state(state, self._described(), ("tasks", "newest"))
        tasks = texts("state: tasks", state["tasks"])
        newest = whole_in(state, "newest", UNKNOWN_VERSION)
        known = dict.fromkeys(task for task in tasks if task in self._rollouts)
        if tasks and self._tasks and not known:
            logger.warning("state: it names %s, none of which is here", counted(len(tasks), "task"))
        self._tasks = [*known, *(task for task in self._tasks if task not in known)]
        self._place = {task: at for at, task in enumerate(self._tasks)}
        self._inside = None
        self.reached(newest)

    def figures(self) -> dict[str, float]:
        return {"tasks": float(len(self._rollouts))}


def _shuffled(count: int, generator: torch.Generator) -> Iterator[int]:
    """Yield ``0 .. count - 1`` lazily in a random order.

    Source: Fisher-Yates shuffle, storing only the touched places.
    """
    moved: dict[int, int] = {}
    chance: list[float] = []
    for at in range(count):
        if not chance:
            chance = uniform(min(64, count - at), generator).tolist()[::-1]
        other = min(at + int(chance.pop() * (count - at)), count - 1)
        yield moved.get(other, other)
        moved[other] = moved.pop(at, at)
