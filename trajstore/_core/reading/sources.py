"""Directories that a buffer reads; each opens its shards by row, mapped if possible.

Opening shards of a buffer needs ``Contents.lock``; changing tables of loaded sources needs ``View.steady``.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.limits import UNKNOWN_TIME
from trajstore._core.columns.schema import Extent
from trajstore._core.files.base import Directory
from trajstore._core.files.partial import PartialMap, fetched
from trajstore._core.formats import frames, packed
from trajstore._core.formats.base import SHARDS_FOLDER, ShardManifest, ShardReader
from trajstore._core.reading.address_table import MappedShard
from trajstore._core.reading.shard_access import damage_of, reader_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import ids_in_words
from trajstore._core.store.notes import StoreNotes
from trajstore._core.store.run_ids import own_id
from trajstore.errors import CorruptStoreError, listed, trajectories

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lost:
    """Index entries whose files are absent or have changed size.

    Attributes:
        positions: positions of the entries.
        ids: their trajectory ids.
        files: a sentence on each file.
    """

    positions: npt.NDArray[np.intp]
    ids: npt.NDArray[np.int64]
    files: tuple[str, ...]

    def __str__(self) -> str:
        ids = ids_in_words(self.ids)
        known = f"trajectory {ids} is" if len(self.ids) == 1 else f"{trajectories(len(self.ids))} (ids {ids}) are"
        return f"{known} lost: {listed(self.files)}"


class Source(ABC):
    """A directory with trajectories; column ``shard`` of their index holds rows of its table of shards."""

    directory: Directory
    checked: bool = False
    """Whether checksums are verified on the first read of a shard."""
    linkable: ClassVar[bool]
    """Whether another directory can link to a shard's files."""

    @property
    def name(self) -> str:
        """Identity of the directory; the same name implies the same trajectories for its ids."""
        return self.directory.url

    @property
    def generation(self) -> int:
        """Number of commits seen."""
        return 0

    def changed(self, listed: Mapping[str, str] | None = None) -> bool:
        """Check for new commits; return whether there were any. The argument is that of :meth:`Catalog.behind`."""
        return False

    def extent(self, row: int) -> Extent | None:
        """Return the extent of a single-trajectory shard if the index lacks it."""
        return None

    @property
    @abstractmethod
    def shards(self) -> int:
        """Number of shards."""

    @abstractmethod
    def map_shard(self, row: int) -> MappedShard | None:
        """Return a mapped shard, or None if its columns cannot be read in place.

        Raises:
            CorruptStoreError: a file is missing or damaged, or its size differs from the index.
        """

    @abstractmethod
    def manifest(self, row: int) -> ShardManifest:
        """Return a shard's manifest."""

    @abstractmethod
    def reader(self, row: int) -> ShardReader:
        """Return a reader that decodes a shard."""


class StoreSource(Source):
    """A directory written by trajstore."""

    linkable = True

    has_pending = False
    """Whether the catalog has late values from the store's inbox, which the log lacks."""

    lost_rows: frozenset[int] = frozenset()
    """Numbers of the shards whose late values by row are damaged; a copy leaves them out."""

    twins: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)
    """Trajectories that are shown as another store's: their ids here, and there."""

    newest = UNKNOWN_TIME
    """Commit time of the newest trajectory that a reader of a run has shown of this store."""

    def __init__(self, catalog: Catalog, checked: bool = False) -> None:
        self.checked = checked
        self._sound: set[str] = set()
        self._told_whole: set[str] = set()
        self.catalog = catalog
        self.directory = catalog.directory
        self._reader: tuple[int, ShardReader] | None = None  # the next trajectory is often in the same shard

    @property
    def name(self) -> str:
        return self.catalog.store_id

    @property
    def generation(self) -> int:
        return self.catalog.generation

    def changed(self, listed: Mapping[str, str] | None = None) -> bool:
        return self.catalog.behind(listed)

    def notes_for(self, number: int, ids: npt.NDArray[np.int64]) -> StoreNotes:
        """Return the late values of shown trajectories of this source, and of its twins.

        Args:
            number: number of the source.
            ids: shown ids.
        """
        count = self.shards
        lost = np.isin(self.catalog.shards.numbers()[:count], list(self.lost_rows))
        own, shown = np.concatenate([own_id(ids), self.twins[:, 0]]), np.concatenate([ids, self.twins[:, 1]])
        return StoreNotes(self.name, number, self.catalog.notes.frozen(), own, shown, count, lost)

    def lost(self, index: TrajectoryIndex) -> Lost | None:
        """Return entries whose shard has missing or wrongly sized files; None if all are intact.

        Contents are not read; only files of these entries' shards are checked.
        """
        needed = np.zeros(self.shards, np.bool_)
        needed[index["shard"]] = True
        wrong: dict[int, str] = {}
        shard_files = list(self.catalog.shards.file_sizes(np.flatnonzero(needed)))
        actual_sizes = self.directory.sizes_of([name for _, names, _ in shard_files for name in names], SHARDS_FOLDER)
        parts = np.split(actual_sizes, np.cumsum([len(names) for _, names, _ in shard_files], dtype=np.intp))
        for (rows, names, sizes), there in zip(shard_files, parts, strict=False):  # nothing follows the last one
            for at in np.flatnonzero(there != sizes).tolist():
                problem = f"has {there[at]:,} bytes, must have {sizes[at]:,}" if there[at] >= 0 else "is missing"
                wrong[int(rows[at])] = f"{names[at]} {problem}"
        if not wrong:
            return None
        at_fault = np.isin(index["shard"], list(wrong))
        return Lost(index.first + np.flatnonzero(at_fault), index["trajectory_id"][at_fault], tuple(wrong.values()))

    @property
    def shards(self) -> int:
        return len(self.catalog.shards)

    def manifest(self, row: int) -> ShardManifest:
        return self.catalog.shards.manifest(row)

    def _check(self, row: int, manifest: ShardManifest) -> None:
        """Verify the checksums of a shard on its first read.

        Local copies are always verified, and fetched again on mismatch: a checksum is cheap beside a fetch, and copies
        may decay unnoticed.

        Raises:
            CorruptStoreError: a checksum does not match; names files, columns and trajectories.
        """
        directory = self.directory
        if manifest.name in self._sound or not (self.checked or directory.copies_files):
            return
        if not self.checked and directory.reads_ranges and None not in manifest.places:
            return  # read in place
        damage = damage_of(self.directory, manifest)
        if damage and self.directory.drop_copies(file.name for file in manifest.files):
            logger.warning("%s/%s: fetched again", self.directory.url, "; ".join(damage))
            damage = damage_of(self.directory, manifest)
        if damage:
            ids = self._ids_in(row)
            if not len(ids):
                given = ids_in_words(self.catalog.notes.ids_in(row))
                raise CorruptStoreError(
                    f"{self.directory.url}/{'; '.join(damage)}; values by row of trajectories {given} are in it; "
                    "restore the file from a copy, annotate them again, or remove them (annotate with None)"
                )
            raise CorruptStoreError(
                f"{self.directory.url}/{'; '.join(damage)}; trajectories {ids_in_words(ids)} are in it; "
                "restore the file from a copy, evict these trajectories, or let `trajstore repair` make a new store "
                "without them"
            )
        self._sound.add(manifest.name)

    def _ids_in(self, row: int) -> npt.NDArray[np.int64]:
        """Return the ids of the trajectories in a shard, by the present index of the directory."""
        catalog, number = Catalog.open(self.directory), self.catalog.shards.number(row)
        rows = np.flatnonzero(catalog.shards.numbers() == number)
        indexes = (catalog.index, catalog.pinned)
        return np.concatenate([index["trajectory_id"][np.isin(index["shard"], rows)] for index in indexes])

    def map_shard(self, row: int) -> MappedShard | None:
        manifest = self.catalog.shards.manifest(row)
        self._check(row, manifest)
        if None in manifest.places:
            self._tell_whole(manifest)
            return None
        open_file = self.directory.map if self.checked else self.directory.map_rows  # checksums cover whole columns
        maps = [open_file(file.name, file.size) for file in manifest.files]
        addresses = [maps[place.file].address + place.offset for place in manifest.places if place is not None]
        partial = [file_map for file_map in maps if isinstance(file_map, PartialMap)]
        keep: list[Any] = [*maps]
        for column, before in manifest.schema.stored_once.items():
            own, nbytes = addresses[column], frames.table_nbytes(manifest, column)
            table = _bytes_at(own, nbytes, partial)
            keep.append(frames.row_addresses(manifest, column, table, own, addresses[before]))
            addresses[column] = keep[-1].ctypes.data
        in_blocks = packed.is_packed(manifest.schema)
        for column, block in enumerate([*addresses] if in_blocks else ()):
            head = _bytes_at(block, min(packed.HEAD_BYTES, manifest.nbytes[column]), partial)
            nbytes, at = packed.table_nbytes(manifest, column, head), block
            if partial:  # what was fetched may be dropped
                keep.append(np.frombuffer(_bytes_at(block, nbytes, partial), np.uint8))
                at = keep[-1].ctypes.data
            keep.append(packed.description(manifest, column, block, at))
            addresses[column] = keep[-1].ctypes.data
        return MappedShard(manifest.schema, addresses, keep, maps=len(maps), partial=partial, packed=in_blocks)

    def _tell_whole(self, manifest: ShardManifest) -> None:
        if self.directory.reads_ranges and manifest.format not in self._told_whole:
            self._told_whole.add(manifest.format)
            logger.warning(
                "%s: range_reads has no effect on %s, whose columns are compressed or pickled: such shards of format "
                "%s are fetched whole",
                self.directory.url,
                manifest.name,
                manifest.format,
            )

    def reader(self, row: int) -> ShardReader:
        if self._reader is None or self._reader[0] != row:
            self._reader = None  # free its decoded data before decoding more
            manifest = self.manifest(row)
            self._check(row, manifest)
            self._reader = (row, reader_of(self.directory, manifest))
        return self._reader[1]


def _bytes_at(address: int, nbytes: int, partial: Sequence[PartialMap]) -> bytes:
    """Return a copy of bytes of mapped files, fetched where necessary."""
    if not partial:
        return ctypes.string_at(address, nbytes)
    with fetched(partial, lambda: (np.array([address]), np.array([nbytes]))):
        return ctypes.string_at(address, nbytes)
