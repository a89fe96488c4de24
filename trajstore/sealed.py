"""The JSON files of a directory and their checksums: sealed bodies, and ``metadata.json``. Pure; no I/O."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from trajstore.errors import CorruptStoreError, UnsupportedVersionError

LAYOUT = "trajstore"
LAYOUT_VERSION = 1


def seal(name: str, body: bytes) -> bytes:
    """Return a JSON file ``{"crc32": ..., name: body}`` whose checksum covers ``body``."""
    return b'{"crc32":"%08x","%b":' % (zlib.crc32(body), name.encode()) + body + b"}"


def begins_sealed(name: str, data: bytes) -> bool:
    """Return whether a file begins as :func:`seal` begins it, damaged behind that or not."""
    head = seal(name, b"")[:-1]
    return data[:10] == head[:10] and data[18 : len(head)] == head[18:]


def unseal(name: str, data: bytes, source: str) -> Any:
    """Return the parsed body of a sealed file.

    Raises:
        CorruptStoreError: it is no such file, or its checksum does not fit.
    """
    head = len(seal(name, b"")) - 1
    if data[:10] != b'{"crc32":"' or data[18:head] != b'","%b":' % name.encode() or data[-1:] != b"}":
        raise CorruptStoreError(f"{source}: not a file that trajstore wrote, or cut short")
    body = memoryview(data)[head:-1]
    if data[10:18] != b"%08x" % zlib.crc32(body):
        raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


def metadata_json(values: Mapping[str, Any]) -> bytes:
    """Return ``metadata.json``: flat values, readable by any program, with a checksum of them."""
    body = dict(values)
    checksum = zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return orjson.dumps({**body, "crc32": f"{checksum:08x}"}, option=orjson.OPT_INDENT_2)


def parse_metadata(data: bytes, source: str) -> dict[str, Any]:
    """Return the values of a ``metadata.json`` written by trajstore.

    Raises:
        CorruptStoreError: it is damaged.
        UnsupportedVersionError: a newer trajstore wrote it.
    """
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}; restore it from a copy") from error
    if not isinstance(values, dict):
        raise CorruptStoreError(f"{source}: not a JSON object")
    if values.get("layout") != LAYOUT:
        raise CorruptStoreError(f"{source}: not the metadata of a trajstore directory")
    version = values.get("layout_version")
    if not isinstance(version, int) or version > LAYOUT_VERSION:
        raise UnsupportedVersionError(
            f"{source}: written with layout version {version}, this trajstore reads up to {LAYOUT_VERSION}; upgrade it"
        )
    checksum = values.pop("crc32", None)
    try:
        body = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # it can be nested more deeply than anything that was written
        raise CorruptStoreError(f"{source}: {error}; restore it from a copy") from error
    if checksum != f"{zlib.crc32(body):08x}":
        raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
    return values
