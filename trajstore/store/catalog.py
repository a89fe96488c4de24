"""The committed state of one directory: its snapshot and the valid tail of its log.

A catalog is what a writer keeps up to date and what a reader loads and refreshes. It needs no lock on the directory:
a snapshot is replaced by rename, the log only grows, and what both say overlaps without harm. Among threads, a writer's
is guarded by ``CommitLog.lock``, that of a follower by ``View.steady``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.columns.fields import Axis
from trajstore.columns.limits import MAX_GENERATION, MAX_ID
from trajstore.columns.schema import Extent, Schema
from trajstore.errors import CorruptStoreError, StoreError, StoreNotFoundError
from trajstore.files.base import Directory, EncodedFile
from trajstore.formats.base import ShardManifest
from trajstore.store.additions import AddedShard, added_in, entries_from_json
from trajstore.store.entry_checks import EntryGate, Fault, check_lengths, range_faults, shape_faults
from trajstore.store.index import TrajectoryIndex
from trajstore.store.lifetimes import Lifetimes
from trajstore.store.log_records import (
    LOG_FOLDER,
    LogTail,
    decode_lines,
    manifest_from_json,
    natural,
    parse_ranges,
    segment_generation,
)
from trajstore.store.moves import Moved, check_moved, move_entries, move_from_json, starts_in
from trajstore.store.packing import declared_rows
from trajstore.store.saved_points import Pins
from trajstore.store.sealed import LAYOUT, LAYOUT_VERSION, metadata_json, parse_metadata, seal, unseal
from trajstore.store.shard_table import ShardTable

METADATA_NAME = "metadata.json"
INDEX_NAME = "trajectory_index.json"

_NONSENSE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What values of the wrong kind or size raise when they are used."""

_RECORDS_AT_ONCE = 256  # of the log, made into columns together; who refreshes holds a lock for so long
_ATTEMPTS = 20  # a reader that lost a race with a snapshot loads again


@dataclass(frozen=True, slots=True)
class Added:
    """Commits brought shards: the index columns of their trajectories."""

    columns: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A commit took trajectories out: inclusive ranges of their ids."""

    ranges: npt.NDArray[np.int64]


Change = Added | Evicted | Moved


def log_segments(directory: Directory) -> list[tuple[int, str]]:
    """Return first generation and name of each segment of a directory's log, in order.

    What is called so and is no file (a folder) is among them: reading it says what it is.
    """
    files, folders = directory.listing(LOG_FOLDER)
    return sorted((first, name) for name in (*files, *folders) if (first := segment_generation(name)) is not None)


class Catalog:
    """Shards and trajectories that are committed in one directory.

    Attributes:
        directory: where the files are.
        shards: all shards that live or pinned trajectories need.
        index: the live trajectories, oldest first.
        pins: the checkpoints inside the store.
        pinned: evicted trajectories that a checkpoint inside the store still names.
        generation: number of commits applied.
        next_id: the next trajectory id; never goes back.
        next_shard: the next shard number; never goes back.
        store_id: UUID of the directory.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._gate = EntryGate()
        self.pins = Pins(directory)
        self.shards = ShardTable()
        self.index = TrajectoryIndex()
        self.pinned = TrajectoryIndex()
        self.generation = 0
        self.next_id = 0
        self.next_shard = 0
        self.store_id = ""
        self.snapshot_generation = 0
        self.snapshot_bytes = 0
        self.log_bytes = 0
        self.segment = ""
        self.segment_end = 0
        self.segment_torn = 0
        self._schemas: list[Schema] = []
        self.lifetimes = Lifetimes()

    @staticmethod
    def exists(directory: Directory) -> bool:
        """Return whether a trajstore directory is there (a RLinf directory is none)."""
        try:
            values = orjson.loads(directory.read(METADATA_NAME))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (orjson.JSONDecodeError, CorruptStoreError):
            return bool(directory.names(LOG_FOLDER)) or bool(directory.names("shards"))
        return isinstance(values, dict) and values.get("layout") == LAYOUT

    @staticmethod
    def has_begun(directory: Directory) -> bool:
        """Return whether there is the snapshot of a store in which nothing has been committed yet."""
        try:
            value = unseal("snapshot", directory.read(INDEX_NAME), INDEX_NAME)
        except CorruptStoreError:
            return False
        return isinstance(value, dict) and value.get("generation") == 0 and value.get("next_id") == 0

    @classmethod
    def open(cls, directory: Directory) -> Catalog:
        """Load the newest state of a directory.

        Raises:
            StoreNotFoundError: there is no store.
            UnsupportedVersionError: a newer trajstore wrote it.
            CorruptStoreError: snapshot or log are damaged; names the file.
        """
        for _ in range(_ATTEMPTS):
            catalog = cls(directory)
            catalog._load_snapshot()
            # A snapshot may have been taken and older segments deleted between the two reads: then start again.
            if catalog._read_log() and catalog.metadata()["generation"] <= catalog.generation:
                return catalog
        raise CorruptStoreError(f"{directory.url}: records are missing between {INDEX_NAME} and {LOG_FOLDER}/")

    @classmethod
    def create(cls, directory: Directory) -> Catalog:
        """Return the state of a directory in which nothing has been committed yet (writes nothing)."""
        catalog = cls(directory)
        catalog.store_id = str(uuid.uuid4())
        return catalog

    def refresh(self) -> bool:
        """Apply what has been committed since; return whether anything was.

        After a snapshot by the writer the arrays are loaded anew, so hold on to no position.
        """
        before = self.generation
        if not self._read_log() or self.metadata()["generation"] > self.generation:
            fresh = Catalog.open(self.directory)
            self.__dict__.update(fresh.__dict__)
        return self.generation != before

    @property
    def left_out(self) -> Mapping[int, str]:
        """By trajectory id, what is wrong with each entry that was left out."""
        return self._gate.left_out

    def behind(self) -> bool:
        """Return whether anything has been committed since; changes nothing, so that others may read on."""
        if self.metadata()["generation"] > self.generation:
            return True
        segments = log_segments(self.directory)
        if not segments or segments[-1][1] == self.segment:
            try:
                return bool(segments) and self.directory.size(self.segment) != self.segment_end + self.segment_torn
            except FileNotFoundError:
                return True
        return True

    def metadata(self) -> dict[str, Any]:
        """Return the directory's ``metadata.json``, checked."""
        source = f"{self.directory.url}/{METADATA_NAME}"
        values = parse_metadata(self.directory.read(METADATA_NAME), source)
        try:
            natural(values["generation"])
        except (KeyError, ValueError) as error:
            raise CorruptStoreError(f"{source}: generation: {error}") from error
        return values

    # -- loading ----------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        source = f"{self.directory.url}/{INDEX_NAME}"
        try:
            self.metadata()
            data = self.directory.read(INDEX_NAME)
        except StoreNotFoundError:
            raise  # it was there when it was opened
        except FileNotFoundError as error:
            if self.directory.exists() and self.directory.names("shards"):
                raise CorruptStoreError(
                    f"{self.directory.url}: {METADATA_NAME} or {INDEX_NAME} is missing, but there are shards; "
                    "restore it from a copy"
                ) from error
            raise StoreNotFoundError(f"{self.directory.url}: no trajectory store here (no {METADATA_NAME})") from error
        except NotADirectoryError as error:
            raise StoreNotFoundError(f"{self.directory.url}: not a directory") from error
        value = unseal("snapshot", data, source)
        self.snapshot_bytes = len(data)
        del data
        try:
            self.generation = self.snapshot_generation = natural(value["generation"], MAX_GENERATION)
            self.next_id = natural(value["next_id"], MAX_ID // 2)
            self.next_shard = natural(value["next_shard"], MAX_ID // 2)
            self.store_id = str(value["store_id"])
            entries = sum(declared_rows(value[name]["columns"]["shard"]) for name in ("live", "pinned"))
            if declared_rows(value["shards"]["numbers"]) > entries:
                raise CorruptStoreError("there are more shards than trajectories")
            self.shards = ShardTable.from_json(value.pop("shards"))
            self.index = TrajectoryIndex.from_json(value.pop("live"), len(self.shards), self._gate)
            self.pinned = TrajectoryIndex.from_json(value.pop("pinned"), len(self.shards), self._gate)
        except (*_NONSENSE, CorruptStoreError) as error:
            raise CorruptStoreError(f"{source}: {error}") from error
        for index in (self.index, self.pinned):
            self._check_rows(index, source)
        self._schemas = list(self.shards.schemas)

    def _check_rows(self, index: TrajectoryIndex, source: str) -> None:
        """Refuse entries whose rows lie outside their shard: they would be read out of bounds."""
        columns = index.arrays
        of_steps = self.shards.of_steps()[columns["shard"]] if len(index) else np.zeros(0, np.bool_)
        try:
            sound = self._gate.admit(columns, shape_faults(columns, of_steps))
            sound = self._gate.admit(sound, self._row_faults(sound))
            if len(sound["trajectory_id"]) < len(index):
                index.adopt(sound)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{source}: {error}") from error

    def _row_faults(self, columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[Fault]:
        steps, batch, extra = (columns[name].astype(np.int64) for name in ("steps", "batch", "extra"))
        shard = columns["shard"]
        for axes, start, rows in (
            ((Axis.SAMPLES,), "start_samples", steps * batch),
            ((Axis.FIRST_EXTRA, Axis.LAST_EXTRA), "start_extra", (steps + extra) * batch),
            ((Axis.RESPONSE,), "start_extra", extra),
            ((Axis.DOCUMENT,), "start_document", columns["document"].astype(np.int64)),
        ):
            if len(shard):
                outside = columns[start] > self.shards.rows_on(axes)[shard] - rows
                if outside.any():
                    yield "a trajectory lies outside its shard", outside

    def news(self) -> list[tuple[str, LogTail]] | None:
        """Read the log records that follow, by segment; None if some are missing (a newer snapshot has them)."""
        for _ in range(_ATTEMPTS):
            found = self._following_tails()
            if found is None:
                return None
            last = max((_generation_of(record) for _, tail in found for record in tail.records), default=0)
            if self.metadata()["generation"] <= max(self.generation, last):
                return found
            # A snapshot was taken after the log had been read: what it has is in the log, or the log is gone.
            if not any(tail.records for _, tail in found) and not self._segment_follows():
                return None
        return None

    def _segment_follows(self) -> bool:
        return any(first <= self.generation + 1 for first, _ in log_segments(self.directory))

    def _following_tails(self) -> list[tuple[str, LogTail]] | None:
        generation = self.generation
        found: list[tuple[str, LogTail]] = []
        segments = log_segments(self.directory)
        for place, (first, name) in enumerate(segments):
            last = place == len(segments) - 1
            if not last and segments[place + 1][0] <= generation + 1:
                continue  # everything in it is applied already
            if first > generation + 1:
                return None
            offset = self.segment_end if name == self.segment else 0
            try:
                data = self.directory.read(name, offset)
            except FileNotFoundError:
                return None
            tail = decode_lines(data, f"{self.directory.url}/{name}", offset)
            if tail.torn and not last:
                raise CorruptStoreError(
                    f"{self.directory.url}/{name}: the record at byte {tail.end} is damaged; "
                    "restore the file from a copy"
                )
            found.append((name, tail))
            generation = max([generation, *(_generation_of(record) for record in tail.records[-1:])])
        return found if segments or not self.segment else None

    def _read_log(self) -> bool:
        """Apply new records of all segments; return False if some are missing (a newer snapshot has them)."""
        self.load_pins()
        news = self._following_tails()
        for _ in self.changes(news or ()):
            pass
        return news is not None

    def changes(self, news: Iterable[tuple[str, LogTail]]) -> Iterator[Change]:
        """Apply what :meth:`news` found, record by record; yield what each has changed."""
        for name, tail in news:
            yield from self._apply_tail(tail, name)

    def _apply_tail(self, tail: LogTail, name: str) -> Iterator[Change]:
        source = f"{self.directory.url}/{name}"
        fresh: list[Mapping[str, Any]] = []
        for record in tail.records:
            generation = record.get("generation")
            if not isinstance(generation, int):
                raise CorruptStoreError(f"{source}: a record without generation")
            if generation <= self.generation:
                continue
            newest = self.generation + len(fresh)
            if generation <= newest:  # a line that is there twice says nothing new
                if record == fresh[generation - self.generation - 1]:
                    continue
                raise CorruptStoreError(f"{source}: two records of generation {generation}; two writers have written")
            if generation != newest + 1 or generation > MAX_GENERATION:
                raise CorruptStoreError(f"{source}: generation {generation} follows {newest}; records are missing")
            fresh.append(record)
        for begin in range(0, len(fresh), _RECORDS_AT_ONCE):
            yield from self._apply_some(fresh[begin : begin + _RECORDS_AT_ONCE], source)
        if name != self.segment:
            self.log_bytes = 0
        self.log_bytes += tail.end - (self.segment_end if name == self.segment else 0)
        self.segment, self.segment_end, self.segment_torn = name, tail.end, tail.torn

    def load_pins(self) -> None:
        """Read which ids the checkpoints inside the store name; entries that none names any more are forgotten."""
        self.pins.load()
        # Also right after loading: the snapshot may be from before the last pin was let go.
        unpinned = np.flatnonzero(~self.pins.named(self.pinned["trajectory_id"]))
        if len(unpinned):
            self.pinned.drop(self.pinned.first + unpinned)
            # A reader of the pin shows this very generation: it is from the next one on that nobody needs them.
            self.lifetimes.note(self.needed_shards(), self.generation + 1)

    # -- applying ---------------------------------------------------------------------------------

    def _apply_some(self, records: Sequence[Mapping[str, Any]], source: str) -> Iterator[Change]:
        """Apply records that follow each other; those that add are taken in together, which is much faster."""
        begin = 0
        while begin < len(records):
            end = begin + 1
            if _adds(records[begin]):
                while end < len(records) and _adds(records[end]):
                    end += 1
            try:
                change = self.apply(records[begin:end])
            except (*_NONSENSE, CorruptStoreError) as error:
                if end - begin > 1:  # one by one, to find out which
                    for record in records[begin:end]:
                        yield from self._apply_some([record], source)
                generation = records[begin]["generation"]
                raise CorruptStoreError(f"{source}: generation {generation}: {error}") from error
            yield change
            begin = end

    def apply(self, records: Sequence[Mapping[str, Any]]) -> Change:
        """Apply one record read from disk, or several that add; all of it or nothing. Return what has changed.

        Raises:
            CorruptStoreError: it names what is not there, or is of an unknown kind.
        """
        operation = records[0]["operation"]
        if operation == "add":
            change: Change = Added(self._add_recorded(records))
        elif operation == "evict":
            change = Evicted(parse_ranges(records[0]["ids"]))
            self.evict(change.ranges)
        elif operation == "rewrite":
            change = self._move_recorded(records[0])
        else:
            raise CorruptStoreError(f"unknown operation {operation!r}; written by a newer trajstore?")
        self.generation = records[-1]["generation"]
        return change

    def _add_recorded(self, records: Sequence[Mapping[str, Any]]) -> Mapping[str, npt.NDArray[Any]]:
        schemas = list(self._schemas)
        added: list[AddedShard] = []
        for record in records:
            schemas += [Schema.from_json(item) for item in record["schemas"]]
            for one in added_in(record):
                manifest = manifest_from_json(one["shard"], schemas)
                row, number = len(self.shards) + len(added), natural(one["number"], MAX_ID // 2)
                added.append(AddedShard(record["generation"], number, row, manifest, one["entries"]))
        columns: Mapping[str, npt.NDArray[Any]] = entries_from_json(added, self.index.weights)
        ids = columns["trajectory_id"]
        check_lengths(columns)
        columns = self._gate.admit(
            columns, range_faults(columns, len(self.shards) + len(added), len(self.index.weights))
        )
        steps = np.array([one.manifest.schema.kind == "step" for one in added], np.bool_)
        columns = self._gate.admit(columns, shape_faults(columns, steps[columns["shard"] - len(self.shards)]))
        if int(ids[0]) < self.next_id or np.any(ids[1:] <= ids[:-1]):
            raise CorruptStoreError(f"trajectory id {ids[0]} was given before, or ids do not ascend")
        self._schemas = schemas
        for new in added:
            self.lifetimes.add(self.shards.add(new.number, new.manifest), new.generation)
            self.next_shard = max(self.next_shard, new.number + 1)
        self.index.append(columns)
        self.next_id = int(ids[-1]) + 1
        return columns

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

    def add(self, shards: Sequence[tuple[int, ShardManifest]], columns: Mapping[str, Any]) -> None:
        """Take in the shards of a commit, number and manifest of each, and its entries, by ascending id."""
        for number, manifest in shards:
            self.lifetimes.add(self.shards.add(number, manifest), self.generation + 1)
            self.next_shard = max(self.next_shard, number + 1)
        self.index.append(columns)
        self.next_id = max(self.next_id, int(columns["trajectory_id"][-1]) + 1)

    def evict(self, ranges: npt.NDArray[np.int64]) -> int:
        """Take entries in inclusive ranges ``[n, 2]`` out of the live index; return their bytes.

        Those that a pin names are kept aside.
        """
        positions = self.index.positions_in(ranges)
        if not len(positions):
            return 0
        nbytes = int(self.index.arrays["nbytes"][positions].sum())
        kept = self.pins.named(self.index.arrays["trajectory_id"][positions])
        if kept.any():
            columns = self.index.take(positions[kept])
            columns["weights"] = self.pinned.weights.extend(self.index.weights, columns["weights"].tolist())
            self.pinned.append(columns)
        self.index.drop(positions)
        return nbytes

    def move(
        self, number: int, manifest: ShardManifest, ids: npt.NDArray[np.int64], extents: Sequence[Extent]
    ) -> Moved:
        """Take in a shard that holds trajectories of others, which are read from it from now on."""
        moved = Moved(self.shards.add(number, manifest), ids, starts_in(extents, manifest))
        self.lifetimes.add(moved.row, self.generation + 1)
        self.next_shard = max(self.next_shard, number + 1)
        for index in (self.index, self.pinned):
            move_entries(index, moved)
        return moved

    def pinned_index(self, name: str) -> TrajectoryIndex:
        """Return the trajectories that a checkpoint inside the store names, oldest first.

        Raises:
            StoreNotFoundError: there is no such checkpoint.
        """
        ranges = self.pins.ranges(name)
        index = TrajectoryIndex()
        for part in (self.pinned, self.index):
            positions = part.positions_in(ranges)
            columns = part.take(positions)
            columns["weights"] = index.weights.extend(part.weights, columns["weights"].tolist())
            index.append(columns)
        order = np.argsort(index["trajectory_id"], kind="stable")
        index.replace(index.take(order))
        return index

    # -- saving -----------------------------------------------------------------------------------

    def snapshot_file(self) -> EncodedFile:
        """Return ``trajectory_index.json`` of this state; shards that nobody needs are left out."""
        shards, rows = self.shards.compacted(self.needed_shards())
        body = orjson.dumps(
            {
                "generation": self.generation,
                "next_id": self.next_id,
                "next_shard": self.next_shard,
                "store_id": self.store_id,
                "shards": shards.to_json(),
                "live": self.index.to_json(shard=rows[self.index["shard"]]),
                "pinned": self.pinned.to_json(shard=rows[self.pinned["shard"]]),
            }
        )
        return EncodedFile(INDEX_NAME, [seal("snapshot", body)])

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
        """Return, per shard, whether a live or pinned trajectory lies in it."""
        needed = np.zeros(len(self.shards), np.bool_)
        needed[self.index["shard"]] = True
        needed[self.pinned["shard"]] = True
        return needed

    def unneeded(self) -> npt.NDArray[np.intp]:
        """Return the shards that no live or pinned trajectory lies in and whose files were not deleted yet."""
        self.lifetimes.note(self.needed_shards(), self.generation)
        return self.lifetimes.waiting()


def oldest_generation(directory: Directory) -> int:
    """Return a generation that whoever opens a directory from now on will not go below: that of its snapshot.

    0 where it cannot be told: there is no store, or what it says is damaged.
    """
    try:
        return int(Catalog(directory).metadata()["generation"])
    except (StoreError, OSError):
        return 0


def _generation_of(record: Mapping[str, Any]) -> int:
    """Return a record's generation; 0 where it has none (applying it refuses that)."""
    value = record.get("generation")
    return value if isinstance(value, int) else 0


def _adds(record: Mapping[str, Any]) -> bool:
    return record.get("operation") == "add"
