"""Kernels that move rows, compiled on import by :mod:`trajstore.core.base.machine_code`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

SAMPLES, FIRST_EXTRA, LAST_EXTRA, RESPONSE, DOCUMENT = range(5)

Array: TypeAlias = np.ndarray[Any, Any]

_NUMBERS, _TABLE = "int64[::1]", "int64[:, ::1]"


def compiled(*types_of_arguments: str, nogil: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function for these arguments, or loads it from numba's cache.

    Args:
        types_of_arguments: in numba's notation.
        nogil: release the GIL while it runs.
    """

    def compile_now(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=nogil, cache=True)(function)
        dispatcher.compile(f"({', '.join(types_of_arguments)})")
        return dispatcher

    return compile_now


_AHEAD = 16
"""Rows to prefetch ahead of the copy. Drawn rows are scattered, so the processor's own prefetcher fails."""

_FETCHED_BYTES = 512
"""Bytes of a row to prefetch; in a longer row the processor recognises the sequence by itself."""


def _loader(element: types.Type) -> Any:
    """Return an intrinsic that copies one element from one address to another."""

    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(element).as_pointer()
            value = builder.load(builder.inttoptr(args[1], pointer), align=1)
            builder.store(value, builder.inttoptr(args[0], pointer), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return copy


def _prefetcher() -> Any:
    """Return an intrinsic that prefetches the cache line at an address; it never faults."""

    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            read, keep, data = flag(0), flag(3), flag(1)
            builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return prefetch


def _reader() -> Any:
    """Return an intrinsic that returns the byte at an address."""

    @intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), align=1)

        return types.uint8(types.intp), generate

    return read


def _adder() -> Any:
    """Return an intrinsic that atomically adds to an int64 at an address, and returns its old value."""

    @intrinsic
    def add(typing_context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw("add", pointer, args[1], "monotonic")

        return types.int64(types.intp, types.int64), generate

    return add


_prefetch = _prefetcher()
_add_to = _adder()
_byte_at = _reader()
_copy1, _copy2, _copy4, _copy8 = (_loader(t) for t in (types.uint8, types.uint16, types.uint32, types.uint64))


@compiled(_NUMBERS, "int64", "int64", _NUMBERS, _NUMBERS, _NUMBERS)
def find_rows(samples: Array, first: int, end: int, before: Array, positions: Array, rows: Array) -> None:
    """Find trajectory and row of samples drawn from the window of positions ``first <= p < end``.

    Sample s of the window is in the first trajectory with more than s samples up to its end (``bucketize`` with
    ``right=True``). ``before`` is the running total of samples before each position.
    """
    for k in range(len(samples)):
        wanted = samples[k] + before[first]
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            if before[middle + 1] > wanted:
                high = middle
            else:
                low = middle + 1
        positions[k] = low
        rows[k] = wanted - before[low]


@compiled(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, "int32[::1]", "int32[::1]", "int32[::1]", _TABLE)
def place_rows(
    positions: Array,
    rows: Array,
    start_samples: Array,
    start_extra: Array,
    steps: Array,
    batch: Array,
    extra: Array,
    places: Array,
) -> None:
    """Set ``places[axis, k]`` to the row, within its slot, of row k of a trajectory; see ``fields.skip_extra_rows``."""
    for k in range(len(positions)):
        p, row = positions[k], rows[k]
        places[SAMPLES, k] = start_samples[p] + row
        head = start_extra[p] + row
        tail = head
        if 0 < extra[p] <= steps[p]:  # for an agent trajectory, extra is its response tokens, with or without others
            epoch = row // (np.int64(steps[p]) // extra[p] * batch[p])
            head += (epoch + 1) * batch[p]
            tail += epoch * batch[p]
        places[FIRST_EXTRA, k] = head
        places[LAST_EXTRA, k] = tail


@compiled(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _NUMBERS, "int64", "int64")
def copy_rows(
    slot: Array,
    rows: Array,
    addresses: Array,
    axes: Array,
    columns: Array,
    row_nbytes: Array,
    targets: Array,
    begin: int,
    end: int,
) -> None:
    """Copy, for samples ``begin <= k < end``, row ``rows[axis, k]`` of each column of slot ``slot[k]``.

    ``addresses[s, c]`` is the address of the first row of column c of slot s, ``axes[s, c]`` its axis;
    ``columns[j]`` is the c that output j takes, ``targets[j]`` the address of its row 0.
    """
    count = end - begin
    sources = np.empty(count, np.int64)
    for j in range(len(columns)):
        c = columns[j]
        width = row_nbytes[j]
        target = targets[j] + begin * width
        for i in range(count):
            s = slot[begin + i]
            sources[i] = addresses[s, c] + rows[axes[s, c], begin + i] * width
        reach = min(width, _FETCHED_BYTES)
        for i in range(count):
            if i + _AHEAD < count:
                line = sources[i + _AHEAD]
                stop = line + reach
                while line < stop:
                    _prefetch(line)
                    line += 64
            if width == 4:
                _copy4(target + i * 4, sources[i])
            elif width == 1:
                _copy1(target + i, sources[i])
            elif width == 8:
                _copy8(target + i * 8, sources[i])
            elif width == 2:
                _copy2(target + i * 2, sources[i])
            else:
                _memcpy(target + i * width, sources[i], width)


@compiled(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _NUMBERS, "int64", _NUMBERS)
def share_rows(
    slot: Array,
    rows: Array,
    addresses: Array,
    axes: Array,
    columns: Array,
    row_nbytes: Array,
    targets: Array,
    piece: int,
    taken: Array,
) -> None:
    """Copy rows as :func:`copy_rows` does, together with other threads that call this with the same arrays.

    Each takes ``piece`` samples at a time until none are left; ``taken[0]`` counts the samples taken, at first 0.
    """
    counter = taken.ctypes.data
    while True:
        begin = _add_to(counter, piece)
        if begin >= len(slot):
            return
        copy_rows(slot, rows, addresses, axes, columns, row_nbytes, targets, begin, min(begin + piece, len(slot)))


@compiled(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _TABLE)
def row_addresses(
    slot: Array, rows: Array, addresses: Array, axes: Array, columns: Array, row_nbytes: Array, sources: Array
) -> None:
    """Set ``sources[j, i]`` to the address from which :func:`copy_rows` copies row i of column ``columns[j]``."""
    for j in range(len(columns)):
        c = columns[j]
        for i in range(len(slot)):
            s = slot[i]
            sources[j, i] = addresses[s, c] + rows[axes[s, c], i] * row_nbytes[j]


@compiled("int32[::1]", _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _TABLE, nogil=False)
def set_locations(
    slots: Array, samples: Array, extra: Array, document: Array, positions: Array, locations: Array
) -> None:
    """Set slot and first rows of index entries, ``locations`` of ``[positions, 4]``, without interrupts in between."""
    for i in range(len(positions)):
        at = positions[i]
        slots[at], samples[at], extra[at], document[at] = (
            locations[i, 0],
            locations[i, 1],
            locations[i, 2],
            locations[i, 3],
        )


@compiled(_TABLE, _NUMBERS, _NUMBERS, _TABLE, _TABLE, "int64", nogil=False)
def lay_out(extents: Array, axes: Array, widths: Array, sizes: Array, offsets: Array, alignment: int) -> int:
    """Lay trajectories out column by column; return their size in bytes.

    ``extents[i]`` are steps, batch, extra rows and bytes of the document of trajectory i, ``axes`` and ``widths`` those
    of the columns' rows. Sets ``sizes[i, c]`` to the bytes of its column c, ``offsets[i, c]`` to their beginning.
    """
    end = 0
    for c in range(len(axes)):
        end += -end % alignment
        for i in range(len(extents)):
            steps, batch, extra, document = extents[i]
            rows = (steps + extra) * batch
            if axes[c] == SAMPLES:
                rows = steps * batch
            elif axes[c] == RESPONSE:
                rows = extra
            elif axes[c] == DOCUMENT:
                rows = document
            sizes[i, c] = rows * widths[c]
            offsets[i, c] = end
            end += sizes[i, c]
    return end


@compiled(_NUMBERS, _NUMBERS, _NUMBERS, nogil=False)
def copy_few_blocks(targets: Array, sources: Array, sizes: Array) -> None:
    """Copy blocks of bytes from addresses to addresses, holding the GIL.

    For copies that take less time than acquiring the GIL again.
    """
    for i in range(len(sizes)):
        _memcpy(targets[i], sources[i], sizes[i])


@compiled(_NUMBERS, _NUMBERS, _NUMBERS)
def copy_blocks(targets: Array, sources: Array, sizes: Array) -> None:
    """Copy blocks of bytes from addresses to addresses."""
    for i in range(len(sizes)):
        _memcpy(targets[i], sources[i], sizes[i])


@compiled(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, "int64")
def are_there(addresses: Array, sizes: Array, bases: Array, ends: Array, marks: Array, block: int) -> bool:
    """Return whether all blocks of these pieces of memory are marked; pieces outside the maps are ignored.

    Map m covers the bytes ``bases[m] <= address < ends[m]``, in ascending order. It has one byte per block from
    the address ``marks[m]`` on, nonzero if the block is there.
    """
    for i in range(len(addresses)):
        low, high = 0, len(bases)
        while low < high:
            middle = (low + high) // 2
            if bases[middle] > addresses[i]:
                high = middle
            else:
                low = middle + 1
        m = low - 1
        if m < 0 or addresses[i] >= ends[m] or sizes[i] <= 0:
            continue
        start = addresses[i] - bases[m]
        for mark in range(marks[m] + start // block, marks[m] + (start + sizes[i] - 1) // block + 1):
            if _byte_at(mark) == 0:
                return False
    return True
