"""Rewrites partly dead shards to free the disk space of evicted trajectories.

The live trajectories of several shards are copied into one new shard, committed by one log record; the old shards are
then unneeded. docs/design/store.md describes the state after a crash at each point.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.base.machine_code import kernels
from trajstore._core.base.types import IntArray
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.schema import Schema, rows_on
from trajstore._core.files.base import Directory
from trajstore._core.formats import get_format
from trajstore._core.formats.base import ShardContent, ShardManifest, ShardReader, TrajectoryFormat
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.reading.shard_access import damage_of, reader_of
from trajstore._core.store.additions import label_at
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.row_location import START_OF
from trajstore._core.store.shard_table import shard_name
from trajstore._core.writing.commit_log import CommitLog
from trajstore.errors import CorruptStoreError, StoreClosedError, TrajstoreError

logger = logging.getLogger(__name__)

_UNPACKED = 16
"""Rows of a new shard may take this many times its bytes in memory: those of rollouts are packed in files."""

_ENTRY_BYTES = 1024
"""Least bytes that a trajectory of a new shard counts as: recording many takes long, and others wait meanwhile."""

_AT_ONCE = 1 << 18
"""Entries counted in one call, in which no other thread runs."""

COMPRESSED: Mapping[str, Any] = {"codec": "blosc_zstd", "level": 9, "chunk_bytes": 16 << 20}
"""Options of the format ``zarr`` for compressed shards."""

SLACK_BYTES = 1 << 20
"""Dead bytes allowed beyond the live bytes before any rewrite, so that small stores are left alone."""

_LEASES_SECONDS = 1.0
"""Interval at which reader leases are checked while files are kept for readers only."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Fill state of the needed shards.

    Attributes:
        total: bytes of all rows as stored, per shard (row of the shard table); 0 for unneeded shards.
        live: bytes of live and pinned trajectories, per shard; of packed shards, their part of the rows' bytes.
        sizes: what these count as in a new shard: their bytes, more where they take much more memory or are many.
    """

    total: npt.NDArray[np.int64]
    live: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @staticmethod
    def of(entries: Sequence[TrajectoryIndex], rows: IntArray, stored: IntArray) -> Usage:
        """Return the usage of shards.

        Args:
            entries: of the shards; without the log's lock, slices that no commit changes.
            rows: bytes of all rows in memory, per shard.
            stored: bytes of all rows as stored, per shard.
        """
        live, counts = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for index in entries:
            shards, nbytes = index["shard"], index["nbytes"]
            for begin in range(0, len(index), _AT_ONCE):
                block = shards[begin : begin + _AT_ONCE]
                np.add.at(live, block, nbytes[begin : begin + _AT_ONCE])
                counts += np.bincount(block, minlength=len(rows))
        part = stored * (live / np.maximum(rows, 1))
        of_live = np.maximum(np.where(live == rows, stored, np.minimum(part.astype(np.int64), stored - 1)), 0)
        sizes = np.maximum(np.maximum(of_live, live // _UNPACKED), counts * _ENTRY_BYTES)
        return Usage(np.where(counts > 0, stored, 0), of_live, sizes)

    @property
    def is_due(self) -> bool:
        """Whether the dead bytes exceed the live ones by more than the slack."""
        return int(self.total.sum()) > 2 * int(self.live.sum()) + SLACK_BYTES


def choose_cold(
    usage: Usage, schemas: npt.NDArray[np.int32], limit: int, cold: npt.NDArray[np.bool_], *, everything: bool
) -> list[int]:
    """Return shards to compress into one, as rows of the shard table; empty if there are none.

    Args:
        usage: of all shards.
        schemas: schema number of each shard.
        limit: most live bytes to copy; at least one shard is chosen regardless.
        cold: which shards may be compressed.
        everything: also choose fewer bytes than half of the limit.
    """
    sizes, candidates = usage.sizes, np.flatnonzero(cold & (usage.total > 0))
    for schema in np.unique(schemas[candidates]).tolist():
        rows = candidates[schemas[candidates] == schema]
        if everything or 2 * int(sizes[rows].sum()) >= limit:
            fitting: list[int] = rows[: max(1, int(np.searchsorted(np.cumsum(sizes[rows]), limit, "right")))].tolist()
            return fitting
    return []


def choose(
    usage: Usage, schemas: npt.NDArray[np.int32], limit: int, excluded: npt.NDArray[np.bool_], *, everything: bool
) -> list[int]:
    """Return the shards to merge, as rows of the shard table; empty if nothing is gained.

    Args:
        usage: of all shards.
        schemas: kind of each shard; those of one kind can be merged.
        limit: most live bytes to copy; at least one shard is chosen regardless.
        excluded: which shards to leave alone.
        everything: also choose shards with few dead bytes; if there are none, several small shards to merge.
    """
    needed = (usage.total > 0) & ~excluded
    sizes, dead = usage.sizes, usage.total - usage.live
    if everything:
        candidates = np.flatnonzero(needed & (dead > 0))
        if not len(candidates):
            candidates = np.flatnonzero(needed & (2 * sizes <= limit))
    elif usage.is_due:
        candidates = np.flatnonzero(needed & (2 * usage.live <= usage.total))
    else:
        return []
    candidates = candidates[np.argsort(usage.live[candidates] / usage.total[candidates], kind="stable")]
    best: list[int] = []
    for schema in np.unique(schemas[candidates]).tolist():
        rows = candidates[schemas[candidates] == schema]
        fitting = max(1, int(np.searchsorted(np.cumsum(sizes[rows]), limit, side="right")))
        rows = rows[:fitting]
        gained = int(dead[rows].sum())
        if (gained or len(rows) > 1) and (not best or gained > int(dead[best].sum())):
            best = rows.tolist()
    return best


class Rewriter:
    """Rewrites shards of the writer's store, one new shard at a time, in a thread that calls :meth:`run`.

    Commits are blocked while it records, but not while it chooses and copies.

    Args:
        directory: the store's.
        log: the store's.
        trajectory_format: format of new shards.
        shard_bytes: most bytes of trajectories in a new shard.
        new_shard: assigns and returns a shard number.
        compress_after: compress shards that have none of this many newest trajectories; None: none.
    """

    def __init__(
        self,
        directory: Directory,
        log: CommitLog,
        trajectory_format: TrajectoryFormat,
        shard_bytes: int,
        new_shard: Callable[[], int],
        compress_after: int | None = None,
    ) -> None:
        self._compress_after = compress_after
        codec = getattr(trajectory_format, "codec", "none")
        self._compressed = get_format("zarr", **COMPRESSED) if codec == "none" else trajectory_format
        self._directory = directory
        self._log = log
        self._format = trajectory_format
        self._shard_bytes = shard_bytes
        self._new_shard = new_shard
        self._one = locks.lock("Rewriter._one")
        self.damaged: set[int] = set()
        """Rows of the damaged shards that stay as they are."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # an interrupt within an Event.set keeps its lock
        self._closing = False

    def note(self) -> None:
        """Make :meth:`run` check for work."""
        self._news.put(None)

    def stop(self) -> None:
        """Make :meth:`run` return after finishing the current shard."""
        self._closing = True
        self._news.put(None)

    def wait(self) -> None:
        """Wait for the current rewrite; a closed log prevents new ones.

        ``compact`` runs in a user's thread, and the next writer may reuse the number of its new shard.
        """
        with self._one:
            return

    def run(self) -> None:
        """Rewrite shards when it pays off, at first and whenever enough was evicted, until :meth:`stop`."""
        looked_at = -SLACK_BYTES  # evicted bytes at the last check; forces a first check
        pause, after, next_id = 0, self._compress_after, 0
        while not self._closing:
            is_cold = after is not None and self._log.catalog.next_id - next_id > after // 8
            if self._log.evicted_bytes - looked_at <= pause and not is_cold:
                held = self._log.garbage.held_bytes or self._log.garbage.leftovers  # kept for readers only
                self._wait(_LEASES_SECONDS if held else None)
                if held:
                    self._log.collect_garbage()
                continue
            looked_at, next_id = self._log.evicted_bytes, self._log.catalog.next_id
            try:
                while not self._closing and self.step():
                    pass
                while after is not None and not self._closing and self.step(compress=after):
                    pass
            except StoreClosedError:
                return
            except (TrajstoreError, OSError, MemoryError) as error:  # nothing is lost; tried again after more evictions
                logger.warning("%s: shards could not be rewritten: %s", self._directory.url, error)
            except Exception:  # a bug; without rewriting the store only uses more disk space
                logger.exception("%s: shards could not be rewritten", self._directory.url)
            live, _ = self._log.space()  # check again after an eighth of it was evicted
            pause = max(SLACK_BYTES, live // 8)

    def _wait(self, seconds: float | None) -> None:
        """Wait for :meth:`note` or :meth:`stop`; several calls count once."""
        with suppress(queue.Empty):
            self._news.get(timeout=seconds)
            while True:
                self._news.get_nowait()

    def step(self, *, below: int | None = None, compress: int | None = None) -> bool:
        """Merge several shards into a new one if that pays off; return whether it did.

        Args:
            below: merge everything that can be merged, see :func:`choose`, of the shards that have lower ids than this.
            compress: choose shards without these many newest trajectories instead, and compress them.

        Raises:
            StoreClosedError: the writer was closed.
            StoreWriteError: the log could not be written; nothing was moved.
            OSError: the new shard could not be written; nothing was moved.
        """
        with self._one:
            rows = self._choose(below, compress)
            if not rows:
                return False
            with self._log.keeping_files():  # also those of trajectories that are evicted meanwhile
                chosen = self._entries_of(rows, compress=compress is not None)
                if chosen is None:
                    return True
                sources = {row: self._open(row, manifest) for row, manifest in chosen.manifests.items()}
                readable = {row: source for row, source in sources.items() if source is not None}
                if len(readable) < len(sources):
                    return True  # choose again, without those that are damaged
                row, manifest, nbytes = self._rewrite(chosen, readable)
            if compress is None and len(readable) == 1 and nbytes >= chosen.nbytes:  # never ends otherwise
                self.damaged.add(row)
                logger.warning(
                    "%s: the index gives too few bytes for trajectories in %s", self._directory.url, manifest.name
                )
            self._log.collect_garbage()
            return True

    def _choose(self, below: int | None, compress: int | None) -> list[int]:
        """Return the shards to rewrite, as rows of the shard table; empty if there are none."""
        with self._log.standing_still() as catalog:  # all entries are looked at without the lock
            self._log.check_open()
            live, pinned = _slices(catalog)
            rows, stored = catalog.shards.row_bytes(), catalog.shards.stored_bytes()
            schemas, compressed = catalog.shards.schema_numbers(), catalog.shards.compressed()
        usage = Usage.of((live, pinned), rows, stored)
        everything, excluded = below is not None, np.zeros(len(rows), np.bool_)
        if below is not None:
            excluded[:] = True
            for index in (live, pinned):
                excluded[index["shard"][index["trajectory_id"] < below]] = False
        excluded[[*self.damaged]] = True
        if compress is None:
            kinds = 2 * schemas + compressed
            return choose(usage, kinds, self._shard_bytes, excluded, everything=everything)
        cold = ~(compressed | excluded)
        cold[live["shard"][max(0, len(live) - compress) :]] = False
        return choose_cold(usage, schemas, self._shard_bytes, cold, everything=everything)

    def _entries_of(self, rows: Sequence[int], *, compress: bool) -> _Chosen | None:
        """Return what is rewritten of chosen shards; None if all that one of them had was evicted meanwhile."""
        with self._log.standing_still() as catalog:
            slices, chosen = _slices(catalog), np.zeros(len(catalog.shards), np.bool_)
            nbytes = int(catalog.shards.row_bytes()[rows].sum())
            manifests = {row: catalog.shards.manifest(row) for row in rows}
            compress |= bool(catalog.shards.compressed()[rows[0]])
        chosen[rows] = True
        found = TrajectoryIndex()
        for index in slices:
            inside = np.flatnonzero(chosen[index["shard"]])
            found.append(found.translated(index.take(inside), index.texts))
        found.adopt(found.take(np.argsort(found["trajectory_id"], kind="stable")))
        return _Chosen(manifests, found, nbytes, compress) if len(np.unique(found["shard"])) == len(rows) else None

    def _open(self, row: int, manifest: ShardManifest) -> ShardReader | None:
        """Return a reader of an intact shard, or None if it is damaged: a copy would get a new, valid checksum."""
        try:
            problems = damage_of(self._directory, manifest)
        except CorruptStoreError as error:
            problems = [str(error)]
        if not problems:
            return reader_of(self._directory, manifest)
        self.damaged.add(row)
        logger.warning(
            "%s: a shard is damaged and stays as it is: %s; `trajstore verify` lists the loss, `trajstore repair` "
            "makes a new store of the intact part",
            self._directory.url,
            problems[0],
        )
        return None

    def _rewrite(self, chosen: _Chosen, sources: Mapping[int, ShardReader]) -> tuple[int, ShardManifest, int]:
        """Write one merged shard; return its row, its manifest and the bytes of its rows."""
        number, ids, extents = self._new_shard(), chosen.entries["trajectory_id"], chosen.entries.extents()
        schema = chosen.manifests[next(iter(sources))].schema
        columns = [chosen.column(schema, column, sources) for column in range(len(schema.columns))]
        content = ShardContent(schema, extents, [[column.data] for column in columns])
        form = self._compressed if chosen.compressed else self._format
        label = label_at(chosen.entries, np.arange(len(ids)))
        files, manifest = encoded_shard(form, shard_name(number), content, entries=label)
        self._directory.publish(files)
        with self._log.recording(manifest):
            row = self._log.move(number, manifest, ids, extents)
        return row, manifest, sum(column.nbytes for column in columns)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Shards to rewrite together, by row, and their live or pinned entries, by ascending id."""

    manifests: Mapping[int, ShardManifest]
    entries: TrajectoryIndex
    nbytes: int
    """Bytes of all rows written to the shards."""

    compressed: bool
    """Whether the new shard is compressed."""

    def column(self, schema: Schema, column: int, sources: Mapping[int, ShardReader]) -> npt.NDArray[np.uint8]:
        """Return the rows of a column, trajectory after trajectory, as bytes: each shard is read once."""
        spec, width = schema.columns[column], schema.row_nbytes[column]
        counts, starts = rows_on(self.entries.extents(), spec.axis), self.entries[START_OF[spec.axis]]
        sizes = counts * width
        ends = np.cumsum(sizes)
        joined = np.empty(int(ends[-1]), np.uint8)
        targets = joined.ctypes.data + ends - sizes
        for row, reader in sources.items():
            here = np.flatnonzero(self.entries["shard"] == row)
            first, end = int(starts[here].min()), int((starts + counts)[here].max())
            rows = np.frombuffer(raw_bytes(reader.rows(column, first, end).contiguous()), np.uint8)
            kernels.copy_blocks(targets[here], rows.ctypes.data + (starts[here] - first) * width, sizes[here])
        return joined


def _slices(catalog: Catalog) -> tuple[TrajectoryIndex, TrajectoryIndex]:
    """Return the live and the pinned entries, to be read without the log's lock until shards are rewritten."""
    return catalog.index.slice(0, len(catalog.index)), catalog.pinned.slice(0, len(catalog.pinned))
