"""Reads a store for its mirror: a picture of one generation, and the log records up to it.

For the mirror's thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.store.additions import added_in
from trajstore._core.store.catalog import Catalog, log_segments
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import decode_each, parse_ranges
from trajstore._core.store.saved_points import Snapshot, pin_name
from trajstore.errors import CorruptStoreError


@dataclass(frozen=True, slots=True)
class Line:
    """One record of the log, in its file.

    Attributes:
        generation: of the record.
        data: the line, with its line feed.
        shards: numbers of the shards that it names.
        evicts: whether it removes trajectories.
        newest_id: highest id that it adds; None if it adds none.
        segment: its file.
        end: offset after it.
    """

    generation: int
    data: bytes
    shards: tuple[int, ...]
    evicts: bool
    newest_id: int | None
    segment: str
    end: int


class Tail:
    """Reads the log of a store of this process, from the last position."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._segment = ""
        self._end = 0

    def lines(self, after: int, upto: int) -> list[Line] | None:
        """Return the records of all generations above ``after`` up to ``upto``; None if the log lacks some.

        Raises:
            OSError: the log cannot be read.
        """
        found: list[Line] = []
        segments = log_segments(self._directory)
        for place, (first, name) in enumerate(segments):
            if place + 1 < len(segments) and segments[place + 1][0] <= after + 1:
                continue
            if first > after + len(found) + 1:
                return None
            begin = self._end if name == self._segment else 0
            try:
                data = self._directory.read(name, begin)
            except FileNotFoundError:
                return None  # replaced by an index just now
            start = 0
            for record, end in decode_each(data):
                generation = None if record is None else record.get("generation")
                if record is None or not isinstance(generation, int) or generation > upto:
                    break
                if generation > after + len(found):
                    if generation != after + len(found) + 1:
                        return None
                    found.append(_line(record, generation, data[start:end], name, begin + end))
                start = end
        return found if len(found) == upto - after else None

    def move(self, line: Line) -> None:
        """Continue after this record next time."""
        self._segment, self._end = line.segment, line.end


def _line(record: Mapping[str, Any], generation: int, data: bytes, segment: str, end: int) -> Line:
    operation = record.get("operation")
    shards: tuple[int, ...] = ()
    newest = None
    if operation == "add":
        added = added_in(record)
        shards = tuple(int(shard["number"]) for shard in added)
        newest = max(int(parse_ranges(shard["entries"]["ids"]).max()) for shard in added)
    elif operation == "rewrite":
        shards = (int(record["number"]),)
    elif operation == "annotate" and "rows" in record:
        shards = (int(record["rows"]["number"]),)
    elif operation not in ("evict", "annotate"):
        raise CorruptStoreError(f"{segment}: unknown operation {operation!r}")
    return Line(generation, data, shards, operation == "evict", newest, segment, end)


@dataclass(frozen=True, slots=True)
class Picture:
    """A store's state at one generation.

    Attributes:
        generation: of the store.
        newest_id: highest committed id.
        needed: per shard (row of the shard table), whether it holds a live or pinned trajectory.
        pins: all pins, by name.
        pin_files: those that the mirror lacks or has differently, by name.
        whole: ``trajectory_index.json`` and ``metadata.json`` of this state, if requested.
    """

    generation: int
    newest_id: int
    needed: npt.NDArray[np.bool_]
    pins: Mapping[str, Snapshot]
    pin_files: Mapping[str, bytes]
    whole: tuple[EncodedFile, EncodedFile] | None

    @staticmethod
    def of(catalog: Catalog, mirrored: Mapping[str, int], metadata: Mapping[str, Any] | None) -> Picture:
        """Return the picture of a catalog; the caller holds its lock.

        Args:
            catalog: the writer's.
            mirrored: the mirror's pins, with the checksum of each.
            metadata: further fields of ``metadata.json``, if both files are wanted.

        Raises:
            OSError: a pin cannot be read.
        """
        pins = dict(catalog.pins.heads)
        changed = [name for name, head in pins.items() if mirrored.get(name) != head.crc32]
        return Picture(
            catalog.generation,
            catalog.next_id - 1,
            catalog.needed_shards(),
            pins,
            {name: catalog.directory.read(pin_name(name)) for name in changed},
            None if metadata is None else (catalog.snapshot_file(), catalog.metadata_file(**metadata)),
        )


def strange_id(there: TrajectoryIndex, here: TrajectoryIndex) -> int | None:
    """Return an id that has different UUIDs in a mirror and its store; None if there is none."""
    ids, mine, theirs = np.intersect1d(
        here["trajectory_id"], there["trajectory_id"], assume_unique=True, return_indices=True
    )
    other = np.flatnonzero(here["uuid"][mine] != there["uuid"][theirs])
    return int(ids[other[0]]) if len(other) else None
