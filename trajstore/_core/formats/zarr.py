"""Shards as Zarr v3 groups, one array per column, chunked along its rows.

Any Zarr v3 reader opens ``shards/<name>.zarr``. A column's array has the column's dotted name, quoted
where Zarr would not accept it; attributes have the rest, so that a group describes itself::

    shards/<name>.zarr/zarr.json            attributes: layout, version, schema, label,
                                            trajectories [T, B, E, document bytes]
                       <column>/zarr.json   attributes: name, axis, torch_dtype if Zarr lacks that dtype
                       <column>/c.0.0       chunk: row-major, little-endian, then the codec

zarr, an optional package, is imported when the first shard is encoded or opened. Its event loop runs in its
own thread, shared by all threads of a process. zarr gives a forked child a fresh one, but the process must not be
forked while another thread is inside zarr: use spawn where shards are being written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trajstore._core.base.arguments import one_of, whole, whole_or_none
from trajstore._core.base.exits import close_before_what_was_imported_now
from trajstore._core.columns.schema import ColumnSpec, Schema
from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.formats.base import (
    SHARD_LAYOUT,
    SHARDS_FOLDER,
    ColumnPlace,
    EncodedShard,
    Fetch,
    ShardContent,
    ShardManifest,
    ShardReader,
    TrajectoryFormat,
    rows_from_bytes,
)
from trajstore._core.formats.checksums import check_file
from trajstore._core.formats.packed import is_packed, stored_width
from trajstore.errors import CorruptStoreError, MissingDependencyError, TrajstoreError

if TYPE_CHECKING:
    import zarr

SHARD_VERSION = 1

_METADATA = "zarr.json"
_ROTATED = "rotated"
_WORDS = (2, 4, 8)
"""Bytes of floats that may be stored rotated."""
_LEVELS = {"none": range(1, 23), "zstd": range(1, 23), "blosc": range(1, 10), "blosc_zstd": range(1, 10)}
_CNAMES = {"blosc": "lz4", "blosc_zstd": "zstd"}
_COMPRESSED_CHUNK_BYTES = 1 << 20
_MAX_NODE_NAME = 150
_BLOSC_LENGTH = slice(12, 16)  # of the whole chunk, in the header of Blosc 1
_NOT_IN_ZARR = ("bfloat16", "complex32")  # and all float8 dtypes


@dataclass(frozen=True)
class ZarrFormat(TrajectoryFormat):
    """``shards/<name>.zarr/``: a Zarr v3 group of one array per column.

    Attributes:
        codec: ``"none"`` (default) keeps a column as one raw chunk, which is mapped and sampled in place at
            memory speed. ``"zstd"`` and ``"blosc_zstd"`` (shuffled bytes) make files small, ``"blosc"`` (shuffled LZ4)
            is faster with larger files; all must be decoded into the cache, which pays off for images and slow disks.
        level: of the codec, 1 to 22 (zstd) or 1 to 9 (others); without effect for ``"none"``.
        chunk_bytes: upper bound of a chunk's uncompressed bytes, but at least one row. None: the whole column if it
            is not compressed, else 1 MiB. Columns of more than one chunk are not mapped.

    Raises:
        ConfigurationError: an option is out of range.
    """

    name: ClassVar[str] = "zarr"

    codec: Literal["none", "zstd", "blosc", "blosc_zstd"] = "none"
    level: int = 3
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        levels = _LEVELS[one_of("zarr: codec", self.codec, tuple(_LEVELS))]
        object.__setattr__(self, "level", whole("zarr: level", self.level, levels[0], levels[-1]))
        object.__setattr__(self, "chunk_bytes", whole_or_none("zarr: chunk_bytes", self.chunk_bytes, 1))

    def encode(self, name: str, content: ShardContent) -> EncodedShard:
        folder = f"{SHARDS_FOLDER}/{name}.zarr"
        files = [EncodedFile(f"{folder}/{_METADATA}", [_group_metadata(content)])]
        mapped: dict[int, ColumnPlace] = {}
        crcs: dict[int, int] = {}
        empty: list[int] = []
        for column, (spec, count) in enumerate(content.stored):
            node = f"{folder}/{node_name(spec.name)}"
            pieces = content.pieces[column]
            if count * spec.row_nbytes == 0:
                files.append(EncodedFile(f"{node}/{_METADATA}", [_whole_metadata(self, spec, count)]))
                empty.append(column)
            elif self.codec == "none" and self._chunk_rows(spec, count) == count:
                files.append(EncodedFile(f"{node}/{_METADATA}", [_whole_metadata(self, spec, count)]))
                mapped[column] = ColumnPlace(len(files), 0)
                crcs[column] = content.column_crc32[column]
                files.append(EncodedFile(f"{node}/c{'.0' * (1 + len(spec.row_shape))}", pieces))
            else:
                dtype = content.schema.columns[column].torch_dtype
                written = _write_array(self, spec, count, pieces, _item_bytes(content, column), dtype)
                files.extend(EncodedFile(f"{node}/{key}", [data]) for key, data in written.items())
        # An empty column is never read, so any mapped place will do.
        anywhere = ColumnPlace(next((place.file for place in mapped.values()), 0), 0)
        places = mapped | dict.fromkeys(empty, anywhere)
        crcs |= dict.fromkeys(empty, 0)
        columns = range(len(content.stored))
        return EncodedShard(tuple(files), tuple(map(places.get, columns)), tuple(map(crcs.get, columns)))

    def open(self, fetch: Fetch, manifest: ShardManifest) -> ShardReader:
        return _ZarrReader(fetch, manifest)

    def find(self, data: Buffer, source: str) -> tuple[Mapping[str, Any], list[int] | None]:
        return orjson.loads(data)["attributes"], None

    def _chunk_rows(self, spec: ColumnSpec, rows: int) -> int:
        """Return the rows of one chunk, such that all chunks are about equally full."""
        limit = self.chunk_bytes
        if limit is None:
            if self.codec == "none":
                return rows
            limit = _COMPRESSED_CHUNK_BYTES
        chunks = -(-rows // max(1, limit // spec.row_nbytes))
        return -(-rows // chunks)


def node_name(column: str) -> str:
    """Return the name of a column's Zarr array: legal in Zarr, file systems and object stores, and unique.

    Characters other than ``A-Z a-z 0-9 _ . -`` are percent-encoded (UTF-8), and so is the first one of names that
    Zarr reserves. Very long names end in a hash. The array's attribute ``name`` has the original name.
    """
    name = quote(column, safe="").replace("~", "%7E")
    if name.startswith("__") or not name.strip(".") or name == _METADATA:
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%"
    if len(name) > _MAX_NODE_NAME:
        digest = hashlib.blake2b(column.encode(), digest_size=16).hexdigest()
        name = f"{name[: _MAX_NODE_NAME - 33]}~{digest}"
    return name


def _import_zarr() -> Any:
    try:
        import zarr
        import zarr.buffer.cpu  # zarr does not import it
    except ImportError as error:
        raise MissingDependencyError("zarr", "zarr") from error
    _close_stores_first()
    return zarr


@cache
def _close_stores_first() -> None:
    """Register, once per process, to close stores before zarr stops."""
    close_before_what_was_imported_now()


def _stored_dtype(spec: ColumnSpec) -> str:
    """Return the name of the dtype in Zarr; unsigned integers of the same size where Zarr lacks it."""
    if spec.dtype in _NOT_IN_ZARR or spec.dtype.startswith("float8"):
        return f"uint{8 * spec.torch_dtype.itemsize}"
    return spec.dtype


def _item_bytes(content: ShardContent, column: int) -> int | None:
    """Return the bytes of a packed column's rows, whose bytes are compressed apart; None for others."""
    return max(1, stored_width(content.pieces[column])) if is_packed(content.schema) else None


def _compressors(shard_format: ZarrFormat, item_bytes: int | None) -> Any:
    codecs = _import_zarr().codecs
    if shard_format.codec == "zstd":
        return codecs.ZstdCodec(level=shard_format.level)
    if (cname := _CNAMES.get(shard_format.codec)) is not None:
        return codecs.BloscCodec(cname=cname, clevel=shard_format.level, shuffle="shuffle", typesize=item_bytes)
    return None


def _group_metadata(content: ShardContent) -> bytes:
    zarr = _import_zarr()
    written: dict[str, Any] = {}
    attributes = {
        "layout": SHARD_LAYOUT,
        "version": SHARD_VERSION,
        "schema": content.schema.to_json(),
        **content.described(),
    }
    zarr.create_group(zarr.storage.MemoryStore(written), zarr_format=3, attributes=attributes)
    return _without_spaces(written[_METADATA].to_bytes())


def _create_array(
    shard_format: ZarrFormat,
    spec: ColumnSpec,
    data: npt.NDArray[Any],
    chunk_rows: int,
    item_bytes: int | None = None,
    *,
    write_data: bool,
    **described: Any,
) -> dict[str, bytes]:
    """Return the files of a Zarr array, by their keys below it; ``described`` is added to its attributes."""
    zarr = _import_zarr()
    inner = tuple(max(1, size) for size in spec.row_shape)
    attributes: dict[str, Any] = {"name": spec.name, "axis": spec.axis.name.lower(), **described}
    if data.dtype.name != spec.dtype:
        attributes["torch_dtype"] = spec.dtype
    content: dict[str, Any] = {}
    zarr.create_array(
        zarr.storage.MemoryStore(content),
        data=data,
        write_data=write_data,
        chunks=(chunk_rows, *inner),
        filters=None,
        compressors=_compressors(shard_format, item_bytes),
        fill_value=0,
        zarr_format=3,
        attributes=attributes,
        chunk_key_encoding={"name": "default", "separator": "."},  # one folder per column, not one per dimension
        config={"write_empty_chunks": True},  # an absent chunk is damage, never zeros
    )
    files = {key: bytes(value.to_bytes()) for key, value in content.items()}
    return files | {_METADATA: _without_spaces(files[_METADATA])}


def _without_spaces(metadata: bytes) -> bytes:
    """Return Zarr's metadata on one line: its indentation takes more space than the rest."""
    return orjson.dumps(orjson.loads(metadata))


def _write_array(
    shard_format: ZarrFormat,
    spec: ColumnSpec,
    rows: int,
    pieces: Sequence[Buffer],
    item_bytes: int | None,
    dtype: torch.dtype,
) -> dict[str, bytes]:
    data = np.frombuffer(b"".join(pieces), np.dtype(_stored_dtype(spec))).reshape(rows, *spec.row_shape)
    chunk = shard_format._chunk_rows(spec, rows)
    described = {}
    is_rotated = dtype.is_floating_point and shard_format.codec == "blosc_zstd"
    if is_rotated and item_bytes is not None and item_bytes in _WORDS and (chunk % item_bytes == 0 or chunk >= rows):
        described = {_ROTATED: item_bytes}
        data = _rotated(data, item_bytes, 1)
    return _create_array(shard_format, spec, data, chunk, item_bytes, write_data=True, **described)


def _rotated(data: npt.NDArray[np.uint8], item_bytes: int, bits: int) -> npt.NDArray[np.uint8]:
    """Return packed floats with their bits rotated to the left: by 1, the exponent has a byte of its own."""
    words = data[: len(data) // item_bytes * item_bytes].view(f"<u{item_bytes}")
    rotated = (words << bits) | (words >> (8 * item_bytes - bits))
    return np.concatenate([rotated.view(np.uint8), data[words.nbytes :]])


@lru_cache(maxsize=1024)
def _metadata_template(shard_format: ZarrFormat, spec: ColumnSpec) -> bytes:
    data = np.zeros((1, *spec.row_shape), np.dtype(_stored_dtype(spec)))
    return _create_array(shard_format, spec, data, 1, write_data=False)[_METADATA]


def _whole_metadata(shard_format: ZarrFormat, spec: ColumnSpec, rows: int) -> bytes:
    """Return the metadata of an array with one chunk: Zarr's own, with this number of rows.

    Calling Zarr for each array would take most of the time of encoding a shard.
    """
    metadata = orjson.loads(_metadata_template(shard_format, spec))
    metadata["shape"][0] = rows
    metadata["chunk_grid"]["configuration"]["chunk_shape"][0] = max(1, rows)
    return orjson.dumps(metadata)


class _ZarrReader(ShardReader):
    """Reads through zarr, from a memory store that holds only the files needed at the moment, each verified.

    Zarr reads an absent chunk as zeros, so every chunk is fetched here first, in the caller's thread.
    """

    def __init__(self, fetch: Fetch, manifest: ShardManifest) -> None:
        self._zarr = _import_zarr()
        self._fetch = fetch
        self._manifest, self._stored = manifest, manifest.stored
        self._files = {file.name: number for number, file in enumerate(manifest.files)}
        self._arrays: dict[int, zarr.Array[Any]] = {}
        self._blocks: dict[int, tuple[int, torch.Tensor]] = {}
        first = manifest.files[0].name if manifest.files else ""
        if not first.endswith(f"/{_METADATA}"):
            raise CorruptStoreError(
                f"shard {manifest.name}: its first file must be a zarr group's metadata, not {first!r}"
            )
        self._folder = first.removesuffix(_METADATA)
        store = self._store([_METADATA])
        with _told_by_file(first):
            group = self._zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False)
            attributes = dict(group.attrs)
            if (attributes["layout"], attributes["version"]) != (SHARD_LAYOUT, SHARD_VERSION):
                raise CorruptStoreError(f"{first}: layout {attributes['layout']!r} version {attributes['version']!r}")
            if Schema.from_json(attributes["schema"]) != manifest.schema:
                raise CorruptStoreError(f"{first}: the group has other columns than the shard's description")

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        spec, _ = self._stored[column]
        first, block = self._blocks.get(column, (0, None))
        if block is None or start < first or stop > first + len(block):
            first, block = self._blocks[column] = self._decode(column, spec, start, stop)
        return block[start - first : stop - first]

    def _decode(self, column: int, spec: ColumnSpec, start: int, stop: int) -> tuple[int, torch.Tensor]:
        """Return the first row of the chunks that hold rows ``[start, stop)``, and all rows of these chunks."""
        array = self._array(column, spec)
        _, total = self._stored[column]
        chunk = array.chunks[0]
        first, last = start // chunk * chunk, min(-(-stop // chunk) * chunk, total)
        node = node_name(spec.name)
        keys = []
        if last > first and spec.row_nbytes:
            inner = (0,) * len(spec.row_shape)
            keys = [
                f"{node}/{array.metadata.encode_chunk_key((number, *inner))}"
                for number in range(first // chunk, -(-last // chunk))
            ]
        blosc = any(isinstance(codec, self._zarr.codecs.BloscCodec) for codec in array.compressors)
        store = self._store([f"{node}/{_METADATA}", *keys], keys if blosc else ())
        with _told_by_file(f"{self._folder}{node}", spec.name):
            data = np.asarray(self._zarr.open_array(store, path=node, mode="r", zarr_format=3)[first:last])
            if _ROTATED in array.attrs:
                word = _WORDS[_WORDS.index(array.attrs[_ROTATED])]
                data = _rotated(data, word, 8 * word - 1)
        content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return first, rows_from_bytes(content.data, spec.torch_dtype, (last - first, *spec.row_shape))

    def _array(self, column: int, spec: ColumnSpec) -> zarr.Array[Any]:
        """Open a column's array and check it against the manifest, before allocating memory."""
        if column in self._arrays:
            return self._arrays[column]
        node = node_name(spec.name)
        _, rows = self._stored[column]
        store = self._store([f"{node}/{_METADATA}"])
        with _told_by_file(f"{self._folder}{node}/{_METADATA}", spec.name):
            array: zarr.Array[Any] = self._zarr.open_array(store, path=node, mode="r", zarr_format=3)
            inner = tuple(max(1, size) for size in spec.row_shape)
            unit = array.chunks
            if array.shape != (rows, *spec.row_shape) or array.dtype.name != _stored_dtype(spec):
                raise CorruptStoreError(f"{self._folder}{node}/{_METADATA}: {array.dtype} {list(array.shape)}")
            if array.shards or unit[1:] != inner or not 0 < unit[0] <= 2 * max(1, rows):
                raise CorruptStoreError(f"{self._folder}{node}/{_METADATA}: chunks of shape {list(unit)}")
        self._arrays[column] = array
        return array

    def _store(self, keys: Sequence[str], blosc: Sequence[str] = ()) -> Any:
        """Return a store of these files of the shard.

        Args:
            keys: of the files below the group.
            blosc: those compressed by blosc, which trusts the size in a chunk's header.

        Raises:
            CorruptStoreError: one is not in the manifest, is absent, has a wrong checksum, or is too short.
        """
        content = {}
        for key in keys:
            name = self._folder + key
            if name not in self._files:
                raise CorruptStoreError(f"{name}: missing from the description of shard {self._manifest.name}")
            data = self._fetch(name)
            damage = check_file(data, self._manifest, self._files[name])
            if damage:
                raise CorruptStoreError(f"{'; '.join(damage)}; restore it from a copy")
            if key in blosc and len(data) != int.from_bytes(bytes(data[_BLOSC_LENGTH]), "little"):
                raise CorruptStoreError(f"{name}: not as long as blosc's header says")
            content[key] = self._zarr.buffer.cpu.Buffer.from_bytes(data)
        return self._zarr.storage.MemoryStore(content, read_only=True)


@contextmanager
def _told_by_file(name: str, column: str | None = None) -> Iterator[None]:
    """Convert zarr's errors on damaged files to an error that names the file."""
    try:
        yield
    except TrajstoreError:
        raise
    except Exception as error:  # zarr and its codecs raise nearly anything here
        of_column = "" if column is None else f" (column {column})"
        raise CorruptStoreError(f"{name}{of_column}: not readable by zarr: {error!r}") from error
