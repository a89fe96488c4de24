"""A pool's state, made of the records of its store again.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore.errors import CorruptStoreError, StoreError
from trajstore.experience.buckets import DifficultyBuckets
from trajstore.experience.entry import PoolEntry, Refusal, entry_of
from trajstore.experience.journal import (
    JOURNAL_KEY,
    GeneratorState,
    MakeEntry,
    PoolState,
    TaskChange,
    uses_from_json,
    warn_of_unreadable,
)
from trajstore.experience.rules import PoolRules
from trajstore.experience.selection import admit
from trajstore.experience.store import PoolRecords
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@dataclass
class Recovered:
    """What a store's records amount to."""

    state: PoolState
    generator: GeneratorState | None
    """State of the random generator at the newest task record; ``None`` if there was no such record."""
    global_steps: int
    sequence: int
    """Number of the next task record or snapshot."""
    records: list[int]
    """Ids of the task records and snapshots."""
    garbage: list[int]
    """Ids of the pool's records that no longer matter."""
    fingerprint: str
    added: int
    """Entries since the newest snapshot."""
    unreadable: int = 0
    """Records that say something of the pool, and are damaged."""
    difficulties: dict[int, dict[int, int]] = field(default_factory=dict)
    """Tasks per difficulty at the end of each step, from that of the newest snapshot on."""


def recover(store: PoolRecords, rules: PoolRules, make_entry: MakeEntry = entry_of) -> Recovered:
    """Return the state that a store's records describe: the newest snapshot, and all records after it.

    Records that are not the pool's are left alone. Reads from the newest record backwards to that snapshot.

    Args:
        store: with the records.
        rules: say what took whose place where a record does not: those of earlier versions, and those that name a
            trajectory that is lost.
        make_entry: makes an entry of a record.

    Raises:
        CorruptStoreError: a record of the pool cannot be understood.
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
    if head["kind"] == "staged":  # the snapshot that would have named it was not written
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
    result.state.uses.update(uses_from_json(head.get("uses", ())))  # of before the changes, as when it was written
    result.garbage.extend(result.state.apply(changes))
    _note_head(record_id, head, result)


def _put(
    held: tuple[PoolEntry, ...], entry: PoolEntry, head: Mapping[str, Any], rules: PoolRules
) -> tuple[tuple[PoolEntry, ...], PoolEntry | None] | Refusal:
    """Put an entry among those of its task as its record says, whatever the rules are now."""
    if "replaces" in head:
        gone = next((one for one in held if one.trajectory_id == head["replaces"]), None)
        if gone is not None or head["replaces"] is None:
            return (*(one for one in held if one is not gone), entry), gone
    return admit(held, entry, rules)


def _note_head(record_id: int, head: dict[str, Any], result: Recovered) -> None:
    result.records.append(record_id)
    result.generator = head["generator"]
    result.global_steps = int(head["step"])
    result.sequence = int(head["sequence"]) + 1
    result.difficulties[result.global_steps] = result.state.buckets.sizes()
