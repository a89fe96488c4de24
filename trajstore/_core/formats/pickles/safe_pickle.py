"""Reads untrusted pickles without running code that they name.

``pickle.loads`` calls any callable that a pickle names. Restricting its ``find_class`` is not enough for untrusted
files: the C unpickler sets attributes on any object, allocates claimed sizes, and hashes nested keys until the stack
overflows. A subclass of the unpickler in Python, which replaces these operations, is used instead
(:mod:`trajstore._core.formats.pickles.machine`). It supports plain containers, numbers, text, torch tensors, numpy
arrays (:mod:`trajstore._core.formats.pickles.safe_values`), and the caller's stand-ins. Memory is bounded by a
multiple of the size of the pickle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from trajstore._core.files.base import Buffer
from trajstore._core.formats.pickles.machine import Machine, PersistentLoad, Resolve
from trajstore._core.formats.pickles.safe_values import StorageType, Token, Unwanted, admitted, require
from trajstore.errors import UnsafeContentError

Classes = Mapping[tuple[str, str], Callable[..., Any]]

# Names from Python 2, which pickle protocols 0 to 2 still write.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_TORCH_PROTOCOL = 1001


def safe_loads(
    data: Buffer,
    *,
    classes: Classes | None = None,
    packages: Mapping[str, Callable[..., Any]] | None = None,
    left_out: Collection[str] = (),
    persistent_load: PersistentLoad | None = None,
    source: str = "pickle",
) -> Any:
    """Return the object in a pickle; bytes after its end are ignored.

    Admitted are dict, list, tuple, set, frozenset, OrderedDict, defaultdict (as a dict), bytes, bytearray, str,
    numbers, None; torch tensors, storages, sizes, dtypes and devices; numpy arrays, numbers and dtypes other than
    objects and records. Tensors are returned on the CPU, without gradient or hooks.

    Args:
        data: the pickle, any protocol.
        classes: callables for further names, ``(module, name)``. The result receives the
            pickled state through its ``__setstate__`` or, without one, in its ``__dict__``.
        packages: callables for all classes of a package, by the first part of its name; called with module
            and name of the class before the pickle's own arguments.
        left_out: packages whose objects are not needed: an :class:`~.safe_values.Unwanted` replaces
            each, and operations on it have no effect.
        persistent_load: returns the object for a persistent id. A storage class in the id is a
            :class:`~trajstore._core.formats.pickles.safe_values.StorageType`.
        source: name of the pickle in messages, e.g. its file's name.

    Raises:
        UnsafeContentError: the pickle names something else; nothing of it was run.
        CorruptStoreError: this is not a pickle, it is truncated, or a size exceeds its data.

    """
    resolve = _resolver(classes or {}, source, packages=packages or {}, left_out=left_out)
    return Machine(memoryview(data).cast("B"), resolve, persistent_load, source).run()


def _resolver(
    classes: Classes,
    source: str,
    *,
    packages: Mapping[str, Callable[..., Any]] | None = None,
    left_out: Collection[str] = (),
    nested: bool = False,
) -> Resolve:
    """Return the function that resolves names in a pickle."""
    by_package = packages or {}
    stand_ins = {key: Token(".".join(key), call, stand_in=True) for key, call in classes.items()}

    def load_storage(raw: Any) -> Any:
        return _load_storage(raw, source)

    def resolve(module: str, name: str) -> Any:
        key = (_OLD_MODULES.get(module, module), name)
        if key in stand_ins:
            return stand_ins[key]
        if key in admitted():
            return admitted()[key]
        package = key[0].partition(".")[0]
        if package in by_package:
            return Token(".".join(key), partial(by_package[package], *key), stand_in=True)
        if package in left_out:
            return Token(".".join(key), Unwanted, stand_in=True, left_out=True)
        if key == ("torch.storage", "_load_from_bytes") and not nested:
            return Token("torch.storage._load_from_bytes", load_storage)
        raise UnsafeContentError(
            f"{source}: names {module}.{name}, which is not plain data; nothing of it was run. "
            "Convert the file with the program that wrote it, if you trust it."
        )

    return resolve


def _load_storage(raw: Any, source: str) -> Any:
    """Return the storage within a pickled tensor, for which ``TypedStorage.__reduce__`` writes a file of its own.

    It has the form of ``torch.save`` before torch 1.6 (``torch.serialization._legacy_save``): five pickles, of which
    the fourth is the object, then for each storage its number of elements and its data.
    """
    require(type(raw) is bytes, "a torch storage without data")
    view, resolve = memoryview(raw), _resolver({}, source, nested=True)
    storages: dict[str, tuple[StorageType, int, torch.UntypedStorage]] = {}

    def persistent_load(identity: Any) -> Any:
        require(type(identity) is tuple and len(identity) == 6 and identity[0] == "storage", "no torch storage")
        _, kind, key, _, count, part = identity
        known = isinstance(kind, StorageType) and type(key) is str and type(count) is int and part is None
        require(known, "an unknown kind of torch storage")
        if key not in storages:
            nbytes = count * kind.dtype.itemsize
            require(0 <= nbytes <= len(view), f"a torch storage of {nbytes} bytes in a file of {len(view)}")
            storages[key] = kind, count, torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        first, stored_count, storage = storages[key]
        require((first, stored_count) == (kind, count), "a torch storage of two kinds")
        if not kind.typed:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=kind.dtype, _internal=True)  # type: ignore[no-untyped-call]

    parts, position = [], 0
    for _ in range(5):
        machine = Machine(view, resolve, persistent_load, source, position)
        parts.append(machine.run())
        position = machine.position
    magic, protocol, system, loaded, keys = parts
    known = magic == _TORCH_MAGIC and protocol == _TORCH_PROTOCOL and type(system) is dict
    require(known and system.get("little_endian") is (sys.byteorder == "little"), "an unknown kind of torch storage")
    complete = type(keys) is list and len(keys) == len(storages) and set(keys) == storages.keys()
    require(complete, "torch storages are missing, or nothing names them")
    for key in keys:
        _, count, storage = storages[key]
        content = view[position + 8 : position + 8 + storage.nbytes()]
        require(view[position : position + 8] == count.to_bytes(8, "little"), "a torch storage of another size")
        require(len(content) == storage.nbytes(), "a torch storage is cut short")
        if storage.nbytes():
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
            )
        position += 8 + storage.nbytes()
    is_storage = isinstance(loaded, torch.UntypedStorage | torch.storage.TypedStorage)
    require(is_storage, "an unknown kind of torch storage")
    return loaded
