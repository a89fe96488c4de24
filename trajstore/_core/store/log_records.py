"""The commit log: one line per commit, each with its checksum and generation. Pure; no I/O.

A line is eight hex digits (CRC-32 of what follows the space), a space, a JSON object, a line feed::

    5d1b0c2e {"generation":7,"operation":"add","shard":{...},"entries":{...}}

``generation`` grows by one from line to line and from segment to segment. Only the last line of the
last segment may be torn (a crash in the append); any other bad line is damage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.columns.limits import RANGES
from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import check_name
from trajstore._core.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore._core.store.run_ids import shown_id
from trajstore._core.store.sealed import FROM_A_COPY, OR_WHAT_IS_WHOLE
from trajstore.errors import CorruptStoreError, listed

LOG_FOLDER = "log"

_INT64_MAX = RANGES["nbytes"][1]

_PIECE = 1 << 15


def segment_name(first_generation: int) -> str:
    """Return the name of the log segment whose first record has this generation."""
    return f"{LOG_FOLDER}/{first_generation:016d}.log"


def segment_generation(name: str) -> int | None:
    """Return the first generation of a segment, or None if the name is not a segment's."""
    stem = name.removeprefix(LOG_FOLDER + "/").removesuffix(".log")
    return (
        int(stem)
        if name == f"{LOG_FOLDER}/{stem}.log" and len(stem) == 16 and stem.isascii() and stem.isdigit()
        else None
    )


def encode_line(record: dict[str, Any], long: Sequence[bytes] = ()) -> bytes:
    """Return one log line; ``long`` has the items that :func:`in_pieces` has left out, in the order of the record."""
    body = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    if long:
        body = b"".join(chain.from_iterable(zip(body.split(_LEFT_OUT), (*long, b""), strict=True)))
    return b"".join([b"%08x " % zlib.crc32(body), body, b"\n"])  # unlike ``%``, it lets other threads run


_LEFT_OUT = b"\0"
"""Stands for the items of a long list: JSON has no such byte, as in texts it is escaped."""


def in_pieces(values: Sequence[Any] | npt.NDArray[Any], long: list[bytes]) -> orjson.Fragment:
    """Append the items of a long list to ``long``, as JSON, and return what stands for the list in a record.

    It is encoded in pieces, and joined later, because no other thread runs while orjson encodes one or copies them.
    """
    parts = (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))
    long.append(b",".join(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in parts))
    return orjson.Fragment(b"[%b]" % _LEFT_OUT)


@dataclass(frozen=True, slots=True)
class LogTail:
    """The records read from a segment.

    Attributes:
        records: the complete records.
        end: offset after the last complete record.
        torn: bytes after ``end``, an incomplete record.
    """

    records: list[dict[str, Any]]
    end: int
    torn: int


def decode_lines(data: bytes, source: str, offset: int = 0) -> LogTail:
    """Return the records in ``data``, which begins at ``offset`` of the segment ``source``.

    Raises:
        CorruptStoreError: a line before the last one, or the line feed of a complete one, is damaged; names segment and
            byte.
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
                    f"{source}: the record at byte {offset + position} is damaged{FROM_A_COPY}{OR_WHAT_IS_WHOLE}"
                )
            if newline < 0 and record_without_end(line) is not None:
                raise CorruptStoreError(
                    f"{source}: the line feed of the record at byte {offset + position} is damaged{FROM_A_COPY}"
                    f"{OR_WHAT_IS_WHOLE}"
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


def record_without_end(data: bytes) -> dict[str, Any] | None:
    """Return the last record of a segment whose line feed was replaced by another byte.

    A crash cannot cause that, except by a zero, from a sector that never reached the disk.
    """
    return None if data.endswith((b"\n", b"\0")) else _decode_line(data[data.rfind(b"\n") + 1 : -1])


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
    """Return a shard's manifest as JSON values; its schema is referred to by number."""
    return {
        "name": manifest.name,
        "format": manifest.format,
        "schema": schema_number,
        "files": [[file.name, file.size, file.crc32] for file in manifest.files],
        "places": [None if place is None else [place.file, place.offset] for place in manifest.places],
        "column_crc32": list(manifest.column_crc32),
        "rows": list(manifest.rows),
        **({} if manifest.nbytes == manifest.schema.plain_nbytes(manifest.rows) else {"nbytes": list(manifest.nbytes)}),
    }


def manifest_from_json(value: Any, schemas: Sequence[Schema]) -> ShardManifest:
    """Return the manifest described by :func:`manifest_to_json`.

    Raises:
        CorruptStoreError: it does not describe a shard.
        UnsafeContentError: a file name leaves the directory.
    """
    try:
        number = natural(value["schema"])
        if number >= len(schemas) or (value["places"] and not schemas[number].columns):  # salvage's placeholder
            raise ValueError("its columns are described by an earlier record, which is damaged or missing")
        schema = schemas[number]
        columns = len(schema.columns)
        files = tuple(StoredFile(check_name(name), natural(size), natural(crc)) for name, size, crc in value["files"])
        if not files:
            raise ValueError("it has no files")
        places = tuple(None if place is None else ColumnPlace(*place) for place in value["places"])
        crcs, rows = tuple(value["column_crc32"]), tuple(value["rows"])
        # Checked together for speed: shards have dozens of numbers, and a log has thousands of shards.
        nbytes = tuple(value["nbytes"]) if "nbytes" in value else None
        numbers = [*rows, *(nbytes or ()), *[crc for crc in crcs if crc is not None]]
        numbers += [number for place in places if place is not None for number in (place.file, place.offset)]
        if not all(type(number) is int and 0 <= number <= _INT64_MAX for number in numbers):
            raise ValueError("places, checksums and rows must be natural numbers")
        nbytes = schema.plain_nbytes(rows) if nbytes is None else nbytes
        if not len(places) == len(crcs) == len(rows) == len(nbytes) == columns:
            raise ValueError("columns")
        schema.check_nbytes(rows, nbytes)
        for place, size in zip(places, nbytes, strict=True):
            if place is not None and place.offset + size > files[place.file].size:
                raise ValueError("a column ends after its file")
        if not isinstance(value["name"], str) or not isinstance(value["format"], str):
            raise TypeError("name")
        return ShardManifest(value["name"], value["format"], schema, files, places, crcs, rows, nbytes)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptStoreError(f"not a shard's description: {error}") from error


def natural(value: Any, most: int = RANGES["nbytes"][1]) -> int:
    """Return a parsed value if it is an integer from 0 to ``most``.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a natural number up to {most}")
    return value


def integers(values: list[Any], width: int | None = None) -> npt.NDArray[np.int64]:
    """Return parsed numbers as an array ``[n]``, or rows of numbers as ``[n, width]``.

    Raises:
        ValueError: some are not 64-bit integers, or a row has the wrong length.
    """
    array = np.array(values, None if values else np.int64)
    shape = (len(values),) if width is None else (len(values), width)
    if array.dtype != np.int64 or (values and array.shape != shape):
        raise ValueError("not whole numbers of 64 bits, or another count of them")
    return array.reshape(shape)


def id_ranges(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ascending, distinct ids as inclusive ranges ``[n, 2]``."""
    if not len(ids):
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    return np.stack([ids[np.append(0, breaks + 1)], ids[np.append(breaks, len(ids) - 1)]], axis=1)


def ids_in_words(ids: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Return ids for a message, with consecutive ones as ranges: ``"3 to 7, 9"``."""
    return ranges_in_words(id_ranges(np.unique(np.asarray(ids, np.int64))).tolist())


def ranges_in_words(ranges: Iterable[Sequence[int]]) -> str:
    """Return inclusive ranges of ids for a message."""
    pairs = ((shown_id(low), shown_id(high)) for low, high in ranges)
    return listed(low if low == high else f"{low} to {high}" for low, high in pairs)


def parse_ranges(value: Any) -> npt.NDArray[np.int64]:
    """Return the inclusive id ranges of a record or a pin, ``[n, 2]``.

    Raises:
        CorruptStoreError: they are not ranges.
    """
    try:
        if not isinstance(value, list):
            raise TypeError(f"a {type(value).__name__}")
        ranges = integers(value, 2)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"not a list of id ranges: {error}") from error
    wrong = (ranges[:, 0] < 0) | (ranges[:, 0] > ranges[:, 1]) | (ranges[:, 1] > RANGES["trajectory_id"][1])
    if wrong.any():
        first, last = ranges[np.argmax(wrong)].tolist()
        raise CorruptStoreError(f"not a list of id ranges: range {first}..{last}")
    return ranges


def lie_in(ids: npt.NDArray[np.int64], ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return, per id, whether it lies in one of the inclusive ranges ``[n, 2]``, which may overlap."""
    if not len(ranges):
        return np.zeros(len(ids), np.bool_)
    order = np.argsort(ranges[:, 0], kind="stable")
    lows, reach = ranges[order, 0], np.maximum.accumulate(ranges[order, 1])
    at = np.searchsorted(lows, ids, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (reach[at] >= ids)
    return inside
