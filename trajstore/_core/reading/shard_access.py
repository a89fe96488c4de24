"""Reads single trajectories of a catalog from disk without a buffer, for inspection and checks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, cast

import torch

from trajstore._core.columns.conversion import trajectory_of
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import Block, FlatTrajectory
from trajstore._core.columns.schema import Extent, Schema
from trajstore._core.files.base import Buffer, Directory
from trajstore._core.formats import open_shard
from trajstore._core.formats.base import ShardManifest, ShardReader, rows_from_bytes
from trajstore._core.formats.checksums import check_file
from trajstore._core.formats.frames import FramesReader
from trajstore._core.formats.packed import is_packed
from trajstore._core.reading.address_table import MappedShard, ranges_of, rows_at
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryEntry, TrajectoryIndex
from trajstore._core.store.row_location import START_OF, RowLocation
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AnyTrajectory


class ShardAccess:
    """Reads columns and trajectories by index position. Keeps the newest shard open; not thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._row: int | None = None
        self._manifest: ShardManifest | None = None
        self._maps: dict[str, Buffer] = {}
        self._reader: ShardReader | None = None

    def schema(self, index: TrajectoryIndex, position: int) -> Schema:
        """Return the columns of a trajectory."""
        return self._catalog.shards.schema(int(index.at("shard", position)))

    def columns(
        self, index: TrajectoryIndex, position: int, only: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return columns of one trajectory: ``[T (+ E), B, ...]`` (step) or ``[rows, ...]`` (agent).

        Args:
            index: the catalog's ``index`` or ``pinned``.
            position: position in the index.
            only: names to read; None reads all. Absent ones are left out.

        Raises:
            CorruptStoreError: a file is missing or damaged; names it.
        """
        manifest, extent = self._open(int(index.at("shard", position))), index.extent(position)
        tensors = {}
        for number, column in enumerate(manifest.schema.columns):
            if only is not None and column.name not in only:
                continue
            start, rows = int(index.at(START_OF[column.axis], position)), extent.rows(column.axis)
            tensor = self._rows(manifest, number, start, start + rows)
            if manifest.schema.kind == "step" and column.axis is not Axis.DOCUMENT and extent.batch:
                tensor = tensor.reshape(rows // extent.batch, extent.batch, *column.row_shape)
            tensors[column.name] = tensor
        return tensors

    def rows(self, index: TrajectoryIndex, position: int, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Return rows ``[start, stop)`` of a trajectory's column, or None if it lacks the column.

        Raises:
            CorruptStoreError: a file is missing or damaged; names it.
        """
        manifest = self._open(int(index.at("shard", position)))
        for number, column in enumerate(manifest.schema.columns):
            if column.name == name:
                first = int(index.at(START_OF[column.axis], position))
                return self._rows(manifest, number, first + start, first + stop)
        return None

    def trajectory(self, index: TrajectoryIndex, position: int, only: Collection[str] | None = None) -> AnyTrajectory:
        """Return one trajectory with the named columns (all if None).

        Raises:
            CorruptStoreError: a file is missing or damaged; names it.
        """
        entry = index.entry(position)
        schema = self.schema(index, position)
        columns = tuple(column for column in schema.columns if only is None or column.name in only)
        tensors = self.columns(index, position, [column.name for column in columns])
        return trajectory_of(
            Schema(schema.kind, columns),
            entry.extent,
            list(tensors.values()),
            max_episode_length=entry.max_episode_length,
            model_weights_id=entry.model_weights_id,
        )

    def close(self) -> None:
        """Release the open shard."""
        self._row = self._manifest = self._reader = None
        self._maps = {}

    def _open(self, row: int) -> ShardManifest:
        if self._manifest is None or self._row != row:
            self.close()
            self._row, self._manifest = row, self._catalog.shards.manifest(row)
        return self._manifest

    def _rows(self, manifest: ShardManifest, column: int, start: int, stop: int) -> torch.Tensor:
        place, spec = manifest.places[column], manifest.schema.columns[column]
        if place is None or spec.axis is Axis.NEXT or is_packed(manifest.schema):
            if self._reader is None:
                self._reader = open_shard(partial(self._fetch, manifest), manifest)
            return self._reader.rows(column, start, stop)
        width = spec.row_nbytes
        data = memoryview(self._fetch(manifest, manifest.files[place.file].name))
        piece = bytearray(data[place.offset + start * width : place.offset + stop * width])
        return rows_from_bytes(piece, spec.torch_dtype, (stop - start, *spec.row_shape))

    def _fetch(self, manifest: ShardManifest, name: str) -> Buffer:
        if name not in self._maps:
            self._maps[name] = fetch_file(self._catalog.directory, manifest, name)
        return self._maps[name]


def decoded(reader: ShardReader, schema: Schema, extent: Extent, location: RowLocation) -> MappedShard:
    """Return one trajectory in memory, ``keep`` has its arrays; rows stored once stay so."""
    once = schema.stored_once
    starts = [location.first(column.axis) for column in schema.columns]
    stops = [start + extent.rows(column.axis) for start, column in zip(starts, schema.columns, strict=True)]
    tensors = {c: reader.rows(c, starts[c], stops[c]) for c in range(len(starts)) if c not in once}
    addresses = {c: tensor.data_ptr() for c, tensor in tensors.items()}
    keep: list[Any] = [*tensors.values()]
    for column, before in once.items():
        rows, of_each = cast("FramesReader", reader).once(column, starts[column], stops[column], addresses[before])
        addresses[column] = of_each.ctypes.data
        keep += [rows, of_each]
    return MappedShard(schema, [addresses[column] for column in range(len(starts))], keep)


def flat_of(
    reader: ShardReader | Block, schema: Schema, extent: Extent, location: RowLocation, entry: TrajectoryEntry
) -> FlatTrajectory:
    """Return one decoded trajectory as columns; ``extent`` may be more complete than the entry's."""
    tensors = tuple(rows_at(reader, ranges_of(schema, extent, location)))
    known = entry.num_samples, entry.max_episode_length, entry.model_weights_id, entry.versions
    return FlatTrajectory(schema, extent, tensors, *known)


def reader_of(directory: Directory, manifest: ShardManifest) -> ShardReader:
    """Return a reader of a directory's shard."""
    return open_shard(partial(fetch_file, directory, manifest), manifest)


def damage_of(directory: Directory, manifest: ShardManifest) -> list[str]:
    """Return the damage of a shard's files, see :func:`check_file`; empty if none.

    Raises:
        CorruptStoreError: a file is missing, or has another size.
    """
    files = enumerate(manifest.files)
    return [text for at, file in files for text in check_file(fetch_file(directory, manifest, file.name), manifest, at)]


def fetch_file(directory: Directory, manifest: ShardManifest, name: str) -> Buffer:
    """Map a shard's file and return its bytes.

    Raises:
        CorruptStoreError: it is absent, or its size differs from the manifest.
    """
    size = next((file.size for file in manifest.files if file.name == name), None)
    if size is None:
        raise CorruptStoreError(f"{directory.url}/{name}: not a file of {manifest.name}")
    return directory.map(name, size, sequential=True).view
