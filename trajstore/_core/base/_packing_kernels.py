"""Kernels that pack the columns of rollouts and copy rows out of them; :mod:`trajstore._core.formats.packed` explains.

Compiled on import by :mod:`trajstore._core.base.machine_code`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from trajstore._core.base._kernels import compiled

Array: TypeAlias = np.ndarray[Any, Any]

_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
_memcmp: Any = types.ExternalFunction("memcmp", types.int32(types.intp, types.intp, types.intp))

_NUMBERS = "int64[::1]"

BITS = 0
"""Width of rows of a bit each. Other widths are bytes, negative for signed integers."""

STORED, RUNS, ENDS, SOURCES, TABLE, WIDTH, DESCRIPTION = range(7)
"""Numbers of a description: address of the stored rows; runs; addresses of their ends and sources; bytes of such a
number; width of a stored row. And how many there are."""


def _called(function: Callable[..., Any]) -> Any:
    """Compile a function that other kernels call."""
    return numba.njit(function)


def _inlined(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always")(function)


_SHARED_BYTES = 16
"""A shorter common beginning is stored again: a run has 8 bytes."""


def _loader(element: types.Type) -> Any:
    """Return an intrinsic that loads an element from any address."""

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(element).as_pointer()
            return builder.load(builder.inttoptr(args[0], pointer), align=1)

        return element(types.intp), generate

    return load


def _storer(element: types.Type) -> Any:
    """Return an intrinsic that stores the low bytes of an int64 at any address."""

    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = context.get_value_type(element)
            value = args[1] if kind.width == 64 else builder.trunc(args[1], kind)
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64), generate

    return store


_load1, _load2, _load4, _load8 = (_loader(t) for t in (types.uint8, types.uint16, types.uint32, types.int64))
_signed1, _signed2, _signed4 = (_loader(t) for t in (types.int8, types.int16, types.int32))
_store1, _store2, _store4, _store8 = (_storer(t) for t in (types.uint8, types.uint16, types.uint32, types.int64))


@_inlined
def _value(address: int, width: int) -> Any:
    """Return the integer of ``width`` bytes at an address; the byte before one of 3 bytes must be readable."""
    if width == 3:
        return np.int64(_load4(address - 1)) >> 8
    if width == 2:
        return np.int64(_load2(address))
    if width == 1:
        return np.int64(_load1(address))
    if width == 4:
        return np.int64(_load4(address))
    if width == -3:
        return np.int64(_signed4(address - 1)) >> 8
    if width == -2:
        return np.int64(_signed2(address))
    if width == -1:
        return np.int64(_signed1(address))
    if width == -4:
        return np.int64(_signed4(address))
    return _load8(address)


@_inlined
def _store(address: int, value: int, width: int) -> None:
    """Store the low ``width`` bytes of an integer."""
    if width == 8:
        _store8(address, value)
    elif width == 4:
        _store4(address, value)
    elif width == 3:
        _store2(address, value)
        _store1(address + 2, value >> 16)
    elif width == 2:
        _store2(address, value)
    else:
        _store1(address, value)


@_called
def _widen(target: int, rows: int, first: int, count: int, width: int, itemsize: int) -> None:
    """Copy stored rows to elements of ``itemsize`` bytes."""
    size = abs(width)
    if size == itemsize:
        _memcpy(target, rows + first * size, count * size)
    elif width == BITS:
        for k in range(count):
            bits = np.int64(_load1(rows + (first + k) // 8))
            _store(target + k * itemsize, (bits >> ((first + k) % 8)) & 1, itemsize)
    elif width == 3 and itemsize == 8:
        source = rows + first * 3 - 1
        for k in range(count):
            _store8(target + k * 8, np.int64(_load4(source + k * 3)) >> 8)
    elif width == 2 and itemsize == 8:
        source = rows + first * 2
        for k in range(count):
            _store8(target + k * 8, np.int64(_load2(source + k * 2)))
    else:
        source = rows + first * size
        for k in range(count):
            _store(target + k * itemsize, _value(source + k * size, width), itemsize)


@_called
def _repeat(target: int, rows: int, row: int, count: int, width: int, itemsize: int) -> None:
    """Copy one stored row to ``count`` elements."""
    _widen(target, rows, row, 1, width, itemsize)
    if itemsize == 8:
        value = _load8(target)
        for k in range(1, count):
            _store8(target + k * 8, value)
    elif itemsize == 4:
        value = np.int64(_load4(target))
        for k in range(1, count):
            _store4(target + k * 4, value)
    elif itemsize == 1:
        value = np.int64(_load1(target))
        for k in range(1, count):
            _store1(target + k, value)
    else:
        for k in range(1, count):
            _memcpy(target + k * itemsize, target, itemsize)


@_inlined
def _end(table: int, run: int, size: int) -> Any:
    return np.int64(_load4(table + run * 4)) if size == 4 else _load8(table + run * 8)


@_inlined
def _source(table: int, run: int, size: int) -> Any:
    return np.int64(_signed4(table + run * 4)) if size == 4 else _load8(table + run * 8)


@_called
def _run_at(ends: int, runs: int, size: int, row: int) -> Any:
    """Return the run that has a row: the first one that ends after it."""
    low, high = 0, runs
    while low < high:
        middle = (low + high) // 2
        if _end(ends, middle, size) > row:
            high = middle
        else:
            low = middle + 1
    return low


@compiled(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, "int64")
def unpack_rows(targets: Array, packed: Array, starts: Array, counts: Array, itemsize: int) -> None:
    """Copy rows ``starts[i] <= row < starts[i] + counts[i]`` of packed columns to elements of ``itemsize`` bytes.

    ``packed[i]`` is the address of the column's description, ``targets[i]`` that of the first element.
    """
    for i in range(len(targets)):
        at, row, stop, target = packed[i], starts[i], starts[i] + counts[i], targets[i]
        if row >= stop:
            continue
        rows, runs = _load8(at + 8 * STORED), _load8(at + 8 * RUNS)
        ends, sources = _load8(at + 8 * ENDS), _load8(at + 8 * SOURCES)
        size, width = _load8(at + 8 * TABLE), _load8(at + 8 * WIDTH)
        run = _run_at(ends, runs, size, row)
        begin = _end(ends, run - 1, size) if run else 0
        while row < stop:
            end = min(_end(ends, run, size), stop)
            source = _source(sources, run, size)
            if source >= 0:
                _widen(target, rows, source + row - begin, end - row, width, itemsize)
            else:
                _repeat(target, rows, -1 - source, end - row, width, itemsize)
            target += (end - row) * itemsize
            begin = row = end
            run += 1


@compiled("int64", "int64", "int64")
def pieces_of(at: int, start: int, stop: int) -> Array:
    """Return address and bytes of the stored rows that :func:`unpack_rows` needs, ``[pieces, 2]``."""
    rows, runs = _load8(at + 8 * STORED), _load8(at + 8 * RUNS)
    ends, sources = _load8(at + 8 * ENDS), _load8(at + 8 * SOURCES)
    size, width = _load8(at + 8 * TABLE), _load8(at + 8 * WIDTH)
    first = _run_at(ends, runs, size, start)
    last = _run_at(ends, runs, size, stop - 1) if stop > start else first - 1
    pieces = np.empty((last - first + 1, 2), np.int64)
    begin = _end(ends, first - 1, size) if first else 0
    for run in range(first, last + 1):
        source, end = _source(sources, run, size), _end(ends, run, size)
        low = source + max(start, begin) - begin if source >= 0 else -1 - source
        high = source + min(stop, end) - begin if source >= 0 else low + 1
        begin = end
        if width == BITS:
            pieces[run - first] = rows + low // 8, (high + 7) // 8 - low // 8
        else:
            pieces[run - first] = rows + low * abs(width) - (abs(width) == 3), (high - low) * abs(width) + 1
    return pieces


@compiled("int64", "int64", "int64", "int64", "int64", "int64")
def is_sound(ends: int, sources: int, runs: int, size: int, rows: int, stored: int) -> Any:
    """Return whether runs end one after the other, the last with the column's rows, and name stored rows."""
    begin = 0
    for run in range(runs):
        end, source = _end(ends, run, size), _source(sources, run, size)
        if end <= begin or end > rows:
            return False
        if (source + end - begin > stored) if source >= 0 else (-1 - source >= stored):
            return False
        begin = end
    return begin == rows


@compiled(_NUMBERS, _NUMBERS, "int64")
def range_of_values(addresses: Array, counts: Array, width: int) -> Any:
    """Return the lowest and the highest of integers of a width; 0 and 0 for none."""
    low, high, found = np.int64(0), np.int64(0), False
    size = abs(width)
    for i in range(len(addresses)):
        for k in range(counts[i]):
            value = _value(addresses[i] + k * size, width)
            if not found:
                low, high, found = value, value, True
            low, high = min(low, value), max(high, value)
    return low, high


@_inlined
def _same(one: int, other: int, itemsize: int) -> Any:
    if itemsize == 8:
        return _load8(one) == _load8(other)
    if itemsize == 4:
        return _load4(one) == _load4(other)
    if itemsize == 1:
        return _load1(one) == _load1(other)
    return _memcmp(one, other, itemsize) == 0


@_called
def _repetition(first: int, at: int, count: int, itemsize: int, least: int) -> tuple[int, int]:
    """Return where the next ``least`` or more equal elements begin and end; the count twice if there are none."""
    begin = at
    if itemsize == 8:
        last = _load8(first + at * 8)
        for k in range(at + 1, count):
            value = _load8(first + k * 8)
            if value != last:
                if k - begin >= least:
                    return begin, k
                begin, last = k, value
    else:
        for k in range(at + 1, count):
            if not _same(first + k * itemsize - itemsize, first + k * itemsize, itemsize):
                if k - begin >= least:
                    return begin, k
                begin = k
    return (begin, count) if count - begin >= least else (count, count)


@_called
def _common(one: int, other: int, nbytes: int) -> Any:
    """Return how many bytes at the beginning are the same."""
    at = 0
    while at + 8 <= nbytes and _load8(one + at) == _load8(other + at):
        at += 8
    while at < nbytes and _load1(one + at) == _load1(other + at):
        at += 1
    return at


@_called
def _put(stored: Array, at: int, source: int, count: int, width: int, itemsize: int) -> None:
    """Store elements as rows ``at``, ``at + 1``, ..."""
    size, target = abs(width), stored.ctypes.data
    if width == BITS:
        for k in range(count):
            stored[(at + k) // 8] |= _load1(source + k * itemsize) << ((at + k) % 8)
    elif size == itemsize:
        _memcpy(target + at * size, source, count * size)
    elif size == 3 and itemsize == 8:
        target += at * 3
        for k in range(count):
            value = _load8(source + k * 8)
            _store2(target + k * 3, value)
            _store1(target + k * 3 + 2, value >> 16)
    else:
        for k in range(count):
            _store(target + (at + k) * size, _value(source + k * itemsize, itemsize), size)


@_called
def _grown(array: Array) -> Array:
    larger = np.empty(2 * len(array), np.int64)
    larger[: len(array)] = array
    return larger


@_called
def _joined(lengths: Array, sources: Array, begins: Array, runs: Array, used: int) -> tuple[Array, Array]:
    """Return end and source of the runs in the order of the trajectories; those that continue one another are one."""
    ends, starts = np.empty(used, np.int64), np.empty(used, np.int64)
    count = end = length = 0
    for own in range(len(begins)):
        for run in range(begins[own], begins[own] + runs[own]):
            end += lengths[run]
            source = sources[run]
            previous = starts[count - 1] if count else 0
            continues = previous == source if source < 0 else previous >= 0 and previous + length == source
            if count and continues:
                length += lengths[run]
            else:
                starts[count], length = source, lengths[run]
                count += 1
            ends[count - 1] = end
    return ends[:count], starts[:count]


@compiled(_NUMBERS, _NUMBERS, _NUMBERS, "int64", "int64", "int64")
def pack_rows(
    addresses: Array, counts: Array, order: Array, itemsize: int, width: int, least: int
) -> tuple[Array, int, Array, Array]:
    """Pack a column; return the stored rows, their number, and end and source of each run.

    Args:
        addresses: of each trajectory's first element, ``[n]``.
        counts: elements of each, ``[n]``.
        order: in which they are stored: each shares its beginning with the one before, ``[n]``.
        itemsize: bytes of an element.
        width: of a stored row.
        least: fewest equal elements in sequence that are stored as one row; 0: never.
    """
    total, size = counts.sum(), abs(width)
    stored = np.zeros((total + 7) // 8, np.uint8) if width == BITS else np.empty(total * size, np.uint8)
    lengths, sources = np.empty(len(order) + 64, np.int64), np.empty(len(order) + 64, np.int64)
    begins, runs = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    recent = np.zeros((4, 2), np.int64)  # address and row of the last repeated elements
    used, rows, repeated = 0, 0, 0
    for place in range(len(order)):
        own = order[place]
        first, count = addresses[own], counts[own]
        begins[own] = used
        done = 0
        if place:
            before = order[place - 1]
            most = min(count, counts[before])
            same = _common(addresses[before], first, most * itemsize) // itemsize
            run = begins[before]
            while done < same and (same * size >= _SHARED_BYTES if size else same >= 8 * _SHARED_BYTES):
                if used == len(lengths):
                    lengths, sources = _grown(lengths), _grown(sources)
                lengths[used], sources[used] = min(lengths[run], same - done), sources[run]
                done += lengths[used]
                used += 1
                run += 1
        at = done
        while at < count:
            begin, end = _repetition(first, at, count, itemsize, least) if least else (count, count)
            if used + 2 > len(lengths):
                lengths, sources = _grown(lengths), _grown(sources)
            if begin > at:
                _put(stored, rows, first + at * itemsize, begin - at, width, itemsize)
                if used > begins[own] and sources[used - 1] >= 0 and sources[used - 1] + lengths[used - 1] == rows:
                    lengths[used - 1] += begin - at
                else:
                    lengths[used], sources[used] = begin - at, rows
                    used += 1
                rows += begin - at
            if end > begin:
                element, known = first + begin * itemsize, -1
                for k in range(min(repeated, 4)):
                    if _same(recent[k, 0], element, itemsize):
                        known = recent[k, 1]
                if known < 0:
                    _put(stored, rows, element, 1, width, itemsize)
                    recent[repeated % 4] = element, rows
                    known = rows
                    rows += 1
                    repeated += 1
                lengths[used], sources[used] = end - begin, -1 - known
                used += 1
            at = end
        runs[own] = used - begins[own]
    ends, firsts = _joined(lengths, sources, begins, runs, used)
    return stored[: (rows + 7) // 8 if width == BITS else rows * size], rows, ends, firsts
