"""Arrays and string tables as JSON values: little-endian bytes, delta-encoded, deflated, base64. Pure.

A million-entry index is parsed at memory speed this way; plain JSON numbers would take seconds and several times the
memory. The format specification describes the encoding.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore.errors import CorruptStoreError

_MAX_INFLATION = 1100  # deflate's maximum ratio; larger claims are forged

_PIECE = 1 << 19
"""Bytes inflated at a time: fresh memory for a whole long column costs more than inflating it."""

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
    wanted = np.dtype(dtype)
    try:
        shape = tuple(map(int, value["shape"]))
        if value["dtype"] != wanted.str or len(shape) != dimensions or min(shape, default=0) < 0:
            raise ValueError(f"dtype {value['dtype']!r}, shape {shape}")
        integers = wanted.kind in "iu"
        size = prod(shape) * (8 if integers else wanted.itemsize)
        packed = binascii.a2b_base64(value["data"], strict_mode=True)
        if size > len(packed) * _MAX_INFLATION + 64:
            raise ValueError(f"claims {size} bytes in {len(packed)}")
        return (_summed if integers else _joined)(_inflated(packed, size), shape, wanted)
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise CorruptStoreError(f"a packed array is damaged: {error}") from error


def _inflated(packed: bytes, size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a zlib stream in pieces.

    Raises:
        ValueError, zlib.error: it has fewer bytes, or is not a zlib stream.
    """
    inflater = zlib.decompressobj()
    left = size
    for start in range(0, len(packed), _PIECE):
        tail = packed[start : start + _PIECE]
        while left:
            piece = inflater.decompress(tail, min(_PIECE, left))
            if not piece:
                break
            tail = inflater.unconsumed_tail
            left -= len(piece)
            yield piece
    if left:
        raise ValueError(f"holds {size - left} bytes, not {size}")


def _joined(pieces: Iterable[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array of concatenated raw bytes."""
    joined = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece)
        joined[begin:end] = np.frombuffer(piece, np.uint8)
    return joined.view(dtype).reshape(shape)


def _summed(pieces: Iterable[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array from its 64-bit differences along the first axis."""
    summed = np.empty(shape, dtype)
    row, end, rest = prod(shape[1:]) * 8, 0, b""
    last = np.zeros((1, *shape[1:]), np.int64)
    for piece in pieces:
        data = rest + piece if rest else piece
        begin, end = end, end + len(data) // row
        rest = data[(end - begin) * row :]
        steps = np.frombuffer(data, np.int64, (end - begin) * row // 8).reshape(-1, *shape[1:])
        if len(steps) > _SHORT and not steps[1:].any():  # common for similar trajectories; cheaper than sums
            last = last + steps[:1]
            summed[begin:end] = last
        elif end > begin:
            rows = steps.cumsum(axis=0)
            rows += last
            summed[begin:end] = rows
            last = rows[-1:]
    return summed


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
