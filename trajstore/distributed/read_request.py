"""Requests and rows as bytes, which Ray passes on unchanged. Pure; no I/O.

Rows are packed column by column into one block. Ray inlines an answer below 100 KB in its reply. A larger one goes
through the object store of its node, and fetching it takes longer than all other work on a batch. So moderately larger
answers are split into pieces, which are all inlined.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trajstore._core.base.machine_code import kernels
from trajstore._core.columns.memory import aligned
from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.reading.column_interner import ColumnSet
from trajstore._core.reading.plan import allocate
from trajstore._core.sampling.base import Drawn
from trajstore.errors import SchemaMismatchError, StoreError, counted

Block = bytes | npt.NDArray[np.uint8]

_PIECE_BYTES = 96 << 10
_MOST_PIECES = 32
"""Above this the object store is faster, as inlined answers are copied more often."""

_PLACES = ""
"""Column of an answer that lacks rows: the place of each row in the request. No other column has this name."""

_BEGIN = struct.Struct("<qq")  # bytes of the head, number of rows


def pieces_of(nbytes: int) -> int:
    """Return the number of pieces for an answer of about ``nbytes``."""
    count = -(-nbytes // _PIECE_BYTES)
    return count if 0 < count <= _MOST_PIECES else 1


def request(drawn: Drawn, columns: Sequence[str] | None, pieces: int) -> bytes:
    """Return a request for columns of drawn rows (None = all columns), answered in ``pieces`` pieces."""
    arrays = [part for part in (drawn.ids, drawn.samples, drawn.names) if part is not None]
    head = orjson.dumps([columns, pieces, len(arrays)])
    return b"".join(
        [_BEGIN.pack(len(head), len(drawn)), head, *(np.asarray(part, np.int64).tobytes() for part in arrays)]
    )


def requested(asked: bytes) -> tuple[Drawn, Sequence[str] | None, int]:
    """Return the arguments given to :func:`request`."""
    length, count = _BEGIN.unpack_from(asked)
    start = _BEGIN.size + length
    columns, pieces, parts = orjson.loads(asked[_BEGIN.size : start])
    arrays = np.frombuffer(asked, np.int64, parts * count, start).reshape(parts, count)
    return Drawn(arrays[0], arrays[1], names=arrays[2] if parts > 2 else None), columns, pieces


def pack(
    rows: Mapping[str, torch.Tensor], pieces: int, places: npt.NDArray[np.intp] | None = None
) -> tuple[Block, ...]:
    """Return rows as ``pieces`` pieces of about equal size.

    Args:
        rows: tensors by dotted column name, contiguous ``[n, ...]``, all with the same n.
        pieces: number of pieces. A single piece is an array, which Ray's object store shares without a copy.
        places: places of the rows in the request, ``[n]``; None if no row is missing.
    """
    if places is not None:
        rows = {_PLACES: torch.from_numpy(places), **rows}
    tensors = list(rows.values())
    head = _head(rows)
    sizes = [tensor.nbytes for tensor in tensors]
    starts = _starts(head, sizes)
    block = np.empty(starts[-1], np.uint8)
    begin = _BEGIN.pack(len(head), len(tensors[0]) if tensors else 0) + head
    block[: len(begin)] = np.frombuffer(begin, np.uint8)
    targets = np.array(starts[:-1], np.int64) + block.ctypes.data
    kernels.copy_blocks(
        targets, np.array([tensor.data_ptr() for tensor in tensors], np.int64), np.array(sizes, np.int64)
    )
    if pieces == 1:
        return (block,)
    size = aligned(-(-len(block) // pieces))
    return tuple(block[number * size : (number + 1) * size].tobytes() for number in range(pieces))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one store.

    Attributes:
        specs: specs of their columns.
        count: number of rows.
        addresses: address of each column's first row; columns are contiguous.
        nbytes: size of the rows.
        keeps: owner of the memory; a writable array if nothing else uses it.
        places: places of the rows in the request, ``[n]``; None if no row is missing.
    """

    specs: Sequence[ColumnSpec]
    count: int
    addresses: Sequence[int]
    nbytes: int
    keeps: object
    places: npt.NDArray[np.intp] | None = None

    @classmethod
    def unpacked(cls, pieces: Sequence[Block]) -> Part:
        """Return the rows packed by :func:`pack`."""
        parts = [np.frombuffer(piece, np.uint8) for piece in pieces]
        block = parts[0] if len(parts) == 1 else np.concatenate(parts)
        length, count = _BEGIN.unpack_from(block.data)
        head = block[_BEGIN.size : _BEGIN.size + length].tobytes()
        specs = _specs(head)
        starts = _starts(head, [count * spec.row_nbytes for spec in specs])
        addresses = [block.ctypes.data + start for start in starts[:-1]]
        if not specs or specs[0].name != _PLACES:
            return cls(specs, count, addresses, len(block), block)
        places = np.frombuffer(block, np.intp, count, starts[0])
        return cls(specs[1:], count, addresses[1:], len(block), block, places)

    def views(self) -> dict[str, torch.Tensor] | None:
        """Return the rows as views of the memory, by column name; None if something else uses the memory."""
        if not isinstance(self.keeps, np.ndarray) or not self.keeps.flags.writeable:
            return None
        block, first = torch.from_numpy(self.keeps), self.keeps.ctypes.data
        starts = [address - first for address in self.addresses]
        return {
            spec.name: block[start : start + self.count * spec.row_nbytes]
            .view(spec.torch_dtype)
            .view(self.count, *spec.row_shape)
            for spec, start in zip(self.specs, starts, strict=True)
        }

    @classmethod
    def of(cls, rows: Mapping[str, torch.Tensor]) -> Part:
        """Return local rows, given by dotted column name, contiguous ``[n, ...]``."""
        specs = _specs(_head(rows))
        tensors = list(rows.values())
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return cls(specs, len(tensors[0]) if tensors else 0, [tensor.data_ptr() for tensor in tensors], nbytes, rows)


def united(
    parts: Sequence[Part], places: Sequence[npt.NDArray[np.intp]], out: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return rows of several stores as one batch, by dotted column name, ``[n, ...]``; of one store without a copy.

    Args:
        parts: rows of each store; their columns may be in any order.
        places: batch positions of each store's rows; together ``0 .. n - 1``.
        out: tensors to fill; None allocates them.

    Raises:
        SchemaMismatchError: the stores differ in their columns.
        ConfigurationError: a tensor of ``out`` does not fit.
        StoreError: a store returned a wrong number of rows.
    """
    specs = parts[0].specs
    addresses = np.array(
        [part.addresses if part.specs == specs else _in_order(part, specs) for part in parts], np.int64
    )
    count = sum(map(len, places))
    if out is None and len(parts) == 1 and parts[0].count == count and np.array_equal(places[0], np.arange(count)):
        rows_of_one = parts[0].views()
        if rows_of_one is not None:
            return rows_of_one
    slots, rows = np.empty(count, np.int64), np.empty((1, count), np.int64)
    for slot, (part, at) in enumerate(zip(parts, places, strict=True)):
        if part.count != len(at):
            rows_given = f"{part.count} of {counted(len(at), 'row')}"
            raise StoreError(f"a store returned {rows_given}: all machines must have the same trajstore")
        slots[at], rows[0, at] = slot, np.arange(len(at))
    columns = ColumnSet(specs, range(len(specs)))
    targets = allocate(columns, count, out)
    kernels.copy_rows(
        slots,
        rows,
        addresses,
        np.zeros(addresses.shape, np.int8),
        columns.numbers,
        columns.widths,
        np.array([target.data_ptr() for target in targets], np.int64),
        0,
        count,
        np.empty(count, np.int64),
    )
    return {spec.name: target for spec, target in zip(specs, targets, strict=True)}


def _in_order(part: Part, wanted: Sequence[ColumnSpec]) -> Sequence[int]:
    """Return the addresses of a part's columns, in the order of ``wanted``."""
    if part.specs == wanted:
        return part.addresses
    mine = {spec.name: (spec, address) for spec, address in zip(part.specs, part.addresses, strict=True)}
    if differing := mine.keys() ^ {spec.name for spec in wanted}:
        raise SchemaMismatchError(f"stores differ in {', '.join(sorted(differing))}; name the columns to read")
    for spec in wanted:
        if mine[spec.name][0] != spec:
            raise SchemaMismatchError(f"stores differ in the dtype or shape of {spec.name}; name the columns to read")
    return [mine[spec.name][1] for spec in wanted]


def _head(rows: Mapping[str, torch.Tensor]) -> bytes:
    """Return name, dtype and row shape of each column, as JSON."""
    return orjson.dumps(
        [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])) for name, tensor in rows.items()]
    )


@lru_cache(maxsize=256)
def _specs(head: bytes) -> tuple[ColumnSpec, ...]:
    return tuple(ColumnSpec(name, dtype, tuple(shape)) for name, dtype, shape in orjson.loads(head))


def _starts(head: bytes, sizes: Sequence[int]) -> list[int]:
    """Return the offset of each column in the block, and the block's size."""
    return list(accumulate(map(aligned, sizes), initial=aligned(_BEGIN.size + len(head))))
