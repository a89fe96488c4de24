"""The interface of shard formats. A format is pure: bytes in, bytes out; directories do the I/O.

A *shard* holds one or more trajectories of one schema. Its columns are the trajectories' rows, one
after the other: column c of trajectory j begins at the sum of the rows of trajectories 0..j-1 on c's
axis. A format turns trajectories into files and reports the byte offset of columns whose rows are
uncompressed and contiguous in a file; such columns are mapped and never decoded. Columns of rollouts are
packed before (:mod:`~trajstore._core.formats.packed`): a format stores each as a block of bytes.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import orjson
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.schema import ColumnSpec, Schema
from trajstore._core.files.base import Buffer, EncodedFile, crc32_of
from trajstore.errors import CorruptStoreError

SHARDS_FOLDER = "shards"
"""Folder of a store's shard files."""

SHARD_LAYOUT = "trajstore.shard"
"""Layout name in every shard, beside its format's version."""

Fetch = Callable[[str], Buffer]
"""Returns the bytes of one file of a shard, by the file's name in the manifest.

Raises ``CorruptStoreError`` naming the file when it is absent or its size differs from the manifest's.
"""


@dataclass(frozen=True)
class ShardContent:
    """Content of a new shard: trajectories of one schema, column by column.

    Attributes:
        schema: their columns.
        extents: of each trajectory, in order, ``[n, 4]``; at least one.
        pieces: per column, the rows of all trajectories in order, or their packed block, as consecutive buffers.
        entries: what its label says of the trajectories; None without a label.
    """

    schema: Schema
    extents: IntArray
    pieces: Sequence[Sequence[Buffer]]
    entries: Mapping[str, Any] | None = None

    @staticmethod
    def of(flats: Sequence[FlatTrajectory]) -> ShardContent:
        """Return the content of trajectories, without copying."""
        schema = flats[0].schema
        pieces = [[flat.column_bytes(column) for flat in flats] for column in range(len(schema.columns))]
        return ShardContent(schema, np.array([flat.extent for flat in flats], np.int64), pieces)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Total rows per column."""
        steps, batch, extra, document = self.extents.T
        more = (steps + extra) * batch
        total = np.array([steps * batch, more, more, extra, document, steps * batch]).sum(axis=1)  # by axis
        return tuple(total[self.schema.layout[0]].tolist())

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each column's pieces."""
        return tuple(sum(memoryview(piece).nbytes for piece in pieces) for pieces in self.pieces)

    @cached_property
    def stored(self) -> list[tuple[ColumnSpec, int]]:
        """The columns as a format stores them, see :func:`as_stored`."""
        return as_stored(self.schema, self.rows, self.nbytes)

    @cached_property
    def column_crc32(self) -> tuple[int, ...]:
        """CRC-32 of each column's pieces."""
        return tuple(crc32_of(pieces) for pieces in self.pieces)

    def described(self) -> dict[str, Any]:
        """Return extents and label, as every format stores them.

        The label is one line: a checksum and what the index knows of the shard; see :func:`read_label`.
        """
        described: dict[str, Any] = {
            "trajectories": self.extents.ravel().tolist()
        }  # a list each would set off the collector
        if self.entries is None:
            return described
        shard = {"schema": self.schema.to_json(), "rows": self.rows, "column_crc32": self.column_crc32}
        if self.nbytes != self.schema.plain_nbytes(self.rows):
            shard["nbytes"] = self.nbytes
        body = orjson.dumps({**shard, "entries": self.entries}, option=orjson.OPT_SERIALIZE_NUMPY)
        return described | {"label": f"{zlib.crc32(body):08x} {body.decode()}"}


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Place of a column's bytes: index into the shard's files, and byte offset."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """Files of trajectories encoded by a format.

    ``places[c]`` is None where column c cannot be mapped (compressed, pickled, split over files); else
    ``column_crc32[c]`` is the CRC-32 of its bytes.
    """

    files: tuple[EncodedFile, ...]
    places: tuple[ColumnPlace | None, ...]
    column_crc32: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a shard as written. ``crc32`` covers the bytes outside mapped columns (see format spec)."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """Everything needed to read a shard: kept in the commit log, next to the trajectories' entries.

    Attributes:
        name: name without suffix, unique in its store (``shard_00000042``).
        format: name of the format that reads it.
        schema: columns, in storage order.
        files: relative to the store's directory, ``/``-separated.
        places: per column, where its bytes begin, or None.
        column_crc32: per column, CRC-32 of its bytes; None where ``places`` is None.
        rows: per column, the rows of all trajectories together.
        nbytes: per column, its bytes in the shard; see :mod:`~trajstore._core.formats.frames` and
            :mod:`~trajstore._core.formats.packed`.
    """

    name: str
    format: str
    schema: Schema
    files: tuple[StoredFile, ...]
    places: tuple[ColumnPlace | None, ...]
    column_crc32: tuple[int | None, ...]
    rows: tuple[int, ...]
    nbytes: tuple[int, ...]

    @property
    def stored(self) -> list[tuple[ColumnSpec, int]]:
        """The columns as the format stores them, see :func:`as_stored`."""
        return as_stored(self.schema, self.rows, self.nbytes)


def as_stored(schema: Schema, rows: Sequence[int], nbytes: Sequence[int]) -> list[tuple[ColumnSpec, int]]:
    """Return columns as a format stores them: spec and number of rows, those of rollouts as bytes."""
    if schema.kind == "agent":
        return [(ColumnSpec(c.name, "uint8", (), c.axis), size) for c, size in zip(schema.columns, nbytes, strict=True)]
    once = schema.stored_once
    counts = [nbytes[c] // schema.row_nbytes[c] if c in once else count for c, count in enumerate(rows)]
    return list(zip(schema.columns, counts, strict=True))


class ShardReader(ABC):
    """Decodes rows of one shard. May cache decoded data; not thread-safe."""

    @abstractmethod
    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        """Return rows ``[start, stop)`` of a column, ``[stop - start, *row_shape]``, contiguous, on the CPU.

        Raises:
            CorruptStoreError: the shard is damaged; names file and column.
            UnsafeContentError: reading it would run code.
        """


class TrajectoryFormat(ABC):
    """One way to store trajectories in files. Stateless; options are frozen fields of the subclass."""

    name: ClassVar[str]
    """Value of ``trajectory_format``."""

    @abstractmethod
    def encode(self, name: str, content: ShardContent) -> EncodedShard:
        """Return the files of a shard called ``name``. Their pieces may alias those of the content."""

    @abstractmethod
    def open(self, fetch: Fetch, manifest: ShardManifest) -> ShardReader:
        """Return a reader of a stored shard."""

    @abstractmethod
    def find(self, data: Buffer, source: str) -> tuple[Mapping[str, Any], list[int] | None]:
        """Return :meth:`ShardContent.described` as stored in a shard's first file, and where its columns begin there.

        Args:
            data: the file.
            source: its name, for messages.

        Returns:
            The values, unchecked, and the byte offset of each column; None where they must be decoded.

        Raises:
            CorruptStoreError: it is damaged.
            UnsafeContentError: reading it would run code.
            KeyError, TypeError, ValueError, AttributeError: it is not a shard.
        """


def read_label(label: Any, source: str) -> Mapping[str, Any]:
    """Return the values of a label.

    Raises:
        CorruptStoreError: it is absent, or its checksum does not match.
    """
    if not isinstance(label, str):
        raise CorruptStoreError(f"{source}: has no label that names its trajectories")
    crc, _, body = label.encode("utf-8", "replace").partition(b" ")
    if crc != b"%08x" % zlib.crc32(body):
        raise CorruptStoreError(f"{source}: label: the checksum does not fit the content")
    value: Mapping[str, Any] = orjson.loads(body)
    return value


def rows_from_bytes(data: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over ``data`` (not copied; the caller must not write to read-only data)."""
    view = memoryview(data)
    if view.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
