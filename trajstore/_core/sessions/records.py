"""The records of a journal of calls, as bytes. Pure; ``docs/format.md`` describes them.

A frame is a head and the payload: a JSON object, a line feed, and the arrays that the object describes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from trajstore._core.columns.document import encode_document
from trajstore._core.files.base import Buffer
from trajstore._core.sessions.tree import Call, Tokens
from trajstore.errors import CorruptStoreError, InvalidCallError

CALLS_FOLDER = "calls"
SUFFIX = ".calls"

MAGIC = b"\xcc\xa1"
_HEAD = struct.Struct("<2sQII")
"""Magic; bytes from the first frame that was written with it to this one; length of the payload; checksum."""
HEAD_BYTES = _HEAD.size
LONGEST = 1 << 30
"""Most bytes of a payload."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        fields: the JSON object.
        arrays: the bytes of its arrays.
        begin, end: where its frame lies in the journal.
    """

    fields: dict[str, Any]
    arrays: memoryview
    begin: int
    end: int


def payload(fields: Mapping[str, Any], *arrays: bytes) -> bytes:
    """Return the payload of a record.

    Raises:
        InvalidCallError: it is too long.
    """
    content = b"".join((orjson.dumps(fields), b"\n", *arrays))
    if len(content) > LONGEST:
        raise InvalidCallError(f"has {len(content):,} bytes of tokens, messages and metadata, at most {LONGEST:,}")
    return content


def frames(payloads: Iterable[bytes]) -> list[bytes]:
    """Return the frames of records that are written at once, in pieces."""
    pieces: list[bytes] = []
    before = 0
    for content in payloads:
        pieces += (_HEAD.pack(MAGIC, before, len(content), _checksum(content, before)), content)
        before += _HEAD.size + len(content)
    return pieces


def _checksum(content: Buffer, before: int) -> int:
    return zlib.crc32(before.to_bytes(8, "little"), zlib.crc32(content))


def scan(data: bytes, offset: int = 0) -> tuple[list[Record], int, list[int]]:
    """Return the whole records of a journal, where the last one ends, and where damaged ones begin.

    The last write may be torn: it counts up to its first record that is not whole. Such a record before a later write
    is damaged.

    Args:
        data: bytes of the journal from ``offset`` on, which begins a frame.
        offset: where ``data`` begins in the file.
    """
    view = memoryview(data)
    records: list[Record] = []
    damaged: list[int] = []
    at = end = 0
    gap: tuple[int, int] | None = None  # where a write is not whole, and how many records are before this
    while at < len(data):
        record, before = _record_at(view, at, offset)
        if record is None:
            at = data.find(MAGIC, at + 1)
            if at < 0:
                break
            continue
        if at > end and gap is None:
            gap = end, len(records)
        if gap is not None and at - before > gap[0]:
            damaged.append(gap[0] + offset)
            gap = None
        records.append(record)
        at = end = record.end - offset
    if gap is not None:
        end, count = gap
        del records[count:]
    return records, end + offset, damaged


def _record_at(view: memoryview, at: int, offset: int) -> tuple[Record | None, int]:
    """Return a whole record, and how many bytes before it its write begins."""
    if at + _HEAD.size > len(view):
        return None, 0
    magic, before, size, checksum = _HEAD.unpack_from(view, at)
    begin, end = at + _HEAD.size, at + _HEAD.size + size
    is_whole = magic == MAGIC and 0 < size <= LONGEST and end <= len(view)
    if not is_whole or _checksum(view[begin:end], before) != checksum:
        return None, 0
    content = bytes(view[begin:end])
    head, _, _ = content.partition(b"\n")
    try:
        fields = orjson.loads(head)
    except orjson.JSONDecodeError:
        return None, 0
    return Record(fields, memoryview(content)[len(head) + 1 :], at + offset, end + offset), before


def encode_call(call: Call, session: int) -> bytes:
    """Return the payload of a call.

    Args:
        call: the call.
        session: number of its session in the journal.
    """
    fields: dict[str, Any] = {"s": session, "k": call.number, "at": call.time}
    if call.id != str(call.number):
        fields["c"] = call.id
    if call.metadata:
        fields["x"] = call.metadata
    if call.gap is not None:
        return payload(fields | {"gap": call.gap})
    width = _width(call.added)
    fields["n"] = [call.start - call.taken, call.stop - call.start, width]
    if call.base is not None:
        fields["b"] = [call.base.number, call.taken]
    if call.parent is not None and not (call.parent is call.base and call.parent.stop == call.taken):
        fields["p"] = call.parent.number
    elif call.parent is None and call.base is not None:
        fields["p"] = None
    if call.kept or call.messages:
        fields["m"] = [call.kept, call.messages]
    if call.policy_version is not None:
        fields["v"] = call.policy_version
    if call.finish_reason:
        fields["f"] = call.finish_reason
    log_probs = b"" if call.log_probs is None else call.log_probs.astype("<f4", copy=False).tobytes()
    if call.log_probs is not None:
        fields["l"] = 1
    return payload(fields, _narrow(call.added, width), log_probs)


def decode_call(record: Record, calls: list[Call]) -> Call:
    """Return the call of a record.

    Args:
        record: of a call.
        calls: the session's calls before it.

    Raises:
        CorruptStoreError: it names calls that are absent, or its sizes are wrong.
    """
    fields = record.fields
    try:
        number = fields["k"]
        if number != len(calls):
            raise CorruptStoreError(f"call {number} follows {len(calls)} calls")
        known: dict[str, Any] = {"number": number, "id": fields.get("c", str(number)), "time": fields["at"]}
        known["metadata"] = fields.get("x", {})
        if "gap" in fields:
            return Call(**known, gap=fields["gap"])
        prompt, sampled, width = fields["n"]
        base, taken = fields.get("b", (None, 0))
        above = None if base is None else calls[base]
        parent = above if "p" not in fields else None if fields["p"] is None else calls[fields["p"]]
        size = prompt + sampled
        log_probs = None
        if "l" in fields:
            log_probs = np.frombuffer(record.arrays, "<f4", sampled, size * width).astype(np.float32)
        kept, messages = fields.get("m", (0, []))
        return Call(
            **known,
            parent=parent,
            base=above,
            taken=taken,
            start=taken + prompt,
            added=_widened(record.arrays[: size * width], width),
            log_probs=log_probs,
            kept=kept,
            messages=messages,
            policy_version=fields.get("v"),
            finish_reason=fields.get("f", ""),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptStoreError(f"the record at byte {record.begin:,} is no call: {error!r}") from error


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object as the JSON types that it is read back as.

    Raises:
        InvalidTrajectoryError: names the place of a value without an equal in JSON.
    """
    result: dict[str, Any] = orjson.loads(encode_document(value))
    return result


def _width(tokens: Tokens) -> int:
    """Return the fewest bytes that hold each token."""
    return max(1, (int(tokens.max(initial=0)).bit_length() + 7) // 8)


def _narrow(tokens: Tokens, width: int) -> bytes:
    return tokens.astype("<i4", copy=False).view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def _widened(data: memoryview, width: int) -> Tokens:
    wide = np.zeros((len(data) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return wide.view("<i4").reshape(-1).astype(np.int32)
