"""The checksummed JSON files of a directory: sealed bodies and ``metadata.json``. Pure; no I/O."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from trajstore._core.columns.document import decode_document
from trajstore._core.store.json_arrays import parsed_arrays
from trajstore.errors import CorruptStoreError, UnsupportedVersionError

METADATA_NAME = "metadata.json"
RESTORE_NAME = "restore.json"
"""Names the mirror in an unfinished restore; removed once it is a store."""
COPYING_NAME = "copying.json"
"""Names the source in an unfinished copy of several stores; removed once they are all there."""
INDEX_NAME = "trajectory_index.json"
COPY_NAME = "index_copy.json"
"""The same file once more, read where the index is missing or damaged. Local stores have it."""

LEDGER_NAME = "mirror.json"
"""In a mirror: its owner, and the copied files that its index does not name yet."""


FROM_A_COPY = "; restore it from a copy"
"""Ending of messages about damaged files."""

OR_WHAT_IS_WHOLE = "; strict=False loads the intact part, and `trajstore repair` makes a new store of it"
"""Further remedy."""


def without_advice(text: str) -> str:
    """Strip the repair hint from a damage message."""
    for advice in (OR_WHAT_IS_WHOLE, FROM_A_COPY):
        text = text.removesuffix(advice)
    return text


_OF_METADATA = f"it has the store's format, generation and generator, and no trajectory{FROM_A_COPY}{OR_WHAT_IS_WHOLE}"
"""Consequence of losing ``metadata.json``, and the remedy."""

LAYOUT = "trajstore"
LAYOUT_VERSION = 1
"""Version of the layout on disk; other versions are refused."""

_FOR_RLINF = (
    b'"trajectory_id_list":["this directory was written by trajstore, which RLinf cannot read: '
    b"load it with trajstore, or save it for RLinf with save_checkpoint(layout='rlinf')\"],"
)
"""RLinf converts the ids under this key to integers, so this text fails; without the key it silently loads nothing."""


def _between(name: str) -> bytes:
    """Return the bytes between checksum and body of a sealed file."""
    return b'",%b"%b":' % (_FOR_RLINF if name == "snapshot" else b"", name.encode())


def seal(name: str, body: bytes) -> bytes:
    """Return a JSON file ``{"crc32": ..., name: body}`` whose checksum covers ``body``."""
    return b'{"crc32":"%08x%b' % (zlib.crc32(body), _between(name)) + body + b"}"


def begins_sealed(name: str, data: bytes) -> bool:
    """Return whether a file has the beginning that :func:`seal` writes; the rest may be damaged."""
    return data[:10] == b'{"crc32":"' and data.startswith(_between(name), 18)


def check_owner(value: Any, store_id: str | None, source: str) -> None:
    """Refuse a copy of the index of another store, as when files of several stores were mixed up.

    Raises:
        CorruptStoreError: names the file; not if ``store_id`` is None.
    """
    if store_id is not None and isinstance(value, dict) and value.get("store_id") != store_id:
        raise CorruptStoreError(f"{source}: belongs to another store{FROM_A_COPY}")


def unseal(name: str, data: bytes, source: str) -> Any:
    """Return the parsed body of a sealed file; long packed arrays of a snapshot are views of ``data``.

    Raises:
        CorruptStoreError: it is not a sealed file, or its checksum does not match.
    """
    if not begins_sealed(name, data) or data[-1:] != b"}":
        raise CorruptStoreError(f"{source}: not a file that trajstore wrote, or cut short")
    begin = 18 + len(_between(name))
    body = memoryview(data)[begin:-1]
    if data[10:18] != b"%08x" % zlib.crc32(body):
        raise CorruptStoreError(f"{source}: the checksum does not fit the content{FROM_A_COPY}")
    try:
        return parsed_arrays(data, begin, len(data) - 1) if name == "snapshot" else orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


_KEYS_OF_RLINF = frozenset({"trajectory_format", "size", "total_samples", "trajectory_counter", "seed"})
"""All keys of RLinf's ``metadata.json``."""


def is_of_rlinf(data: bytes) -> bool:
    """Return whether a ``metadata.json`` was written by RLinf."""
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return isinstance(values, dict) and len(values) >= 3 and values.keys() <= _KEYS_OF_RLINF


def metadata_json(values: Mapping[str, Any]) -> bytes:
    """Return a checksummed ``metadata.json`` of flat values."""
    body = dict(values)
    checksum = zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return orjson.dumps({**body, "crc32": f"{checksum:08x}"}, option=orjson.OPT_INDENT_2)


def parse_metadata(data: bytes, source: str) -> dict[str, Any]:
    """Return the values of a ``metadata.json`` written by trajstore.

    Raises:
        CorruptStoreError: it is damaged.
        UnsupportedVersionError: it has another layout version.
    """
    try:
        values = decode_document(data)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: damaged ({error}); {_OF_METADATA}") from error
    if is_of_rlinf(data):
        raise CorruptStoreError(
            f"{source}: RLinf has written into this store and replaced its metadata.json and trajectory_index.json; "
            "shards/ and log/ are unchanged. Move RLinf's files (these two and trajectory_*) to a directory of "
            "their own, from which they load, and put the two files of trajstore back from a checkpoint or a copy; "
            "load_checkpoint(strict=False) reads what the copy of the index, the log and the shards have"
        )
    if values.get("layout") != LAYOUT:
        raise CorruptStoreError(
            f"{source}: not written by trajstore (layout {str(values.get('layout'))[:40]!r}): damaged, or another "
            f"program's; a store needs its own directory. If it was the store's: {_OF_METADATA}"
        )
    version = values.get("layout_version")
    if not isinstance(version, int):
        raise CorruptStoreError(f"{source}: damaged (layout_version {str(version)[:40]!r}); {_OF_METADATA}")
    if version != LAYOUT_VERSION:
        raise UnsupportedVersionError(
            f"{source}: has layout version {version}, and this trajstore reads version {LAYOUT_VERSION} only; open it "
            "with the trajstore that wrote it"
        )
    checksum = values.pop("crc32", None)
    try:
        body = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # nested more deeply than any written file
        raise CorruptStoreError(f"{source}: damaged ({error}); {_OF_METADATA}") from error
    if checksum != f"{zlib.crc32(body):08x}":
        raise CorruptStoreError(f"{source}: damaged (the checksum does not fit the content); {_OF_METADATA}")
    return values
