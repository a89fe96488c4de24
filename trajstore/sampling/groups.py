"""Whole groups: all rollouts of a task together, as group-relative advantages want them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.sampling.base import Additions, Drawn, IntArray, Sampler, Unit

logger = logging.getLogger(__name__)


class GroupSampler(Sampler):
    """Draws tasks uniformly, none twice, and of each all its rollouts (or its newest).

    ``count`` counts tasks. Rollouts that name no task are not drawn; the first is warned of.

    Args:
        least: tasks with fewer rollouts are passed over.
        most: of each task only the newest this many; None = all.
        max_age: only rollouts at most so many policy versions behind the newest of all; None = any.
    """

    unit: Unit = "trajectory"
    needs_tasks = True

    def __init__(self, least: int = 1, most: int | None = None, max_age: int | None = None) -> None:
        if least < 1 or (most is not None and most < least) or (max_age is not None and max_age < 0):
            raise ConfigurationError(
                f"groups: least {least} must be at least 1, most {most} at least that, max_age {max_age} at least 0"
            )
        self._least, self._most, self._max_age = least, most, max_age
        self._rollouts: dict[str, dict[int, int]] = {}
        """By task, the version of each rollout by its id, in the order of addition."""
        self._task: dict[int, str] = {}
        self._order: dict[int, int] = {}
        self._added = 0
        self._newest = UNKNOWN_VERSION
        self._told = False

    @property
    def ids(self) -> IntArray:
        return np.array(list(self._order), np.int64)

    def added(self, additions: Additions) -> None:
        if additions.tasks is None:
            raise ConfigurationError("groups need to know the task of every trajectory")
        rows = zip(additions.ids.tolist(), additions.versions.tolist(), additions.tasks, strict=True)
        for number, version, task in rows:
            self._order[number] = self._added
            self._added += 1
            self._newest = max(self._newest, version)
            if task:
                self._task[number] = task
                self._rollouts.setdefault(task, {})[number] = version
            elif not self._told:
                self._told = True
                logger.warning("groups: trajectory %d names no task, so it is in no group", number)

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        for number in np.asarray(ids).tolist():
            self._order.pop(number, None)
            task = self._task.pop(number, None)
            if task is not None:
                del self._rollouts[task][number]
                if not self._rollouts[task]:
                    del self._rollouts[task]

    def draw(self, count: int, generator: torch.Generator, first: int | None = None) -> Drawn:
        oldest = -1 if first is None else self._order[first]
        groups: list[list[int]] = []
        tasks = list(self._rollouts)
        for at in torch.randperm(len(tasks), generator=generator).tolist():
            rollouts = [
                number
                for number, version in self._rollouts[tasks[at]].items()
                if self._order[number] >= oldest
                and (self._max_age is None or (version != UNKNOWN_VERSION and version >= self._newest - self._max_age))
            ]
            if len(rollouts) >= self._least:
                groups.append(rollouts[-self._most :] if self._most else rollouts)
                if len(groups) == count:
                    break
        if not groups:
            raise EmptyBufferError(f"cannot sample: none of {len(tasks)} tasks has {self._least} rollouts to draw")
        ids = np.array([number for group in groups for number in group], np.int64)
        return Drawn(ids, np.zeros(len(ids), np.int64))

    def reached(self, version: int) -> None:
        self._newest = max(self._newest, version)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state beyond the trajectories."""

    def figures(self) -> dict[str, float]:
        return {"tasks": float(len(self._rollouts))}
