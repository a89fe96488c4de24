"""What is asked for and the rows that answer it, as bytes: Ray passes these on as they are. Pure; no I/O.

Rows are columns one after another in one block. An answer of less than 100 KB comes with Ray's reply to the call; a
larger one goes into the object store of its node, which the learner's node then asks for it, and that takes longer than
all else about a batch. So what is not much larger is cut into pieces, which all come with the reply.
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

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.memory import aligned
from trajstore.core.columns.schema import ColumnSpec
from trajstore.core.reading.column_interner import ColumnSet
from trajstore.core.reading.plan import allocate
from trajstore.core.sampling.base import Drawn
from trajstore.errors import SchemaMismatchError, StoreError

Block = bytes | npt.NDArray[np.uint8]

_PIECE_BYTES = 96 << 10
_MOST_PIECES = 32
"""Above, the object store is quicker: what comes with a reply is copied more often."""

_BEGIN = struct.Struct("<qq")  # bytes of the head, and number of rows


def pieces_of(nbytes: int) -> int:
    """Return into how many pieces an answer of about so many bytes is to be cut."""
    count = -(-nbytes // _PIECE_BYTES)
    return count if 0 < count <= _MOST_PIECES else 1


def request(drawn: Drawn, columns: Sequence[str] | None, pieces: int) -> bytes:
    """Return what asks for rows that were drawn, or for some of their columns, in so many pieces."""
    told = [part for part in (drawn.ids, drawn.samples, drawn.names) if part is not None]
    head = orjson.dumps([columns, pieces, len(told)])
    return b"".join(
        [_BEGIN.pack(len(head), len(drawn)), head, *(np.asarray(part, np.int64).tobytes() for part in told)]
    )


def requested(asked: bytes) -> tuple[Drawn, Sequence[str] | None, int]:
    """Return what :func:`request` was given; of the rows, which they are."""
    length, count = _BEGIN.unpack_from(asked)
    start = _BEGIN.size + length
    columns, pieces, parts = orjson.loads(asked[_BEGIN.size : start])
    told = np.frombuffer(asked, np.int64, parts * count, start).reshape(parts, count)
    return Drawn(told[0], told[1], names=told[2] if parts > 2 else None), columns, pieces


def pack(rows: Mapping[str, torch.Tensor], pieces: int) -> tuple[Block, ...]:
    """Return rows as so many pieces, of about the same size.

    Args:
        rows: by dotted column name, contiguous ``[n, ...]``, all with the same n.
        pieces: how many. A single one is an array, for Ray's object store lends arrays without copying them.
    """
    tensors = list(rows.values())
    head = _head(rows)
    sizes = [one.nbytes for one in tensors]
    starts = _starts(head, sizes)
    block = np.empty(starts[-1], np.uint8)
    begin = _BEGIN.pack(len(head), len(tensors[0]) if tensors else 0) + head
    block[: len(begin)] = np.frombuffer(begin, np.uint8)
    targets = np.array(starts[:-1], np.int64) + block.ctypes.data
    kernels.copy_blocks(targets, np.array([one.data_ptr() for one in tensors], np.int64), np.array(sizes, np.int64))
    if pieces == 1:
        return (block,)
    size = aligned(-(-len(block) // pieces))
    return tuple(block[number * size : (number + 1) * size].tobytes() for number in range(pieces))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one store.

    Attributes:
        specs: of their columns.
        count: how many.
        addresses: of each column's first row; the others follow.
        nbytes: that they take.
        keeps: what they lie in.
    """

    specs: Sequence[ColumnSpec]
    count: int
    addresses: Sequence[int]
    nbytes: int
    keeps: object

    @classmethod
    def unpacked(cls, pieces: Sequence[Block]) -> Part:
        """Return what :func:`pack` has packed."""
        parts = [np.frombuffer(piece, np.uint8) for piece in pieces]
        block = parts[0] if len(parts) == 1 else np.concatenate(parts)
        length, count = _BEGIN.unpack_from(block.data)
        head = block[_BEGIN.size : _BEGIN.size + length].tobytes()
        specs = _specs(head)
        starts = _starts(head, [count * spec.row_nbytes for spec in specs])
        first = block.ctypes.data
        return cls(specs, count, [first + start for start in starts[:-1]], len(block), block)

    @classmethod
    def of(cls, rows: Mapping[str, torch.Tensor]) -> Part:
        """Return rows that are here, by dotted column name, contiguous ``[n, ...]``."""
        specs = _specs(_head(rows))
        tensors = list(rows.values())
        nbytes = sum(one.nbytes for one in tensors)
        return cls(specs, len(tensors[0]) if tensors else 0, [one.data_ptr() for one in tensors], nbytes, rows)


def united(
    parts: Sequence[Part], places: Sequence[npt.NDArray[np.intp]], out: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return rows of several stores as one batch, by dotted column name, ``[n, ...]``.

    Args:
        parts: of each store; their columns may be in any order.
        places: where in the batch the rows of each go; together ``0 .. n - 1``.
        out: tensors to fill; None makes new ones.

    Raises:
        SchemaMismatchError: the stores differ in their columns.
        ConfigurationError: a tensor of ``out`` does not fit.
        StoreError: a store gave another number of rows than it was asked for.
    """
    specs = parts[0].specs
    addresses = np.array(
        [part.addresses if part.specs == specs else _in_order(part, specs) for part in parts], np.int64
    )
    count = sum(map(len, places))
    slots, rows = np.empty(count, np.int64), np.empty((1, count), np.int64)
    for slot, (part, at) in enumerate(zip(parts, places, strict=True)):
        if part.count != len(at):
            raise StoreError(f"a store gave {part.count} of {len(at)} rows: all machines must have the same trajstore")
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
    )
    return {spec.name: target for spec, target in zip(specs, targets, strict=True)}


def _in_order(part: Part, wanted: Sequence[ColumnSpec]) -> Sequence[int]:
    """Return the addresses of a part's columns, in the order of those that are wanted."""
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
    """Return name, dtype and shape of a row of each column, as JSON."""
    return orjson.dumps(
        [(name, str(one.dtype).removeprefix("torch."), list(one.shape[1:])) for name, one in rows.items()]
    )


@lru_cache(maxsize=256)
def _specs(head: bytes) -> tuple[ColumnSpec, ...]:
    return tuple(ColumnSpec(name, dtype, tuple(shape)) for name, dtype, shape in orjson.loads(head))


def _starts(head: bytes, sizes: Sequence[int]) -> list[int]:
    """Return where each column begins in the block, and the block's size."""
    return list(accumulate(map(aligned, sizes), initial=aligned(_BEGIN.size + len(head))))
