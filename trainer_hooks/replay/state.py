"""A pool's state, its document in a saved point, and its recovery from a store.

The pool is a choice of the store's trajectories: the document, which is the state of a saved point of the store, has
their ids and everything else that the pool knows. Other trajectories of the store are not the pool's.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_hooks.replay.buckets import DifficultyBuckets
from trainer_hooks.replay.entry import PoolEntry, Refusal
from trainer_hooks.replay.outcomes import REPLAY_MARK, REPLAYED_ID, TaskOutcome
from trainer_hooks.replay.prompts import RowPrompts
from trainer_hooks.replay.rows import with_usual_columns
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import eligible
from trainer_hooks.replay.store import PoolRecords, entries_of
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError
from trajstore.query.engine import pl
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_VERSION = 3

Uses = dict[tuple[str, bytes], int]
"""Number of draws, by task and digest of the tokens."""


@dataclass
class PoolState:
    """Buckets, skip set and entries."""

    buckets: DifficultyBuckets = field(default_factory=DifficultyBuckets)
    skip: dict[str, None] = field(default_factory=dict)
    entries: dict[str, tuple[PoolEntry, ...]] = field(default_factory=dict)
    uses: Uses = field(default_factory=dict)
    """Number of draws of each trajectory; absent = 0. Keyed by task and tokens, so that it survives a new id. It is
    dropped with the entry, so that a resumed run has the same counts as one that went on."""
    waiting: dict[str, None] = field(default_factory=dict)
    """Tasks displaced by tasks with history."""
    rows: RowPrompts = field(default_factory=RowPrompts)
    """Prompts of the training data's rows; not in the document."""
    global_steps: int = 0
    """The training step."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused trajectories, by reason."""
    fingerprint: str = ""
    """Tokenizer of the trajectories; empty if unknown."""

    def to_document(self) -> dict[str, Any]:
        """Return everything but the trajectories as plain containers; inverse of :meth:`of_document`."""
        return {
            "version": _VERSION,
            "global_steps": self.global_steps,
            "difficulty2task_dict": self.buckets.to_dict(),
            "skip_uid_set": list(self.skip),
            "uses": [[task, digest.hex(), count] for (task, digest), count in self.live_uses().items()],
            "waiting": list(self.waiting),
            "refused": dict(self.refused),
            "tokenizer_fingerprint": self.fingerprint,
        }

    @staticmethod
    def of_document(value: Mapping[str, Any]) -> PoolState:
        """Return a state without trajectories from its document, in which JSON may have turned numbers into strings.

        Raises:
            CorruptStoreError: ``value`` is not such a document.
        """
        try:
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']!r}, this program reads {_VERSION}")
            return PoolState(
                DifficultyBuckets({int(key): list(tasks) for key, tasks in value["difficulty2task_dict"].items()}),
                dict.fromkeys(map(str, value["skip_uid_set"])),
                uses={(str(task), bytes.fromhex(digest)): int(count) for task, digest, count in value["uses"]},
                waiting=dict.fromkeys(map(str, value["waiting"])),
                global_steps=int(value["global_steps"]),
                refused=Counter({str(reason): int(count) for reason, count in value["refused"].items()}),
                fingerprint=str(value["tokenizer_fingerprint"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, ConfigurationError) as error:
            raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error

    def begin_run(self) -> None:
        """Forget what only a checkpoint restores: waiting tasks and refusals."""
        self.waiting, self.refused = {}, Counter()

    def uses_of(self, entries: Iterable[PoolEntry]) -> list[int]:
        """Return the number of draws of each of these entries."""
        return [self.uses.get((entry.task_id, entry.digest), 0) for entry in entries]

    def live_uses(self) -> Uses:
        """Return the uses of the present entries."""
        keys = ((entry.task_id, entry.digest) for entry in self.all_entries())
        return {key: self.uses[key] for key in keys if key in self.uses}

    def place(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> None:
        """Put tasks into their buckets; a skipped task without a failure gets none."""
        for task, outcome in outcomes.items():
            difficulty = outcome.difficulty(n_rollout)
            if difficulty is None:
                continue
            if task in self.skip and not outcome.failed:
                self.buckets.remove(task)
            else:
                self.buckets.place(task, difficulty)
                self.skip.pop(task, None)

    def retire(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> list[int]:
        """Put solved tasks into the skip set, and remove failed tasks from it.

        Returns:
            The ids of trajectories that left the pool.
        """
        left: list[int] = []
        for task, outcome in outcomes.items():
            if outcome.solved(n_rollout):
                self.buckets.remove(task)
                self.skip[task] = None
                left += [entry.trajectory_id for entry in self.entries.get(task, ())]
                self.set_entries(task, ())
            elif outcome.failed:
                self.skip.pop(task, None)
        return left

    def open_to(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> dict[str, TaskOutcome]:
        """Return the tasks whose rollouts may enter: unsolved, and either not skipped or with a failure."""
        unsolved = {task: outcome for task, outcome in outcomes.items() if not outcome.solved(n_rollout)}
        return {task: outcome for task, outcome in unsolved.items() if outcome.failed or task not in self.skip}

    def set_entries(self, task: str, entries: tuple[PoolEntry, ...]) -> None:
        """Set the entries of a task, and drop the uses of those that leave. Without entries, the task is removed."""
        left = {entry.digest for entry in self.entries.get(task, ())} - {entry.digest for entry in entries}
        for digest in left:
            self.uses.pop((task, digest), None)
        if entries:
            self.entries[task] = entries
        else:
            self.entries.pop(task, None)

    def forget(self, entry: PoolEntry) -> None:
        """Drop one entry; a task without entries is removed."""
        left = tuple(other for other in self.entries.get(entry.task_id, ()) if other is not entry)
        self.set_entries(entry.task_id, left)

    def eligible(self, task: str, rules: PoolRules, global_steps: int) -> tuple[PoolEntry, ...]:
        """Return the entries of a task that may be drawn at this step, oldest first."""
        held = self.entries.get(task, ())
        return tuple(
            candidate
            for candidate in held
            if eligible(candidate, rules, global_steps) and not self.is_of_other_row(candidate)
        )

    def is_of_other_row(self, entry: PoolEntry) -> bool:
        """Return whether an entry answers another prompt than its task's row; then it is never drawn."""
        return self.rows.differs(entry.task_id, entry.prompt)

    def valid_buckets(self, rules: PoolRules, global_steps: int) -> dict[int, list[str]]:
        """Return the tasks, by difficulty, that are not skipped and have an eligible entry."""
        result: dict[int, list[str]] = {}
        for difficulty, tasks in self.buckets.to_dict().items():
            valid = [task for task in tasks if task not in self.skip and self.eligible(task, rules, global_steps)]
            if valid:
                result[difficulty] = valid
        return result

    def count(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self.entries.values()))

    def demonstrations(self) -> int:
        """Return the number of entries without recorded log-probabilities."""
        return sum(entry.is_demonstration for entry in self.all_entries())

    def all_entries(self) -> Iterable[PoolEntry]:
        """Yield every entry, task by task."""
        for entries in self.entries.values():
            yield from entries


def warn_of_unreadable(trajectory_id: int, error: Exception, task: str = "") -> None:
    """Warn that a trajectory cannot be read, and name its task if it is known."""
    of_task = f" of task {task!r}" if task else ""
    logger.warning("experience pool: trajectory %d%s cannot be read and is left out: %s", trajectory_id, of_task, error)


def replayed_copy(record: AgentTrajectory, trajectory_id: int | None = None) -> AgentTrajectory:
    """Return a private copy of an entry's trajectory, marked as replayed; ids and masks are ``int64``.

    Args:
        record: the stored trajectory.
        trajectory_id: its id in the store; ``None`` = the records are in memory.
    """
    trajectory = with_usual_columns(copy.deepcopy(record))
    trajectory.metadata[REPLAY_MARK] = True
    if trajectory_id is not None:
        trajectory.metadata[REPLAYED_ID] = trajectory_id
    return trajectory


def generator_state(generator: np.random.Generator) -> str:
    """Return a generator's state as JSON text, since its numbers have 128 bits."""
    return json.dumps(generator.bit_generator.state)


def set_generator_state(generator: np.random.Generator, state: str) -> None:
    """Set a generator to a state that :func:`generator_state` returned.

    Raises:
        CorruptStoreError: ``state`` is no such state.
    """
    try:
        generator.bit_generator.state = json.loads(state)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"not the state of a random generator: {error!r}") from error


@dataclass
class Recovered:
    """The pool in a store."""

    state: PoolState
    generator: str | None
    """State of the random generator at the newest saved point; ``None`` without a point."""
    point: str
    """Name of the newest saved point, if nothing was added since; else empty."""
    garbage: list[int]
    """Ids of trajectories that left the pool and are still stored."""
    unreadable: int
    """Number of damaged trajectories."""


def recover(store: PoolRecords) -> Recovered:
    """Return the pool in a store, as the newest saved point describes it. Without a point it is empty.

    Raises:
        CorruptStoreError: the document cannot be decoded.
    """
    point = store.newest_point()
    if point is None:
        return Recovered(PoolState(), None, "", [], 0)
    document = point.document
    state, listed = PoolState.of_document(document), entries_of(document)
    try:
        left, newest = list(map(int, document["left"])), int(document["newest"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error
    is_changed = store.newest_id() > newest
    there = store.kept([*(number for numbers in listed.values() for number in numbers), *left])
    result = Recovered(state, document["generator"], "" if is_changed else point.name, [], 0)
    result.garbage = [number for number in left if number in there]
    fingerprint = ""
    for task, numbers in listed.items():
        entries = []
        for number in filter(there.__contains__, numbers):
            try:
                entry, tokenizer = store.entry(number)
            except StoreError as error:
                warn_of_unreadable(number, error)
                result.unreadable += 1
                continue
            if isinstance(entry, Refusal):
                result.garbage.append(number)
                continue
            fingerprint = fingerprint or tokenizer
            entries.append(entry)
        if entries:
            state.entries[task] = tuple(entries)
    state.fingerprint = fingerprint  # an empty pool accepts any tokenizer
    return result


def with_pool_facts(facts: pl.DataFrame, state: PoolState) -> pl.DataFrame:
    """Return the facts of the trajectories in a pool, with the pool's own facts.

    These are ``difficulty`` (successes of the task in its newest step; null where it is in no bucket),
    ``pool_entropy`` (mean entropy of the history when it entered, in nats; null of a demonstration), ``uses`` (how
    often it was drawn), and ``demonstration`` (whether it is one, which has no log-probs).

    Args:
        facts: of all trajectories in the pool's store.
        state: of the pool.
    """
    entries = list(state.all_entries())
    known = pl.DataFrame(
        {
            "trajectory_id": [entry.trajectory_id for entry in entries],
            "difficulty": [state.buckets.difficulty(entry.task_id) for entry in entries],
            "pool_entropy": [entry.entropy for entry in entries],
            "uses": state.uses_of(entries),
            "demonstration": [entry.is_demonstration for entry in entries],
        },
        schema={
            **dict.fromkeys(("trajectory_id", "difficulty"), pl.Int64),
            "pool_entropy": pl.Float64,
            "uses": pl.Int64,
            "demonstration": pl.Boolean,
        },
    )
    others = facts.drop(known.columns[1:], strict=False)
    joined: pl.DataFrame = others.join(known, on="trajectory_id", maintain_order="left")
    return joined
