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
from trajstore._core.formats.torch_zip import TensorSlot, locate, write_torch_zip
from trajstore.errors import CorruptStoreError

SHARD_VERSION = 1


@dataclass(frozen=True)
class PtFormat(TrajectoryFormat):
    """``shards/<name>.pt``: ``{"layout", "version", "kind", "columns": {name: [rows, ...]}, "trajectories", "label"}``.

    ``trajectories`` has T, B, E and document bytes of each trajectory, one after another, which define its rows.
    Columns of rollouts are packed, ``uint8`` ``[bytes]``.
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
    """Reads the columns where the manifest places them, without interpreting the file's pickle."""

    def __init__(self, fetch: Fetch, manifest: ShardManifest) -> None:
        self._name = manifest.files[0].name
        self._data = memoryview(fetch(self._name)).cast("B")
        self._columns = list(zip(manifest.stored, manifest.places, strict=True))

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        (spec, _), place = self._columns[column]
        nbytes = (stop - start) * spec.row_nbytes
        first = len(self._data) if place is None else place.offset + start * spec.row_nbytes
        if first + nbytes > len(self._data):
            raise CorruptStoreError(f"{self._name}: column {spec.name}: lies outside the file")
        return rows_from_bytes(
            bytearray(self._data[first : first + nbytes]), spec.torch_dtype, (stop - start, *spec.row_shape)
        )
