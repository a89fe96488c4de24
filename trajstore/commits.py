"""The commit log: one line per commit, each with its checksum and generation. Pure; no I/O.

A line is eight hex digits (CRC-32 of what follows the space), a space, a JSON object, a line feed::

    5d1b0c2e {"generation":7,"operation":"add","shard":{...},"entries":{...}}

``generation`` grows by one from line to line and from segment to segment. Only the last line of the
last segment may be torn (a crash in the append); any other bad line is damage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.errors import CorruptStoreError, listed
from trajstore.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore.index import UNKNOWN_VERSION, starts_of
from trajstore.packing import StringTable
from trajstore.record import Record
from trajstore.schema import Extent, Schema
from trajstore.storage import check_name

LOG_FOLDER = "log"


def segment_name(first_generation: int) -> str:
    """Return the name of the log segment whose first record has this generation."""
    return f"{LOG_FOLDER}/{first_generation:016d}.log"


def segment_generation(name: str) -> int | None:
    """Return the first generation of a segment, or None if the name is not a segment's."""
    stem = name.removeprefix(LOG_FOLDER + "/").removesuffix(".log")
    return int(stem) if name == f"{LOG_FOLDER}/{stem}.log" and len(stem) == 16 and stem.isdigit() else None


def encode_line(record: dict[str, Any]) -> bytes:
    """Return one log line."""
    body = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"%08x %b\n" % (zlib.crc32(body), body)


@dataclass(frozen=True, slots=True)
class LogTail:
    """What was read from a segment.

    Attributes:
        records: the whole records.
        end: offset after the last whole record.
        torn: bytes after ``end`` that are no whole record.
    """

    records: list[dict[str, Any]]
    end: int
    torn: int


def decode_lines(data: bytes, source: str, offset: int = 0) -> LogTail:
    """Return the records in ``data``, which begins at ``offset`` of the segment ``source``.

    Raises:
        CorruptStoreError: a line that is not the last one is damaged; names segment and byte.
    """
    records: list[dict[str, Any]] = []
    position = 0
    while position < len(data):
        newline = data.find(b"\n", position)
        line = data[position:] if newline < 0 else data[position:newline]
        record = _decode_line(line) if newline >= 0 else None
        if record is None:
            rest = data[newline + 1 :] if newline >= 0 else b""
            if any(_decode_line(later) is not None for later in rest.split(b"\n")):
                raise CorruptStoreError(
                    f"{source}: the record at byte {offset + position} is damaged; "
                    "restore the file from a copy, or load the last checkpoint"
                )
            break
        records.append(record)
        position = newline + 1
    return LogTail(records, offset + position, len(data) - position)


def decode_each(data: bytes) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield every line of a segment: its record, None if it is damaged or torn, and the offset after it."""
    position = 0
    while position < len(data):
        newline = data.find(b"\n", position)
        end = len(data) if newline < 0 else newline + 1
        yield (None if newline < 0 else _decode_line(data[position:newline])), end
        position = end


def _decode_line(line: bytes) -> dict[str, Any] | None:
    if len(line) < 10 or line[8:9] != b" ":
        return None
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        record = orjson.loads(line[9:])
    except (ValueError, orjson.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None


def manifest_to_json(manifest: ShardManifest, schema_number: int) -> dict[str, Any]:
    """Return a shard's manifest as JSON values; its schema is told by number."""
    return {
        "name": manifest.name,
        "format": manifest.format,
        "schema": schema_number,
        "files": [[file.name, file.size, file.crc32] for file in manifest.files],
        "places": [None if place is None else [place.file, place.offset] for place in manifest.places],
        "column_crc32": list(manifest.column_crc32),
        "rows": list(manifest.rows),
    }


def manifest_from_json(value: Any, schemas: Sequence[Schema]) -> ShardManifest:
    """Return the manifest that :func:`manifest_to_json` described.

    Raises:
        CorruptStoreError: it does not describe a shard.
        UnsafeContentError: a file name leaves the directory.
    """
    try:
        schema = schemas[natural(value["schema"])]
        columns = len(schema.columns)
        files = tuple(StoredFile(check_name(name), natural(size), natural(crc)) for name, size, crc in value["files"])
        places = tuple(
            None if place is None else ColumnPlace(natural(place[0]), natural(place[1])) for place in value["places"]
        )
        crcs = tuple(None if crc is None else natural(crc) for crc in value["column_crc32"])
        rows = tuple(natural(count) for count in value["rows"])
        if not len(places) == len(crcs) == len(rows) == columns:
            raise ValueError("columns")
        for place, count, width in zip(places, rows, schema.row_nbytes, strict=True):
            if place is not None and place.offset + count * width > files[place.file].size:
                raise ValueError("a column ends after its file")
        if not isinstance(value["name"], str) or not isinstance(value["format"], str):
            raise TypeError("name")
        return ShardManifest(value["name"], value["format"], schema, files, places, crcs, rows)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptStoreError(f"not a shard's description: {error}") from error


def natural(value: Any) -> int:
    """Return a value that was read, if it is a whole number and not negative.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def entries_to_json(records: Sequence[Record], ids: Sequence[int], uuids: bytes) -> dict[str, Any]:
    """Return what a record says of the trajectories of a shard, as JSON values.

    Args:
        records: the trajectories.
        ids: their ids, ascending.
        uuids: 16 bytes for each.
    """
    return {
        "ids": ranges_of(ids),
        "extents": [[r.extent.steps, r.extent.batch, r.extent.extra, r.extent.document] for r in records],
        "max_episode_length": [record.max_episode_length for record in records],
        "versions": [record.versions for record in records],
        "weights": [record.model_weights_id for record in records],
        "uuids": uuids.hex(),
    }


def entries_from_json(
    value: Mapping[str, Any], manifest: ShardManifest, weights: StringTable, shard: int
) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories that a record says are in a shard.

    Args:
        value: the record's ``entries``.
        manifest: the shard's.
        weights: table that takes their ``model_weights_id``.
        shard: the shard's row.

    Raises:
        CorruptStoreError: the trajectories do not add up to the shard's rows, or their ids are no ranges.
        KeyError, TypeError, ValueError: values are absent or of the wrong kind.
    """
    ranges = list(iterate_ranges(value["ids"]))
    extents = [Extent(*(natural(n) for n in item)) for item in value["extents"]]
    count = len(extents)
    if sum(last - first + 1 for first, last in ranges) != count:
        raise CorruptStoreError(f"{count} trajectories, but the ids {value['ids']}")
    ids = [number for first, last in ranges for number in range(first, last + 1)]
    kind = manifest.schema.kind
    for column, rows in zip(manifest.schema.columns, manifest.rows, strict=True):
        if sum(extent.rows(column.axis) for extent in extents) != rows:
            raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {rows} rows")
    columns: dict[str, npt.NDArray[Any]] = {
        "trajectory_id": np.array(ids, np.int64),
        "num_samples": np.array([e.steps * e.batch if kind == "step" else 1 for e in extents], np.int64),
        "steps": np.array([e.steps for e in extents], np.int32),
        "batch": np.array([e.batch for e in extents], np.int32),
        "extra": np.array([e.extra for e in extents], np.int32),
        "document": np.array([e.document for e in extents], np.int32),
        "nbytes": np.array([manifest.schema.nbytes(e) for e in extents], np.int64),
        "max_episode_length": np.array(value["max_episode_length"], np.int64),
        "version_low": np.array([UNKNOWN_VERSION if v is None else v[0] for v in value["versions"]], np.int64),
        "version_high": np.array([UNKNOWN_VERSION if v is None else v[1] for v in value["versions"]], np.int64),
        "weights": np.array([weights.add(str(text)) for text in value["weights"]], np.int32),
        "uuid": np.frombuffer(bytes.fromhex(value["uuids"]), "V16"),
        "shard": np.full(count, shard, np.int32),
    }
    return columns | starts_of(extents, kind)


def ranges_of(ids: Sequence[int]) -> list[list[int]]:
    """Return sorted, distinct ids as inclusive ranges, ``[[first, last], ...]``."""
    ranges: list[list[int]] = []
    for number in ids:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = int(number)
        else:
            ranges.append([int(number), int(number)])
    return ranges


def ids_in_words(ids: Sequence[int] | npt.NDArray[np.int64], limit: int = 10) -> str:
    """Return ids for a message, runs of them as ranges: ``"3 to 7, 9"``."""
    ordered = np.unique(np.asarray(ids, np.int64))
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    firsts, lasts = ordered[np.append(0, breaks)], ordered[np.append(breaks, len(ordered)) - 1]
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return listed((str(low) if low == high else f"{low} to {high}" for low, high in pairs), limit)


def iterate_ranges(ranges: Any) -> Iterator[tuple[int, int]]:
    """Yield checked ``(first, last)`` pairs of a record's ranges.

    Raises:
        CorruptStoreError: they are not ranges.
    """
    try:
        for first, last in ranges:
            if not 0 <= first <= last:
                raise ValueError(f"range {first}..{last}")
            yield int(first), int(last)
    except (TypeError, ValueError) as error:
        raise CorruptStoreError(f"not a list of id ranges: {error}") from error
