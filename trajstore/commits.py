"""The commit log: one line per commit, each with its checksum and generation. Pure; no I/O.

A line is eight hex digits (CRC-32 of what follows the space), a space, a JSON object, a line feed::

    5d1b0c2e {"generation":7,"operation":"add","shard":{...},"entries":{...}}

``generation`` grows by one from line to line and from segment to segment. Only the last line of the
last segment may be torn (a crash in the append); any other bad line is damage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trajstore.errors import CorruptStoreError
from trajstore.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore.schema import Schema
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
        schema = schemas[_natural(value["schema"])]
        columns = len(schema.columns)
        files = tuple(StoredFile(check_name(name), _natural(size), _natural(crc)) for name, size, crc in value["files"])
        places = tuple(
            None if place is None else ColumnPlace(_natural(place[0]), _natural(place[1])) for place in value["places"]
        )
        crcs = tuple(None if crc is None else _natural(crc) for crc in value["column_crc32"])
        rows = tuple(_natural(count) for count in value["rows"])
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


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def ranges_of(ids: Sequence[int]) -> list[list[int]]:
    """Return sorted, distinct ids as inclusive ranges, ``[[first, last], ...]``."""
    ranges: list[list[int]] = []
    for number in ids:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = int(number)
        else:
            ranges.append([int(number), int(number)])
    return ranges


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
