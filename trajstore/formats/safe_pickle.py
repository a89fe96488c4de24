"""Reads pickles that somebody else wrote, without running anything that they name.

``pickle.loads`` calls whatever a pickle asks for. Restricting its ``find_class`` is not enough for untrusted
files: the C unpickler sets attributes on anything it is told to, allocates what sizes claim, and hashes
nested keys until the stack ends. A small interpreter of the same opcodes is used instead
(:mod:`trajstore.formats.pickle_machine`). It knows plain containers, numbers, text, torch tensors and numpy
arrays (:mod:`trajstore.formats.safe_values`), and the stand-ins that its caller names. Memory is bounded by a
multiple of the size of the pickle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trajstore.errors import UnsafeContentError
from trajstore.formats.base import Buffer
from trajstore.formats.pickle_machine import Machine, PersistentLoad, Resolve
from trajstore.formats.safe_values import StorageType, Token, admitted, require

Classes = Mapping[tuple[str, str], Callable[..., Any]]

# Names that Python 2 wrote, and that pickle protocols 0 to 2 still write.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_TORCH_PROTOCOL = 1001


def safe_loads(
    data: Buffer,
    *,
    classes: Classes | None = None,
    persistent_load: PersistentLoad | None = None,
    source: str = "pickle",
) -> Any:
    """Return the object that a pickle describes; bytes after its end are ignored.

    Admitted are dict, list, tuple, set, frozenset, OrderedDict, bytes, bytearray, str, numbers, None; torch
    tensors, storages, sizes, dtypes and devices; numpy arrays, numbers and dtypes other than objects and
    records. Tensors come back on the CPU, without gradient or hooks.

    Args:
        data: the pickle, any protocol.
        classes: for further names, ``(module, name)``, what to call in their place. The result takes the
            pickled state through its ``__setstate__`` or, without one, into its ``__dict__``.
        persistent_load: given each persistent id, returns the object it means. A storage class in it is a
            :class:`~trajstore.formats.safe_values.StorageType`.
        source: what messages call the pickle, e.g. the name of its file.

    Raises:
        UnsafeContentError: the pickle names something else; nothing of it was run.
        CorruptStoreError: this is not a pickle, or it is cut short, or it claims what it does not hold.

    """
    return Machine(memoryview(data).cast("B"), _resolver(classes or {}, source), persistent_load, source).run()


def _resolver(classes: Classes, source: str, nested: bool = False) -> Resolve:
    """Return the function that says what a name in a pickle stands for."""
    stand_ins = {key: Token(".".join(key), call, stand_in=True) for key, call in classes.items()}

    def load_storage(raw: Any) -> Any:
        return _load_storage(raw, source)

    def resolve(module: str, name: str) -> Any:
        key = (_OLD_MODULES.get(module, module), name)
        if key in stand_ins:
            return stand_ins[key]
        if key in admitted():
            return admitted()[key]
        if key == ("torch.storage", "_load_from_bytes") and not nested:
            return Token("torch.storage._load_from_bytes", load_storage)
        raise UnsafeContentError(
            f"{source}: names {module}.{name}, which is not plain data; nothing of it was run. "
            "Convert the file with the program that wrote it, if you trust it."
        )

    return resolve


def _load_storage(raw: Any, source: str) -> Any:
    """Return the storage within a pickled tensor: five pickles, then the number of elements and the data.

    Source: ``torch.serialization._legacy_save``, which is what ``TypedStorage.__reduce__`` calls.
    """
    require(type(raw) is bytes, "a torch storage without data")
    view = memoryview(raw)
    position = 0
    wanted: list[tuple[StorageType, str, int]] = []

    def persistent_load(identity: Any) -> Any:
        require(
            type(identity) is tuple and len(identity) == 6 and identity[0] == "storage" and identity[5] is None
            and isinstance(identity[1], StorageType) and type(identity[2]) is str and type(identity[4]) is int
            and not wanted,
            "an unknown kind of torch storage",
        )  # fmt: skip
        wanted.append((identity[1], identity[2], identity[4]))
        return None

    resolve = _resolver({}, source, nested=True)
    parts = []
    for _ in range(5):
        machine = Machine(view, resolve, persistent_load, source, position)
        parts.append(machine.run())
        position = machine.position
    magic, protocol, system, _, keys = parts
    known = magic == _TORCH_MAGIC and protocol == _TORCH_PROTOCOL and type(system) is dict
    require(known and system.get("little_endian") is (sys.byteorder == "little"), "an unknown kind of torch storage")
    require(known and len(wanted) == 1 and keys == [wanted[0][1]], "an unknown kind of torch storage")
    storage_type, _, count = wanted[0]
    content = bytearray(view[position + 8 :])
    require(view[position : position + 8] == count.to_bytes(8, "little"), "a torch storage of another size")
    require(len(content) == count * storage_type.dtype.itemsize, "a torch storage is cut short")
    tensor = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    if not storage_type.typed:
        return storage
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=storage_type.dtype, _internal=True)  # type: ignore[no-untyped-call]
