"""The pool's state and its store: every change is recorded in the store first.

If the store fails, the state stays as it was. A crash loses only the newest changes, those that the store had not yet
written.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trainer_hooks.replay import journal
from trainer_hooks.replay.entry import Departure, PoolEntry
from trainer_hooks.replay.journal import (
    PoolState,
    TaskChange,
    recover,
)
from trainer_hooks.replay.outcomes import outcome_of
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import AdmissionPlan
from trainer_hooks.replay.store import BufferStore, PoolStore
from trajstore.errors import ConfigurationError, StoreError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query

logger = logging.getLogger(__name__)

COMPACT_AFTER = 64
"""Number of task records and dead trajectories after which a snapshot is written; also written after this many
additions, if they are at least half of the pool. So the newest snapshot is never among the older half of a store's
records: a store that evicts its oldest loses trajectories, not the journal."""


class PoolLedger:
    """Recovers the pool of a store, and keeps state and store in step.

    Args:
        store: where records are kept.
        rules: used to read the store's records.
        generator: set to the recorded state, if there is one; recorded with every change.

    Raises:
        CorruptStoreError: a record of the pool cannot be decoded.
    """

    def __init__(self, store: PoolStore, rules: PoolRules, generator: np.random.Generator) -> None:
        recovered = recover(store, rules)
        if recovered.generator is not None:
            journal.set_generator_state(generator, recovered.generator)
        self.state = recovered.state
        """The pool's contents, changed only by this class."""
        self.generator = generator
        self.global_steps = recovered.global_steps
        """The training step that records are made at."""
        self.fingerprint = recovered.fingerprint
        """Tokenizer of the recovered trajectories; empty if unknown."""
        self.left: Counter[str] = Counter()
        """How many trajectories have left the state since it was opened, by reason (see ``Departure``). Records that
        could not be read then are among them."""
        self._count(Departure.UNREADABLE, recovered.unreadable)
        self.store = store
        self._sequence = recovered.sequence
        self._records = recovered.records
        self._garbage = recovered.garbage
        self._added = recovered.added
        self._held: frozenset[int] = frozenset()
        self._drawn: dict[tuple[str, bytes], None] = {}

    def query(self, relation: str) -> Query:
        """Return a query over all records of the store.

        Raises:
            ConfigurationError: the store has no index.
        """
        if not isinstance(self.store, BufferStore):
            raise ConfigurationError(
                "query: the pool is not kept in a buffer, which would have the facts; give it one, "
                "store=BufferStore.open(path)"
            )
        return self.store.query(relation)

    def read(self, entries: Sequence[PoolEntry]) -> list[tuple[PoolEntry, AgentTrajectory]]:
        """Return entries with their records, which the caller must not change.

        Entries that the store evicted leave the pool; unreadable ones leave it with a warning.
        """
        records = []
        for entry in entries:
            try:
                records.append((entry, self.store.get(entry.trajectory_id)))
            except TrajectoryUnavailableError:
                logger.info("experience pool: the store no longer keeps a trajectory of task %s", entry.task_id)
                self._forget(entry, Departure.UNAVAILABLE)
            except StoreError as error:  # one damaged record does not hide the others
                journal.warn_of_unreadable(entry.trajectory_id, error, entry.task_id)
                self._forget(entry, Departure.UNREADABLE)
        return records

    def correct(self) -> None:
        """Apply late outcome corrections and their retractions."""
        given = self.store.outcomes_given()
        changed = [
            entry
            for entry in self.state.all_entries()
            if (given.get(entry.trajectory_id) != entry.outcome if entry.trajectory_id in given else entry.is_corrected)
        ]
        for entry, record in self.read(changed):
            outcome, corrected = outcome_of(record), entry.trajectory_id in given
            logger.warning(
                "experience pool: a trajectory of task %s (record %d) has the outcome %s that %s",
                entry.task_id,
                entry.trajectory_id,
                outcome,
                "it was given late" if corrected else "was recorded, since a later one was taken back",
            )
            fresh = replace(entry, outcome=outcome, is_corrected=corrected)
            held = self.state.entries[entry.task_id]
            self.state.set_entries(entry.task_id, tuple(fresh if other is entry else other for other in held))

    def change(self, changes: Mapping[str, TaskChange]) -> None:
        """Record and apply changes to buckets and skip set. Changes without effect are not recorded."""
        needed = {task: change for task, change in changes.items() if self.state.differs(task, change)}
        if not needed:
            return
        record = journal.tasks_record(
            needed,
            uses={key: self.state.uses[key] for key in self._drawn if key in self.state.uses},
            sequence=self._sequence,
            global_steps=self.global_steps,
            generator=self.generator,
        )
        self._records.extend(self.store.add_trajectories([record]))
        self._drawn = {}
        self._sequence += 1
        left = self.state.apply(needed)
        self._count(Departure.TASK_SOLVED, len(left))
        self._garbage.extend(left)
        self._compact_if_due()

    def note_used(self, entries: Sequence[PoolEntry]) -> None:
        """Count one use of each of these entries. The counts are recorded with the next change of the pool."""
        for entry in entries:
            key = (entry.task_id, entry.digest)
            self.state.uses[key] = self.state.uses.get(key, 0) + 1
            self._drawn[key] = None

    def add(self, plan: AdmissionPlan) -> None:
        """Store the trajectories of a plan and apply the plan."""
        records = [
            journal.record_of(trajectory, "entry", self.global_steps, replaces=plan.replaces.get(number))
            for number, trajectory in plan.accepted.items()
        ]
        for task, entries in plan.with_ids(self.store.add_trajectories(records) if records else []).items():
            self.state.set_entries(task, entries)
        self._count(Departure.REPLACED, plan.displaced)
        self._garbage.extend(plan.replaces.values())
        self._added += len(records)
        self._compact_if_due()

    def adopt(self, fresh: PoolState, ids: Mapping[str, Sequence[int]]) -> None:
        """Add stored trajectories to a state that will replace this one; those no longer stored are left out."""
        self._count(Departure.UNREADABLE, fresh.adopt(self.store, ids)[1])

    def replace(self, fresh: PoolState, plan: AdmissionPlan, global_steps: int, generator: np.random.Generator) -> None:
        """Replace the state by ``fresh`` and the plan's trajectories. In the store, one record does this.

        The pool's generator is set to the state of ``generator``.
        """
        records = [journal.record_of(trajectory, "staged", global_steps) for trajectory in plan.accepted.values()]
        fresh.entries.update(plan.with_ids(self.store.add_trajectories(records) if records else []))
        fresh.uses = fresh.live_uses()
        before = {entry.trajectory_id for entry in self.state.all_entries()}
        live = {entry.trajectory_id for entry in fresh.all_entries()}
        try:
            snapshot = self._write_snapshot(fresh, global_steps, generator)
        except BaseException:
            self._garbage.extend(live - before)
            raise
        self._garbage = sorted({*self._garbage, *self._records, *before} - live)
        self._count(Departure.REPLACED, plan.displaced)
        fresh.rows = self.state.rows
        self.state, self._records, self.global_steps = fresh, snapshot, global_steps
        self._drawn = {}
        journal.set_generator_state(self.generator, journal.generator_state(generator))
        self._collect()

    def hold(self, ids: Collection[int]) -> None:
        """Keep these trajectories in the store even when they leave the pool, until the next call."""
        self._held = frozenset(ids)

    def compact(self) -> None:
        """Write the whole state as one record, and evict obsolete records.

        Trajectories that the store has evicted leave the state.
        """
        before = self.state.count()
        self.state.keep_only(set(self.store.ids()))
        self._count(Departure.UNAVAILABLE, before - self.state.count())
        self.state.uses = self.state.live_uses()
        snapshot = self._write_snapshot(self.state, self.global_steps, self.generator)
        self._drawn = {}
        self._garbage.extend(self._records)
        self._records = snapshot
        self._collect()

    def _forget(self, entry: PoolEntry, reason: Departure) -> None:
        self.state.forget(entry)
        self._count(reason, 1)

    def _count(self, reason: Departure, number: int) -> None:
        if number:
            self.left[reason.value] += number

    def _compact_if_due(self) -> None:
        dead = len(self._records) + len(self._garbage) - len(self._held.intersection(self._garbage))
        grown = self._added >= COMPACT_AFTER and self._added >= self.state.count() // 2
        if dead >= COMPACT_AFTER or grown:
            self.compact()

    def _write_snapshot(self, state: PoolState, global_steps: int, generator: np.random.Generator) -> list[int]:
        snapshot = journal.snapshot_record(
            state, sequence=self._sequence, global_steps=global_steps, generator=generator
        )
        ids = self.store.add_trajectories([snapshot])
        self._sequence += 1
        self._added = 0
        return ids

    def _collect(self) -> None:
        self.store.flush()  # evict only once the replacement is durable
        self.store.evict([number for number in self._garbage if number not in self._held])
        self._garbage = [number for number in self._garbage if number in self._held]
