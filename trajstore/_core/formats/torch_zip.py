"""The container of ``torch.save``: writes it without copying tensors, and locates the tensors in it.

A file of ``torch.save`` is a zip archive without compression. ``archive/data.pkl`` is a pickle in which each
tensor names a storage by a persistent id, and ``archive/data/<key>`` holds that storage's bytes. Every member
begins at a multiple of 64 bytes, reached by an extra field ``FB`` in its local header. The layout here is
byte for byte that of torch 2.13 (``torch.serialization._save``, ``caffe2/serialize/inline_container.cc``) except
for the serialization id, which is left out, and the numbering of the pickle's memo.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import FunctionType
from typing import Any

import torch

from trajstore._core.files.base import Buffer
from trajstore._core.formats.pickles.safe_pickle import safe_loads
from trajstore._core.formats.pickles.safe_values import RefusedError, StorageType, UnfitError, place_tensor, require
from trajstore._core.formats.zip_members import ZipPieces, zip_members
from trajstore.errors import ConfigurationError, CorruptStoreError

ALIGNMENT = 64
"""Storages begin at multiples of this many bytes."""

_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A contiguous tensor to write, as a placeholder for the tensor itself.

    Attributes:
        pieces: its bytes, in order; their total size matches ``dtype`` and ``shape``. Never copied.
        dtype: any dtype that can be stored.
        shape: sizes of its dimensions.
        crc32: CRC-32 of the bytes if known.
    """

    pieces: Sequence[Buffer]
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor in a file: byte offset of its first element, dtype, shape, strides in elements."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Number of elements from the first one's place to the last one's."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if self.nbytes else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous and in order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if step != expected:
                    return prod(self.shape) == 0
                expected *= size
        return True


# -- writing -----------------------------------------------------------------------------------------


def write_torch_zip(obj: Any) -> tuple[list[Buffer], list[int]]:
    """Return a file that ``torch.load(..., weights_only=True)`` reads, as pieces, and the places of its tensors.

    Args:
        obj: plain containers with a :class:`TensorSlot` in place of every tensor.

    Returns:
        The file's content in order; pieces of slots are passed on unchanged. And, per slot in the order
        of ``obj``, the byte at which its data begins.

    Raises:
        ConfigurationError: ``obj`` holds anything else, or the size of a slot's pieces does not match its shape.
    """
    target = io.BytesIO()
    pickler = _SlotPickler(target)
    pickler.dump(obj)
    archive = ZipPieces(ALIGNMENT)
    archive.add("archive/data.pkl", [target.getvalue()])
    archive.add("archive/.format_version", [b"1"])
    archive.add("archive/.storage_alignment", [str(ALIGNMENT).encode()])
    archive.add("archive/byteorder", [sys.byteorder.encode()])
    offsets = [
        archive.add(f"archive/data/{key}", slot.pieces, crc32=slot.crc32) for key, slot in enumerate(pickler.slots)
    ]
    archive.add("archive/version", [b"3\n"])
    return archive.finish(), offsets


@cache
def _storage_types() -> Mapping[torch.dtype, type[Any]]:
    """Return torch's storage classes; newer dtypes have none and use untyped storages."""
    return {dtype: getattr(torch, name) for dtype, name in torch.storage._dtype_to_storage_type_map().items()}


class _Storage(tuple[str, type[Any], str, str, int]):
    """A tensor's storage in the pickle: kind, key and size, as its persistent id."""


class _SlotPickler(pickle.Pickler):
    """Pickles slots as torch pickles tensors, and plain containers."""

    _PLAIN = (type, FunctionType, torch.dtype, OrderedDict, complex)

    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, 2)
        self.slots: list[TensorSlot] = []

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if type(obj) is _Storage else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not TensorSlot:
            if isinstance(obj, self._PLAIN):
                return NotImplemented
            raise ConfigurationError(
                f"a {type(obj).__name__} among what is written; use plain containers and TensorSlot"
            )
        count = prod(obj.shape)
        given = sum(memoryview(piece).nbytes for piece in obj.pieces)
        if given != count * obj.dtype.itemsize:
            raise ConfigurationError(f"a slot of {obj.dtype} {list(obj.shape)} was given {given} bytes")
        key = len(self.slots)
        self.slots.append(obj)
        strides = [1]
        for size in reversed(obj.shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        place: tuple[Any, ...] = 0, tuple(obj.shape), tuple(reversed(strides[: len(obj.shape)])), False, OrderedDict()
        kind = _storage_types().get(obj.dtype)
        if kind is not None:
            return torch._utils._rebuild_tensor_v2, (_Storage(("storage", kind, str(key), "cpu", count)), *place)
        storage = _Storage(("storage", torch.UntypedStorage, str(key), "cpu", count * obj.dtype.itemsize))
        return torch._utils._rebuild_tensor_v3, (storage, *place, obj.dtype)


# -- locating ----------------------------------------------------------------------------------------


class UnplacedTensor:
    """Placeholder of a tensor that is not a region of the file: sparse, lazily conjugated, or of a subclass."""

    def __init__(self, *_arguments: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _StoragePlace:
    offset: int
    nbytes: int
    type: StorageType


def is_torch_zip(data: Buffer) -> bool:
    """Return whether a file starts like a zip archive."""
    return bytes(memoryview(data).cast("B")[:4]) == _ZIP_MAGIC


def locate(data: Buffer, *, source: str = "file") -> Any:
    """Return the object of ``torch.load``, with a :class:`TensorPlace` for every tensor. Reads no tensor.

    Args:
        data: the whole file; a map of it will do.
        source: name of the file in messages.

    Returns:
        The object; a tensor without a place is an :class:`UnplacedTensor`.

    Raises:
        CorruptStoreError: the file is truncated, compressed, of torch before 1.6, or of the other byte order; or its
            parts overlap or do not fit together.
        UnsafeContentError: it names something that is not data; nothing of it was run.
    """
    view = memoryview(data).cast("B")
    if not is_torch_zip(view):
        raise CorruptStoreError(f"{source}: damaged, or not a file of torch.save since torch 1.6")
    members = zip_members(view, source)
    root = next(iter(members), "").split("/", 1)[0]
    order = members.get(f"{root}/byteorder")
    if order is not None and bytes(view[order.offset : order.end]) != sys.byteorder.encode():
        raise CorruptStoreError(
            f"{source}: was written by a machine of the other byte order; save it again on this one"
        )
    program = members.get(f"{root}/data.pkl")
    if program is None:
        raise CorruptStoreError(f"{source}: a zip archive without data.pkl; not a file of torch.save")
    content = view[program.offset : program.end]
    if not program.fits(content):
        raise CorruptStoreError(f"{source}: data.pkl has changed since it was written (checksum)")

    def storage(identity: Any) -> _StoragePlace:
        require(type(identity) is tuple and len(identity) == 5 and identity[0] == "storage", "not a storage")
        _, kind, key, _, count = identity
        require(isinstance(kind, StorageType) and type(key) is str and type(count) is int, "not a storage")
        member = members.get(f"{root}/data/{key}")
        if member is None:
            raise CorruptStoreError(f"{source}: data/{key} is absent, which a tensor names")
        size = member.end - member.offset
        require(count * kind.dtype.itemsize == size, f"data/{key} has {size} bytes, not {count} {kind.dtype}")
        return _StoragePlace(member.offset, size, kind)

    return safe_loads(content, classes=_CLASSES, persistent_load=storage, source=f"{source}: data.pkl")


def damaged_members(data: Buffer, *, source: str = "file") -> list[str]:
    """Return the members of a file of ``torch.save`` with wrong checksums. Reads all of it.

    Args:
        data: the whole file; files that are not zip archives have no checksums.
        source: name of the file in messages.

    Raises:
        CorruptStoreError: the archive is truncated, or its parts overlap or do not fit together.
    """
    view = memoryview(data).cast("B")
    if not is_torch_zip(view):
        return []
    members = zip_members(view, source)
    return [name for name, member in members.items() if not member.fits(view[member.offset : member.end])]


def _place(
    storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, metadata: Any
) -> TensorPlace | UnplacedTensor:
    require(isinstance(dtype, torch.dtype), "a tensor without dtype")
    offset, shape, steps = place_tensor(storage.nbytes, dtype, offset, size, stride)
    place = TensorPlace(storage.offset + offset * dtype.itemsize, dtype, shape, steps)
    if place.nbytes > storage.nbytes:
        raise RefusedError("holds a tensor that repeats elements of its storage; save a contiguous copy instead")
    return UnplacedTensor() if metadata else place


def _version_2(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> TensorPlace | UnplacedTensor:
    require(isinstance(storage, _StoragePlace) and storage.type.typed, "a tensor without storage")
    return _place(storage, storage.type.dtype, offset, size, stride, metadata)


def _version_3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorPlace | UnplacedTensor:
    require(isinstance(storage, _StoragePlace) and not storage.type.typed, "a tensor without storage")
    return _place(storage, dtype, offset, size, stride, metadata)


def _parameter(data: Any, _grad: Any, _hooks: Any) -> TensorPlace | UnplacedTensor:
    if not isinstance(data, TensorPlace | UnplacedTensor):
        raise UnfitError("a parameter without tensor")
    return data


_CLASSES: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _version_2,
    ("torch._utils", "_rebuild_tensor_v2"): _version_2,
    ("torch._utils", "_rebuild_tensor_v3"): _version_3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_sparse_tensor"): UnplacedTensor,
    ("torch._utils", "_rebuild_parameter_with_state"): UnplacedTensor,
    ("torch._tensor", "_rebuild_from_type_v2"): UnplacedTensor,
    ("torch.serialization", "_get_layout"): UnplacedTensor,
}
