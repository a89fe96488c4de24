"""One RLinf trajectory file: columns are mapped in place where possible, else decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.files.base import Directory
from trajstore._core.formats.base import ShardReader, rows_from_bytes
from trajstore._core.formats.pickles.safe_pickle import safe_loads
from trajstore._core.formats.torch_zip import TensorPlace, locate
from trajstore._core.reading.address_table import MappedShard
from trajstore._core.store.rlinf_layout import TRAJECTORY_CLASSES, columns_of_file, fields_of_file


class RLinfFile:
    """One trajectory file: its columns, mapped (``places``) or decoded."""

    def __init__(self, directory: Directory, name: str) -> None:
        self.source = f"{directory.url}/{name}"
        self.map = directory.map(name)
        content = self._content(name)
        self.content = columns_of_file(content, self.source, self._read)  # rejects files without a trajectory
        self.fields = fields_of_file(content)

    def _content(self, name: str) -> Any:
        if name.endswith(".pkl"):
            return safe_loads(self.map.view, classes=TRAJECTORY_CLASSES, source=self.source)
        return locate(self.map.view, source=self.source)

    def _read(self, place: TensorPlace) -> torch.Tensor:
        rows = self.rows_at(place.offset, place.span * place.dtype.itemsize, place.dtype, (place.span,))
        return rows.as_strided(place.shape, place.stride).contiguous()

    def rows_at(self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a copy of a part of the file as a tensor."""
        return rows_from_bytes(bytearray(self.map.view[offset : offset + nbytes]), dtype, shape)

    def unrepresented(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that are not sampled or not stored, with the reason."""
        yield from ((name, f"is left out: {reason}") for name, reason in self.content.left_out.items())
        yield from ((name, f"is kept, but never sampled: {reason}") for name, reason in self.content.kept.items())

    def mapped(self) -> MappedShard | None:
        base = self.map.address
        addresses = []
        for column, leaf in zip(self.content.schema.columns, self.content.leaves, strict=True):
            if isinstance(leaf, TensorPlace):
                addresses.append(base + leaf.offset)
            elif column.name == DOCUMENT:
                addresses.append(leaf.data_ptr())
            else:
                return None
        keep = (self.map, self.content.leaves)
        return MappedShard(self.content.schema, tuple(addresses), keep, extent=self.content.extent)


class RLinfFileReader(ShardReader):
    """Decoded rows of a trajectory file."""

    def __init__(self, file: RLinfFile) -> None:
        self._file = file

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        content = self._file.content
        leaf, spec = content.leaves[column], content.schema.columns[column]
        if isinstance(leaf, TensorPlace):
            width = spec.row_nbytes
            shape = (stop - start, *spec.row_shape)
            return self._file.rows_at(leaf.offset + start * width, (stop - start) * width, leaf.dtype, shape)
        return leaf.reshape(content.extent.rows(spec.axis), *spec.row_shape)[start:stop].contiguous()
