"""Changes of a store's files with recomputed checksums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from trajstore._core.store.log_records import decode_lines, encode_line
from trajstore._core.store.sealed import INDEX_NAME, METADATA_NAME, metadata_json, seal, unseal


@contextmanager
def forged(file: Path, name: str) -> Iterator[Any]:
    """Yield a sealed file's values and reseal it with the changes."""
    value = unseal(name, file.read_bytes(), "")
    yield value
    file.write_bytes(seal(name, orjson.dumps(value, default=lambda view: bytes(view).decode())))  # of a long array


@contextmanager
def forged_index(path: Path) -> Iterator[Any]:
    """Yield the values of a store's index."""
    with forged(path / INDEX_NAME, "snapshot") as value:
        yield value


@contextmanager
def forged_metadata(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the values of a store's metadata."""
    file = path / METADATA_NAME
    values = orjson.loads(file.read_bytes())
    del values["crc32"]
    yield values
    file.write_bytes(metadata_json(values))


@contextmanager
def forged_log(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of a store's log, which has one segment."""
    (segment,) = (path / "log").iterdir()
    records = decode_lines(segment.read_bytes(), segment.name).records
    yield records
    segment.write_bytes(b"".join(map(encode_line, records)))


def spoil_document(shard: Path, word: bytes) -> None:
    """Make a rollout's document unreadable from a word on, keeping lengths and old checksums."""
    content = shard.read_bytes()
    at = content.index(word)
    shard.write_bytes(content[:at] + b'{"/{[[[[' + content[at + 8 :])
