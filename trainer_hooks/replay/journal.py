"""The pool's state as records of a trajectory store, and its recovery from them.

A pool is the result of its records in order of their ids. *Entries* are replayable trajectories; *task records* have a
step's changes to buckets and skip set; a *snapshot* has the whole state; *staged* entries count only once a snapshot
names them, so that a whole pool is replaced at one point. Each record is an ``AgentTrajectory`` whose ``metadata`` has
the key ``experience_pool``; task records and snapshots have no tokens.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_hooks.replay.buckets import DifficultyBuckets
from trainer_hooks.replay.compact import with_small_columns, with_usual_columns
from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of
from trainer_hooks.replay.outcomes import REPLAY_MARK, TaskOutcome
from trainer_hooks.replay.prompts import RowPrompts
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import admit, eligible
from trainer_hooks.replay.store import PoolRecords
from trajstore.errors import CorruptStoreError, StoreError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

JOURNAL_KEY = "experience_pool"
"""Key of ``metadata`` for a record's kind and contents."""

GeneratorState = dict[str, str | int]

Uses = dict[tuple[str, bytes], int]
"""Number of draws, by task and digest of the tokens."""

MakeEntry = Callable[[AgentTrajectory, int], PoolEntry | Refusal]
"""Makes an entry from a record and its id, or returns why it cannot be replayed."""


def uses_to_json(uses: Mapping[tuple[str, bytes], int]) -> list[list[Any]]:
    """Return uses as JSON: ``[[task, digest in hex, count], ...]``; inverse of :func:`uses_from_json`."""
    return [[task, digest.hex(), count] for (task, digest), count in uses.items()]


def uses_from_json(value: Iterable[Sequence[Any]]) -> Uses:
    """Return the uses that :func:`uses_to_json` encoded."""
    return {(str(task), bytes.fromhex(digest)): int(count) for task, digest, count in value}


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
    dropped with the entry, so that a run resumed from a cut has the same counts as one that went on."""
    waiting: dict[str, None] = field(default_factory=dict)
    """Tasks displaced by tasks with history. Not recorded: a crash without a checkpoint loses the order of the training
    tasks anyway."""
    rows: RowPrompts = field(default_factory=RowPrompts)
    """Prompts of the training data's rows; not recorded."""

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

    def differs(self, task: str, change: TaskChange) -> bool:
        """Return whether :meth:`apply` would change anything about a task."""
        if self.buckets.difficulty(task) != change.difficulty or (task in self.skip) != change.skip:
            return True
        return change.forget and task in self.entries

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

    def adopt(
        self, store: PoolRecords, ids: Mapping[str, Sequence[int]], make_entry: MakeEntry = entry_of
    ) -> tuple[str, int]:
        """Add stored trajectories by id; return their tokenizer, and the number of unreadable ones.

        Unreadable and evicted trajectories are left out.
        """
        fingerprint = ""
        lost = unreadable = 0
        for task, numbers in ids.items():
            entries = []
            for number in numbers:
                try:
                    record = store.get(number)
                except TrajectoryUnavailableError:
                    lost += 1
                    continue
                except StoreError as error:
                    warn_of_unreadable(number, error, task)
                    unreadable += 1
                    continue
                entry = make_entry(record, number)
                if isinstance(entry, PoolEntry):
                    entries.append(entry)
                    fingerprint = fingerprint or record.tokenizer_fingerprint
            if entries:
                self.entries[task] = tuple(entries)
        if lost:
            logger.warning("experience pool: the store no longer keeps %d of its trajectories", lost)
        return fingerprint, unreadable

    def keep_only(self, ids: Collection[int]) -> None:
        """Drop entries whose ids are not among these."""
        for entry in [entry for entry in self.all_entries() if entry.trajectory_id not in ids]:
            self.forget(entry)

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


def warn_of_unreadable(trajectory_id: int, error: Exception, task: str = "") -> None:
    """Warn that a record cannot be read, and name the loss."""
    consequence = f"a trajectory of task {task!r} is left out" if task else "what it says of the pool is left out"
    logger.warning("experience pool: record %d cannot be read, %s: %s", trajectory_id, consequence, error)


def record_of(trajectory: AgentTrajectory, kind: str, global_steps: int, **more: Any) -> AgentTrajectory:
    """Return the record of a replayable trajectory, with compact ids and masks.

    Args:
        trajectory: the trajectory.
        kind: ``entry``, with the id of the entry that it ``replaces`` or None; or ``staged``: counts once a snapshot
            names it.
        global_steps: number of the step.
        more: further fields of the kind.
    """
    metadata = {**trajectory.metadata, JOURNAL_KEY: {"kind": kind, "step": global_steps, **more}}
    return dataclasses.replace(with_small_columns(trajectory), metadata=metadata)


def trajectory_of_entry(record: AgentTrajectory) -> AgentTrajectory:
    """Return an entry's trajectory without the pool's own metadata. Tensors and messages are shared with the record."""
    metadata = {key: value for key, value in record.metadata.items() if key != JOURNAL_KEY}
    return dataclasses.replace(record, metadata=metadata)


def replayed_copy(record: AgentTrajectory) -> AgentTrajectory:
    """Return a private copy of an entry's trajectory, marked as replayed; ids and masks are ``int64``."""
    trajectory = with_usual_columns(copy.deepcopy(trajectory_of_entry(record)))
    trajectory.metadata[REPLAY_MARK] = True
    return trajectory


def tasks_record(
    changes: Mapping[str, TaskChange],
    *,
    uses: Uses,
    sequence: int,
    global_steps: int,
    generator: np.random.Generator,
) -> AgentTrajectory:
    """Return the record of a step's changes to buckets and skip set, and of changed uses."""
    tasks = [[task, change.difficulty, change.skip, change.forget] for task, change in changes.items()]
    return _record("tasks", sequence, global_steps, generator, tasks=tasks, uses=uses_to_json(uses))


def snapshot_record(
    state: PoolState, *, sequence: int, global_steps: int, generator: np.random.Generator
) -> AgentTrajectory:
    """Return the record of the whole state; trajectories are named by id."""
    return _record(
        "snapshot",
        sequence,
        global_steps,
        generator,
        buckets=[[difficulty, tasks] for difficulty, tasks in state.buckets.to_dict().items()],
        skip=list(state.skip),
        entries=[[task, [entry.trajectory_id for entry in entries]] for task, entries in state.entries.items()],
        uses=uses_to_json(state.live_uses()),
    )


def _record(
    kind: str, sequence: int, global_steps: int, generator: np.random.Generator, **content: Any
) -> AgentTrajectory:
    head = {"kind": kind, "sequence": sequence, "step": global_steps, "generator": generator_state(generator)}
    return AgentTrajectory(metadata={JOURNAL_KEY: head | content})


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


@dataclass
class Recovered:
    """The state recovered from a store's records."""

    state: PoolState
    generator: GeneratorState | None
    """State of the random generator at the newest task record; ``None`` if there was no such record."""
    global_steps: int
    sequence: int
    """Number of the next task record or snapshot."""
    records: list[int]
    """Ids of the task records and snapshots."""
    garbage: list[int]
    """Ids of the pool's obsolete records."""
    fingerprint: str
    added: int
    """Entries since the newest snapshot."""
    unreadable: int = 0
    """Damaged records of the pool."""
    difficulties: dict[int, dict[int, int]] = field(default_factory=dict)
    """Tasks per difficulty at the end of each step, from the newest snapshot's step on."""


def recover(store: PoolRecords, rules: PoolRules, make_entry: MakeEntry = entry_of) -> Recovered:
    """Recover the pool's state from the newest snapshot and all records after it.

    Ignores records of others. Reads backwards from the newest record to that snapshot.

    Args:
        store: with the records.
        rules: decide on replacements where a record does not: records of earlier versions, and records that name a lost
            trajectory.
        make_entry: makes an entry from a record.

    Raises:
        CorruptStoreError: a record of the pool cannot be decoded.
    """
    tail: list[tuple[int, AgentTrajectory, dict[str, Any]]] = []
    snapshot: tuple[int, dict[str, Any]] | None = None
    unreadable = 0
    ids = store.ids()
    below: list[int] = []
    for position in range(len(ids) - 1, -1, -1):
        try:
            record = store.get(ids[position])
        except StoreError as error:
            warn_of_unreadable(ids[position], error)
            unreadable += 1
            continue
        head = record.metadata.get(JOURNAL_KEY)
        if not isinstance(head, dict):
            continue
        if head.get("kind") == "snapshot":
            snapshot = (ids[position], head)
            below = ids[:position]
            break
        tail.append((ids[position], record, head))
    tail.reverse()
    if ids and snapshot is None and not tail:
        logger.warning(
            "experience pool: its store holds %d trajectories that are none of a pool's; they are left alone, and the"
            " pool is begun among them. Give the pool a directory of its own if that is not what you want",
            len(ids),
        )

    result = Recovered(PoolState(), None, 0, 0, [], [], "", 0, unreadable)
    try:
        if snapshot is not None:
            _from_snapshot(store, *snapshot, below, result, make_entry)
        for record_id, record, head in tail:
            _replay(record_id, record, head, rules, result, make_entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStoreError(
            f"experience pool: a record of its journal is not what this version writes ({error!r});"
            " load a saved pool (experience_pool/step_N) into an empty store"
        ) from error
    return result


def _from_snapshot(
    store: PoolRecords, record_id: int, head: dict[str, Any], below: list[int], result: Recovered, make_entry: MakeEntry
) -> None:
    result.state.buckets = DifficultyBuckets({int(difficulty): tasks for difficulty, tasks in head["buckets"]})
    result.state.skip = dict.fromkeys(head["skip"])
    result.state.uses = uses_from_json(head.get("uses", ()))  # absent in pools of earlier versions
    result.fingerprint, unreadable = result.state.adopt(store, dict(head["entries"]), make_entry)
    result.unreadable += unreadable
    live = {entry.trajectory_id for entry in result.state.all_entries()}
    for other in below:
        try:
            if other not in live and JOURNAL_KEY in store.get(other).metadata:
                result.garbage.append(other)
        except StoreError as error:
            warn_of_unreadable(other, error)
    _note_head(record_id, head, result)


def _replay(
    record_id: int,
    record: AgentTrajectory,
    head: dict[str, Any],
    rules: PoolRules,
    result: Recovered,
    make_entry: MakeEntry,
) -> None:
    if head["kind"] == "entry":
        result.added += 1
        entry = make_entry(record, record_id)
        held = result.state.entries.get(record.task_id, ())
        outcome = entry if isinstance(entry, Refusal) else _put(held, entry, head, rules)
        if isinstance(outcome, Refusal):
            result.garbage.append(record_id)
            return
        entries, replaced = outcome
        result.state.set_entries(record.task_id, entries)
        if replaced is not None:
            result.garbage.append(replaced.trajectory_id)
        result.fingerprint = result.fingerprint or record.tokenizer_fingerprint
        return
    if head["kind"] == "staged":  # its snapshot was never written
        result.garbage.append(record_id)
        return
    if head["kind"] != "tasks":
        raise ValueError(f"kind {head['kind']!r}")
    if head["sequence"] != result.sequence:
        logger.warning(
            "experience pool: the store lacks %d records of the pool's journal (evicted by its capacity?);"
            " buckets and skipped tasks may be out of date",
            head["sequence"] - result.sequence,
        )
    changes = {task: TaskChange(difficulty, skip, forget) for task, difficulty, skip, forget in head["tasks"]}
    result.state.uses.update(uses_from_json(head.get("uses", ())))  # from before the changes
    result.garbage.extend(result.state.apply(changes))
    _note_head(record_id, head, result)


def _put(
    held: tuple[PoolEntry, ...], entry: PoolEntry, head: Mapping[str, Any], rules: PoolRules
) -> tuple[tuple[PoolEntry, ...], PoolEntry | None] | Refusal:
    """Add an entry to its task as its record says, whatever the rules are now."""
    if "replaces" in head:
        displaced = next((other for other in held if other.trajectory_id == head["replaces"]), None)
        if displaced is not None or head["replaces"] is None:
            return (*(other for other in held if other is not displaced), entry), displaced
    return admit(held, entry, rules)


def _note_head(record_id: int, head: dict[str, Any], result: Recovered) -> None:
    result.records.append(record_id)
    result.generator = head["generator"]
    result.global_steps = int(head["step"])
    result.sequence = int(head["sequence"]) + 1
    result.difficulties[result.global_steps] = result.state.buckets.sizes()
