"""The buffer's contents: an index over all sources, and the place of each trajectory's rows.

A trajectory's rows are in its shard on disk (its *location*) or in memory: pending (not committed yet), or cached. The
index column ``slot`` says where to read, the ``start_*`` columns give the first row. Changes need ``lock``; copies run
without it, on addresses that stay valid until they end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base import locks
from trajstore._core.base.clock import microseconds
from trajstore._core.base.types import Flags, IntArray
from trajstore._core.columns.conversion import trajectory_of, with_notes
from trajstore._core.columns.fields import VALID
from trajstore._core.columns.flat import Block, Copied
from trajstore._core.columns.limits import RANGES
from trajstore._core.columns.schema import Extent, Schema
from trajstore._core.formats.base import ShardReader
from trajstore._core.reading.address_table import UNAVAILABLE, AddressTable, MappedShard, Rows, ranges_of, rows_at
from trajstore._core.reading.cache import TrajectoryCache
from trajstore._core.reading.forks import stop_at_forks
from trajstore._core.reading.late import COLUMNS, without_notes
from trajstore._core.reading.late_rows import late_of_batch, late_rows_of
from trajstore._core.reading.plan import BatchColumns, Late, RowPlan
from trajstore._core.reading.read_snapshot import ReadSnapshot, slots_on_disk, snapshot_of
from trajstore._core.reading.runs import plan_runs
from trajstore._core.reading.shard_access import decoded
from trajstore._core.reading.sources import Source
from trajstore._core.reading.store_news import StoreNews
from trajstore._core.reading.valid_rows import Valid, ValidRows
from trajstore._core.store.additions import NewEntries, starts_of
from trajstore._core.store.committed import Change, Evicted
from trajstore._core.store.facts import NOTE_ROWS, joined
from trajstore._core.store.index import Remainder, TrajectoryIndex
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.moves import Moved
from trajstore._core.store.notes import Noted
from trajstore._core.store.row_location import STARTS, RowLocation
from trajstore._core.store.run_ids import own_id, shown_id
from trajstore.errors import TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory

_SPARE = 8
"""A full index of a run grows by one in so many entries, so that it takes no more memory than opening the run."""


class Contents:
    """Trajectories of a buffer, oldest first, and their memory.

    Args:
        cache: policy for trajectories kept in memory; None keeps only those that are not on disk.
        map_limit: maximum number of mapped files.
    """

    def __init__(self, cache: TrajectoryCache | None, map_limit: int) -> None:
        self.lock = locks.rlock("Contents.lock")
        self.index = TrajectoryIndex("slot")
        self.sources: list[Source] = []
        self.cache = cache
        self.addresses = AddressTable(map_limit)
        self.unavailable = range(0)
        """Positions of unavailable trajectories: one range, because they leave memory in order."""
        self.start = 0
        """Position of the oldest readable trajectory; an RLinf index may also list older ones without files."""
        self.added = 0
        """Number of trajectories added here rather than loaded from a source."""
        self._pending: set[int] = set()
        """Ids of uncommitted trajectories."""
        self._on_disk: dict[int, RowLocation] = {}
        """Disk slots, by id, of trajectories that are also in memory; after an interrupt, also of some evicted ones."""
        self._decoded: list[int] = []
        self._columns = BatchColumns(self.addresses)
        self._valid_rows = ValidRows()
        stop_at_forks(self)

    # -- taking in --------------------------------------------------------------------------------

    def attach(self, source: Source) -> int:
        """Add a source without its trajectories; return its number."""
        self.sources.append(source)
        return self.addresses.add_source(source)

    def show(self, number: int, part: TrajectoryIndex) -> None:
        """Append entries of a source's index, resolving all locations at once."""
        rows = part["shard"]
        entries = np.zeros(self.sources[number].shards, np.int64)
        for table in (rows, *(part[NOTE_ROWS + name] for name in part.row_notes)):
            np.add.at(entries, table[table != UNAVAILABLE], 1)
        needed = np.flatnonzero(entries)
        slots = np.full(len(entries) + 1, UNAVAILABLE, np.int32)  # the last one stands for UNAVAILABLE
        slots[needed] = self.addresses.add_shards(number, needed, entries[needed])
        if len(self.index) == 0:
            self.index = part.in_slots(slots)
        else:
            columns = part.take(slice(part.first, part.end))
            columns["slot"] = slots[columns.pop("shard")]
            for name in part.row_notes:
                columns[NOTE_ROWS + name] = slots[columns[NOTE_ROWS + name]]
            self._append(self.index.translated(columns, part.texts))
        # An index of RLinf alone begins with trajectories without files.
        self.start = self.index.first + int(np.count_nonzero(self.index["slot"] == UNAVAILABLE))

    def follow(self, source: int, change: Change, first_id: int = 0) -> None:
        """Apply a commit to a source, of trajectories that do not wait for it here.

        What changes many entries copies them without ``lock``, so that others add and read meanwhile.

        Args:
            source: number of the source.
            change: the changes of the commit.
            first_id: lower ids belong to other sources.
        """
        if isinstance(change, Evicted):
            self._evict(change, first_id)
        elif isinstance(change, Noted):
            self._note(source, change, first_id)
        elif isinstance(change, Moved):
            with self.lock:
                self._move(source, change, first_id)
        else:
            with self.lock:
                columns = dict(change.columns)
                columns["slot"] = self._slots_of(source, columns.pop("shard"))
                self._append(self.index.translated(columns, change.texts))

    def _move(self, source: int, moved: Moved, first_id: int) -> None:
        """Read trajectories of a source from another of its shards; ids below ``first_id`` belong to other sources."""
        positions = self.index.find_many(moved.ids)
        known = (positions >= 0) & (moved.ids >= first_id)
        self._move_to(source, positions[known], moved.locations(moved.row)[known])

    def _move_to(self, source: int, positions: npt.NDArray[np.int64], locations: IntArray) -> None:
        """Read trajectories from other places of their source; ``locations`` has its rows, ``[n, 4]``."""
        if not len(positions):
            return
        locations[:, 0] = self._slots_of(source, locations[:, 0].astype(np.int32))
        before = self.index.at("slot", positions)
        elsewhere = self.addresses.are_memory(before)
        for at in np.flatnonzero(elsewhere).tolist():
            number = int(self.index.at("trajectory_id", positions[at]))
            before[at] = self._on_disk[number].table
            self._on_disk[number] = RowLocation(*locations[at].tolist())
        self.index.point(positions[~elsewhere], locations[~elsewhere])
        self.addresses.leave(before)

    def _note(self, source: int, noted: Noted, first_id: int) -> None:
        """Apply late values of a source's trajectories; ids below ``first_id`` belong to other sources."""
        with self.lock:
            shared = self.index.shared()
        if not noted.has_rows:
            positions = np.where(noted.ids >= first_id, shared.find_many(noted.ids), -1)
            shared.note(positions, noted.columns, noted.texts)
        with self.lock:
            if noted.has_rows or not self.index.take_notes(shared):
                positions = self.index.find_many(noted.ids)
                mine = (noted.ids >= first_id) & (positions >= 0)
                columns = {name: column[mine] for name, column in noted.columns.items()}
                self._give(source, positions[mine], columns, noted.texts)

    def _give(
        self, source: int, positions: npt.NDArray[np.int64], columns: dict[str, npt.NDArray[Any]], texts: StringTable
    ) -> None:
        """Set late values of a source's trajectories; columns with shards get their slots."""
        left = []
        for name in [name for name in columns if name.startswith(NOTE_ROWS)]:
            if name.removeprefix(NOTE_ROWS) in self.index.row_notes:
                left.append(self.index.at(name, positions))
            columns[name] = self._slots_of(source, columns[name])
        self.index.note(positions, columns, texts)
        for slots in left:
            self.addresses.leave(slots[slots != UNAVAILABLE])

    def lend(self, positions: npt.NDArray[np.intp]) -> TrajectoryIndex:
        """Return the entries at some positions of a source as its own index has them; with ``lock`` held."""
        columns = self.index.take(positions)
        columns["shard"] = self.addresses.shards_of(slots_on_disk(columns, self.addresses, self._on_disk))[:, 1]
        for name in self.index.row_notes:
            tables = columns[NOTE_ROWS + name]
            tables[tables >= 0] = self.addresses.shards_of(tables[tables >= 0])[:, 1]
        lent = TrajectoryIndex()
        lent.texts = self.index.texts
        lent.append(columns | {"trajectory_id": own_id(columns["trajectory_id"])})
        return lent

    def follow_run(self, news: Sequence[StoreNews]) -> None:
        """Apply the news of several sources as one change.

        Nothing else may change the entries since they were lent. Those that stay are copied without ``lock``.
        """
        with self.lock:
            shared = self.index.shared()
        gone = np.sort(np.concatenate([item.gone for item in news]))
        remainder = shared.remainder(gone, len(shared) // _SPARE) if len(gone) else None
        added = [item.added for item in news]
        with self.lock:
            if len(gone):
                self.drop(gone, remainder)

            def moved(positions: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
                places: npt.NDArray[np.intp] = positions - shared.first - np.searchsorted(gone, positions)
                return self.index.first + places

            for item, columns in zip(news, added, strict=True):
                self._move_to(item.source, moved(item.moved), item.locations)
                if len(item.noted):
                    self._give(item.source, moved(item.noted), item.late, item.texts)
                for name in ["shard", *(name for name in columns if name.startswith(NOTE_ROWS))]:
                    columns[name] = self._slots_of(item.source, columns[name])
                columns["slot"] = columns.pop("shard")
            parts = [self.index.translated(columns, item.texts) for item, columns in zip(news, added, strict=True)]
            self._insert(joined(parts))

    def _insert(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Insert entries of a run, in the order of commit times, ranks and ids."""
        index = self.index
        oldest = columns["committed"].min(initial=RANGES["committed"][1])
        begin = index.first + int(np.searchsorted(index["committed"], oldest))
        later = joined([index.take(slice(begin, index.end)), columns])
        order, shown = np.lexsort((later["trajectory_id"], later["committed"])), index.end - begin
        later = {name: column[order] for name, column in later.items()}
        if np.array_equal(order[:shown], np.arange(shown)):
            index.reserve(len(order) - shown, len(index) // _SPARE)
            index.append({name: column[shown:] for name, column in later.items()})
        else:
            whole = index.shared()
            whole.adopt(joined([index.take(slice(index.first, begin)), later]))
            vars(index).update(vars(whole))  # at once: draws after an interrupt must not see some columns of each
        self.start = index.first  # all can be read

    def _slots_of(self, source: int, tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return slots for shards of a source, reference-counted by occurrence; -1 stays -1."""
        slots = tables.copy()
        for row, count in zip(*np.unique(tables[tables >= 0], return_counts=True), strict=True):
            slots[tables == row] = self.addresses.add_shard(source, int(row), int(count))
        return slots

    def _append(self, columns: Mapping[str, Any]) -> None:
        """Append entries, and shift stored positions when all entries shift."""
        first = self.index.first
        self.index.append(columns)
        lower = first - self.index.first
        if lower:
            self.start -= lower
            self.unavailable = (
                range(self.unavailable.start - lower, self.unavailable.stop - lower)
                if self.unavailable
                else self.unavailable
            )

    def add(self, copies: Sequence[Copied], ids: Sequence[int], uuids: bytes, *, pending: bool) -> NewEntries:
        """Append trajectories in memory and return their entries; ``pending`` ones stay until committed.

        All become visible at once. If this raises, call :meth:`retract`.

        Args:
            copies: the trajectories, in order.
            ids: their ids.
            uuids: 16 bytes for each.
            pending: whether they will be written.
        """
        with self.lock:
            entries = NewEntries.of([run for run, _ in copies], ids, uuids, self.index.texts, microseconds())
            blocks = [block for _, block in copies]
            slots = [slot for block in blocks for slot in [self.addresses.add_memory(block, len(block))] * len(block)]
            columns = {**entries.columns, "slot": np.array(slots, np.int32), **_starts_in(blocks, entries.extents)}
            if pending:
                self._pending.update(ids)
            if self.cache is not None:
                for number, nbytes in zip(ids, entries.nbytes, strict=True):
                    self.cache.put(number, nbytes)
            self._append(columns)
            self.added += len(ids)
            self._trim()
            return entries

    def retract(self, copies: Sequence[Copied], ids: Sequence[int]) -> None:
        """Remove trajectories after a partial :meth:`add`."""
        with self.lock:
            positions = self.index.find_many(ids)
            self.drop(positions[positions >= 0])
            self.addresses.withdraw([block for _, block in copies])  # rows not in the index yet
            self._pending.difference_update(ids)
            if self.cache is not None:
                for number in ids:
                    self.cache.discard(number)

    def committed(self, source: int, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Record that pending trajectories are on disk now.

        Args:
            source: number of the source.
            columns: index columns of the trajectories of a commit; ``shard`` is a row of the source.
        """
        with self.lock:
            ids = columns["trajectory_id"].tolist()
            here = np.fromiter(map(self._pending.__contains__, ids), np.bool_, len(ids))
            if not here.any():
                return
            positions = self.index.find_many(columns["trajectory_id"][here])
            self.index.fill(positions, committed=columns["committed"][here])
            slots = self._slots_of(source, columns["shard"][here])
            locations = np.stack([slots, *[columns[name][here] for name in STARTS]], axis=1)
            numbers, kept = columns["trajectory_id"][here].tolist(), np.zeros(len(positions), np.bool_)
            if self.cache is not None:
                for at, number in enumerate(numbers):
                    if number in self.cache:
                        kept[at] = True
                        self._on_disk[number] = RowLocation(*locations[at].tolist())
            self._point(positions[~kept], locations[~kept])
            self._pending.difference_update(numbers)

    # -- memory -----------------------------------------------------------------------------------

    def _trim(self) -> None:
        if self.cache is not None:
            self._send_home(self.cache.overflow())

    def _send_home(self, ids: Sequence[int]) -> None:
        """Read trajectories from disk again; uncommitted ones stay in memory, or become unavailable."""
        going = [number for number in dict.fromkeys(ids) if number not in self._pending]
        if not going:
            return
        locations = np.array([self._on_disk.get(number) or RowLocation(UNAVAILABLE) for number in going], np.int64)
        positions = self.index.find_many(going)
        in_index = positions >= 0
        in_index[in_index] = self.addresses.are_memory(self.index.at("slot", positions[in_index]))
        lost = positions[in_index & (locations[:, 0] == UNAVAILABLE)]
        if len(lost):
            self.unavailable = range(self.unavailable.start if self.unavailable else int(lost[0]), int(lost[-1]) + 1)
        self._point(positions[in_index], locations[in_index])
        for number in going:
            self._on_disk.pop(number, None)

    def _point(self, positions: npt.NDArray[np.int64], locations: npt.NDArray[np.int64]) -> None:
        """Move trajectories from memory to other locations."""
        left = self.index.at("slot", positions)
        self.index.point(positions, locations)
        self.addresses.leave(left)

    def clear_cache(self) -> None:
        """Drop cached trajectories; those that exist only in memory stay."""
        with self.lock:
            if self.cache is None:
                return
            going = [number for number in self.cache if number in self._on_disk]
            for number in going:
                self.cache.discard(number)
            self._send_home(going)

    def _evict(self, evicted: Evicted, first_id: int) -> None:
        """Remove trajectories; ids below ``first_id`` belong to other sources.

        The entries that stay are copied without ``lock``, so that others add and read meanwhile.
        """
        with self.lock:
            shared = self.index.shared()
        positions = _positions_in(shared, evicted, first_id)
        remainder = shared.remainder(positions)
        with self.lock:
            index = self.index
            if (index.first, index.revision, index.noted) != (shared.first, shared.revision, shared.noted):
                positions, remainder = _positions_in(index, evicted, first_id), None
            self.drop(positions, remainder)

    def drop(self, positions: npt.NDArray[np.intp], remainder: Remainder | None = None) -> None:
        """Remove trajectories from the index; see :meth:`TrajectoryIndex.drop`."""
        with self.lock:
            slots = self.index.at("slot", positions)
            of_rows = [self.index.at(NOTE_ROWS + name, positions) for name in self.index.row_notes]
            in_memory, locations = self.addresses.are_memory(slots), []
            numbers = self.index.at("trajectory_id", positions[in_memory]).tolist()
            for number in numbers:
                location = self._on_disk.pop(number, None)
                if location is not None:
                    locations.append(location.table)
                if self.cache is not None:
                    self.cache.discard(number)
            self._pending.difference_update(numbers)
            listed = max(self.start - self.index.first, 0)
            listed -= int(np.count_nonzero(positions < self.start)) if listed else 0
            self.index.drop(positions, remainder)
            self.start = self.index.first + listed
            if self.unavailable:
                lost = self.start + np.flatnonzero(self.index["slot"][listed:] == UNAVAILABLE)
                self.unavailable = range(int(lost[0]), int(lost[-1]) + 1) if len(lost) else range(0)
            left = np.concatenate([slots, np.array(locations, np.int32), *of_rows])
            self.addresses.leave(left[left != UNAVAILABLE])

    def pending_in(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Return the ids of uncommitted trajectories among some."""
        pending = np.array([*self._pending], np.int64)
        return pending[np.isin(pending, ids)]

    def snapshot(self) -> ReadSnapshot:
        """Return a snapshot of everything that can be saved; fast, with ``lock`` held."""
        return snapshot_of(self.index, self.addresses, self.sources, self._on_disk)

    # -- reading ----------------------------------------------------------------------------------

    def plan(self, positions: IntArray, rows: IntArray, oldest: int, columns: Sequence[str] | None) -> RowPlan:
        """Plan the copy of rows, given as trajectory positions and rows within them.

        Needs ``lock``. The plan must be read or dropped.

        Args:
            positions: position of each row's trajectory, ``[n]``.
            rows: row within its trajectory, ``[n]``.
            oldest: position of the trajectory whose dtypes the batch takes.
            columns: names of the columns, including late values; None = all stored columns.

        Raises:
            SchemaMismatchError: the trajectories differ in their columns.
            TrajectoryUnavailableError: a trajectory is no longer in memory and was never on disk.
            CorruptStoreError: a file is missing or damaged.
        """
        table, index = self.addresses, self.index
        slots = self.make_resident(positions)
        stored, late_names = without_notes(columns) if columns is not None else (None, [])
        chosen, parts = self._columns.choose(index, positions, slots, oldest, stored)
        late: list[Late] = []
        if late_names:  # before the plan: mapping these may unmap slots that no plan holds yet
            late = late_of_batch(table, index, positions, rows, slots, late_names)
        plan = RowPlan(table, slots, index.place_rows(positions, rows), chosen, parts, late)
        if self._decoded:
            self.forget_decoded()
        return plan

    def rows_of(self, positions: IntArray, places: IntArray) -> IntArray:
        """Return the rows ``t * B + b`` of places among the valid rows of trajectories, all ``[n]``.

        Needs ``lock``; raises the errors of :meth:`make_resident`.
        """
        if not self.index.may_be_partial:
            return places
        partial_ones, which, valid = self._valid(positions)
        if valid is None:
            return places
        rows = places.copy()
        rows[partial_ones] = valid.at(which, places[partial_ones])
        return rows

    def are_valid(self, positions: IntArray, rows: IntArray) -> Flags | None:
        """Return whether rows of trajectories, both ``[n]``, are valid; None if all are.

        Needs ``lock``; raises the errors of :meth:`make_resident`.
        """
        partial_ones, which, valid = self._valid(positions)
        if valid is None:
            return None
        good = np.ones(len(rows), np.bool_)
        good[partial_ones] = valid.has(which, rows[partial_ones])
        return good

    def _valid(self, positions: IntArray) -> tuple[Flags, IntArray, Valid | None]:
        """Return a mask of the positions with invalid rows, the number of each trajectory, and their valid rows."""
        index = self.index
        samples, steps, batch = (index.at(name, positions) for name in ("num_samples", "steps", "batch"))
        partial_ones = samples < steps.astype(np.int64) * batch
        distinct, which = np.unique(positions[partial_ones], return_inverse=True)
        of_agents = np.array([schema.kind == "agent" for schema in self.schemas(distinct)], np.bool_)
        if of_agents.any():  # their samples are not rows
            partial_ones[partial_ones] = ~of_agents[which]
            distinct, which = np.unique(positions[partial_ones], return_inverse=True)
        if not len(distinct):
            return partial_ones, which, None

        def read(at: IntArray) -> list[Flags]:
            slots = self.make_resident(distinct[at])
            plan = plan_runs(self.addresses, index, distinct[at], slots, [VALID])
            self.forget_decoded()
            run = plan.columns[VALID]
            ends, pieces = np.cumsum(run.counts), plan.pieces()
            with plan.fetched(lambda: pieces):
                flags = run.copy(ends - run.counts, int(ends[-1])).numpy()
            plan.end()
            return np.split(flags, ends[:-1])

        ids, counts = (index.at(name, distinct) for name in ("trajectory_id", "num_samples"))
        return partial_ones, which, self._valid_rows.of(ids, counts, read)

    def make_resident(self, positions: IntArray) -> IntArray:
        """Make trajectories readable in place and return their slots; then call :meth:`forget_decoded`.

        Needs ``lock``.

        Args:
            positions: positions of the trajectories, ``[n]``.

        Raises:
            TrajectoryUnavailableError: one is no longer in memory and was never on disk.
            CorruptStoreError: a file is missing or damaged.
        """
        index, table = self.index, self.addresses
        while True:
            slots: IntArray = index.at("slot", positions).astype(np.int64)
            if not len(slots):
                return slots
            if slots.min() < 0:
                self._check_available(int(positions[slots.argmin()]))
            if table.signature[slots].min() >= 0:
                return slots
            undecoded = table.ensure(slots, partial(self._note_extent, positions, slots))
            if undecoded:
                self._decode(np.unique(positions[np.isin(slots, undecoded)]))

    def schemas(self, positions: IntArray) -> list[Schema]:
        """Return the columns of the trajectory at each position, and note extents that the index lacks.

        Needs ``lock``; raises the errors of :meth:`make_resident`.
        """
        schemas = [self.addresses.schema(slot) for slot in self.make_resident(positions).tolist()]
        if self._decoded:
            self.forget_decoded()
        return schemas

    def _note_extent(self, positions: IntArray, slots: IntArray, slot: int, extent: Extent) -> None:
        """Record the extent of the single trajectory in a slot."""
        self.index.fill_extent(positions[slots == slot], extent)

    def forget_decoded(self) -> None:
        """Release decoded trajectories that the cache does not keep, once running copies end."""
        self._trim()
        self._send_home([n for n in self._decoded if self.cache is None or n not in self.cache])
        self._decoded.clear()

    def _decode(self, positions: IntArray) -> None:
        """Decode trajectories whose columns cannot be mapped into memory; the cache decides how long they stay."""
        order = np.argsort(self.index.at("slot", positions), kind="stable")
        for position in positions[order].tolist():
            number, row = self.addresses.shard_of(int(self.index.at("slot", position)))
            source = self.sources[number]
            extent = source.extent(row)
            if extent is not None:
                self.index.fill_extent(position, extent)
            location, schema = self.index.location(position), source.manifest(row).schema
            rows = decoded(source.reader(row), schema, self.index.extent(position), location)
            slot = self.addresses.add_memory(rows, 1)
            number = int(self.index.at("trajectory_id", position))
            self._on_disk[number] = location
            self.index.point(np.array([position], np.int64), [RowLocation(slot)])
            if self.cache is not None:
                self.cache.put(number, sum(array.nbytes for array in rows.keep))
            self._decoded.append(number)

    def get(self, position: int) -> AnyTrajectory:
        """Return a copy of the trajectory at a position; late values correct a rollout's reward.

        Raises:
            TrajectoryUnavailableError: it is no longer in memory and was never on disk.
            CorruptStoreError: a file is missing or damaged.
        """
        with self.lock:
            index, location = self.index, self.index.location(position)
            if location.table == UNAVAILABLE:
                self._check_available(position)
            reader, extent = self._reader(location.table)
            if extent is not None:
                index.fill_extent(position, extent)
            schema, extent = self.addresses.schema(location.table), index.extent(position)
            tensors = rows_at(reader, ranges_of(schema, extent, location))
            if not isinstance(reader, MappedShard):  # views of memory that others see
                tensors = [tensor.clone() for tensor in tensors]
            known: dict[str, Any] = {}
            if schema.kind == "step":
                known["max_episode_length"] = int(index.at("max_episode_length", position))
                known["model_weights_id"] = index.texts[int(index.at("weights", position))]
            trajectory = trajectory_of(schema, extent, tensors, **known)
            if index.row_notes and (rows := self._late_rows_of(position, schema)):
                trajectory = replace(trajectory, notes=rows)
            if isinstance(trajectory, AgentTrajectory) and (late_values := index.given(position)):
                return with_notes(trajectory, late_values)
            return trajectory

    def _reader(self, slot: int) -> tuple[Rows | ShardReader, Extent | None]:
        """Return a reader of a slot's rows, and the extent of its trajectory if the index may lack it."""
        rows = self.addresses.rows(slot)
        if rows is not None:
            return rows, rows.extent if isinstance(rows, MappedShard) else None
        number, row = self.addresses.shard_of(slot)
        return self.sources[number].reader(row), self.sources[number].extent(row)

    def _late_rows_of(self, position: int, schema: Schema) -> dict[str, torch.Tensor]:
        """Return all per-row values of the trajectory at a position: ``[T, B, ...]``, ``[L]`` or ``[R]``."""
        index, positions = self.index, np.array([position], np.int64)
        names = [COLUMNS + name for name in index.row_notes if index.at(NOTE_ROWS + name, position) != UNAVAILABLE]
        steps, batch, *_ = extent = index.extent(position)
        late = {}
        for values in late_rows_of(self.addresses, index, positions, names, np.zeros(0, np.int64)):
            slot, start = int(values.slots[0]), int(values.starts[0])
            number = self.addresses.schema(slot).columns.index(values.column)
            stop = start + extent.rows(values.column.axis)
            (rows,) = rows_at(self._reader(slot)[0], [(number, start, stop)])
            shaped = rows.reshape(steps, batch, *rows.shape[1:]) if schema.kind == "step" else rows
            late[values.name.removeprefix(COLUMNS)] = shaped
        return late

    def texts_of(self, fact: str, positions: npt.NDArray[np.intp]) -> list[str]:
        """Return a fact that is a text, of the trajectory at each position; empty if it has none."""
        with self.lock:
            index, at = self.index, positions - self.index.first
            numbers, inverse = np.unique(index.fact(fact)[at], return_inverse=True)
            texts = ["" if number < 0 else index.texts[number] for number in numbers.tolist()]
            return [texts[text_number] for text_number in inverse.tolist()]

    def sessions_of(self, positions: npt.NDArray[np.intp]) -> list[tuple[str, int]] | None:
        """Return session and its number of rows for the trajectory at each position; None if there are no sessions."""
        with self.lock:
            if "session" not in self.index.facts:
                return None
            rows = self.index.fact("session_paths")[positions - self.index.first].tolist()
            return list(zip(self.texts_of("session", positions), rows, strict=True))

    def _check_available(self, position: int) -> None:
        """Raise if a trajectory cannot be read.

        Raises:
            TrajectoryUnavailableError: names it.
        """
        if self.index.at("slot", position) != UNAVAILABLE:
            return
        number = shown_id(int(self.index.at("trajectory_id", position)))
        if position < self.start:
            raise TrajectoryUnavailableError(f"trajectory {number} is listed and counted, but its file is not there")
        raise TrajectoryUnavailableError(
            f"trajectory {number} was in memory only and has been dropped; use auto_save=True to keep all"
        )


def _positions_in(index: TrajectoryIndex, evicted: Evicted, first_id: int) -> npt.NDArray[np.intp]:
    positions = index.positions_in(evicted.ranges)
    mine: Flags = index.at("trajectory_id", positions) >= first_id
    return positions[mine]


def _starts_in(blocks: Sequence[Block], extents: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the first rows of trajectories within their blocks."""
    if len(blocks) == len(extents):
        return {name: np.zeros(len(blocks), np.int64) for name in STARTS}
    if len(blocks) == 1:
        return starts_of(extents, blocks[0].schema.kind)
    ends = accumulate(map(len, blocks))
    parts = [
        starts_of(extents[end - len(block) : end], block.schema.kind) for block, end in zip(blocks, ends, strict=True)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in STARTS}
