"""Directories that a buffer reads: each opens its shards by row, mapped where it can be."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

import numpy as np

from trajstore.catalog import Catalog
from trajstore.errors import CorruptStoreError
from trajstore.formats import open_shard
from trajstore.formats.base import Buffer, ShardManifest, ShardReader
from trajstore.index import TrajectoryIndex
from trajstore.residency import MappedShard, address_of, map_file
from trajstore.schema import Extent
from trajstore.storage import Directory


class Source(ABC):
    """A directory with trajectories; ``index`` says which, its ``shard`` column in which row."""

    directory: Directory
    index: TrajectoryIndex
    linkable: ClassVar[bool]
    """Whether a shard's files can serve in another directory as they are."""

    @property
    def generation(self) -> int:
        """Number of commits that are seen."""
        return 0

    def changed(self) -> bool:
        """Look for new commits; return whether there were any."""
        return False

    def extent(self, row: int) -> Extent | None:
        """Return the extent of the one trajectory in a shard, where the index does not tell it."""
        return None

    @property
    @abstractmethod
    def shards(self) -> int:
        """Number of rows."""

    @abstractmethod
    def map_shard(self, row: int) -> MappedShard | None:
        """Return a shard with its columns mapped; None where they cannot be read in place.

        Raises:
            CorruptStoreError: a file is missing, damaged, or has another size than the index says.
        """

    @abstractmethod
    def manifest(self, row: int) -> ShardManifest:
        """Return what is known of a shard."""

    @abstractmethod
    def reader(self, row: int) -> ShardReader:
        """Return a reader that decodes a shard."""


class StoreSource(Source):
    """A directory that trajstore wrote."""

    linkable = True

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.directory = catalog.directory
        self._reader: tuple[int, ShardReader] | None = None  # the next trajectory is often in the same shard

    @property
    def index(self) -> TrajectoryIndex:  # type: ignore[override]
        return self.catalog.index

    @property
    def generation(self) -> int:
        return self.catalog.generation

    def changed(self) -> bool:
        return self.catalog.behind()

    def missing(self, index: TrajectoryIndex) -> list[tuple[int, str]]:
        """Return (position, file) for each entry whose shard lacks a file."""
        present = set(self.directory.names("shards"))
        needed = np.zeros(self.shards, np.bool_)
        needed[index["shard"]] = True
        absent: dict[int, str] = {}
        for rows, names in self.catalog.shards.file_names(np.flatnonzero(needed)):
            if not present.issuperset(names):
                pairs = zip(rows.tolist(), names, strict=True)
                absent |= {row: name for row, name in pairs if name not in present}
        if not absent:
            return []
        shard = index["shard"]
        return [(index.first + at, absent[shard[at]]) for at in np.flatnonzero(np.isin(shard, list(absent))).tolist()]

    @property
    def shards(self) -> int:
        return len(self.catalog.shards)

    def manifest(self, row: int) -> ShardManifest:
        return self.catalog.shards.manifest(row)

    def map_shard(self, row: int) -> MappedShard | None:
        manifest = self.manifest(row)
        if any(place is None for place in manifest.places):
            return None
        maps: list[mmap.mmap | bytes] = []
        for file in manifest.files:
            try:
                maps.append(map_file(self.directory.local_path(file.name), file.size))
            except FileNotFoundError as error:
                raise CorruptStoreError(
                    f"{self.directory.url}/{file.name}: is missing, but the index names it"
                ) from error
        bases = [address_of(mapped) for mapped in maps]
        addresses = tuple(bases[place.file] + place.offset for place in manifest.places if place is not None)
        return MappedShard(manifest.schema, addresses, maps, maps=len(maps))

    def reader(self, row: int) -> ShardReader:
        if self._reader is None or self._reader[0] != row:
            self._reader = None  # what it decoded goes before more is decoded
            manifest = self.manifest(row)
            self._reader = (row, open_shard(partial(self._fetch, manifest), manifest))
        return self._reader[1]

    def _fetch(self, manifest: ShardManifest, name: str) -> Buffer:
        size = next((file.size for file in manifest.files if file.name == name), None)
        if size is None:
            raise CorruptStoreError(f"{self.directory.url}/{name}: not a file of {manifest.name}")
        try:
            return memoryview(map_file(self.directory.local_path(name), size))
        except FileNotFoundError as error:
            raise CorruptStoreError(f"{self.directory.url}/{name}: is missing, but the index names it") from error
