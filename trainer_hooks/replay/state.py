"""A pool's state, its document in a saved point, and its recovery from a store.

The pool is a choice of the store's trajectories: the document, which is the state of a saved point of the store, has
their ids and everything else that the pool knows. Other trajectories of the store are not the pool's.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_hooks.replay.buckets import DifficultyBuckets
from trainer_hooks.replay.compact import with_usual_columns
from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of
from trainer_hooks.replay.outcomes import REPLAY_MARK, REPLAYED_ID, TaskOutcome
from trainer_hooks.replay.prompts import RowPrompts
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import eligible
from trainer_hooks.replay.store import RECORDED, PoolRecords, ids_of
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

MOST_STEPS = 200
"""Number of steps whose tasks per difficulty are kept, for the viewer."""

_VERSION = 2

GeneratorState = dict[str, str | int]

Uses = dict[tuple[str, bytes], int]
"""Number of draws, by task and digest of the tokens."""

Draws = list[tuple[dict[int, int], dict[int, int]]]
"""For each step, the number of tasks that could be drawn and that were drawn, by difficulty."""

MakeEntry = Callable[[AgentTrajectory, int], PoolEntry | Refusal]
"""Makes an entry from a stored trajectory and its id, or returns why it cannot be replayed."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One step's change to one task."""

    difficulty: int | None
    """Its bucket from now on; ``None`` = no bucket."""
    skip: bool
    """Whether it is in the skip set from now on."""
    forget: bool = False
    """Whether its trajectories leave the pool."""


@dataclass
class PoolState:
    """Buckets, skip set and entries. Live changes and recovery go through the same methods."""

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
    draws: Draws = field(default_factory=list)
    """Draws of the newest steps, for a figure."""
    fingerprint: str = ""
    """Tokenizer of the trajectories; empty if unknown."""
    difficulties: dict[int, dict[int, int]] = field(default_factory=dict)
    """Tasks per difficulty at the end of each of the newest steps."""

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
            "draws": list(self.draws),
            "tokenizer_fingerprint": self.fingerprint,
            "difficulties": dict(self.difficulties),
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
                draws=[(_counts(drawable), _counts(drawn)) for drawable, drawn in value["draws"]],
                fingerprint=str(value["tokenizer_fingerprint"]),
                difficulties={int(step): _counts(sizes) for step, sizes in value["difficulties"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError, ConfigurationError) as error:
            raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error

    def begin_run(self) -> None:
        """Forget what only a checkpoint restores: waiting tasks, refusals, and draws for the figures."""
        self.waiting, self.refused, self.draws = {}, Counter(), []

    def uses_of(self, entries: Iterable[PoolEntry]) -> list[int]:
        """Return the number of draws of each of these entries."""
        return [self.uses.get((entry.task_id, entry.digest), 0) for entry in entries]

    def live_uses(self) -> Uses:
        """Return the uses of the present entries."""
        keys = ((entry.task_id, entry.digest) for entry in self.all_entries())
        return {key: self.uses[key] for key in keys if key in self.uses}

    def placed(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> dict[str, TaskChange]:
        """Return the changes that put tasks into their buckets; a skipped task without a failure gets none."""
        changes = {}
        for task, outcome in outcomes.items():
            difficulty = outcome.difficulty(n_rollout)
            if difficulty is not None:
                skip = not outcome.failed and task in self.skip
                changes[task] = TaskChange(None if skip else difficulty, skip)
        return changes

    def retired(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> dict[str, TaskChange]:
        """Return the changes that put solved tasks into the skip set, and remove failed tasks from it."""
        changes = {}
        for task, outcome in outcomes.items():
            if outcome.solved(n_rollout):
                changes[task] = TaskChange(None, skip=True, forget=True)
            elif outcome.failed:
                changes[task] = TaskChange(self.buckets.difficulty(task), skip=False)
        return changes

    def open_to(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> dict[str, TaskOutcome]:
        """Return the tasks whose rollouts may enter: unsolved, and either not skipped or with a failure."""
        unsolved = {task: outcome for task, outcome in outcomes.items() if not outcome.solved(n_rollout)}
        return {task: outcome for task, outcome in unsolved.items() if outcome.failed or task not in self.skip}

    def apply(self, changes: Mapping[str, TaskChange]) -> list[int]:
        """Apply a step's changes and return the ids of trajectories that left the pool."""
        left: list[int] = []
        for task, change in changes.items():
            if change.difficulty is None:
                self.buckets.remove(task)
            else:
                self.buckets.place(task, change.difficulty)
            if change.skip:
                self.skip[task] = None
            else:
                self.skip.pop(task, None)
            if change.forget:
                left.extend(entry.trajectory_id for entry in self.entries.get(task, ()))
                self.set_entries(task, ())
        self.difficulties[self.global_steps] = self.buckets.sizes()
        if len(self.difficulties) > MOST_STEPS:
            del self.difficulties[next(iter(self.difficulties))]
        return left

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
        allowed = tuple(
            candidate
            for candidate in held
            if eligible(candidate, rules, global_steps) and not self.is_of_other_row(candidate)
        )
        max_uses = rules.max_uses
        if max_uses is None:
            return allowed
        return tuple(entry for entry, uses in zip(allowed, self.uses_of(allowed), strict=True) if uses < max_uses)

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


def _counts(value: Mapping[Any, Any]) -> dict[int, int]:
    """Return counts by difficulty; JSON has turned the keys into strings."""
    return {int(difficulty): int(count) for difficulty, count in value.items()}


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


def generator_state(generator: np.random.Generator) -> GeneratorState:
    """Return a PCG64 generator's state as JSON; its 128-bit numbers are hexadecimal."""
    state = generator.bit_generator.state
    return {
        "bit_generator": str(state["bit_generator"]),
        "state": hex(state["state"]["state"]),
        "inc": hex(state["state"]["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def set_generator_state(generator: np.random.Generator, state: GeneratorState) -> None:
    """Set a generator to a state that :func:`generator_state` returned.

    Raises:
        CorruptStoreError: ``state`` is no such state.
    """
    try:
        generator.bit_generator.state = {
            "bit_generator": state["bit_generator"],
            "state": {"state": int(str(state["state"]), 16), "inc": int(str(state["inc"]), 16)},
            "has_uint32": int(state["has_uint32"]),
            "uinteger": int(state["uinteger"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"experience pool: not the state of a random generator: {error}") from error


def generator_of(state: GeneratorState) -> np.random.Generator:
    """Return a generator in a state that :func:`generator_state` returned.

    Raises:
        CorruptStoreError: ``state`` is no such state.
    """
    generator = np.random.Generator(np.random.PCG64())
    set_generator_state(generator, state)
    return generator


@dataclass
class Recovered:
    """The pool in a store."""

    state: PoolState
    generator: GeneratorState | None
    """State of the random generator at the newest saved point; ``None`` without a point."""
    point: str
    """Name of the newest saved point, if nothing was added since; else empty."""
    garbage: list[int]
    """Ids of trajectories that left the pool and are still stored."""
    unreadable: int
    """Number of damaged trajectories."""
    among_others: bool = False
    """Whether the store has all rollouts of the trainer, among which the pool chose."""


def recover(store: PoolRecords, make_entry: MakeEntry = entry_of) -> Recovered:
    """Return the pool in a store, as the newest saved point describes it. Without a point it is empty.

    Args:
        store: with the trajectories.
        make_entry: makes an entry from a stored trajectory.

    Raises:
        CorruptStoreError: the document cannot be decoded.
    """
    point = store.newest_point()
    if point is None:
        return Recovered(PoolState(), None, "", [], 0)
    state = PoolState.of_document(point.document)
    listed, left, newest = _ids_in(point.document)
    is_changed = store.newest_id() > newest
    there = store.kept([*ids_of(point.document), *left])
    result = Recovered(state, point.document["generator"], "" if is_changed else point.name, [], 0)
    result.among_others = bool(point.document.get(RECORDED))
    result.garbage = [number for number in left if number in there]
    fingerprint = ""
    for task, numbers in listed.items():
        entries = []
        for number in filter(there.__contains__, numbers):
            try:
                record = store.get(number)
            except StoreError as error:
                warn_of_unreadable(number, error)
                result.unreadable += 1
                continue
            entry = make_entry(record, number)
            if isinstance(entry, Refusal):
                result.garbage.append(number)
                continue
            fingerprint = fingerprint or record.tokenizer_fingerprint
            entries.append(entry)
        if entries:
            state.entries[task] = tuple(entries)
    state.fingerprint = fingerprint  # an empty pool accepts any tokenizer
    return result


def _ids_in(document: Mapping[str, Any]) -> tuple[dict[str, list[int]], list[int], int]:
    """Return the ids of each task's trajectories, of those that have left, and of the newest one that was stored.

    Raises:
        CorruptStoreError: the document is damaged.
    """
    try:
        listed = {str(task): list(map(int, numbers)) for task, numbers in document["entries"].items()}
        return listed, list(map(int, document["left"])), int(document["newest"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error
