"""Builds commits: shards to record, log lines and listener calls. Pure; no I/O.

Build lines with ``CommitLog._lock`` held; they depend on the catalog's current generation.
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
    """One committed shard, as passed to the listener."""

    ids: tuple[int, ...]
    row: int
    columns: Mapping[str, Any]


class CommitListener:
    """Receives a writer's changes; this base class ignores them.

    Methods run with the log's lock held and must not call the writer. Every reported change is durable: an error raised
    here is logged and changes nothing. If ``evicted``, ``moved``, ``noted`` or ``replaced`` raises,
    ``out_of_step`` is called.
    """

    def metadata(self) -> Mapping[str, Any]:
        """Return extra values for ``metadata.json`` (seed, ...)."""
        return {}

    def make_room(self, index: TrajectoryIndex, ids: npt.NDArray[np.int64]) -> None:
        """Reserve memory in the store's index for entries of these ids."""
        index.reserve(len(ids))

    def committed(self, commits: Sequence[Commit]) -> None:
        """These shards are durable."""

    def rejected(self, ids: Sequence[int]) -> None:
        """These trajectories are invalid and will never become durable."""

    def to_evict(self) -> Sequence[int]:
        """Return the ids that the retention policy evicts now."""
        return ()

    def evicted(self, ids: Sequence[int]) -> None:
        """These trajectories were durably evicted."""

    def moved(self, moved: Moved) -> None:
        """These trajectories were durably moved to another shard."""

    def noted(self, noted: Noted) -> None:
        """These trajectories durably received late values."""

    def replaced(self) -> None:
        """The catalog's live trajectories were durably replaced, by a saved point or by re-adding data set aside."""

    def out_of_step(self, error: Exception) -> None:
        """A listener failed, so the shown index may be stale; refuse reads."""


@dataclass(frozen=True, slots=True)
class AddLines:
    """Commits in the forms for the log, the catalog and the listener.

    Attributes:
        data: one line for each commit.
        entries: per commit, the index columns of its trajectories, by ascending id.
        told: every shard of all commits.
    """

    data: bytes
    entries: list[Mapping[str, Any]]
    told: list[Commit]


def add_lines(catalog: Catalog, commits: Sequence[Sequence[ShardDraft]], now: int) -> AddLines:
    """Return the log lines of commits that follow the catalog's generation.

    Args:
        catalog: the log's catalog.
        commits: the shards of each commit, at least one per commit.
        now: the machine's time in µs since 1970; raised to the newest commit time if that is later.
    """
    time = max(now, catalog.newest_time)
    schemas = _SchemaNumbers(catalog)
    lines: list[bytes] = []
    entries: list[Mapping[str, Any]] = []
    added: list[Commit] = []
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
            added.append(Commit(tuple(shard.ids), row, columns))
            row += 1
        entries.append(by_id(of_shards))
    return AddLines(b"".join(lines), entries, added)


def evict_line(catalog: Catalog, ranges: Sequence[Sequence[int]]) -> bytes:
    """Return the log line that evicts inclusive ranges of ids."""
    return encode_line({"generation": catalog.generation + 1, "operation": "evict", "ids": ranges})


def annotate_line(catalog: Catalog, said: Said) -> bytes:
    """Return the log line for late values."""
    rows: dict[str, Any] = {}
    if said.rows is not None:
        schemas = _SchemaNumbers(catalog)
        schema = schemas.number(said.rows.manifest.schema)
        rows["rows"] = said.rows.to_json(schemas.news(), schema)
    return encode_line({"generation": catalog.generation + 1, "operation": "annotate", **said.to_json(), **rows})


def rewrite_line(
    catalog: Catalog, number: int, manifest: ShardManifest, ids: Sequence[int], extents: Sequence[Extent]
) -> bytes:
    """Return the log line of a rewrite; arguments as in :meth:`CommitLog.move`."""
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
    """Assigns numbers to schemas in new records. The catalog learns new schemas once the records are durable.

    Args:
        catalog: the log's catalog.
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
        """Return the new schemas for the next record as JSON values; each is returned once."""
        new_schemas, self._untold = self._untold, []
        return [schema.to_json() for schema in new_schemas]
