"""Arrays and string tables as JSON values: little-endian bytes, delta-encoded, deflated, base64. Pure.

A million-entry index is parsed at memory speed this way; plain JSON numbers would take seconds and several times the
memory. The format specification describes the encoding.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.base import locks
from trajstore.errors import CorruptStoreError

_MAX_INFLATION = 1100  # deflate's maximum ratio; larger claims are forged

BLOCK_ROWS = 1 << 16
"""Rows inflated at a time: fresh memory for a whole long column costs more than inflating it."""

_PIECE = 1 << 19
"""The same, in bytes, of arrays of several dimensions."""

_LETTERS = 1 << 19
"""Letters of base64 decoded at a time."""

_DATA = b'"data":"'
_LONG_DATA = 1 << 20
"""Least length of the data of an array that is not copied when it is parsed."""

_SHORT = 1 << 10
"""Most differences that are summed sooner than looked at."""

_MAX_TEXT_INFLATION = 256  # for strings without close repetitions

_FEW_BYTES, _FEW_STRINGS = 1 << 20, 1 << 16
"""Bytes and strings that a table may always claim, since a text may be stored again after many others."""

_RECENT = 1024
"""Number of recent strings that are deduplicated."""


def array_to_json(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return an array of integers or raw bytes as JSON values.

    Integers are delta-encoded along the first axis, which makes ids and offsets small.
    """
    array = np.ascontiguousarray(array)
    values = array
    if array.dtype.kind in "iu" and len(array):
        values = np.diff(array.astype(np.int64), axis=0, prepend=np.zeros((1, *array.shape[1:]), np.int64))
    data = base64.b64encode(zlib.compress(values.tobytes(), 1)).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def array_from_json(value: Any, dtype: npt.DTypeLike, dimensions: int = 1) -> npt.NDArray[Any]:
    """Return the array described by :func:`array_to_json`, as a new writable array.

    Raises:
        CorruptStoreError: it is not an array of this dtype and number of dimensions.
    """
    end = 0
    try:
        wanted = np.dtype(dtype)
        shape, row = _shape(value, wanted, dimensions)
        array = np.empty(shape, wanted)
        for rows in _blocks(value["data"], shape, row, wanted):
            begin, end = end, end + len(rows)
            array[begin:end] = rows
    except UNPACKING_ERRORS as error:
        raise CorruptStoreError(f"a packed array is damaged: {error}") from error
    return array


def blocks_from_json(
    packed: Mapping[str, Any], dtypes: Mapping[str, npt.DTypeLike]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the rows of one-dimensional arrays of the same length, ``BLOCK_ROWS`` of each at a time.

    Integers have 64 bits, as before their conversion to their dtype. Those with the same data are unpacked once.

    Raises:
        UNPACKING_ERRORS: one is not such an array.
    """
    streams: dict[Any, Iterator[npt.NDArray[Any]]] = {}
    place: dict[str, int] = {}
    for name in dtypes:
        dtype = np.dtype(dtypes[name])
        (shape, row), data = _shape(packed[name], dtype, 1), packed[name]["data"]
        key = (data, shape) if dtype.kind in "iu" else name
        streams.setdefault(key, _blocks(data, shape, row, dtype))
        place[name] = list(streams).index(key)
    for blocks in zip(*streams.values(), strict=True):
        yield {name: blocks[at] for name, at in place.items()}


UNPACKING_ERRORS = (KeyError, TypeError, ValueError, zlib.error)
"""Errors raised by damaged packed arrays."""


def _shape(value: Any, dtype: np.dtype[Any], dimensions: int) -> tuple[tuple[int, ...], int]:
    """Return the shape of a packed array, and the bytes of a row as it is packed.

    Raises:
        UNPACKING_ERRORS: it has another dtype or number of dimensions, or claims more than its bytes can hold.
    """
    shape = tuple(map(int, value["shape"]))
    if value["dtype"] != dtype.str or len(shape) != dimensions or min(shape, default=0) < 0:
        raise ValueError(f"dtype {value['dtype']!r}, shape {shape}")
    row = prod(shape[1:]) * (8 if dtype.kind in "iu" else dtype.itemsize)  # integers: differences of 64 bits
    most = len(value["data"]) // 4 * 3
    if shape[0] * row > most * _MAX_INFLATION + 64:
        raise ValueError(f"claims {shape[0] * row} bytes in {most}")
    return shape, row


def _blocks(
    data: str | bytes | memoryview, shape: tuple[int, ...], row: int, dtype: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of a packed array in order, see :func:`blocks_from_json`; ``row`` as :func:`_shape` returns it."""
    rows = BLOCK_ROWS if len(shape) == 1 else max(_PIECE // max(row, 1), 1)
    integers = dtype.kind in "iu"
    last = np.zeros((1, *shape[1:]), np.int64)
    for piece in _inflated(_decoded(data), shape[0] * row, rows * row):
        block = np.frombuffer(piece, np.int64 if integers else dtype).reshape(-1, *shape[1:])
        if not integers:
            yield block
        elif len(block) > _SHORT and not block[1:].any():  # common for similar trajectories; cheaper than sums
            last = last + block[:1]
            yield np.broadcast_to(last, block.shape)
        else:
            summed = block.cumsum(axis=0)
            summed += last
            last = summed[-1:]
            yield summed


def _decoded(text: str | bytes | memoryview) -> Iterable[bytes]:
    """Return the bytes of a base64 text, those of a long one in pieces.

    Raises:
        ValueError, TypeError: it is not base64; of a long one, on iteration.
    """
    if len(text) <= _LETTERS:
        return (binascii.a2b_base64(text, strict_mode=True),)
    return _decoded_pieces(text)


def _decoded_pieces(text: str | bytes | memoryview) -> Iterator[bytes]:
    for start in range(0, len(text), _LETTERS):
        piece = binascii.a2b_base64(text[start : start + _LETTERS], strict_mode=True)
        if start + _LETTERS < len(text) and len(piece) < _LETTERS // 4 * 3:
            raise ValueError("padding within base64")
        yield piece


def _inflated(packed: Iterable[bytes], size: int, block: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a zlib stream, ``block`` at a time.

    Raises:
        ValueError, zlib.error: it has fewer bytes, or is not a zlib stream.
    """
    inflater = zlib.decompressobj()
    left, lacking = size, min(block, size)
    parts: list[bytes] = []
    for tail in packed:
        while left:
            part = inflater.decompress(tail, lacking)
            if not part:
                break
            tail = inflater.unconsumed_tail
            left, lacking = left - len(part), lacking - len(part)
            parts.append(part)
            if not lacking:
                yield b"".join(parts)
                lacking, parts = min(block, left), []
    if left:
        raise ValueError(f"holds {size - left} bytes, not {size}")


def parsed_arrays(text: bytes, begin: int, end: int) -> Any:
    """Return the JSON value in ``text[begin:end]``, in which the data of long packed arrays are views of ``text``.

    Most of an index are UUIDs, which the parser would copy.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    whole, done, at = memoryview(text)[begin:end], begin, begin
    views: list[memoryview] = []
    parts: list[bytes] = []
    while end - at > _LONG_DATA and (at := text.find(_DATA, at, end)) >= 0:
        first = at + len(_DATA)
        at = text.find(b'"', first, end)
        if at < 0:
            break
        if at - first > _LONG_DATA and text.find(b"\\", first, at) < 0:
            parts += text[done : first - 1], b"%d" % len(views)  # a number in its place
            views.append(memoryview(text)[first:at])
            done = at = at + 1
    value = orjson.loads(b"".join([*parts, text[done:end]]) if views else whole)
    arrays: list[dict[str, Any]] = []
    rest = [value] if views else []
    while rest:
        item = rest.pop()
        if isinstance(item, dict) and type(item.get("data")) is int:
            arrays.append(item)
        rest += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    if sorted(array["data"] for array in arrays) != list(range(len(views))):  # numbers of its own
        return orjson.loads(whole)
    for array in arrays:
        array["data"] = views[array["data"]]
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
            if declared_rows(blob) > len(blob["data"]) * _MAX_TEXT_INFLATION + _FEW_BYTES:
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
