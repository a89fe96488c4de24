"""Kernels that move rows, compiled on import by :mod:`trajstore._core.base.machine_code`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
_memcmp: Any = types.ExternalFunction("memcmp", types.int32(types.intp, types.intp, types.intp))
_sem_init: Any = types.ExternalFunction("sem_init", types.int32(types.intp, types.int32, types.uint32))
_sem_post: Any = types.ExternalFunction("sem_post", types.int32(types.intp))
_sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())

SAMPLES, FIRST_EXTRA, LAST_EXTRA, RESPONSE, DOCUMENT, NEXT = range(6)

Array: TypeAlias = np.ndarray[Any, Any]

_NUMBERS, _TABLE = "int64[::1]", "int64[:, ::1]"


@cache
def _warn_of_compiling() -> None:
    text = "numba can write no cache, so each process compiles again; set NUMBA_CACHE_DIR to a folder for it"
    warnings.warn(text, stacklevel=1)


def compiled(*types_of_arguments: str, nogil: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function for these arguments, or loads it from numba's cache.

    Where no cache can be written it always compiles, with one warning.

    Args:
        types_of_arguments: in numba's notation.
        nogil: release the GIL while it runs.
    """

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            dispatcher = numba.njit(nogil=nogil, cache=True)(function)
        except RuntimeError:  # numba finds no folder that it can write its cache to
            _warn_of_compiling()
            dispatcher = numba.njit(nogil=nogil)(function)
        dispatcher.compile(f"({', '.join(types_of_arguments)},)")
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


def _adder() -> Any:
    """Return an intrinsic that atomically adds to an int64 at an address, and returns its old value; a full barrier."""

    @intrinsic
    def add(typing_context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

        return types.int64(types.intp, types.int64), generate

    return add


def _pointer(element: types.Type) -> Any:
    """Return an intrinsic that makes an address a pointer to elements."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(element).as_pointer())

        return types.CPointer(element)(types.intp), generate  # type: ignore[no-untyped-call]

    return pointer


_prefetch = _prefetcher()
_add_to = _adder()
_array_at: Any = numba.carray  # type: ignore[attr-defined]
_numbers_at, _bytes_at = _pointer(types.int64), _pointer(types.int8)
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


@compiled(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _NUMBERS, "int64", "int64", _NUMBERS)
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
    sources: Array,
) -> None:
    """Copy, for samples ``begin <= k < end``, row ``rows[axis, k]`` of each column of slot ``slot[k]``.

    ``addresses[s, c]`` is the address of the first row of column c of slot s, ``axes[s, c]`` its axis;
    ``columns[j]`` is the c that output j takes, ``targets[j]`` the address of its row 0. ``sources`` is working memory
    for a number per sample.
    """
    count = end - begin
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


_CALLERS, _CLOSED, _ACTIVE, _TAKEN, _PENDING, _WANTED, HELPERS, _WORK = range(8, 72, 8)
"""Places in the record of helper threads, each in its own cache line; at 0 is the semaphore on which they sleep.

Calls that ask for the helpers; 1 while there is no work; helpers that may be at work; its samples taken so far;
wake-ups under way; helpers still to wake; number of helpers; the work: sizes, and addresses of arrays.
"""

HELPERS_NUMBERS = _WORK + 13
"""Length of the record."""

MOST_SAMPLES = 4096
"""Largest number of samples that a thread takes at a time."""

_SPINS = 1000
"""Times to check for helpers at work before yielding the processor."""


@compiled(_NUMBERS)
def make_helpers(record: Array) -> None:
    """Prepare a record of zeros, for threads that call :func:`help_copy`."""
    _sem_init(record.ctypes.data, 0, 0)
    record[_CLOSED] = 1


@compiled(_NUMBERS, _NUMBERS)
def _share(record: Array, sources: Array) -> None:
    """Wake further helpers, then copy pieces of the work until none are left."""
    at = record.ctypes.data
    work = record[_WORK:]
    count, piece, wakes, slots, width, outputs = work[0], work[1], work[2], work[3], work[4], work[5]
    for _ in range(wakes):
        if _add_to(at + 8 * _WANTED, -1) > 0:
            _add_to(at + 8 * _PENDING, 1)
            _sem_post(at)
    slot = _array_at(_numbers_at(work[6]), count)
    rows = _array_at(_numbers_at(work[7]), (3, count))
    addresses = _array_at(_numbers_at(work[8]), (slots, width))
    axes = _array_at(_bytes_at(work[9]), (slots, width))
    columns = _array_at(_numbers_at(work[10]), outputs)
    row_nbytes = _array_at(_numbers_at(work[11]), outputs)
    targets = _array_at(_numbers_at(work[12]), outputs)
    while True:
        begin = _add_to(at + 8 * _TAKEN, piece)
        if begin >= count:
            return
        end = min(begin + piece, count)
        copy_rows(slot, rows, addresses, axes, columns, row_nbytes, targets, begin, end, sources)


@compiled(_NUMBERS)
def help_copy(record: Array) -> None:
    """Sleep, and help with the copies of :func:`share_rows`; never returns, never needs the GIL.

    A helper that wakes late finds the work closed, and does not look at it. Memory is allocated only here, because an
    error later would leave work undone.
    """
    at = record.ctypes.data
    sources = np.empty(MOST_SAMPLES, np.int64)
    while True:
        while _sem_wait(at) != 0:  # interrupted by a signal
            pass
        _add_to(at + 8 * _PENDING, -1)
        _add_to(at + 8 * _ACTIVE, 1)
        if _add_to(at + 8 * _CLOSED, 0) == 0:
            _share(record, sources)
        _add_to(at + 8 * _ACTIVE, -1)


@compiled(
    *(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _NUMBERS, "int64", "int64", "int64", _NUMBERS)
)
def share_rows(
    slot: Array,
    rows: Array,
    addresses: Array,
    axes: Array,
    columns: Array,
    row_nbytes: Array,
    targets: Array,
    piece: int,
    helpers: int,
    wakes: int,
    record: Array,
) -> None:
    """Copy all rows as :func:`copy_rows` does, with the threads that help.

    Waits only for helpers that have begun. While another call has the helpers, this thread copies alone. Threads take
    ``piece`` samples at a time, at most ``MOST_SAMPLES``. Each first wakes ``wakes`` of at most ``helpers``.
    """
    sources = np.empty(MOST_SAMPLES, np.int64)
    if _add_to(record.ctypes.data + 8 * _CALLERS, 1) > 0:
        _add_to(record.ctypes.data + 8 * _CALLERS, -1)
        record = np.zeros(HELPERS_NUMBERS, np.int64)
    at = record.ctypes.data
    work = record[_WORK:]
    work[0], work[1], work[2] = len(slot), piece, wakes
    work[3], work[4], work[5] = addresses.shape[0], addresses.shape[1], len(columns)
    work[6], work[7], work[8], work[9] = slot.ctypes.data, rows.ctypes.data, addresses.ctypes.data, axes.ctypes.data
    work[10], work[11], work[12] = columns.ctypes.data, row_nbytes.ctypes.data, targets.ctypes.data
    record[_TAKEN] = 0
    record[_WANTED] = min(helpers, record[HELPERS]) - record[_PENDING]
    _add_to(at + 8 * _CLOSED, -1)
    _share(record, sources)
    _add_to(at + 8 * _CLOSED, 1)
    checks = 0
    while _add_to(at + 8 * _ACTIVE, 0) > 0:
        checks += 1
        if checks > _SPINS:
            _sched_yield()
    _add_to(at + 8 * _CALLERS, -1)


@compiled(_NUMBERS, _TABLE, _TABLE, "int8[:, ::1]", _NUMBERS, _NUMBERS, _TABLE)
def row_addresses(
    slot: Array, rows: Array, addresses: Array, axes: Array, columns: Array, row_nbytes: Array, sources: Array
) -> None:
    """Set ``sources[j, i]`` to the address from which :func:`copy_rows` copies row i of column ``columns[j]``.

    On the axis ``NEXT``, ``addresses[s, c]`` is the address of an array with the address of each row.
    """
    for j in range(len(columns)):
        c = columns[j]
        for i in range(len(slot)):
            s = slot[i]
            if axes[s, c] == NEXT:
                sources[j, i] = _numbers_at(addresses[s, c])[rows[SAMPLES, i]]
            else:
                sources[j, i] = addresses[s, c] + rows[axes[s, c], i] * row_nbytes[j]


@compiled(_NUMBERS, _NUMBERS, "int64", "boolean[::1]")
def equal_rows(first: Array, second: Array, width: int, equal: Array) -> None:
    """Set ``equal[i]`` to whether the ``width`` bytes at ``first[i]`` and at ``second[i]`` are the same."""
    for i in range(len(first)):
        equal[i] = _memcmp(first[i], second[i], width) == 0


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
            if _bytes_at(mark)[0] == 0:
                return False
    return True
