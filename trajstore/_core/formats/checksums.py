"""Manifests of encoded shards (sizes and checksums), and verifying files against them. Pure; no I/O.

Exactly one CRC-32 covers every byte of a shard's files: that of its mapped column, or that of its file, which
covers in order all bytes outside mapped columns (the *envelope*: zip
headers, zarr metadata, compressed or pickled columns). So damage is reported with the column's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.formats.base import EncodedShard, ShardContent, ShardManifest, StoredFile, TrajectoryFormat
from trajstore._core.formats.frames import folded
from trajstore._core.formats.packed import is_packed, packed

ENVELOPE = "envelope"
"""Name of a file's part outside mapped columns, in descriptions of damage."""


def manifest_of(encoded: EncodedShard, format_name: str, name: str, content: ShardContent) -> ShardManifest:
    """Return the manifest of a newly encoded shard.

    The format computes the checksums of mapped columns; those of envelopes are computed from the encoded pieces.

    Args:
        encoded: result of encoding ``content``.
        format_name: name of the format.
        name: the shard's name, as given to the format.
        content: the shard's trajectories.
    """
    schema, lengths = content.schema, content.nbytes
    regions: list[list[tuple[int, int]]] = [[] for _ in encoded.files]
    for column, place in enumerate(encoded.places):
        if place is not None:
            regions[place.file].append((place.offset, place.offset + lengths[column]))
    files = []
    for file, inside in zip(encoded.files, regions, strict=True):
        files.append(StoredFile(file.name, file.nbytes, crc32_outside(file.pieces, sorted(inside))))
    columns = (encoded.places, encoded.column_crc32, content.rows, lengths)
    return ShardManifest(name, format_name, schema, tuple(files), *columns)


def encoded_shard(
    form: TrajectoryFormat,
    name: str,
    content: ShardContent,
    *,
    entries: Mapping[str, Any] | None = None,
    search: bool = False,
) -> tuple[tuple[EncodedFile, ...], ShardManifest]:
    """Return the files of a shard and its manifest.

    Args:
        form: its format.
        name: its name.
        content: its trajectories.
        entries: what its label says of them; None without a label.
        search: see :func:`~.frames.folded`.
    """
    content = replace(content, entries=entries)
    content = packed(content) if is_packed(content.schema) else folded(content, search=search)
    encoded = form.encode(name, content)
    return encoded.files, manifest_of(encoded, form.name, name, content)


def check_file(data: Buffer, manifest: ShardManifest, file_index: int) -> list[str]:
    """Verify a file of a shard; return one line per damaged part, empty if it is sound.

    Args:
        data: the file's bytes.
        manifest: of the shard.
        file_index: index into ``manifest.files``.
    """
    view = memoryview(data)
    file = manifest.files[file_index]
    if view.nbytes != file.size:
        return [f"{file.name}: has {view.nbytes:,} bytes, must have {file.size:,}"]
    columns = [column for column, place in enumerate(manifest.places) if place is not None and place.file == file_index]
    damage = []
    inside = []
    for column in columns:
        start, stop = column_region(manifest, column)
        inside.append((start, stop))
        if zlib.crc32(view[start:stop]) != manifest.column_crc32[column]:
            name = manifest.schema.columns[column].name
            damage.append(f"{file.name}: column {name}: checksum does not fit the content")
            damage += [
                f"{file.name}: column {manifest.schema.columns[other].name}: has rows in the damaged column {name}"
                for other, before in manifest.schema.stored_once.items()
                if before == column
            ]
    if crc32_outside([view], sorted(inside)) != file.crc32:
        damage.append(f"{file.name}: {ENVELOPE}: checksum does not fit the content")
    return damage


def column_region(manifest: ShardManifest, column: int) -> tuple[int, int]:
    """Return the bytes ``[start, stop)`` of a mapped column within its file.

    Raises:
        ValueError: the column is not mapped.
    """
    place = manifest.places[column]
    if place is None:
        raise ValueError(f"column {manifest.schema.columns[column].name} of {manifest.name} is not mapped")
    return place.offset, place.offset + manifest.nbytes[column]


def crc32_outside(pieces: Iterable[Buffer], inside: Sequence[tuple[int, int]]) -> int:
    """Return the CRC-32 of all bytes of consecutive pieces outside the sorted regions."""
    crc = 0
    position = 0  # in the file
    region = 0
    for piece in pieces:
        view = memoryview(piece)
        view = view.cast("B") if view.nbytes else view
        end = position + view.nbytes
        cursor = position
        while cursor < end:
            while region < len(inside) and inside[region][1] <= cursor:
                region += 1
            start, stop = inside[region] if region < len(inside) else (end, end)
            if start > cursor:
                crc = zlib.crc32(view[cursor - position : min(start, end) - position], crc)
            cursor = min(max(stop, start), end)
        position = end
    return crc
