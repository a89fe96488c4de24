"""The pool's state and its store.

A change is made in memory; its trajectories go to the store at once, the choice of them and everything else with the
next saved point. After a crash the pool is that of the newest point.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer_hooks.replay.entry import Departure, PoolEntry
from trainer_hooks.replay.outcomes import TaskOutcome, outcome_of
from trainer_hooks.replay.rows import with_small_columns
from trainer_hooks.replay.selection import AdmissionPlan
from trainer_hooks.replay.state import PoolState, generator_state, recover, set_generator_state, warn_of_unreadable
from trainer_hooks.replay.store import BufferStore
from trajstore.errors import StoreError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

MOST_LEFT = 64
"""Number of trajectories that left the pool after which a point is saved, so that they can be evicted."""


class PoolLedger:
    """Reads the pool of a store, and keeps state and store in step.

    Args:
        store: where trajectories and points are kept.
        generator: set to the saved state, if there is one; saved with every point.

    Raises:
        CorruptStoreError: the pool cannot be decoded.
    """

    def __init__(self, store: BufferStore, generator: np.random.Generator) -> None:
        self.store = store
        self.generator = generator
        self.left: Counter[str] = Counter()
        """How many trajectories have left the state since it was opened, by reason (see ``Departure``). Those that
        could not be read then are among them."""
        self._read_store()
        self.state.begin_run()
        self._saved: Mapping[str, Any] = {}
        """Document of the newest point that this object saved."""
        store.before_close = self.save

    def _read_store(self) -> None:
        recovered = recover(self.store)
        if recovered.generator is not None:
            set_generator_state(self.generator, recovered.generator)
        elif (newest := self.store.newest_id()) >= 0 and not self.store.is_recording:
            logger.warning(
                "experience pool: its store holds trajectories of no pool, up to id %d; the pool starts beside them."
                " To keep them apart, give the pool its own directory",
                newest,
            )
        self.state = recovered.state
        """The pool's contents, changed only by this class."""
        self._point = recovered.point
        """Name of the point whose trajectories the store has; empty if others were added since."""
        self._garbage = recovered.garbage
        self._count(Departure.UNREADABLE, recovered.unreadable)

    def read(self, entries: Sequence[PoolEntry]) -> list[tuple[PoolEntry, AgentTrajectory]]:
        """Return entries with their records, which the caller must not change.

        Entries that the store evicted leave the pool; unreadable ones leave it with a warning.
        """
        records = []
        for entry in entries:
            try:
                record = self.store.get(entry.trajectory_id)
                if record.entropy is None and entry.entropy is not None:  # recorded before its admission
                    record = replace(record, entropy=entry.entropy)
                records.append((entry, record))
            except TrajectoryUnavailableError:
                logger.info("experience pool: the store no longer keeps a trajectory of task %s", entry.task_id)
                self._forget(entry, Departure.UNAVAILABLE)
            except StoreError as error:  # one damaged record does not hide the others
                warn_of_unreadable(entry.trajectory_id, error, entry.task_id)
                self._forget(entry, Departure.UNREADABLE)
        return records

    def correct(self) -> None:
        """Apply late outcome corrections and their retractions."""
        given = self.store.outcomes_given([entry.trajectory_id for entry in self.state.all_entries()])
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
                "it was given late" if corrected else "was recorded, since a later one was removed",
            )
            fresh = replace(entry, outcome=outcome, is_corrected=corrected)
            held = self.state.entries[entry.task_id]
            self.state.set_entries(entry.task_id, tuple(fresh if other is entry else other for other in held))

    def retire(self, outcomes: Mapping[str, TaskOutcome], n_rollout: int) -> None:
        """Retire solved tasks: :meth:`PoolState.retire`."""
        left = self.state.retire(outcomes, n_rollout)
        self._count(Departure.TASK_SOLVED, len(left))
        self._garbage.extend(left)

    def withdraw(self, entries: Iterable[PoolEntry]) -> None:
        """Remove entries; the store evicts them when the pool is saved."""
        for entry in entries:
            self.state.forget(entry)
            self._garbage.append(entry.trajectory_id)

    def note_used(self, entries: Sequence[PoolEntry]) -> None:
        """Count one use of each of these entries."""
        for entry in entries:
            key = (entry.task_id, entry.digest)
            self.state.uses[key] = self.state.uses.get(key, 0) + 1

    def add(self, plan: AdmissionPlan) -> list[int]:
        """Store the accepted trajectories of a plan and apply the plan; return their ids."""
        ids = self._store(plan)
        for task, entries in plan.with_ids(ids).items():
            self.state.set_entries(task, entries)
        self._count(Departure.REPLACED, plan.displaced)
        self._garbage.extend(plan.replaces.values())
        if len(self._garbage) >= MOST_LEFT:
            self.save()
        return ids

    def replace(self, fresh: PoolState, plan: AdmissionPlan, generator: np.random.Generator) -> None:
        """Replace the state by ``fresh`` and the plan's trajectories. In the store, one point does this.

        The pool's generator is set to the state of ``generator``.
        """
        before, garbage, state_before = self.state, self._garbage, generator_state(self.generator)
        ids = self._store(plan)
        fresh.entries.update(plan.with_ids(ids))
        fresh.uses, fresh.rows = fresh.live_uses(), before.rows
        self.state, self._garbage = fresh, [*garbage, *(entry.trajectory_id for entry in before.all_entries())]
        set_generator_state(self.generator, generator_state(generator))
        try:
            self.save()
        except BaseException:
            self.state, self._garbage = before, [*garbage, *ids]
            set_generator_state(self.generator, state_before)
            raise
        self._count(Departure.REPLACED, plan.displaced)

    def _store(self, plan: AdmissionPlan) -> list[int]:
        """Store the accepted trajectories of a plan and return their ids."""
        if not plan.accepted:
            return []
        self._point = ""
        return self.store.add_trajectories(list(map(with_small_columns, plan.accepted.values())))

    def document(self) -> dict[str, Any]:
        """Return everything but the trajectories as plain containers."""
        return {**self.state.to_document(), "generator": generator_state(self.generator)}

    def to_save(self) -> dict[str, Any]:
        """Return the document of a saved point."""
        return {
            **self.document(),
            "entries": {task: [entry.trajectory_id for entry in held] for task, held in self.state.entries.items()},
            "demonstrations": [entry.trajectory_id for entry in self.state.all_entries() if entry.is_demonstration],
            "newest": self.store.newest_id(),
            "left": list(self._garbage),
        }

    def save(self, *, keep: bool = False) -> str:
        """Save the pool as a point of its store, unless the newest one is equal; return its name.

        Then trajectories that have left the pool are evicted. Those that the store has evicted leave the pool.

        Args:
            keep: whether the point stays when later ones are saved.

        Raises:
            StoreWriteError: the store could not write; the points before are unchanged.
        """
        self.store.flush()
        kept = self.store.kept([entry.trajectory_id for entry in self.state.all_entries()])
        for entry in [entry for entry in self.state.all_entries() if entry.trajectory_id not in kept]:
            self._forget(entry, Departure.UNAVAILABLE)
        document = self.to_save()
        if keep or document != self._saved:
            self._point = self.store.save(document, keep)
            self._saved = document
        if self._garbage:
            self.store.evict(self._garbage)
            self._garbage = []
        return self._point

    def go_to(self, name: str) -> None:
        """Restore a point, unless the store has its trajectories already; then their late values stay.

        Raises:
            StoreNotFoundError: there is no such point; nothing was changed.
            CorruptStoreError: it cannot be decoded.
        """
        if name != self._point:
            self.store.go_to(name)
        rows = self.state.rows
        self._read_store()
        self.state.rows, self._saved = rows, {}

    def _forget(self, entry: PoolEntry, reason: Departure) -> None:
        self.state.forget(entry)
        self._count(reason, 1)

    def _count(self, reason: Departure, number: int) -> None:
        if number:
            self.left[reason.value] += number
