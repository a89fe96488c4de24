"""Builds commits: shards to record, log lines and listener calls. Pure; no I/O.

Build lines with ``CommitLog._lock`` held; they depend on the catalog's current generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from trajstore._core.base.types import IntArray
from trajstore._core.columns.schema import Schema
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.additions import NewEntries, by_id, starts_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.committed import Change
from trajstore._core.store.index import TrajectoryIndex, renumbered
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.log_records import encode_line, id_ranges, in_pieces, manifest_to_json
from trajstore._core.writing.groups import ShardDraft


class CommitListener:
    """Receives a writer's changes; this base class ignores them.

    Methods run with the log's lock held and must not call the writer. Every reported change is durable: an error raised
    here is logged and changes nothing. If ``changed`` or ``replaced`` raises, ``missed`` is called.
    """

    def make_room(self, index: TrajectoryIndex, ids: IntArray) -> None:
        """Reserve memory in the store's index for entries of these ids."""
        index.reserve(len(ids))

    def changed(self, changes: Sequence[Change]) -> None:
        """These changes are durable, as the log's catalog has applied them."""

    def to_evict(self, newest: int | None = None) -> IntArray:
        """Return the ids that the retention policy evicts now, or once all ids up to ``newest`` are committed."""
        return np.zeros(0, np.int64)

    def forget(self, ids: Sequence[int]) -> None:
        """These trajectories are invalid and will never become durable."""

    def replaced(self) -> None:
        """The catalog's live trajectories were durably replaced, by a saved point or by re-adding data set aside."""

    def missed(self, error: Exception) -> None:
        """Refuse reads from now on: a change could not be shown."""


def add_lines(catalog: Catalog, commits: Sequence[Sequence[ShardDraft]], now: int) -> tuple[bytes, list[NewEntries]]:
    """Return the log lines of commits that follow the catalog's generation, and the entries of each commit.

    Args:
        catalog: the log's catalog.
        commits: the shards of each commit, at least one per commit.
        now: the machine's time in µs since 1970; raised to the newest commit time if that is later.
    """
    time = max(now, catalog.newest_time)
    lines: list[bytes] = []
    entries: list[NewEntries] = []
    row, new = len(catalog.shards), dict[Schema, int]()
    for generation, shards in enumerate(commits, catalog.generation + 1):
        schema_count = len(new)
        records, parts, texts = [], [], shards[0].entries.texts
        for shard in shards:
            added, schema = shard.entries, shard.manifest.schema
            description = manifest_to_json(shard.manifest, catalog.shards.next_number_of(schema, new))
            records.append({"number": shard.number, "shard": description, "entries": orjson.Fragment(shard.record)})
            columns = renumbered(added.columns, added.texts, texts)
            columns["committed"] = np.full(len(added), time, np.int64)
            columns["shard"] = np.full(len(added), row, np.int32)
            parts.append(columns | starts_of(added.extents, schema.kind))
            row += 1
        record = {"generation": generation, "operation": "add", "time": time}
        lines.append(encode_line(record | {"schemas": _to_json(new, schema_count), "shards": records}))
        entries.append(NewEntries(by_id(parts), texts))
    return b"".join(lines), entries


def evict_line(generation: int, ranges: IntArray) -> bytes:
    """Return the log line that evicts inclusive ranges of ids, ``[n, 2]``, the commit of this generation."""
    long: list[bytes] = []
    return encode_line({"generation": generation, "operation": "evict", "ids": in_pieces(ranges, long)}, long)


def annotate_line(catalog: Catalog, update: LateValues) -> bytes:
    """Return the log line for late values."""
    rows: dict[str, Any] = {}
    if update.rows is not None:
        new: dict[Schema, int] = {}
        schema = catalog.shards.next_number_of(update.rows.manifest.schema, new)
        rows["rows"] = update.rows.to_json(_to_json(new), schema)
    record, long = {"generation": catalog.generation + 1, "operation": "annotate", **update.to_json()}, list[bytes]()
    record["ids"] = in_pieces(update.ids, long)
    record["values"] = {name: in_pieces(items, long) for name, items in update.values.items()}
    return encode_line(record | rows, long)


def rewrite_line(catalog: Catalog, number: int, manifest: ShardManifest, ids: IntArray, extents: IntArray) -> bytes:
    """Return the log line of a rewrite; arguments as in :meth:`CommitLog.move`."""
    new: dict[Schema, int] = {}
    schema = catalog.shards.next_number_of(manifest.schema, new)
    return encode_line(
        {
            "generation": catalog.generation + 1,
            "operation": "rewrite",
            "number": number,
            "schemas": _to_json(new),
            "shard": manifest_to_json(manifest, schema),
            "ids": id_ranges(ids),
            "extents": extents,
        }
    )


def _to_json(new: Mapping[Schema, int], first: int = 0) -> list[Any]:
    """Return the new schemas of a record as JSON values, without the ``first`` ones of earlier records.

    The catalog learns new schemas once the records are durable.
    """
    return [schema.to_json() for schema in list(new)[first:]] if len(new) > first else []
