"""Requests, rows and errors as frames. Pure; no I/O.

Rows are packed column by column into one block.
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
from trajstore.distributed.frames import FRAME
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    DescriptorLimitError,
    SchemaMismatchError,
    StoreClosedError,
    StoreError,
    TrajectoryUnavailableError,
    TrajstoreError,
    counted,
)

_PLACES = ""
"""Column of an answer that lacks rows: the place of each row in the request. No other column has this name."""

READ, ROWS, ERROR = b"tsread1\n", b"tsrows1\n", b"tserror\n"
"""Kinds of frames: a request, and both of its answers."""

_BEGIN = struct.Struct(FRAME.format + "qq")  # then bytes of the head, number of rows

MOST_REQUEST, MOST_ANSWER = 256 << 20, 1 << 40
"""Bytes of a request, of which a row takes 24; of an answer."""


_ERRORS = {
    kind.__name__: kind
    for kind in (
        ConfigurationError,
        SchemaMismatchError,
        TrajectoryUnavailableError,
        DescriptorLimitError,
        StoreClosedError,
        CorruptStoreError,
    )
}
"""Errors that a read raises elsewhere as at the store; any other is a StoreError there."""


def request(drawn: Drawn, columns: Sequence[str] | None, seconds: float) -> bytes:
    """Return a request for columns of drawn rows (None = all columns), whose answer is waited for ``seconds``.

    Raises:
        ConfigurationError: too many rows.
    """
    if len(drawn) > MOST_REQUEST // 32:
        raise ConfigurationError(f"{len(drawn)} rows of one store: read at most {MOST_REQUEST // 32} at once")
    arrays = [part for part in (drawn.ids, drawn.samples, drawn.names) if part is not None]
    head = orjson.dumps([columns, seconds, len(arrays)])
    parts = [head, *(np.asarray(part, np.int64).tobytes() for part in arrays)]
    return b"".join([_BEGIN.pack(READ, _BEGIN.size + sum(map(len, parts)), len(head), len(drawn)), *parts])


def requested(asked: bytes | memoryview) -> tuple[Drawn, Sequence[str] | None, float]:
    """Return the arguments given to :func:`request`.

    Raises:
        ConfigurationError: the bytes are no request.
    """
    try:
        _, _, length, count = _BEGIN.unpack_from(asked)
        start = _BEGIN.size + length
        columns, seconds, parts = orjson.loads(asked[_BEGIN.size : start])
        arrays = np.frombuffer(asked, np.int64, -1, start).reshape(parts, count)
        named = columns is None or all(isinstance(name, str) for name in columns)
        if length < 0 or not named or not seconds > 0 or parts not in (2, 3):
            raise ValueError("a value is out of range")
    except (struct.error, TypeError, ValueError) as error:
        raise ConfigurationError(f"no request of this version of trajstore: {error}") from error
    return Drawn(arrays[0], arrays[1], names=arrays[2] if parts > 2 else None), columns, seconds


def packed_error(error: Exception) -> bytes:
    """Return an error of a store as a frame."""
    content = orjson.dumps([type(error).__name__, str(error)])
    return FRAME.pack(ERROR, FRAME.size + len(content)) + content


def pack(rows: Mapping[str, torch.Tensor], places: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.uint8]:
    """Return rows as one block.

    Args:
        rows: tensors by dotted column name, contiguous ``[n, ...]``, all with the same n.
        places: places of the rows in the request, ``[n]``; None if no row is missing.
    """
    if places is not None:
        rows = {_PLACES: torch.from_numpy(places), **rows}
    tensors = list(rows.values())
    head = _head(rows)
    sizes = [tensor.nbytes for tensor in tensors]
    starts = _starts(head, sizes)
    block = np.empty(starts[-1], np.uint8)
    begin = _BEGIN.pack(ROWS, len(block), len(head), len(tensors[0]) if tensors else 0) + head
    block[: len(begin)] = np.frombuffer(begin, np.uint8)
    targets = np.array(starts[:-1], np.int64) + block.ctypes.data
    kernels.copy_blocks(
        targets, np.array([tensor.data_ptr() for tensor in tensors], np.int64), np.array(sizes, np.int64)
    )
    return block


def failure(answer: npt.NDArray[np.uint8]) -> TrajstoreError | None:
    """Return the error given to :func:`packed_error`, as a StoreError if a read raises no such; None of rows."""
    if FRAME.unpack_from(answer.data)[0] == ROWS:
        return None
    name, message = orjson.loads(answer.data[FRAME.size :])
    return _ERRORS[name](message) if name in _ERRORS else StoreError(f"{name}: {message}")


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
    def unpacked(cls, block: npt.NDArray[np.uint8]) -> Part:
        """Return the rows packed by :func:`pack`.

        Raises:
            StoreError: the block is not as large as its head says.
        """
        _, _, length, count = _BEGIN.unpack_from(block.data)
        head = block[_BEGIN.size : _BEGIN.size + length].tobytes()
        specs = _specs(head)
        starts = _starts(head, [count * spec.row_nbytes for spec in specs])
        if starts[-1] != len(block):
            raise StoreError(f"an answer has {len(block)} of {starts[-1]} bytes: all machines must have one trajstore")
        first = block.ctypes.data
        addresses = [first + start for start in starts[:-1]]
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
