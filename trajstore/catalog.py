"""The committed state of one directory: its snapshot and the valid tail of its log.

A catalog is what a writer keeps up to date and what a reader loads and refreshes. It needs no lock: a
snapshot is replaced by rename, the log only grows, and what both say overlaps without harm.
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.commits import (
    LOG_FOLDER,
    LogTail,
    decode_lines,
    iterate_ranges,
    manifest_from_json,
    segment_generation,
)
from trajstore.errors import CorruptStoreError, StoreNotFoundError, UnsupportedVersionError
from trajstore.fields import Axis
from trajstore.formats.base import EncodedFile, ShardManifest
from trajstore.index import UNKNOWN_VERSION, TrajectoryIndex, check_columns, starts_of
from trajstore.schema import Extent, Schema
from trajstore.shards import ShardTable
from trajstore.storage import Directory, check_name

logger = logging.getLogger(__name__)

LAYOUT = "trajstore"
LAYOUT_VERSION = 1
METADATA_NAME = "metadata.json"
INDEX_NAME = "trajectory_index.json"
PINS_FOLDER = "pins"

_ATTEMPTS = 20  # a reader that lost a race with a snapshot loads again


def seal(name: str, body: bytes) -> bytes:
    """Return a JSON file ``{"crc32": ..., name: body}`` whose checksum covers ``body``."""
    return b'{"crc32":"%08x","%b":' % (zlib.crc32(body), name.encode()) + body + b"}"


def unseal(name: str, data: bytes, source: str) -> Any:
    """Return the parsed body of a sealed file.

    Raises:
        CorruptStoreError: it is no such file, or its checksum does not fit.
    """
    head = len(seal(name, b"")) - 1
    if data[:10] != b'{"crc32":"' or data[18:head] != b'","%b":' % name.encode() or data[-1:] != b"}":
        raise CorruptStoreError(f"{source}: not a file that trajstore wrote, or cut short")
    body = memoryview(data)[head:-1]
    if data[10:18] != b"%08x" % zlib.crc32(body):
        raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


def metadata_json(values: Mapping[str, Any]) -> bytes:
    """Return ``metadata.json``: flat values, readable by any program, with a checksum of them."""
    body = dict(values)
    checksum = zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return orjson.dumps({**body, "crc32": f"{checksum:08x}"}, option=orjson.OPT_INDENT_2)


def parse_metadata(data: bytes, source: str) -> dict[str, Any]:
    """Return the values of a ``metadata.json`` written by trajstore.

    Raises:
        CorruptStoreError: it is damaged.
        UnsupportedVersionError: a newer trajstore wrote it.
    """
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}; restore it from a copy") from error
    if not isinstance(values, dict):
        raise CorruptStoreError(f"{source}: not a JSON object")
    if values.get("layout") != LAYOUT:
        raise CorruptStoreError(f"{source}: not the metadata of a trajstore directory")
    version = values.get("layout_version")
    if not isinstance(version, int) or version > LAYOUT_VERSION:
        raise UnsupportedVersionError(
            f"{source}: written with layout version {version}, this trajstore reads up to {LAYOUT_VERSION}; upgrade it"
        )
    checksum = values.pop("crc32", None)
    if checksum != f"{zlib.crc32(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)):08x}":
        raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
    return values


class Catalog:
    """Shards and trajectories that are committed in one directory.

    Attributes:
        directory: where the files are.
        shards: all shards that live or pinned trajectories need.
        index: the live trajectories, oldest first.
        pinned: evicted trajectories that a checkpoint inside the store still names.
        generation: number of commits applied.
        next_id: the next trajectory id; never goes back.
        next_shard: the next shard number; never goes back.
        store_id: UUID of the directory.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
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
        self._gone = np.zeros(0, np.bool_)
        self._pins: dict[str, list[tuple[int, int]]] = {}

    @staticmethod
    def exists(directory: Directory) -> bool:
        """Return whether a trajstore directory is there (a RLinf directory is none)."""
        try:
            values = orjson.loads(directory.read(METADATA_NAME))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except orjson.JSONDecodeError:
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

    def behind(self) -> bool:
        """Return whether anything has been committed since; changes nothing, so that others may read on."""
        if self.metadata()["generation"] > self.generation:
            return True
        segments = [name for name in self.directory.names(LOG_FOLDER) if segment_generation(name) is not None]
        if not segments or segments[-1] == self.segment:
            try:
                return bool(segments) and self.directory.size(self.segment) != self.segment_end + self.segment_torn
            except FileNotFoundError:
                return True
        return True

    def metadata(self) -> dict[str, Any]:
        """Return the directory's ``metadata.json``, checked."""
        return parse_metadata(self.directory.read(METADATA_NAME), f"{self.directory.url}/{METADATA_NAME}")

    # -- loading ----------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        source = f"{self.directory.url}/{INDEX_NAME}"
        try:
            self.metadata()
            data = self.directory.read(INDEX_NAME)
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
            self.generation = self.snapshot_generation = _natural(value["generation"])
            self.next_id = _natural(value["next_id"])
            self.next_shard = _natural(value["next_shard"])
            self.store_id = str(value["store_id"])
            self.shards = ShardTable.from_json(value.pop("shards"))
            self.index = TrajectoryIndex.from_json(value.pop("live"), len(self.shards))
            self.pinned = TrajectoryIndex.from_json(value.pop("pinned"), len(self.shards))
        except (KeyError, TypeError, ValueError, OverflowError, CorruptStoreError) as error:
            raise CorruptStoreError(f"{source}: {error}") from error
        for index in (self.index, self.pinned):
            self._check_rows(index, source)
        self._schemas = list(self.shards.schemas)

    def _check_rows(self, index: TrajectoryIndex, source: str) -> None:
        """Refuse entries whose rows lie outside their shard: they would be read out of bounds."""
        steps, batch, extra = (index[name].astype(np.int64) for name in ("steps", "batch", "extra"))
        shard = index["shard"]
        for axes, start, rows in (
            ((Axis.SAMPLES,), "start_samples", steps * batch),
            ((Axis.FIRST_EXTRA, Axis.LAST_EXTRA), "start_extra", (steps + extra) * batch),
            ((Axis.RESPONSE,), "start_extra", extra),
            ((Axis.DOCUMENT,), "start_document", index["document"].astype(np.int64)),
        ):
            if len(shard) and np.any(index[start] > self.shards.rows_on(axes)[shard] - rows):
                raise CorruptStoreError(f"{source}: a trajectory lies outside its shard")

    def _read_log(self) -> bool:
        """Apply new records of all segments; return False if some are missing (a newer snapshot has them)."""
        self.load_pins()
        segments = sorted(
            (first, name)
            for name in self.directory.names(LOG_FOLDER)
            if (first := segment_generation(name)) is not None
        )
        for place, (first, name) in enumerate(segments):
            last = place == len(segments) - 1
            if not last and segments[place + 1][0] <= self.generation + 1:
                continue  # everything in it is applied already
            if first > self.generation + 1:
                return False
            offset = self.segment_end if name == self.segment else 0
            try:
                data = self.directory.read(name, offset)
            except FileNotFoundError:
                return False
            tail = decode_lines(data, f"{self.directory.url}/{name}", offset)
            if tail.torn and not last:
                raise CorruptStoreError(
                    f"{self.directory.url}/{name}: the record at byte {tail.end} is damaged; "
                    "restore the file from a copy"
                )
            self._apply_all(tail, name)
        return bool(segments) or not self.segment

    def _apply_all(self, tail: LogTail, name: str) -> None:
        source = f"{self.directory.url}/{name}"
        for record in tail.records:
            generation = record.get("generation")
            if not isinstance(generation, int):
                raise CorruptStoreError(f"{source}: a record without generation")
            if generation <= self.generation:
                continue
            if generation != self.generation + 1:
                raise CorruptStoreError(
                    f"{source}: generation {generation} follows {self.generation}; records are missing"
                )
            try:
                self.apply(record)
            except (KeyError, TypeError, ValueError, OverflowError, CorruptStoreError) as error:
                raise CorruptStoreError(f"{source}: generation {generation}: {error}") from error
        if name != self.segment:
            self.log_bytes = 0
        self.log_bytes += tail.end - (self.segment_end if name == self.segment else 0)
        self.segment, self.segment_end, self.segment_torn = name, tail.end, tail.torn

    def load_pins(self) -> None:
        """Read which ids the checkpoints inside the store name; entries that none names any more are forgotten."""
        pins: dict[str, list[tuple[int, int]]] = {}
        for name in self.directory.names(PINS_FOLDER):
            if not name.endswith(".json"):
                continue
            try:
                value = unseal("pin", self.directory.read(name), f"{self.directory.url}/{name}")
            except FileNotFoundError:
                continue
            pins[name.removeprefix(PINS_FOLDER + "/").removesuffix(".json")] = list(iterate_ranges(value["ids"]))
        self._pins = pins
        # Also right after loading: the snapshot may be from before the last pin was let go.
        unpinned = np.flatnonzero(~self._is_pinned(self.pinned["trajectory_id"]))
        if len(unpinned):
            self.pinned.drop(self.pinned.first + unpinned)

    def _is_pinned(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        pinned = np.zeros(len(ids), np.bool_)
        for ranges in self._pins.values():
            for low, high in ranges:
                pinned |= (ids >= low) & (ids <= high)
        return pinned

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, record: Mapping[str, Any]) -> None:
        """Apply a log record read from disk.

        Raises:
            CorruptStoreError: it names what is not there, or is of an unknown kind.
        """
        operation = record["operation"]
        if operation == "add":
            for item in record["schemas"]:
                self._schemas.append(Schema.from_json(item))
            manifest = manifest_from_json(record["shard"], self._schemas)
            self.add(_natural(record["number"]), manifest, self._entries(record["entries"], manifest))
        elif operation == "evict":
            self.evict(list(iterate_ranges(record["ids"])))
        else:
            raise CorruptStoreError(f"unknown operation {operation!r}; written by a newer trajstore?")
        self.generation = record["generation"]

    def _entries(self, value: Mapping[str, Any], manifest: ShardManifest) -> dict[str, Any]:
        ids = [number for first, last in iterate_ranges(value["ids"]) for number in range(first, last + 1)][: 1 << 31]
        extents = [Extent(*(_natural(n) for n in item)) for item in value["extents"]]
        count = len(ids)
        kind = manifest.schema.kind
        for column, rows in zip(manifest.schema.columns, manifest.rows, strict=True):
            if sum(extent.rows(column.axis) for extent in extents) != rows:
                raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {rows} rows")
        uuids = bytes.fromhex(value["uuids"])
        columns: dict[str, npt.NDArray[Any]] = {
            "trajectory_id": np.array(ids, np.int64),
            "num_samples": np.array([e.steps * e.batch if kind == "step" else 1 for e in extents], np.int64),
            "steps": np.array([e.steps for e in extents], np.int32),
            "batch": np.array([e.batch for e in extents], np.int32),
            "extra": np.array([e.extra for e in extents], np.int32),
            "document": np.array([e.document for e in extents], np.int32),
            "nbytes": np.array([_nbytes(manifest.schema, e) for e in extents], np.int64),
            "max_episode_length": np.array(value["max_episode_length"], np.int64),
            "version_low": np.array([UNKNOWN_VERSION if v is None else v[0] for v in value["versions"]], np.int64),
            "version_high": np.array([UNKNOWN_VERSION if v is None else v[1] for v in value["versions"]], np.int64),
            "weights": np.array([self.index.weights.add(str(text)) for text in value["weights"]], np.int32),
            "uuid": np.frombuffer(uuids, "V16"),
            "shard": np.full(count, len(self.shards), np.int32),
        }
        columns |= starts_of(extents, kind)
        check_columns(columns, len(self.shards) + 1, len(self.index.weights))
        if count and int(columns["trajectory_id"][0]) < self.next_id:
            raise CorruptStoreError(f"trajectory id {ids[0]} was given before")
        return columns

    def add(self, number: int, manifest: ShardManifest, columns: Mapping[str, Any]) -> int:
        """Take in a committed shard and its entries; return the shard's row."""
        row = self.shards.add(number, manifest)
        self.index.append(columns)
        self.next_id = max(self.next_id, int(columns["trajectory_id"][-1]) + 1)
        self.next_shard = max(self.next_shard, number + 1)
        return row

    def evict(self, ranges: list[tuple[int, int]]) -> None:
        """Take entries out of the live index; those that a pin names are kept aside."""
        positions = self.index.positions_in(ranges)
        if not len(positions):
            return
        kept = self._is_pinned(self.index.arrays["trajectory_id"][positions])
        if kept.any():
            columns = self.index.take(positions[kept])
            columns["weights"] = self.pinned.weights.extend(self.index.weights, columns["weights"].tolist())
            self.pinned.append(columns)
        self.index.drop(positions)

    def pinned_index(self, name: str) -> TrajectoryIndex:
        """Return the trajectories that a checkpoint inside the store names, oldest first.

        Raises:
            StoreNotFoundError: there is no such checkpoint.
        """
        if name not in self._pins:
            raise StoreNotFoundError(f"{self.directory.url}: no pin is called {name!r}; there are {sorted(self._pins)}")
        index = TrajectoryIndex()
        for part in (self.pinned, self.index):
            positions = part.positions_in(self._pins[name])
            columns = part.take(positions)
            columns["weights"] = index.weights.extend(part.weights, columns["weights"].tolist())
            index.append(columns)
        order = np.argsort(index["trajectory_id"], kind="stable")
        index.replace(index.take(order))
        return index

    def pin_state(self, name: str) -> dict[str, Any]:
        """Return what was saved with a pin.

        Raises:
            StoreNotFoundError: there is no such checkpoint.
        """
        file = check_name(f"{PINS_FOLDER}/{name}.json")
        try:
            state = unseal("pin", self.directory.read(file), f"{self.directory.url}/{file}")
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"{self.directory.url}: no pin is called {name!r}") from error
        return dict(state)

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

    def pin_file(self, name: str, **state: Any) -> EncodedFile:
        """Return the file that pins the live trajectories of this generation under a name."""
        ids = self.index["trajectory_id"]
        breaks = np.flatnonzero(np.diff(ids) != 1)
        lows, highs = (
            ids[np.append(0, breaks + 1)] if len(ids) else ids,
            ids[np.append(breaks, len(ids) - 1)] if len(ids) else ids,
        )
        body = orjson.dumps(
            {
                **state,
                "generation": self.generation,
                "ids": [[int(a), int(b)] for a, b in zip(lows, highs, strict=True)],
            }
        )
        return EncodedFile(check_name(f"{PINS_FOLDER}/{name}.json"), [seal("pin", body)])

    def needed_shards(self) -> npt.NDArray[np.bool_]:
        """Return, per shard, whether a live or pinned trajectory lies in it."""
        needed = np.zeros(len(self.shards), np.bool_)
        needed[self.index["shard"]] = True
        needed[self.pinned["shard"]] = True
        return needed

    def take_unneeded(self) -> npt.NDArray[np.intp]:
        """Return the shards whose files may go, each of them once."""
        known = np.zeros(len(self.shards), np.bool_)
        known[: len(self._gone)] = self._gone
        gone = ~self.needed_shards()
        self._gone = gone
        return np.flatnonzero(gone & ~known)


def _nbytes(schema: Schema, extent: Extent) -> int:
    return sum(
        extent.rows(column.axis) * width for column, width in zip(schema.columns, schema.row_nbytes, strict=True)
    )


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value
