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
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.columns.fields import Axis
from trajstore.columns.limits import RANGES, UNKNOWN_VERSION
from trajstore.columns.record import Record
from trajstore.columns.schema import Schema
from trajstore.errors import CorruptStoreError, listed
from trajstore.files.base import check_name
from trajstore.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore.store.packing import StringTable

LOG_FOLDER = "log"
SHARDS_FOLDER = "shards"

_INT64_MAX = RANGES["nbytes"][1]


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
        places = tuple(None if place is None else ColumnPlace(*place) for place in value["places"])
        crcs, rows = tuple(value["column_crc32"]), tuple(value["rows"])
        # Checked together: shards have dozens of these numbers, and a log has thousands of shards.
        numbers = [*rows, *[crc for crc in crcs if crc is not None]]
        numbers += [number for place in places if place is not None for number in (place.file, place.offset)]
        if not all(type(number) is int and 0 <= number <= _INT64_MAX for number in numbers):
            raise ValueError("places, checksums and rows must be natural numbers")
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


def natural(value: Any, most: int = RANGES["nbytes"][1]) -> int:
    """Return a value that was read, if it is a whole number from 0 to ``most``.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a natural number up to {most}")
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


def added_to_json(schemas: Sequence[Any], shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a record says of the shards that a commit adds: of several a list, a single one stands for itself.

    Args:
        schemas: those that are new, as JSON values.
        shards: ``number``, ``shard`` (its manifest) and ``entries`` of each, as JSON values.
    """
    if len(shards) > 1:
        return {"schemas": schemas, "shards": shards}
    return {"number": shards[0]["number"], "schemas": schemas, **shards[0]}


def added_in(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return number, manifest and entries of each shard that a record adds.

    Raises:
        CorruptStoreError: it adds none.
    """
    shards = record.get("shards", [record])
    if not isinstance(shards, list) or not shards:
        raise CorruptStoreError("a commit without shards")
    return shards


@dataclass(frozen=True, slots=True)
class AddedShard:
    """What a record says that was added.

    Attributes:
        generation: of the record; several shards may come with one.
        number: of the shard.
        row: in the shard table.
        manifest: the shard's.
        entries: the record's, of its trajectories.
    """

    generation: int
    number: int
    row: int
    manifest: ShardManifest
    entries: Mapping[str, Any]


def entries_from_json(added: Sequence[AddedShard], weights: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories of some records, those of each by id; ranges are not checked.

    Args:
        added: what the records say, in their order; one shard or more.
        weights: table that takes their ``model_weights_id``.

    Raises:
        CorruptStoreError: the trajectories do not add up to a shard's rows, or their ids are no ranges.
        KeyError, TypeError, ValueError, OverflowError: values are absent or of the wrong kind.
    """
    entries = [one.entries for one in added]
    for name in ("extents", "versions", "weights", "max_episode_length"):
        if not all(type(one[name]) is list for one in entries):
            raise TypeError(f"{name} must be a list")
    extents = _integers([item for one in entries for item in one["extents"]], 4)
    counts = np.array([len(one["extents"]) for one in entries], np.int64)
    versions = [_UNKNOWN if pair is None else pair for one in entries for pair in one["versions"]]
    bounds = _integers(versions, 2)
    texts = [text for one in entries for text in one["weights"]]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("weights must be strings")
    of_steps = np.repeat(np.array([one.manifest.schema.kind == "step" for one in added], np.bool_), counts)
    rows = _rows_of(extents)
    starts, nbytes = _lay_out(added, counts, rows)
    columns: dict[str, npt.NDArray[Any]] = {
        "trajectory_id": _expand(entries, counts),
        "num_samples": np.where(of_steps, rows[Axis.SAMPLES], 1).astype(np.int64),
        **{name: extents[:, at] for at, name in enumerate(("steps", "batch", "extra", "document"))},
        "nbytes": nbytes.astype(np.int64),
        "max_episode_length": _integers([number for one in entries for number in one["max_episode_length"]]),
        "version_low": bounds[:, 0],
        "version_high": bounds[:, 1],
        "weights": np.array([weights.add(text) for text in texts], np.int32),
        "uuid": np.frombuffer(bytes.fromhex("".join([one["uuids"] for one in entries])), "V16"),
        "shard": np.repeat(np.array([one.row for one in added], np.int32), counts),
        "start_samples": starts[Axis.SAMPLES],
        "start_extra": np.where(of_steps, starts[Axis.FIRST_EXTRA], starts[Axis.RESPONSE]),
        "start_document": starts[Axis.DOCUMENT],
    }
    generations = [one.generation for one in added]
    if len(set(generations)) == len(added):
        return columns
    ends = np.cumsum(counts).tolist()
    shards = [
        {name: column[end - count : end] for name, column in columns.items()}
        for end, count in zip(ends, counts.tolist(), strict=True)
    ]
    commits = groupby(zip(generations, shards, strict=True), key=itemgetter(0))
    return _joined([by_id([shard for _, shard in commit]) for _, commit in commits])


def by_id(shards: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories of one commit, by ascending id.

    Args:
        shards: columns of the trajectories in each of its shards, by ascending id.

    Raises:
        CorruptStoreError: the ids within a shard do not ascend.
    """
    if len(shards) == 1:
        return dict(shards[0])
    for shard in shards:
        if np.any(np.diff(shard["trajectory_id"]) <= 0):
            raise CorruptStoreError("the ids within a shard do not ascend")
    columns = _joined(shards)
    order = np.argsort(columns["trajectory_id"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def _joined(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


_UNKNOWN = (UNKNOWN_VERSION, UNKNOWN_VERSION)


def _integers(values: list[Any], width: int | None = None) -> npt.NDArray[np.int64]:
    """Return numbers ``[n]``, or rows of numbers ``[n, width]``, that were read.

    Raises:
        ValueError: some are no whole numbers of 64 bits, or a row has more or fewer.
    """
    array = np.array(values, None if values else np.int64)
    shape = (len(values),) if width is None else (len(values), width)
    if array.dtype != np.int64 or (values and array.shape != shape):
        raise ValueError("not whole numbers of 64 bits, or another count of them")
    return array.reshape(shape)


def _rows_of(extents: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Return, per axis, the rows of each trajectory; as exact Python numbers where 64 bits might not do."""
    exact: npt.NDArray[Any] = extents
    if len(extents) and (extents.min() < 0 or extents.max() > RANGES["steps"][1]):
        exact = extents.astype(object)
    steps, batch, extra, document = exact.T
    more = (steps + extra) * batch
    return [steps * batch, more, more, extra, document]


def _lay_out(
    added: Sequence[AddedShard], counts: npt.NDArray[np.int64], rows: Sequence[npt.NDArray[Any]]
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[Any]]:
    """Return, per axis, where the rows of each trajectory begin in its shard; and its bytes.

    Raises:
        CorruptStoreError: they do not add up to the rows of a shard.
    """
    if counts.min() == 0:
        raise CorruptStoreError("a shard without trajectories")
    begins = np.cumsum(counts) - counts
    totals = np.stack([np.add.reduceat(each, begins) for each in rows], axis=1).tolist()
    for one, total in zip(added, totals, strict=True):
        for column, count in zip(one.manifest.schema.columns, one.manifest.rows, strict=True):
            if total[column.axis] != count:
                raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {count} rows")
    widths = np.repeat(np.array([one.manifest.schema.axis_nbytes for one in added]), counts, axis=0)
    starts = []
    nbytes = np.zeros(len(rows[0]), np.int64)
    for axis, each in enumerate(rows):
        ends = np.cumsum(each)
        starts.append((ends - each - np.repeat(ends[begins] - each[begins], counts)).astype(np.int64))
        nbytes = nbytes + each * widths[:, axis]
    return starts, nbytes


def _expand(entries: Sequence[Mapping[str, Any]], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ids of all trajectories.

    Raises:
        CorruptStoreError: a record names more or fewer than it has trajectories.
    """
    told = [one["ids"] for one in entries]
    if not all(type(ranges) is list for ranges in told):
        raise CorruptStoreError("not a list of id ranges")
    joined = parse_ranges([pair for ranges in told for pair in ranges])  # of all records at once
    for ranges, count in zip(told, counts.tolist(), strict=True):
        if sum([last - first + 1 for first, last in ranges]) != count:  # exact: a hostile sum of numpy's wraps around
            raise CorruptStoreError(f"{count} trajectories, but the ids {ranges}")
    lengths = joined[:, 1] - joined[:, 0] + 1
    before = np.cumsum(lengths) - lengths
    return np.repeat(joined[:, 0] - before, lengths) + np.arange(lengths.sum())


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


def parse_ranges(value: Any) -> npt.NDArray[np.int64]:
    """Return the inclusive ranges of ids that a record or a pin says, ``[n, 2]``.

    Raises:
        CorruptStoreError: they are not ranges.
    """
    try:
        if not isinstance(value, list):
            raise TypeError(f"a {type(value).__name__}")
        ranges = _integers(value, 2)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"not a list of id ranges: {error}") from error
    wrong = (ranges[:, 0] < 0) | (ranges[:, 0] > ranges[:, 1]) | (ranges[:, 1] > RANGES["trajectory_id"][1])
    if wrong.any():
        first, last = ranges[np.argmax(wrong)].tolist()
        raise CorruptStoreError(f"not a list of id ranges: range {first}..{last}")
    return ranges
