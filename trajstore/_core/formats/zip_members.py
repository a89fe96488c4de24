"""Zip archives of stored (uncompressed) members: written from pieces, and read without reading the members.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3. ``_LIMIT`` and the order of fields follow torch's
writer, so that ``torch.utils.serialization.config.load.calculate_storage_offsets`` works.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trajstore._core.files.base import Buffer
from trajstore.errors import CorruptStoreError

_LIMIT = 0xFFFFFFFF
"""Value of a 32-bit field whose number is in a zip64 field."""
_ZIP64_FROM = _LIMIT
"""Sizes and offsets from here on are written in zip64 fields."""
_COUNT_LIMIT = 0xFFFF

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_END64_MAGIC = b"PK\x06\x06"
_END64_LOCATOR_MAGIC = b"PK\x06\x07"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_UTF8 = 0x0800  # flag: names are UTF-8
_SIZES_FOLLOW = 0x0008  # flag: checksum and sizes follow the data
_ENCRYPTED = 0x0001
_ZIP64 = 1  # id of the extra field
_PADDING = 0x4246  # "FB"
_VERSION64 = 45


class ZipPieces:
    """An archive under construction: a list of pieces, without copies of the caller's."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._pieces: list[Buffer] = []
        self._central: list[bytes] = []
        self._position = 0
        self._pending = b""  # bytes between the last member's data and the next header

    def add(self, name: str, pieces: Sequence[Buffer], *, crc32: int | None = None) -> int:
        """Append a member and return the offset of its data, a multiple of the alignment.

        Args:
            name: the member's name.
            pieces: its content, in order.
            crc32: its CRC-32 if known, else it is computed.
        """
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if crc32 is None:
            crc32 = 0
            for piece in pieces:
                crc32 = zlib.crc32(piece, crc32)
        encoded = name.encode()
        header = self._position + len(self._pending)
        large, far = size >= _ZIP64_FROM, header >= _ZIP64_FROM
        extra = _zip64([size, size] * large + [header] * far)
        data = header + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -data % self._alignment
        data += padding
        flags = _UTF8 | _SIZES_FOLLOW if size else _UTF8
        local = _LOCAL.pack(_LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra) + 4 + padding)
        self._pieces.append(
            b"".join((self._pending, local, encoded, extra, struct.pack("<2H", _PADDING, padding), b"Z" * padding))
        )
        self._pieces.extend(pieces)
        self._position = data + size
        descriptor = struct.Struct("<4sL2Q" if large or far else "<4s3L")
        self._pending = descriptor.pack(_DESCRIPTOR_MAGIC, crc32, size, size) if size else b""
        short, place = _LIMIT if large else size, _LIMIT if far else header
        fixed = (0, _VERSION64 if large or far else 0, flags, 0, 0, 0, crc32, short, short)
        self._central.append(
            _CENTRAL.pack(_CENTRAL_MAGIC, *fixed, len(encoded), len(extra), 0, 0, 0, 0, place) + encoded + extra
        )
        return data

    def finish(self) -> list[Buffer]:
        """Return all pieces, the directory at the end."""
        directory = b"".join(self._central)
        start, count = self._position + len(self._pending), len(self._central)
        end64 = b""
        if start >= _ZIP64_FROM or count >= _COUNT_LIMIT or len(directory) >= _LIMIT:
            versions = (_VERSION64, _VERSION64)
            end64 = _END64.pack(
                _END64_MAGIC, _END64.size - 12, *versions, 0, 0, count, count, len(directory), start
            ) + _END64_LOCATOR.pack(_END64_LOCATOR_MAGIC, 0, start + len(directory), 1)
        short = min(count, _COUNT_LIMIT)
        end = _END.pack(_END_MAGIC, 0, 0, short, short, min(len(directory), _LIMIT), min(start, _LIMIT), 0)
        return [*self._pieces, b"".join((self._pending, directory, end64, end))]


def _zip64(values: list[int]) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", _ZIP64, 8 * len(values), *values) if values else b""


@dataclass(frozen=True, slots=True)
class ZipMember:
    """Place of a member's data, ``[offset, end)``, and its CRC-32 in the directory."""

    offset: int
    end: int
    crc32: int

    def fits(self, content: Buffer) -> bool:
        """Return whether a member's data matches its checksum; 0 means that the writer computed none.

        Source: ``torch.serialization.set_crc32_options``.
        """
        return self.crc32 in (0, zlib.crc32(content))


def zip_members(data: memoryview, source: str) -> dict[str, ZipMember]:
    """Return the members of an archive by name, in the directory's order.

    The directory is checked against the file completely, except for the members' checksums.

    Args:
        data: the whole file, as bytes.
        source: name of the file in messages.

    Raises:
        CorruptStoreError: the archive is truncated, has compressed or encrypted members, or members that
            overlap, are outside the file or share a name.
    """
    try:
        return _members(data)
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptStoreError(f"{source}: not a whole archive of torch.save: {error}") from error


def _members(data: memoryview) -> dict[str, ZipMember]:
    start, end, count = _directory(data)
    members: dict[str, ZipMember] = {}
    taken: list[tuple[int, int, str]] = []
    position = start
    for _ in range(count):
        if position + _CENTRAL.size > end:
            raise ValueError("its directory is cut short")
        fields = _CENTRAL.unpack_from(data, position)
        magic, _, _, flags, method, _, _, crc32, stored, size, name_size, extra_size, comment_size = fields[:13]
        position += _CENTRAL.size
        encoded = bytes(data[position : position + name_size])
        name = encoded.decode()
        extra = bytes(data[position + name_size : position + name_size + extra_size])
        position += name_size + extra_size + comment_size
        if magic != _CENTRAL_MAGIC or position > end:
            raise ValueError("its directory is damaged")
        size, stored, header = _widen(extra, [size, stored, fields[16]])
        if flags & _ENCRYPTED or method != 0 or stored != size:
            raise ValueError(f"member {name!r} is compressed or encrypted")
        if header + _LOCAL.size > start:
            raise ValueError(f"member {name!r} lies outside the file")
        local = _LOCAL.unpack_from(data, header)
        offset = header + _LOCAL.size + local[9] + local[10]
        if local[0] != _LOCAL_MAGIC or bytes(data[header + _LOCAL.size :][: local[9]]) != encoded or local[3] != 0:
            raise ValueError(f"member {name!r} does not begin where the directory says")
        if offset + size > start:
            raise ValueError(f"member {name!r} lies outside the file")
        if name in members:
            raise ValueError(f"two members are called {name!r}")
        members[name] = ZipMember(offset, offset + size, crc32)
        taken.append((header, offset + size, name))
    if position != end:
        raise ValueError("its directory is damaged")
    taken.sort()
    for (_, before, first), (begin, _, second) in pairwise(taken):
        if begin < before:
            raise ValueError(f"members {first!r} and {second!r} overlap")
    return members


def _directory(data: memoryview) -> tuple[int, int, int]:
    """Return the begin and end of the directory, and its number of entries."""
    longest = _END.size + 0xFFFF
    tail = bytes(data[-longest:])
    end_record = tail.rfind(_END_MAGIC)
    if end_record < 0 or end_record + _END.size > len(tail):
        raise ValueError("it has no end")
    end = len(data) - len(tail) + end_record
    _, disk, _, _, count, size, start, comment = _END.unpack_from(data, end)
    if disk not in (0, _COUNT_LIMIT) or end + _END.size + comment != len(data):
        raise ValueError("its end is damaged")
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == _END64_LOCATOR_MAGIC:
        end = _END64_LOCATOR.unpack_from(data, locator)[2]
        if end + _END64.size > locator:
            raise ValueError("its end is damaged")
        magic, _, _, _, _, _, _, count, size, start = _END64.unpack_from(data, end)
        if magic != _END64_MAGIC:
            raise ValueError("its end is damaged")
    if start + size != end:
        raise ValueError("its directory is not where its end says")
    return start, end, count


def _widen(extra: bytes, values: list[int]) -> list[int]:
    """Replace values that overflowed by those in the zip64 field, which holds them in order."""
    if _LIMIT not in values:
        return values
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            return [next(wide, value) if value == _LIMIT else value for value in values]
        position += 4 + size
    return values
