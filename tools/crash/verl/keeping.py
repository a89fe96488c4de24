"""What ``on_resume: keep`` promises, reckoned from the rules as they are documented and not with the pool's code.

Rollouts recorded after a checkpoint enter the pool as it was there, step by step:

- a task of which every rollout of a step succeeded leaves the pool and is skipped, until one of a later step fails; a
  rollout that the crash took counts as one that failed;
- the bucket of another task is its number of successes; where histories took the place of some of its ``n_rollout``
  rollouts, the share of the others counts, rounded: 2 of 3 are 3 of 4;
- of other tasks the successes enter, in the order of their sessions, if what replay needs of them is there;
- one with the tokens of another of its task is refused;
- a task has a largest number of trajectories; then one enters only in the place of one whose entropy is higher.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trajstore import AgentTrajectory


@dataclass
class Kept:
    """A pool to which rollouts are added.

    Attributes:
        most: trajectories that a task may have.
        n_rollout: rows of a task in a batch, histories included.
        held: trajectories by task, oldest first.
        difficulty: bucket of each task by its newest step; tasks of one difficulty in the order of their arrival.
        skip: tasks that are solved, in the order of their arrival.
        refused: how many did not enter, by the pool's name of the reason.
    """

    most: int
    n_rollout: int
    held: dict[str, list[AgentTrajectory]]
    difficulty: dict[str, int]
    skip: dict[str, None]
    refused: Counter[str] = field(default_factory=Counter)

    def take_in(self, rollouts: Iterable[AgentTrajectory]) -> None:
        """Add rollouts, in the order in which they were recorded."""
        for _, step in itertools.groupby(rollouts, lambda one: (one.metadata["run"], one.metadata["step"])):
            ordered = sorted(step, key=lambda one: (one.task_id, int(one.rollout_id.split("_")[1])))
            groups = {task: list(group) for task, group in itertools.groupby(ordered, lambda one: one.task_id)}
            for task, group in groups.items():
                self._rate(task, group)
            for group in groups.values():
                for one in filter(_succeeded, group):
                    self._add(one)

    def buckets(self) -> dict[str, list[str]]:
        """Return ``{difficulty: [task, ...]}`` as JSON has it."""
        found: dict[str, list[str]] = {}
        for task, difficulty in self.difficulty.items():
            found.setdefault(str(difficulty), []).append(task)
        return found

    def _rate(self, task: str, group: list[AgentTrajectory]) -> None:
        successes = sum(map(_succeeded, group))
        if successes == group[0].metadata["task_rollouts"]:
            self.held.pop(task, None)
            self.difficulty.pop(task, None)
            self.skip.setdefault(task)
            return
        self.skip.pop(task, None)
        made = group[0].metadata["task_rollouts"]
        share = math.floor(self.n_rollout * successes / made + 0.5)
        difficulty = min(max(share, int(successes > 0)), self.n_rollout - 1)
        if self.difficulty.get(task) != difficulty:
            self.difficulty.pop(task, None)
            self.difficulty[task] = difficulty

    def _add(self, one: AgentTrajectory) -> None:
        if one.task_id in self.skip:
            return
        held = self.held.get(one.task_id, [])
        if any(torch.equal(_tokens(one), _tokens(other)) for other in held):
            self.refused["duplicate"] += 1
            return
        if len(held) == self.most:
            worst = max(held, key=_entropy)
            if _entropy(one) >= _entropy(worst):
                self.refused["not_better"] += 1
                return
            held = [other for other in held if other is not worst]
        self.held[one.task_id] = [*held, one]


def kept_pool(
    state: Mapping[str, Any],
    held: Mapping[str, list[AgentTrajectory]],
    since: Iterable[AgentTrajectory],
    most: int,
    n_rollout: int,
) -> Kept:
    """Return the pool that ``keep`` must resume with.

    Args:
        state: of the pool, as a cut has it: ``difficulty2task_dict`` and ``skip_uid_set``.
        held: its trajectories by task, oldest first.
        since: rollouts that were recorded since, in the order of their ids.
        most: trajectories that a task may have.
        n_rollout: rows of a task in a batch, histories included.
    """
    difficulty = {task: int(key) for key, tasks in state["difficulty2task_dict"].items() for task in tasks}
    kept = Kept(
        most,
        n_rollout,
        {task: list(all_) for task, all_ in held.items()},
        difficulty,
        dict.fromkeys(state["skip_uid_set"]),
    )
    kept.take_in(since)
    return kept


def _succeeded(one: AgentTrajectory) -> bool:
    return one.reward is not None and one.reward.outcome == 1.0


def _tokens(one: AgentTrajectory) -> torch.Tensor:
    return _present(one.input_ids, one).long()


def _entropy(one: AgentTrajectory) -> float:
    """Return the mean over the tokens that the model wrote, in nats."""
    written = _present(one.response_mask, one) == 1
    return float(_present(one.entropys, one)[written].double().mean())


def _present(column: torch.Tensor | None, one: AgentTrajectory) -> torch.Tensor:
    if column is None:
        raise ValueError(f"rollout {one.rollout_id} lacks tokens, mask or entropies, which verl's trainer always has")
    return column
