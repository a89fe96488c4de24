"""Pickled shards of plain containers and bytes: reading them needs no class and runs no code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.formats.base import (
    SHARD_LAYOUT,
    SHARDS_FOLDER,
    EncodedShard,
    Fetch,
    ShardContent,
    ShardManifest,
    ShardReader,
    TrajectoryFormat,
    rows_from_bytes,
)
from trajstore._core.formats.pickles.safe_pickle import safe_loads
from trajstore._core.formats.pt import SHARD_VERSION
from trajstore.errors import CorruptStoreError

_PROTOCOL = 5


@dataclass(frozen=True)
class PklFormat(TrajectoryFormat):
    """``shards/<name>.pkl``: as the format ``pt``, each column as ``{"dtype", "row_shape", "rows", "data"}``."""

    name: ClassVar[str] = "pkl"

    def encode(self, name: str, content: ShardContent) -> EncodedShard:
        schema = content.schema
        columns = {
            column.name: {
                "dtype": column.dtype,
                "row_shape": list(column.row_shape),
                "rows": rows,
                "data": b"".join(pieces),
            }
            for (column, rows), pieces in zip(content.stored, content.pieces, strict=True)
        }
        document = {
            "layout": SHARD_LAYOUT,
            "version": SHARD_VERSION,
            "kind": schema.kind,
            "columns": columns,
            **content.described(),
        }
        unmapped = (None,) * len(schema.columns)
        data = pickle.dumps(document, protocol=_PROTOCOL)
        return EncodedShard((EncodedFile(f"{SHARDS_FOLDER}/{name}.pkl", [data]),), unmapped, unmapped)

    def open(self, fetch: Fetch, manifest: ShardManifest) -> ShardReader:
        return _PklReader(fetch, manifest)

    def find(self, data: Buffer, source: str) -> tuple[Mapping[str, Any], list[int] | None]:
        return safe_loads(data, source=source), None


class _PklReader(ShardReader):
    """Unpickles once; rows are views of the unpickled bytes."""

    def __init__(self, fetch: Fetch, manifest: ShardManifest) -> None:
        self._stored = manifest.stored
        source = manifest.files[0].name
        content = safe_loads(fetch(source), source=source)
        try:
            if content["layout"] != SHARD_LAYOUT or content["version"] != SHARD_VERSION:
                raise ValueError(f"layout {content['layout']!r} version {content['version']!r}")
            self._data: list[Any] = []
            for column, rows in self._stored:
                stored = content["columns"][column.name]
                data = stored["data"]
                same = (stored["dtype"], tuple(stored["row_shape"])) == (column.dtype, column.row_shape)
                if not same or not isinstance(data, bytes) or len(data) != rows * column.row_nbytes:
                    raise ValueError(f"column {column.name} is not as the index says")
                self._data.append(data)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{source}: not a shard that trajstore wrote, or damaged: {error}") from error

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        spec, _ = self._stored[column]
        piece = bytearray(memoryview(self._data[column])[start * spec.row_nbytes : stop * spec.row_nbytes])
        return rows_from_bytes(piece, spec.torch_dtype, (stop - start, *spec.row_shape))
