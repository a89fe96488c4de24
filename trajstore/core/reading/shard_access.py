"""Reading single trajectories of a catalog from disk, without a buffer: for looking and checking."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from trajstore.core.columns.conversion import trajectory_of
from trajstore.core.columns.fields import Axis
from trajstore.core.columns.flat import Block, FlatTrajectory
from trajstore.core.columns.schema import ColumnSpec, Extent, Schema
from trajstore.core.files.base import Buffer, Directory
from trajstore.core.formats import open_shard
from trajstore.core.formats.base import ShardManifest, ShardReader, rows_from_bytes
from trajstore.core.formats.checksums import check_file
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.index import TrajectoryEntry, TrajectoryIndex
from trajstore.core.store.row_location import START_OF, RowLocation
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AnyTrajectory


class ShardAccess:
    """Columns and trajectories by their position in an index. Keeps the newest shard open; not thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._row: int | None = None
        self._manifest: ShardManifest | None = None
        self._maps: dict[str, Buffer] = {}
        self._reader: ShardReader | None = None

    def schema(self, index: TrajectoryIndex, position: int) -> Schema:
        """Return the columns that a trajectory has."""
        return self._catalog.shards.schema(int(index.at("shard", position)))

    def columns(
        self, index: TrajectoryIndex, position: int, only: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return columns of one trajectory: ``[T (+ E), B, ...]`` (step) or ``[rows, ...]`` (agent).

        Args:
            index: the catalog's ``index`` or ``pinned``.
            position: where in it.
            only: names wanted; all if None. Those that the trajectory lacks are left out.

        Raises:
            CorruptStoreError: a file is missing or damaged; names it.
        """
        found = {}
        for column, extent, rows, tensor in self._read(index, position, 1, only):
            if self.schema(index, position).kind == "step" and column.axis is not Axis.DOCUMENT and extent.batch:
                tensor = tensor.reshape(rows // extent.batch, extent.batch, *column.row_shape)
            found[column.name] = tensor
        return found

    def stacked(
        self, index: TrajectoryIndex, position: int, count: int, only: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Return columns of step trajectories that follow each other in a shard and have one shape, in one read.

        Args:
            index: the catalog's ``index`` or ``pinned``.
            position: of the first.
            count: how many.
            only: names wanted; those that they lack are left out.

        Returns:
            By name, ``[count, T (+ E), B, ...]``.

        Raises:
            CorruptStoreError: a file is missing or damaged; names it.
        """
        return {
            column.name: tensor.reshape(count, rows // extent.batch, extent.batch, *column.row_shape)
            for column, extent, rows, tensor in self._read(index, position, count, only)
        }

    def rows(self, index: TrajectoryIndex, position: int, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Return rows ``[start, stop)`` of a column, counted within the trajectory; None if it lacks the column.

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
        """Return one trajectory, of its columns those named (all if None).

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
            [tensors[column.name] for column in columns],
            max_episode_length=entry.max_episode_length,
            model_weights_id=entry.model_weights_id,
        )

    def close(self) -> None:
        """Let go of the open shard."""
        self._row = self._manifest = self._reader = None
        self._maps = {}

    def _open(self, row: int) -> ShardManifest:
        if self._manifest is None or self._row != row:
            self.close()
            self._row, self._manifest = row, self._catalog.shards.manifest(row)
        return self._manifest

    def _read(
        self, index: TrajectoryIndex, position: int, count: int, only: Collection[str] | None
    ) -> Iterator[tuple[ColumnSpec, Extent, int, torch.Tensor]]:
        """Yield columns of ``count`` trajectories that follow each other: with extent and rows of the first."""
        manifest = self._open(int(index.at("shard", position)))
        extent = index.extent(position)
        for number, column in enumerate(manifest.schema.columns):
            if only is None or column.name in only:
                start, rows = int(index.at(START_OF[column.axis], position)), extent.rows(column.axis)
                yield column, extent, rows, self._rows(manifest, number, start, start + count * rows)

    def _rows(self, manifest: ShardManifest, column: int, start: int, stop: int) -> torch.Tensor:
        place, spec = manifest.places[column], manifest.schema.columns[column]
        if place is None:
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


def rows_of(reader: ShardReader | Block, schema: Schema, extent: Extent, location: RowLocation) -> list[torch.Tensor]:
    """Return the rows of one trajectory, decoded, column by column: ``[rows, *row_shape]``.

    Args:
        reader: of the shard; or the block in memory.
        schema: its columns.
        extent: how many rows the trajectory has.
        location: where they begin; its table does not matter.

    Raises:
        CorruptStoreError: the shard is damaged; names file and column.
        UnsafeContentError: reading it would run code.
    """
    starts = [location.first(column.axis) for column in schema.columns]
    return [
        reader.rows(number, start, start + extent.rows(column.axis))
        for number, (column, start) in enumerate(zip(schema.columns, starts, strict=True))
    ]


def flat_of(
    reader: ShardReader | Block, schema: Schema, extent: Extent, location: RowLocation, entry: TrajectoryEntry
) -> FlatTrajectory:
    """Return one trajectory as columns, decoded; ``extent`` may say more than the entry does."""
    tensors = tuple(rows_of(reader, schema, extent, location))
    known = entry.num_samples, entry.max_episode_length, entry.model_weights_id, entry.versions
    return FlatTrajectory(schema, extent, tensors, *known)


def reader_of(directory: Directory, manifest: ShardManifest) -> ShardReader:
    """Return a reader of a shard of a directory."""
    return open_shard(partial(fetch_file, directory, manifest), manifest)


def damage_of(directory: Directory, manifest: ShardManifest) -> list[str]:
    """Return what is wrong with the files of a shard, see :func:`check_file`; empty if all are sound.

    Raises:
        CorruptStoreError: one is missing, or has another size.
    """
    files = enumerate(manifest.files)
    return [text for at, file in files for text in check_file(fetch_file(directory, manifest, file.name), manifest, at)]


def fetch_file(directory: Directory, manifest: ShardManifest, name: str) -> Buffer:
    """Return the bytes of a shard's file, mapped.

    Raises:
        CorruptStoreError: it is absent, or has another size than the manifest says.
    """
    size = next((file.size for file in manifest.files if file.name == name), None)
    if size is None:
        raise CorruptStoreError(f"{directory.url}/{name}: not a file of {manifest.name}")
    return directory.map(name, size, sequential=True).view
