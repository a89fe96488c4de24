"""Arrays and string tables as JSON values: streams of differences, deflated, base64. Pure.

A million-entry index is parsed at memory speed this way; plain JSON numbers would take seconds and several times the
memory. The format specification describes the encoding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from trajstore._core.base import locks
from trajstore.errors import CorruptStoreError

_MAX_INFLATION = 1100  # deflate's maximum ratio; larger claims are forged

BLOCK_ROWS = 1 << 16
"""Rows of a stream, of which any can be unpacked alone: their 64-bit numbers fit into a processor's cache."""

_WIDTHS = (np.dtype("<i1"), np.dtype("<i2"), np.dtype("<i4"), np.dtype("<i8"))
"""Integers that differences are stored as."""

_DATA = b'"data":'
_LONG_DATA = 1 << 20
"""Least length of a stream that is not copied when it is parsed."""

_SHORT = 1 << 10
"""Most differences that are summed sooner than looked at."""

_MAX_TEXT_INFLATION = 256  # for strings without close repetitions

_FEW_BYTES, _FEW_STRINGS = 1 << 20, 1 << 16
"""Bytes and strings that a table may always claim, since a text may be stored again after many others."""

_RECENT = 1024
"""Number of recent strings that are deduplicated."""

Stream = str | bytes | memoryview
"""Packed rows, in base64."""


def array_to_json(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return an array of integers or raw bytes as JSON values.

    Integers are delta-encoded along the first axis, which makes ids and offsets small.
    """
    array = np.ascontiguousarray(array)
    streams = [_packed(array[first : first + BLOCK_ROWS]) for first in range(0, max(len(array), 1), BLOCK_ROWS)]
    data = streams if len(streams) > 1 else streams[0]
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _packed(rows: npt.NDArray[Any]) -> str:
    data = rows.tobytes()
    if rows.dtype.kind in "iu" and len(rows):
        numbers = rows.astype(np.int64)
        steps = np.diff(numbers, axis=0)
        low, high = steps.min(initial=0), steps.max(initial=0)
        width = next(width for width in _WIDTHS if np.iinfo(width).min <= low and high <= np.iinfo(width).max)
        data = numbers[:1].tobytes() + steps.astype(width).tobytes()
    level = 0 if rows.dtype == "V16" else 1  # UUIDs are random
    return pybase64.b64encode_as_string(zlib.compress(data, level))


def array_from_json(value: Any, dtype: npt.DTypeLike, dimensions: int = 1) -> npt.NDArray[Any]:
    """Return the array described by :func:`array_to_json`, as a new writable array.

    Raises:
        CorruptStoreError: it is not an array of this dtype and number of dimensions.
    """
    wanted = np.dtype(dtype)
    try:
        shape, streams = _streams(value, wanted, dimensions)
        array = np.empty(shape, wanted)
        for first, rows, stream in streams:
            array[first : first + rows] = _unpacked(stream, (rows, *shape[1:]), wanted)
    except UNPACKING_ERRORS as error:
        raise CorruptStoreError(f"a packed array is damaged: {error}") from error
    return array


def blocks_from_json(
    packed: Mapping[str, Any], dtypes: Mapping[str, npt.DTypeLike], first: int, end: int
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the rows ``first <= i < end`` of one-dimensional arrays of the same length, a stream of each at a time.

    Integers have 64 bits, as before their conversion to their dtype. Those with the same data are unpacked once.

    Raises:
        UNPACKING_ERRORS: one is not such an array.
    """
    wanted = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
    streams = {name: _streams(packed[name], dtype, 1)[1] for name, dtype in wanted.items()}
    whole: dict[Any, npt.NDArray[Any]] = {}
    for begin in range(first // BLOCK_ROWS * BLOCK_ROWS, end, BLOCK_ROWS):
        block: dict[Any, npt.NDArray[Any]] = {}
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in wanted.items():
            several = len(streams[name]) > 1
            start, rows, stream = streams[name][begin // BLOCK_ROWS if several else 0]
            known, key = block if several else whole, stream if dtype.kind in "iu" else name
            if key not in known:
                known[key] = _unpacked(stream, (rows,), dtype)
            columns[name] = known[key][max(begin, first) - start : min(begin + BLOCK_ROWS, end) - start]
        yield columns


def packed_length(value: Any) -> int:
    """Return the letters of a packed array's data.

    Raises:
        KeyError, TypeError: it is not a packed array.
    """
    data = value["data"]
    return sum(map(len, data)) if isinstance(data, list) else len(data)


def rows_of(value: Any, first: int, end: int) -> tuple[Any, int]:
    """Return an array with those streams of another that have some of the rows ``first <= i < end``, and its first row.

    It keeps no other data in memory.

    Raises:
        UNPACKING_ERRORS: it is not a packed array.
    """
    _, streams = _streams(value, np.dtype(value["dtype"]), 1)
    kept = [block for block in streams if block[0] < end and block[0] + block[1] > first] or streams[:1]
    data = [bytes(stream) if isinstance(stream, memoryview) else stream for *_, stream in kept]
    shape = [sum(rows for _, rows, _ in kept)]
    return {**value, "shape": shape, "data": data if isinstance(value["data"], list) else data[0]}, kept[0][0]


UNPACKING_ERRORS = (KeyError, TypeError, ValueError, zlib.error)
"""Errors raised by damaged packed arrays."""


def _streams(
    value: Any, dtype: np.dtype[Any], dimensions: int
) -> tuple[tuple[int, ...], Sequence[tuple[int, int, Stream]]]:
    """Return the shape of a packed array, and its streams, each with the first of its rows and their number.

    Raises:
        UNPACKING_ERRORS: it has another dtype or number of dimensions, or claims more than its bytes can hold.
    """
    shape, data = tuple(map(int, value["shape"])), value["data"]
    if value["dtype"] != dtype.str or len(shape) != dimensions or min(shape, default=0) < 0:
        raise ValueError(f"dtype {value['dtype']!r}, shape {shape}")
    streams: Sequence[Stream] = data if isinstance(data, list) else [data]
    most = packed_length(value) // 4 * 3
    least = prod(shape) * (1 if dtype.kind in "iu" else dtype.itemsize)
    if least > most * _MAX_INFLATION + 64:
        raise ValueError(f"claims {least} bytes in {most}")
    if len(streams) != max(-(-shape[0] // BLOCK_ROWS), 1) and isinstance(data, list):
        raise ValueError(f"{len(streams)} streams of {shape[0]} rows")
    rows = BLOCK_ROWS if isinstance(data, list) else shape[0]
    return shape, [(rows * at, min(rows, shape[0] - rows * at), stream) for at, stream in enumerate(streams)]


def _unpacked(stream: Stream, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the rows of a stream, integers with 64 bits; those of equal rows share their memory.

    Raises:
        UNPACKING_ERRORS: it is damaged, or has another number of rows.
    """
    integers, count = dtype.kind in "iu", prod(shape[1:])
    most = prod(shape) * (8 if integers else dtype.itemsize)
    inflater = zlib.decompressobj()
    data = inflater.decompress(pybase64.b64decode(stream, validate=True), most + 1)
    wrong = ValueError(f"a stream is not {shape[0]} rows")
    if not inflater.eof or inflater.unused_data:
        raise wrong
    if not integers or not most:
        if len(data) != most:
            raise wrong
        return np.frombuffer(data, dtype).reshape(shape)
    first = np.frombuffer(data, "<i8", count).reshape(1, *shape[1:])
    number = (shape[0] - 1) * count
    width = next((width for width in _WIDTHS if len(data) == 8 * count + number * width.itemsize), None)
    if width is None:
        raise wrong
    steps = np.frombuffer(data, width, offset=8 * count).reshape(-1, *shape[1:])
    if len(steps) > _SHORT and not steps.any():  # common for similar trajectories; cheaper than sums
        return np.broadcast_to(first, shape)
    numbers = np.empty(shape, np.int64)
    numbers[:1] = first
    np.cumsum(steps, axis=0, dtype=np.int64, out=numbers[1:])
    numbers[1:] += first
    return numbers


def parsed_arrays(text: bytes, begin: int, end: int) -> Any:
    """Return the JSON value in ``text[begin:end]``, in which long streams of packed arrays are views of ``text``.

    Most of an index are UUIDs, which the parser would copy.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    whole, done, at = memoryview(text)[begin:end], begin, begin
    views: list[memoryview] = []
    parts: list[bytes] = []
    while end - at > _LONG_DATA and (at := text.find(_DATA, at, end)) >= 0:
        at += len(_DATA)
        at += text[at : at + 1] == b"["
        while text[at : at + 1] == b'"' and (close := text.find(b'"', at + 1, end)) >= 0:
            if close - at > _LONG_DATA and text.find(b"\\", at, close) < 0:
                parts += text[done:at], b"%d" % len(views)  # a number in its place
                views.append(memoryview(text)[at + 1 : close])
                done = close + 1
            at = close + 1 + (text[close + 1 : close + 2] == b",")  # the next stream of a list
    if not views:
        return orjson.loads(whole)
    value = orjson.loads(b"".join([*parts, text[done:end]]))
    places: list[tuple[Any, Any]] = []
    rest: list[tuple[Any, bool]] = [(value, False)]
    while rest:
        item, is_data = rest.pop()
        for key, child in item.items() if isinstance(item, dict) else enumerate(item):
            if type(child) is int and (is_data or key == "data"):
                places.append((item, key))
            elif isinstance(child, dict | list):
                rest.append((child, key == "data"))
    if sorted(of[key] for of, key in places) != list(range(len(views))):  # numbers of its own
        return orjson.loads(whole)
    for of, key in places:
        of[key] = views[of[key]]
    return value


def declared_rows(value: Any) -> int:
    """Return the number of rows that a packed array claims.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is not a packed array.
    """
    rows = value["shape"][0]
    if not isinstance(rows, int) or rows < 0:
        raise ValueError(f"shape {value['shape']!r}")
    return rows


class StringTable:
    """Numbered strings, stored as one block of bytes: a million ids need no Python objects.

    Indexes of several threads share a table. Strings are only added, and keep their numbers, so reading takes no lock.
    """

    def __init__(self) -> None:
        self._lock = locks.rlock("StringTable._lock")
        self._blob = bytearray()
        self._ends = np.zeros(16, np.int64)
        self._count = 0
        self._recent: dict[str, int] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        start = 0 if number == 0 else int(self._ends[number - 1])
        return self._blob[start : int(self._ends[number])].decode()

    def add(self, text: str) -> int:
        """Return the number of ``text``; a recent one is not stored again."""
        with self._lock:
            number = self._recent.get(text)
            if number is None:
                if len(self._recent) >= _RECENT:
                    self._recent.clear()
                self._blob += text.encode()
                if self._count == len(self._ends):
                    self._ends = np.concatenate([self._ends, np.zeros_like(self._ends)])
                self._ends[self._count] = len(self._blob)
                number = self._recent[text] = self._count
                self._count += 1
            return number

    def texts(self, start: int = 0) -> list[str]:
        """Return the strings from this number on."""
        ends, blob = self._content()
        bounds = [0, *ends.tolist()][start:]
        return [blob[first:end].decode() for first, end in pairwise(bounds)]

    def _content(self) -> tuple[npt.NDArray[np.int64], bytes]:
        """Return the end of each string, and the bytes of all; another thread may add strings meanwhile."""
        count = self._count  # first: the ends and bytes read after it have at least these strings
        ends = self._ends[:count]
        return ends, bytes(self._blob[: int(ends[-1]) if count else 0])

    def extend(self, other: StringTable, numbers: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
        """Add strings of ``other`` by number and return their numbers here; -1 is unchanged.

        If there are many, existing strings are stored again, which is cheaper than a lookup.
        """
        wanted, inverse = np.unique(numbers, return_inverse=True)
        if len(wanted) <= _RECENT:
            added = [number if number < 0 else self.add(other[number]) for number in wanted.tolist()]
            return np.array(added, np.int32)[inverse]
        named = wanted >= 0
        last = other._ends[wanted[named]]
        first = np.where(wanted[named] > 0, other._ends[wanted[named] - 1], 0)
        lengths, begin = last - first, int(first.min())
        ends = np.cumsum(lengths)
        blob = bytes(other._blob[begin : int(last.max())])  # a copy: another thread's add to ``other`` resizes its blob
        places = np.repeat(first - begin - ends + lengths, lengths) + np.arange(ends[-1])
        with self._lock:
            self._ends = np.concatenate([self._ends[: self._count], len(self._blob) + ends])
            self._blob += np.frombuffer(blob, np.uint8)[places].tobytes()
            numbered: npt.NDArray[np.int32] = np.where(named, self._count - 1 + np.cumsum(named), -1).astype(np.int32)
            self._count += len(ends)
        return numbered[inverse]

    def _check_text(self) -> None:
        """Refuse invalid UTF-8, and strings that begin within a character."""
        try:
            self._blob.decode()
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"a string table is damaged: {error}") from error
        begins = self._ends[: self._count]
        first = np.frombuffer(bytes(self._blob), np.uint8)[begins[begins < len(self._blob)]]
        if np.any(first & 0xC0 == 0x80):  # a UTF-8 continuation byte
            raise CorruptStoreError("a string table's offsets do not fit its text")

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        ends, blob = self._content()
        return {"bytes": array_to_json(np.frombuffer(blob, "V1")), "ends": array_to_json(ends)}

    @staticmethod
    def from_json(value: Any) -> StringTable:
        """Return the table described by :meth:`to_json`.

        Raises:
            CorruptStoreError: it does not describe a table.
        """
        table = StringTable()
        try:
            blob, ends = value["bytes"], value["ends"]
            if declared_rows(blob) > packed_length(blob) * _MAX_TEXT_INFLATION + _FEW_BYTES:
                raise ValueError("claims more text than its bytes can hold")
            if declared_rows(ends) > 2 * declared_rows(blob) + _FEW_STRINGS:  # only the empty string has no bytes
                raise ValueError("claims more strings than its text has")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptStoreError(f"not a string table: {error}") from error
        table._blob = bytearray(array_from_json(blob, "V1").tobytes())
        table._ends = array_from_json(ends, np.int64)
        table._count = len(table._ends)
        if table._count and (np.any(np.diff(table._ends, prepend=0) < 0) or table._ends[-1] != len(table._blob)):
            raise CorruptStoreError("a string table's offsets do not fit its bytes")
        table._check_text()
        if table._count == 0:
            table._ends = np.zeros(16, np.int64)
        # Recent strings are likely to recur; each process that continues here should not store them again.
        table._recent = {table[number]: number for number in range(max(0, table._count - _RECENT // 2), table._count)}
        return table
