"""Reads a shard that no index describes: its manifest and its trajectories, by its label."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trajstore._core.columns.conversion import parse_document
from trajstore._core.columns.facts import facts_of, facts_to_json
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import Buffer, Directory
from trajstore._core.formats import get_format
from trajstore._core.formats.base import ShardManifest, read_label
from trajstore._core.formats.checksums import crc32_outside
from trajstore._core.formats.packed import PackedReader
from trajstore._core.store.log_records import integers, manifest_from_json
from trajstore._core.store.shard_table import shard_name
from trajstore.errors import CorruptStoreError


def read_shard(directory: Directory, number: int, files: Sequence[str]) -> tuple[ShardManifest, Mapping[str, Any]]:
    """Return a shard's manifest, and its trajectories as in a log record. Every column is checked.

    The trajectories have a further value ``times``, an array of µs since 1970; empty for late values by row.

    Args:
        directory: of the store.
        number: of the shard.
        files: its files.

    Raises:
        CorruptStoreError: it is damaged, or has no label.
        UnsafeContentError: reading it would run code.
        KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError: its label is invalid.
    """
    first = min(files, key=lambda name: (name.count("/"), name))  # of a zarr group, its metadata
    sizes = {name: directory.size(name) for name in files}

    def fetch(name: str) -> Buffer:
        return directory.map(name, sizes[name], sequential=True).view

    form = get_format(first.split("/")[1].rpartition(".")[2])
    described, offsets = form.find(fetch(first), first)
    label = read_label(described.get("label"), first)
    schema, crcs = Schema.from_json(label["schema"]), label["column_crc32"]
    nowhere = [None] * len(schema.columns)
    value = {
        "name": shard_name(number),
        "format": form.name,
        "schema": 0,
        "files": [[name, sizes[name], 0] for name in (first, *(name for name in files if name != first))],
        "places": nowhere if offsets is None else [[0, offset] for offset in offsets],
        "column_crc32": nowhere if offsets is None else crcs,
        "rows": label["rows"],
        **{name: label[name] for name in ("nbytes",) if name in label},
    }
    lengths = label.get("nbytes", schema.plain_nbytes(label["rows"]))
    inside = [] if offsets is None else sorted((at, at + size) for at, size in zip(offsets, lengths, strict=True))
    for file in value["files"]:
        file[2] = crc32_outside([fetch(file[0])], inside)
    manifest = manifest_from_json(value, [schema])
    reader, entries = form.open(fetch, manifest), {**label["entries"]}
    extents = integers(described["trajectories"]).reshape(-1, 4)
    documents: list[dict[str, Any]] = [{}] * len(extents)
    for at, ((column, rows), crc) in enumerate(zip(manifest.stored, crcs, strict=True)):
        if zlib.crc32(raw_bytes(reader.rows(at, 0, rows).contiguous())) != crc:
            raise CorruptStoreError(f"{first}: column {column.name}: checksum does not fit the content")
        if column.axis is Axis.DOCUMENT and schema.kind == "agent":
            ends = np.cumsum(extents[:, 3]).tolist()
            text = PackedReader(reader, manifest).rows(at, 0, manifest.rows[at])
            documents = [parse_document(text[start:end]) for start, end in pairwise([0, *ends])]
    if not entries:
        return manifest, entries
    entries["extents"], entries["times"] = extents.tolist(), np.cumsum(integers(entries["times"]))
    if schema.kind == "agent":
        entries["facts"] = facts_to_json([facts_of(document) for document in documents])
    return manifest, entries
