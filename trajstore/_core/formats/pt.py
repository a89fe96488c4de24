"""The default format: one file that ``torch.load(..., weights_only=True)`` reads, its columns mapped in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.formats.base import (
    SHARD_LAYOUT,
    SHARDS_FOLDER,
    ColumnPlace,
    EncodedShard,
    Fetch,
    ShardContent,
    ShardManifest,
    ShardReader,
    TrajectoryFormat,
    rows_from_bytes,
)
from trajstore._core.formats.torch_zip import TensorPlace, TensorSlot, locate, write_torch_zip
from trajstore.errors import CorruptStoreError

SHARD_VERSION = 1


@dataclass(frozen=True)
class PtFormat(TrajectoryFormat):
    """``shards/<name>.pt``: ``{"layout", "version", "kind", "columns": {name: [rows, ...]}, "trajectories", "label"}``.

    ``trajectories`` is one ``[T, B, E, document bytes]`` per trajectory, which defines its numbers of rows.
    """

    name: ClassVar[str] = "pt"

    def encode(self, name: str, content: ShardContent) -> EncodedShard:
        schema = content.schema
        slots = {}
        for (column, rows), pieces, crc in zip(content.stored, content.pieces, content.column_crc32, strict=True):
            slots[column.name] = TensorSlot(pieces, column.torch_dtype, (rows, *column.row_shape), crc)
        document = {
            "layout": SHARD_LAYOUT,
            "version": SHARD_VERSION,
            "kind": schema.kind,
            "columns": slots,
            **content.described(),
        }
        written, offsets = write_torch_zip(document)
        return EncodedShard(
            files=(EncodedFile(f"{SHARDS_FOLDER}/{name}.pt", written),),
            places=tuple(ColumnPlace(0, offset) for offset in offsets),
            column_crc32=content.column_crc32,
        )

    def open(self, fetch: Fetch, manifest: ShardManifest) -> ShardReader:
        return _PtReader(fetch, manifest)

    def find(self, data: Buffer, source: str) -> tuple[Mapping[str, Any], list[int] | None]:
        content = locate(data, source=source)
        return content, [place.offset for place in content["columns"].values()]


class _PtReader(ShardReader):
    """Finds the columns by interpreting the file's pickle: slow, but needs no offsets."""

    def __init__(self, fetch: Fetch, manifest: ShardManifest) -> None:
        name = manifest.files[0].name
        self._data = memoryview(fetch(name)).cast("B")
        try:
            content: Any = locate(self._data, source=name)
            if content["layout"] != SHARD_LAYOUT or content["version"] != SHARD_VERSION:
                raise ValueError(f"layout {content['layout']!r} version {content['version']!r}")
            self._columns: list[TensorPlace] = [content["columns"][column.name] for column in manifest.schema.columns]
            self._stored = manifest.stored
            for found, (column, rows) in zip(self._columns, self._stored, strict=True):
                if (found.shape, found.dtype) != ((rows, *column.row_shape), column.torch_dtype):
                    raise ValueError(f"column {column.name}: {found.dtype} {list(found.shape)}")
                if not found.is_contiguous:
                    raise ValueError(f"column {column.name}: strides {list(found.stride)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # from malformed descriptions
            raise CorruptStoreError(f"{name}: not a shard that trajstore wrote, or damaged: {error}") from error

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        (spec, _), place = self._stored[column], self._columns[column]
        first = place.offset + start * spec.row_nbytes
        data = bytearray(self._data[first : first + (stop - start) * spec.row_nbytes])
        return rows_from_bytes(data, place.dtype, (stop - start, *spec.row_shape))
