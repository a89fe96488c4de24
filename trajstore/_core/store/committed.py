"""The committed state and its changes by log records. No I/O except the pins' own files.

Guarded like the catalog it belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.limits import MAX_ID, RANGES, UNKNOWN_TIME
from trajstore._core.columns.schema import Extent, Kind, Schema, rows_on
from trajstore._core.files.base import EncodedFile
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.additions import AddedShard, NewEntries, added_in, entries_from_json, starts_of
from trajstore._core.store.entry_checks import (
    Columns,
    EntryGate,
    Fault,
    FaultsIn,
    check_lengths,
    range_faults,
    shape_faults,
)
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.index_file import index_to_json
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.log_records import ids_in_words, lie_in, manifest_from_json, natural, parse_ranges
from trajstore._core.store.moves import Moved, check_moved, move_from_json
from trajstore._core.store.notes import Noted, Notes
from trajstore._core.store.row_notes import RowShard
from trajstore._core.store.run_ids import ID_LIMIT, in_run
from trajstore._core.store.saved_points import STEP, Pins, Snapshot, by_number
from trajstore._core.store.sealed import (
    COPY_NAME,
    INDEX_NAME,
    LAYOUT,
    LAYOUT_VERSION,
    METADATA_NAME,
    metadata_json,
    seal,
)
from trajstore._core.store.shard_table import ShardTable
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreNotFoundError,
    TrajectoryUnavailableError,
    trajectories,
)

NONSENSE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors raised by values of the wrong kind or size."""

_AXES = ((Axis.SAMPLES,), (Axis.FIRST_EXTRA, Axis.LAST_EXTRA), (Axis.RESPONSE,), (Axis.DOCUMENT,))
"""Axes on which :func:`_row_faults` counts the rows of an entry, in its order."""

FENCES_KEPT = 100
"""Number of fences kept; after this many re-openings a stalled writer is no longer recognised."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Trajectories were evicted: inclusive ranges of their ids."""

    ranges: npt.NDArray[np.int64]


Change = NewEntries | Evicted | Moved | Noted
"""The effect of a log record on the trajectories of a store."""


def change_in_run(change: Change, rank: int) -> Change:
    """Return a change of a rank's store with trajectory ids of the run."""
    if isinstance(change, NewEntries):
        ids = in_run(rank, change.columns["trajectory_id"])
        return replace(change, columns={**change.columns, "trajectory_id": ids})
    if isinstance(change, Evicted):
        return replace(change, ranges=in_run(rank, np.minimum(change.ranges, ID_LIMIT - 1)))
    return replace(change, ids=in_run(rank, change.ids))


class Committed:
    """Committed shards and trajectories.

    Attributes:
        shards: all shards that live or pinned trajectories need.
        index: the live trajectories, oldest first.
        pins: the snapshots.
        pinned: trajectories that are not live but named by a snapshot; without late values.
        notes: late values of the live trajectories.
        generation: number of commits applied.
        visit: how often the store went to a snapshot.
        line: names of the saved points that led to the snapshot to which it went last.
        next_id: the next trajectory id; never decreases.
        next_shard: the next shard number; never decreases.
        store_id: UUID of the directory.
        fences: generations of the fences of an object store's latest writers.
        restored: generation at which the store was restored from its mirror, and its first id after that; else empty.
    """

    def __init__(self, pins: Pins) -> None:
        self._gate = EntryGate()
        self.pins = pins
        self.shards = ShardTable()
        self.index = TrajectoryIndex()
        self.pinned = TrajectoryIndex()
        self.notes = Notes()
        self.generation = 0
        self.visit = 0
        self.line: tuple[str, ...] = ()
        self.next_id = 0
        self.next_shard = 0
        self.store_id = ""
        self.fences: list[int] = []
        self.restored: list[int] = []
        self.snapshot_generation = 0
        self.snapshot_bytes = 0
        self.log_bytes = 0
        self._schemas: list[Schema] = []

    @property
    def newest_time(self) -> int:
        """Time of the newest commit with remaining trajectories, in µs since 1970."""
        newest = UNKNOWN_TIME
        for index in (self.index, self.pinned):
            if len(index):
                newest = max(newest, int(index["committed"][-1]))
        return newest

    @property
    def left_out(self) -> Mapping[int, str]:
        """The fault of each omitted entry, by trajectory id."""
        return self._gate.left_out

    def _row_checks(self) -> tuple[FaultsIn, ...]:
        """Return checks of entries whose numbers are in range; each applies to entries that the one before admits."""
        of_steps, with_valid = self.shards.of_steps(), self.shards.with_valid()
        limits = [self.shards.rows_on(axes) for axes in _AXES]
        return (
            lambda columns: shape_faults(columns, of_steps[columns["shard"]], with_valid[columns["shard"]]),
            lambda columns: _row_faults(columns, limits),
        )

    # -- applying ---------------------------------------------------------------------------------

    def apply_all(self, records: Sequence[Mapping[str, Any]], source: str) -> Iterator[Change]:
        """Apply consecutive records; runs of additions are applied together, which is much faster."""
        begin = 0
        while begin < len(records):
            end = begin + 1
            if _adds(records[begin]):
                while end < len(records) and _adds(records[end]):
                    end += 1
            try:
                change = self.apply(records[begin:end])
            except (*NONSENSE, ConfigurationError, CorruptStoreError) as error:
                if end - begin > 1:  # one by one, to find the bad record
                    for record in records[begin:end]:
                        yield from self.apply_all([record], source)
                generation = records[begin]["generation"]
                raise CorruptStoreError(f"{source}: generation {generation}: {error}") from error
            yield change
            begin = end

    def apply(self, records: Sequence[Mapping[str, Any]]) -> Change:
        """Apply one record from disk, or several additions, atomically. Return the change.

        Raises:
            CorruptStoreError: it refers to missing data, or is of an unknown kind.
        """
        operation = records[0]["operation"]
        if operation == "add":
            change: Change = self._add_recorded(records)
        elif operation == "evict":
            change = Evicted(parse_ranges(records[0]["ids"]))
            self.evict(change.ranges)
            if "fence" in records[0]:  # of a writer, which numbers its shards from here on
                self.next_shard = max(self.next_shard, natural(records[0]["fence"]["next_shard"], MAX_ID // 2))
                self.fences = [*self.fences, records[0]["generation"]][-FENCES_KEPT:]
        elif operation == "rewrite":
            change = self._move_recorded(records[0])
        elif operation == "annotate":
            change = self._annotate_recorded(records[0])
        else:
            raise CorruptStoreError(f"unknown operation {operation!r}")
        self.generation = records[-1]["generation"]
        return change

    def _add_recorded(self, records: Sequence[Mapping[str, Any]]) -> NewEntries:
        schemas = list(self._schemas)
        added: list[AddedShard] = []
        for record in records:
            schemas += [Schema.from_json(item) for item in record["schemas"]]
            time = natural(record["time"], RANGES["committed"][1])
            for shard in added_in(record):
                manifest = manifest_from_json(shard["shard"], schemas)
                row, number = len(self.shards) + len(added), natural(shard["number"], MAX_ID // 2)
                added.append(AddedShard(record["generation"], number, row, manifest, shard["entries"], time))
        columns: Mapping[str, npt.NDArray[Any]] = entries_from_json(added, self.index.texts)
        ids = columns["trajectory_id"]
        check_lengths(columns)
        columns = self._gate.admit(columns, range_faults(columns, len(self.shards) + len(added), len(self.index.texts)))
        schemas_added = [shard.manifest.schema for shard in added]
        kinds = np.array([[schema.kind == "step", schema.has_valid] for schema in schemas_added], np.bool_).T
        columns = self._gate.admit(columns, shape_faults(columns, *kinds[:, columns["shard"] - len(self.shards)]))
        if int(ids[0]) < self.next_id or np.any(ids[1:] <= ids[:-1]):
            raise CorruptStoreError(f"trajectory id {ids[0]} was given before, or ids do not ascend")
        self._schemas, entries = schemas, NewEntries(columns, self.index.texts)
        self.add([(new.number, new.manifest, new.generation) for new in added], entries)
        self.next_id = int(ids[-1]) + 1  # of those left out too
        return entries

    def _move_recorded(self, record: Mapping[str, Any]) -> Moved:
        schemas = [*self._schemas, *(Schema.from_json(item) for item in record["schemas"])]
        manifest = manifest_from_json(record["shard"], schemas)
        ids, extents = move_from_json(record, manifest)
        fitting = self.shards.schema_numbers() == self.shards.number_of_schema(manifest.schema)
        for index in (self.index, self.pinned):
            check_moved(index, ids, extents, fitting)
        number = natural(record["number"], MAX_ID // 2)
        self._schemas = schemas
        return self.move(number, manifest, ids, extents)

    def _annotate_recorded(self, record: Mapping[str, Any]) -> Noted:
        update, row_record = LateValues.from_json(record), record.get("rows")
        if row_record is None:
            return self.annotate(update, record["generation"])
        schemas = [*self._schemas, *(Schema.from_json(item) for item in row_record["schemas"])]
        rows = RowShard.from_json(row_record, schemas, len(update.ids))
        update = replace(update, rows=rows)
        update.check()
        self._check_given(update.ids, rows.extents)
        noted = self.annotate(update, record["generation"])
        self._schemas = schemas
        return noted

    def _check_given(self, ids: IntArray, extents: IntArray) -> None:
        """Refuse rows of another size than their trajectory.

        Raises:
            CorruptStoreError: names the trajectory.
        """
        for index in (self.index, self.pinned):
            positions = index.find_many(ids)
            known = positions >= 0
            other = (extents[known, :3] != index.extents(positions[known])[:, :3]).any(axis=1)
            if other.any():
                raise CorruptStoreError(f"rows of trajectory {ids[known][other][0]}, which is of another size")

    def add(self, shards: Sequence[tuple[int, ShardManifest, int]], entries: NewEntries) -> None:
        """Add shards, each with its number and the generation of its commit, and their entries, by ascending id."""
        for number, manifest, generation in shards:
            self._add_shard(number, manifest, generation)
        self.index.append(self.index.translated(entries.columns, entries.texts))
        self.next_id = max(self.next_id, int(entries.columns["trajectory_id"].max(initial=-1)) + 1)

    def _add_shard(self, number: int, manifest: ShardManifest, generation: int) -> int:
        """Add the shard of a commit of this generation; return its row."""
        self.next_shard = max(self.next_shard, number + 1)
        return self.shards.add(number, manifest, generation)

    def evict(self, ranges: npt.NDArray[np.int64]) -> int:
        """Evict live entries in inclusive id ranges ``[n, 2]``; return their bytes.

        Pinned entries move to ``pinned``.
        """
        positions = self.index.positions_in(ranges)
        if not len(positions):
            return 0
        nbytes = int(self.index.at("nbytes", positions).sum())
        kept = self.pins.named(self.index.at("trajectory_id", positions))
        if kept.any():
            columns = self.index.take(positions[kept])
            self.pinned.append(self.pinned.translated(columns, self.index.texts))
        self.index.drop(positions)
        return nbytes

    def move(
        self, number: int, manifest: ShardManifest, ids: npt.NDArray[np.int64], extents: npt.NDArray[np.int64]
    ) -> Moved:
        """Add a shard with trajectories of other shards, which are read from it from now on."""
        row = self._add_shard(number, manifest, self.generation + 1)
        moved = Moved(row, ids, starts_of(extents, manifest.schema.kind))
        for index in (self.index, self.pinned):
            positions = index.find_many(ids)
            index.point(positions[positions >= 0], moved.locations(row)[positions >= 0])
        return moved

    def annotate(self, update: LateValues, generation: int) -> Noted:
        """Add the late values of a commit of this generation.

        Raises:
            ConfigurationError: they contradict existing values; nothing changed.
        """
        if update.rows is None:
            noted = self.notes.add(update, generation)
        else:
            noted = self.notes.add(update, generation, len(self.shards))
            self._add_shard(update.rows.number, update.rows.manifest, generation)
        self.index.note(self.index.find_many(noted.ids), noted.columns, noted.texts)
        return noted

    def unknown(self, ids: Sequence[int] | IntArray) -> set[int]:
        """Return the ids without a live trajectory."""
        wanted = np.array(ids, np.int64)
        return set(wanted[self.index.find_many(wanted) < 0].tolist())

    def extents_of(self, ids: IntArray) -> tuple[npt.NDArray[np.int64], list[Kind]]:
        """Return the extents of live trajectories, ``[n, 4]`` and without documents, and their kinds.

        Raises:
            TrajectoryUnavailableError: an id is not live.
        """
        self.check_known(ids)
        positions = self.index.find_many(ids)
        extents = self.index.extents(positions)
        extents[:, 3] = 0
        kinds: list[Kind] = [
            "step" if of_steps else "agent" for of_steps in self.shards.of_steps()[self.index.at("shard", positions)]
        ]
        return extents, kinds

    def check_known(self, ids: Sequence[int] | IntArray) -> None:
        """Raise unless all ids are live.

        Raises:
            TrajectoryUnavailableError: names the others.
        """
        if unknown := self.unknown(ids):
            kept = [number for number in sorted(unknown) if self.pinned.find(number) is not None]
            why = f" ({ids_in_words(kept)}: evicted, only in snapshots, which never change)" if kept else ""
            raise TrajectoryUnavailableError(f"no trajectory has the id {ids_in_words(sorted(unknown))}{why}")

    def forget_entries(self) -> None:
        """Delete ``index`` and ``pinned``: a reader of several stores, or of a share, has an index of its own.

        To apply commits, it lends the entries that they name: ``index``, until they are forgotten again.
        """
        del self.index
        self.pinned = TrajectoryIndex()

    # -- snapshots --------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots, sorted by name, steps by number."""
        unfinished = {head.name for head in self.unfinished_asides()}
        heads = [head for head in self.pins.heads.values() if head.name not in unfinished]
        return sorted(heads, key=lambda head: by_number(head.name))

    def asides(self) -> list[Snapshot]:
        """Return the heads that were left, earliest first."""
        return sorted([head for head in self.snapshots() if head.kind == "aside"], key=lambda head: head.visit)

    def unfinished_asides(self) -> list[Snapshot]:
        """Return the asides of an interrupted change to another snapshot.

        Such a change counts a visit when it commits, so a head of the current visit was not left. On a mirror that
        another copy of the store has taken over, one may name uncommitted trajectories.
        """
        return [
            head
            for head in self.pins.heads.values()
            if head.kind == "aside" and (head.visit >= self.visit or (not self.left_out and self.lacking(head) > 0))
        ]

    def points(self) -> list[Snapshot]:
        """Return the saved points of the current line, lowest step first: the newest of this visit, and its line."""
        heads = self.pins.heads
        saved = [head for head in heads.values() if head.step is not None and head.visit == self.visit]
        line = max(saved, key=attrgetter("step")).whole_line if saved else self.line
        return sorted([heads[name] for name in line if name in heads], key=attrgetter("step"))

    def present_line(self, head: Snapshot) -> tuple[str, ...]:
        """Return the names of the existing saved points that led to a snapshot, including itself."""
        return tuple(name for name in head.whole_line if name in self.pins.heads)

    def snapshot(self, name: str | int) -> Snapshot:
        """Return the snapshot of a name or a step; ``step-N`` is the saved point of the current line.

        Raises:
            StoreNotFoundError: there is none; names the existing ones.
        """
        match = None if isinstance(name, int) else STEP.fullmatch(name)
        if isinstance(name, int) or (match is not None and match[2] is None):
            return self.point(name if isinstance(name, int) else int(str(match and match[1])))
        heads = {head.name: head for head in self.snapshots()}
        if name not in heads:
            raise StoreNotFoundError(
                f"{self.pins.url}: no snapshot is called {name!r}; there are {sorted(heads) or 'none'}"
            )
        return heads[name]

    def point(self, step: int) -> Snapshot:
        """Return the saved point of a step on the current line.

        Raises:
            StoreNotFoundError: there is none; names the existing ones.
        """
        points = self.points()
        for head in points:
            if head.step == step:
                return head
        steps = ", ".join(str(head.step) for head in points) or "none"
        others = sorted(head.name for head in self.pins.heads.values() if head.step == step)
        elsewhere = f"; on other lines: {', '.join(others)}" if others else ""
        raise StoreNotFoundError(f"{self.pins.url}: no saved point of step {step}; there are: {steps}{elsewhere}")

    def shown_in(self, head: Snapshot) -> tuple[TrajectoryIndex, Notes]:
        """Return a snapshot's trajectories, oldest first, and its late values.

        Raises:
            CorruptStoreError: some of it is missing or damaged.
        """
        index = self.live_in(head.ids)
        lacking = self.lacking(head)
        if lacking > 0 and not self.left_out:
            raise CorruptStoreError(
                f"the pin {head.name!r} names {trajectories(lacking, 'that is', 'that are')} missing: commits were "
                "lost, or a writer that had lost the store to another one made it; remove it with points.remove"
            )
        notes = self.values_of(head)
        notes.lay_over(index)
        return index, notes

    def live_in(self, ranges: IntArray) -> TrajectoryIndex:
        """Return the live and pinned trajectories in inclusive id ranges ``[n, 2]``, oldest first."""
        index = TrajectoryIndex()
        index.texts = self.index.texts
        for part in (self.pinned, self.index):
            index.append(index.translated(part.take(part.positions_in(ranges)), part.texts))
        index.adopt(index.take(np.argsort(index["trajectory_id"], kind="stable")))
        return index

    def go_to(self, ranges: IntArray, notes: Notes, line: tuple[str, ...]) -> None:
        """Make exactly the trajectories in these ranges live, with these late values and saved points; a commit."""
        live, pinned = self.live_in(ranges), TrajectoryIndex()
        for part in (self.index, self.pinned):
            ids = part["trajectory_id"]
            stay = part.first + np.flatnonzero(~lie_in(ids, ranges) & self.pins.named(ids))
            pinned.append(pinned.translated(part.take(stay), part.texts))
        notes.lay_over(live)
        pinned.forget_notes()
        self.index, self.pinned, self.notes, self.line = live, pinned, notes, line
        self.generation, self.visit = self.generation + 1, self.visit + 1

    def values_of(self, head: Snapshot) -> Notes:
        """Return the late values of a snapshot.

        Raises:
            CorruptStoreError: they are missing or damaged.
        """
        value = self.pins.values_of(head)
        if value is None:
            return Notes()
        source = f"{self.pins.url}: late values of the snapshot {head.name!r}"
        row_of = {number: row for row, number in enumerate(self.shards.numbers().tolist())}
        if not row_of.keys() >= set(head.shards):
            raise CorruptStoreError(f"{source}: shards of rows are missing; restore them from a copy")
        rows = np.array([row_of[number] for number in head.shards], np.int32)
        notes = Notes.from_json(value, len(rows)).in_table(rows)
        self._check_given_rows(notes, (self.index, self.pinned), source)
        return notes

    def lacking(self, head: Snapshot) -> int:
        """Return the number of uncommitted trajectories that a snapshot names."""
        return head.count - sum(len(part.positions_in(head.ids)) for part in (self.pinned, self.index))

    def shards_of_values(
        self, notes: Notes, ids: npt.NDArray[np.int64], intact: Collection[int] | None = None
    ) -> tuple[dict[str, Any] | None, list[int]]:
        """Return late values as JSON for a snapshot, None for none, and the rows of the shards with values by row.

        Args:
            notes: the values.
            ids: of the trajectories whose values are returned.
            intact: rows of the shards that are intact; None if all are.
        """
        if not np.isin(notes.ids(), ids).any():
            return None, []
        needed = notes.rows_needed(ids, intact)
        rows = notes.shards(needed)
        places = np.full(int(rows.max(initial=-1)) + 1, -1, np.int32)
        places[rows] = np.arange(len(rows))
        return notes.to_json(ids, needed, places) | {"sources": []}, rows.tolist()

    # -- saving -----------------------------------------------------------------------------------

    def snapshot_file(self) -> EncodedFile:
        """Return ``trajectory_index.json`` of this state, without unneeded shards."""
        shards, rows = self.shards.compacted(self.needed_shards())
        given = self._rows_needed()
        live_ids = self.index["trajectory_id"]
        body = orjson.dumps(
            {
                "generation": self.generation,
                "visit": self.visit,
                "line": self.line,
                "row_shards": len(self.pins.shards()),
                "next_id": self.next_id,
                "next_shard": self.next_shard,
                "store_id": self.store_id,
                "fences": self.fences,
                "restored": self.restored,
                "shards": shards.to_json(),
                "live": index_to_json(self.index, rows[self.index["shard"]]),
                "pinned": index_to_json(self.pinned, rows[self.pinned["shard"]]),
                "notes": self.notes.to_json(live_ids, given, rows),
            }
        )
        return EncodedFile(INDEX_NAME, [seal("snapshot", body)])

    @staticmethod
    def with_copy(index: EncodedFile) -> list[EncodedFile]:
        """Return the index file, and its copy, as local stores have both."""
        return [index, EncodedFile(COPY_NAME, index.pieces)]

    def metadata_file(self, **values: Any) -> EncodedFile:
        """Return ``metadata.json`` of this state; ``values`` are the buffer's own."""
        state = {
            "layout": LAYOUT,
            "layout_version": LAYOUT_VERSION,
            "store_id": self.store_id,
            "generation": self.generation,
            "size": len(self.index),
            "total_samples": self.index.total_samples,
            "trajectory_counter": self.next_id,
        }
        return EncodedFile(METADATA_NAME, [metadata_json({**state, **values})])

    def needed_shards(self) -> npt.NDArray[np.bool_]:
        """Return, per shard, whether it holds a live or pinned trajectory, or visible late values by row."""
        needed = np.zeros(len(self.shards), np.bool_)
        for index in (self.index, self.pinned):
            needed[index["shard"]] = True
        needed[self.notes.shards(self._rows_needed())] = True
        if named := self.pins.shards():
            needed |= np.isin(self.shards.numbers(), named)
        return needed

    def _rows_needed(self) -> npt.NDArray[np.bool_]:
        """Return which late values need their rows, see :meth:`Notes.rows_needed`."""
        return self.notes.rows_needed(self.index["trajectory_id"])

    def _check_given_rows(self, notes: Notes, indexes: Sequence[TrajectoryIndex], source: str) -> None:
        """Refuse late values with rows outside their shard, which would be read out of bounds.

        Raises:
            CorruptStoreError: names the value.
        """
        for column, ids, shards, starts in notes.row_homes():
            if not all(column in self.shards.schema(row).columns for row in np.unique(shards).tolist()):
                raise CorruptStoreError(f"{source}: values {column.name} are in a shard that has none")
            of_axis = self.shards.rows_on([column.axis])[shards]
            for index in indexes:
                positions = index.find_many(ids)
                known = positions >= 0
                count = rows_on(index.extents(positions[known]), column.axis)
                if (starts[known] > of_axis[known] - count).any():
                    raise CorruptStoreError(f"{source}: values {column.name} lie outside their shard")

    def unneeded(self) -> npt.NDArray[np.intp]:
        """Return the shards without live or pinned trajectories whose files still exist."""
        self.shards.need(self.needed_shards(), self.generation)
        return self.shards.unneeded()


def _row_faults(columns: Columns, limits: Sequence[npt.NDArray[np.int64]]) -> Iterator[Fault]:
    """Yield entries with rows outside their shard.

    Args:
        columns: of the entries; none is out of range.
        limits: for each of ``_AXES``, the rows of each shard of the shard table.
    """
    steps, batch, extra, document = (columns[name].astype(np.int64, copy=False) for name in Extent._fields)
    begins = (columns[name] for name in ("start_samples", "start_extra", "start_extra", "start_document"))
    counted = (steps * batch, (steps + extra) * batch, extra, document)
    for begin, rows, limit in zip(begins, counted, limits, strict=True):
        outside = begin > limit[columns["shard"]] - rows
        if outside.any():
            yield "a trajectory lies outside its shard", outside


def _adds(record: Mapping[str, Any]) -> bool:
    return record.get("operation") == "add"
