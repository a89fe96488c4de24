"""A pool's cut: its state as plain containers, for a trainer's checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_hooks.replay.buckets import DifficultyBuckets
from trainer_hooks.replay.journal import (
    GeneratorState,
    PoolState,
    Uses,
    set_generator_state,
    uses_from_json,
    uses_to_json,
)
from trainer_hooks.replay.persistence import from_plain, to_plain
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AgentTrajectory

Draws = list[tuple[dict[int, int], dict[int, int]]]
"""For each step, the number of tasks that could be drawn and that were drawn, by difficulty."""

_VERSION = 1


@dataclass(frozen=True)
class PoolCut:
    """A pool's state without its rules. Trajectories are ids in a durable store, or included."""

    difficulty2task_dict: dict[int, list[str]]
    skip_uid_set: list[str]
    generator: GeneratorState
    global_steps: int
    refused: dict[str, int]
    tokenizer_fingerprint: str
    store_id: str
    """The store that the ids in ``entries`` belong to."""
    entries: dict[str, list[int]]
    trajectories: dict[str, list[AgentTrajectory]]
    uses: Uses = field(default_factory=dict)
    """Number of draws of each trajectory; absent in cuts of earlier versions."""
    waiting: list[str] = field(default_factory=list)
    """Tasks displaced by tasks with history; absent in cuts of earlier versions."""
    draws: Draws = field(default_factory=list)
    """Draws of the newest steps; absent in cuts of earlier versions."""

    def to_dict(self) -> dict[str, Any]:
        """Return the cut as plain containers; inverse of :meth:`from_dict`."""
        plain = {task: [to_plain(trajectory) for trajectory in held] for task, held in self.trajectories.items()}
        return {**vars(self), "version": _VERSION, "trajectories": plain, "uses": uses_to_json(self.uses)}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> PoolCut:
        """Return the cut that :meth:`to_dict` encoded.

        Raises:
            CorruptStoreError: ``value`` is not an encoded cut.
        """
        try:
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']!r}, this program reads {_VERSION}")
            return PoolCut(
                difficulty2task_dict={int(key): list(tasks) for key, tasks in value["difficulty2task_dict"].items()},
                skip_uid_set=list(value["skip_uid_set"]),
                generator=dict(value["generator"]),
                global_steps=int(value["global_steps"]),
                refused={str(reason): int(count) for reason, count in value["refused"].items()},
                tokenizer_fingerprint=str(value["tokenizer_fingerprint"]),
                store_id=str(value["store_id"]),
                entries={task: [int(number) for number in ids] for task, ids in value["entries"].items()},
                trajectories={
                    task: [from_plain(trajectory) for trajectory in held]
                    for task, held in value["trajectories"].items()
                },
                uses=uses_from_json(value.get("uses", ())),
                waiting=[str(task) for task in value.get("waiting", ())],
                draws=[(_counts(drawable), _counts(drawn)) for drawable, drawn in value.get("draws", ())],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error

    def state(self) -> PoolState:
        """Return buckets and skip set as a pool's state without trajectories."""
        buckets = DifficultyBuckets(self.difficulty2task_dict)
        skip, waiting = dict.fromkeys(self.skip_uid_set), dict.fromkeys(self.waiting)
        return PoolState(buckets, skip, uses=dict(self.uses), waiting=waiting)

    def make_generator(self) -> np.random.Generator:
        """Return a random generator in the cut's state."""
        generator = np.random.Generator(np.random.PCG64())
        set_generator_state(generator, self.generator)
        return generator


def _counts(value: Mapping[Any, Any]) -> dict[int, int]:
    """Return counts by difficulty; JSON has turned the keys into strings."""
    return {int(difficulty): int(count) for difficulty, count in value.items()}
