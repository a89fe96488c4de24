"""What a commit is: the shards to be recorded, the line of the log, what the listener is told. Pure; no I/O.

Lines are made with ``CommitLog._lock`` held, for they go on from what the catalog has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.core.columns.schema import Extent, Schema
from trajstore.core.formats.base import ShardManifest
from trajstore.core.store.additions import by_id
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.given import Said
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.log_records import encode_line, manifest_to_json
from trajstore.core.store.moves import Moved, move_to_json
from trajstore.core.store.new_entries import starts_of
from trajstore.core.store.notes import Noted
from trajstore.core.writing.groups import ShardDraft


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed shard, as told to the listener."""

    ids: tuple[int, ...]
    row: int
    columns: Mapping[str, Any]


class CommitListener:
    """What a writer tells; called with the log's lock held, so it must not call the writer back. This one does nothing.

    What it is told is durable: an error that it raises is logged and changes nothing. After one of
    ``evicted``, ``moved``, ``noted`` or ``replaced`` it is told that it is ``out_of_step``.
    """

    def metadata(self) -> Mapping[str, Any]:
        """Return what else ``metadata.json`` shall say (seed, ...)."""
        return {}

    def make_room(self, index: TrajectoryIndex, ids: npt.NDArray[np.int64]) -> None:
        """Have memory in the store's index for entries of these ids."""
        index.reserve(len(ids))

    def committed(self, commits: Sequence[Commit]) -> None:
        """These shards are durable."""

    def rejected(self, ids: Sequence[int]) -> None:
        """These trajectories cannot be written, for their own sake, and will never be durable."""

    def to_evict(self) -> Sequence[int]:
        """Return the ids that retention wants evicted now."""
        return ()

    def evicted(self, ids: Sequence[int]) -> None:
        """These trajectories are durably out of the store."""

    def moved(self, moved: Moved) -> None:
        """These trajectories are durably in another shard."""

    def noted(self, noted: Noted) -> None:
        """These trajectories durably have values that came late."""

    def replaced(self) -> None:
        """The catalog has other live trajectories now, durably: those of a saved point, or what was set aside too."""

    def out_of_step(self, error: Exception) -> None:
        """What is shown may not be what is durable, because being told raised an error: show nothing any more."""


@dataclass(frozen=True, slots=True)
class AddLines:
    """Commits as they go into the log, the catalog and the view.

    Attributes:
        data: one line for each commit.
        entries: per commit, the index columns of its trajectories, by ascending id.
        told: every shard of all commits.
    """

    data: bytes
    entries: list[Mapping[str, Any]]
    told: list[Commit]


def add_lines(catalog: Catalog, commits: Sequence[Sequence[ShardDraft]], now: int) -> AddLines:
    """Return the lines of commits that follow the catalog's generation, one or more shards in each.

    Args:
        catalog: as the log has it.
        commits: the shards of each.
        now: the machine's time in µs since 1970. A commit is never older than those before it.
    """
    time = max(now, catalog.newest_time)
    schemas = _SchemaNumbers(catalog)
    lines: list[bytes] = []
    entries: list[Mapping[str, Any]] = []
    told: list[Commit] = []
    row = len(catalog.shards)
    for offset, shards in enumerate(commits):
        numbers = [schemas.number(shard.manifest.schema) for shard in shards]
        lines.append(
            encode_line(
                {
                    "generation": catalog.generation + 1 + offset,
                    "operation": "add",
                    "time": time,
                    "schemas": schemas.news(),
                    "shards": [
                        {
                            "number": shard.number,
                            "shard": manifest_to_json(shard.manifest, schema),
                            "entries": orjson.Fragment(shard.record),
                        }
                        for shard, schema in zip(shards, numbers, strict=True)
                    ],
                }
            )
        )
        of_shards = []
        for shard in shards:
            columns = catalog.index.translated(shard.entries.columns, shard.entries.texts)
            columns["committed"] = np.full(len(shard.entries), time, np.int64)
            columns["shard"] = np.full(len(shard.entries), row, np.int32)
            columns |= starts_of(shard.entries.extents, shard.manifest.schema.kind)
            of_shards.append(columns)
            told.append(Commit(tuple(shard.ids), row, columns))
            row += 1
        entries.append(by_id(of_shards))
    return AddLines(b"".join(lines), entries, told)


def evict_line(catalog: Catalog, ranges: Sequence[Sequence[int]]) -> bytes:
    """Return the line of an eviction, of inclusive ranges of ids, that follows the catalog's generation."""
    return encode_line({"generation": catalog.generation + 1, "operation": "evict", "ids": ranges})


def annotate_line(catalog: Catalog, said: Said) -> bytes:
    """Return the line of values that came late, which follows the catalog's generation."""
    told: dict[str, Any] = {}
    if said.rows is not None:
        schemas = _SchemaNumbers(catalog)
        schema = schemas.number(said.rows.manifest.schema)
        told["rows"] = said.rows.to_json(schemas.news(), schema)
    return encode_line({"generation": catalog.generation + 1, "operation": "annotate", **said.to_json(), **told})


def rewrite_line(
    catalog: Catalog, number: int, manifest: ShardManifest, ids: Sequence[int], extents: Sequence[Extent]
) -> bytes:
    """Return the line of a rewrite that follows the catalog's generation; as :meth:`CommitLog.move` is given it."""
    schemas = _SchemaNumbers(catalog)
    schema = schemas.number(manifest.schema)
    return encode_line(
        {
            "generation": catalog.generation + 1,
            "operation": "rewrite",
            "number": number,
            "schemas": schemas.news(),
            "shard": manifest_to_json(manifest, schema),
            **move_to_json(ids, extents),
        }
    )


class _SchemaNumbers:
    """Numbers of the schemas that new records refer to. The catalog has those of new ones when the records are durable.

    Args:
        catalog: as the log has it.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._table = catalog.shards
        self._new: dict[Schema, int] = {}
        self._untold: list[Schema] = []

    def number(self, schema: Schema) -> int:
        """Return a schema's number."""
        number = self._table.schema_number(schema)
        if number is None:
            number = self._new.get(schema)
        if number is None:
            number = self._new[schema] = len(self._table.schemas) + len(self._new)
            self._untold.append(schema)
        return number

    def news(self) -> list[Any]:
        """Return, as JSON values, the schemas that the next record has to tell; they are new but once."""
        untold, self._untold = self._untold, []
        return [schema.to_json() for schema in untold]
