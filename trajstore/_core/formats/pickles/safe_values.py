"""Names admitted by :func:`trajstore._core.formats.pickles.safe_pickle.safe_loads`, and their implementations.

A name in a pickle never becomes the Python object of that name. It becomes a :class:`Token`, which has no
useful attributes and can be called from the pickle only through the functions below.
Each of them checks its arguments and needs memory in proportion to the bytes passed: claimed sizes
are compared with the data first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.schema import dtypes

MAX_DEPTH = 200
"""Nesting limit of containers in a pickle."""

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
_MAX_KEY_DEPTH = 8
_MAX_KEY_SIZE = 1000
_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None), frozenset})
_NUMPY_DTYPE = re.compile(r"[<>=|]?[biufcSU][0-9]{1,9}")


class UnfitError(Exception):
    """Arguments that no valid program can have written."""


class RefusedError(Exception):
    """A valid value that is refused nevertheless."""


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A name that a pickle may use. ``call`` implements a call of it; None = only usable as an argument."""

    name: str
    call: Callable[..., Any] | None = None
    stand_in: bool = False
    """Whether ``call`` makes an object of the caller's class, which may then receive its state."""
    left_out: bool = False
    """Whether its objects are not needed: every operation on it yields an :class:`Unwanted`."""


class Unwanted:
    """Empty placeholder of an object that the reader does not need."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """A storage class in torch's persistent ids; ``dtype`` is uint8 for an untyped storage."""

    dtype: torch.dtype
    typed: bool


def require(condition: bool, what: str) -> None:
    """Raise :class:`UnfitError` unless ``condition`` holds."""
    if not condition:
        raise UnfitError(what)


def check_key(key: Any) -> None:
    """Raise :class:`UnfitError` unless hashing ``key`` is cheap.

    The hash of a tuple visits all its items, without remembering visited ones and on the C stack: a few
    hundred bytes of pickle can make it run for years or crash the process.
    """
    if type(key) not in _PLAIN_KEYS and _key_size(key, _MAX_KEY_DEPTH) > _MAX_KEY_SIZE:
        raise UnfitError("a dict key or set element is too large")


def _key_size(key: Any, depth: int) -> int:
    if type(key) in _PLAIN_KEYS or isinstance(key, np.generic):
        return 1
    require(type(key) is tuple, f"a {type(key).__name__} as dict key or set element")
    require(depth > 0, "a dict key or set element is nested too deeply")
    size = 1
    for item in key:
        size += _key_size(item, depth - 1)
        if size > _MAX_KEY_SIZE:
            break
    return size


def check_nesting(roots: list[Any], limit: int) -> None:
    """Refuse cycles, deep nesting, and sharing that makes a small pickle describe an enormous tree.

    Traversals of the result visit shared values once per reference.

    Args:
        roots: objects from a pickle.
        limit: largest number of visited values.

    Raises:
        UnfitError: there are more values, or nesting beyond ``MAX_DEPTH``, or a cycle.
        RefusedError: a name of the pickle is among the values.
    """
    visited = _CONTAINERS | {Token, StorageType}
    extents: dict[int, tuple[int, int]] = {}  # id -> depth, number of values below
    on_path: set[int] = set()
    pending: list[tuple[Any, list[Any] | None]] = [(roots, None)]
    while pending:
        node, inner = pending.pop()
        key = id(node)
        if inner is not None:
            on_path.discard(key)
            depth = 1 + max((extents[id(child)][0] for child in inner), default=0)
            size = len(node) + sum(extents[id(child)][1] for child in inner)
            require(depth <= MAX_DEPTH + 1, f"containers are nested deeper than {MAX_DEPTH}")
            require(size <= limit, "shared containers multiply beyond any use")
            extents[key] = (depth, size)
        elif key not in extents:
            require(key not in on_path, "a container contains itself")
            on_path.add(key)
            values = node.values() if isinstance(node, dict) else node
            inner = [child for child in values if type(child) in visited]
            for child in inner:
                if type(child) not in _CONTAINERS:
                    raise RefusedError(f"holds {getattr(child, 'name', 'a storage class')} itself as a value")
            pending.append((node, inner))
            pending.extend((child, None) for child in inner)


def place_tensor(
    nbytes: int, dtype: torch.dtype, offset: Any, size: Any, stride: Any
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return checked ``(offset, shape, stride)``, in elements, of a tensor over a storage of ``nbytes`` bytes.

    Raises:
        UnfitError: a value is not a natural number, or the tensor reaches beyond its storage.

    """
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    require(all(type(n) is int and 0 <= n < 2**62 for n in numbers), "a tensor's offset, size or stride is no size")
    require(len(shape) == len(steps) <= 64, f"a tensor has {len(shape)} sizes and {len(steps)} strides")
    if prod(shape):
        last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        require((last + 1) * dtype.itemsize <= nbytes, "a tensor reaches beyond the end of its storage")
    return offset, shape, steps


def _view_of(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    offset, shape, steps = place_tensor(storage.nbytes(), dtype, offset, size, stride)
    # An expanded tensor of a few bytes can claim any size and would be copied at that size later.
    if prod(shape) * dtype.itemsize > storage.nbytes():
        raise RefusedError("holds a tensor that repeats elements of its storage; save a contiguous copy instead")
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, steps)


def _with_metadata(tensor: torch.Tensor, metadata: Any) -> torch.Tensor:
    if not metadata:
        return tensor
    require(type(metadata) is dict and metadata.keys() <= {"conj", "neg"}, "unknown metadata of a tensor")
    if metadata.get("conj"):
        tensor = tensor.conj().resolve_conj()
    return -tensor if metadata.get("neg") else tensor


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    require(isinstance(storage, torch.storage.TypedStorage), "a tensor without storage")
    return _view_of(storage._untyped_storage, storage.dtype, offset, size, stride)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
) -> torch.Tensor:
    return _with_metadata(_rebuild_tensor(storage, offset, size, stride), metadata)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> torch.Tensor:
    require(isinstance(storage, torch.UntypedStorage), "a tensor without storage")
    require(isinstance(dtype, torch.dtype), "a tensor without dtype")
    return _with_metadata(_view_of(storage, dtype, offset, size, stride), metadata)


def _rebuild_parameter(data: Any, _grad: Any, _hooks: Any) -> torch.Tensor:
    require(isinstance(data, torch.Tensor), "a parameter without tensor")
    tensor: torch.Tensor = data
    return tensor


def _size(sizes: Any) -> torch.Size:
    require(type(sizes) is tuple and all(type(n) is int for n in sizes), "torch.Size of something else than integers")
    return torch.Size(sizes)


def _device(kind: Any, index: Any = None) -> torch.device:
    require(type(kind) is str and (index is None or type(index) is int), "torch.device of something else than a name")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _numpy_dtype(name: Any, *_align_copy: Any) -> np.dtype[Any]:
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        raise RefusedError(f"holds numpy data of dtype {name!r}: only booleans, numbers and fixed-length text are read")
    return np.dtype(name, copy=True)  # a private copy: set_state changes the byte order in place


def _check_numpy_dtype(dtype: Any) -> np.dtype[Any]:
    require(isinstance(dtype, np.dtype) and dtype.kind in "biufcSU", "a numpy array without a plain dtype")
    checked: np.dtype[Any] = dtype
    return checked


def _check_numpy_shape(shape: Any, dtype: np.dtype[Any], nbytes: int) -> tuple[int, ...]:
    shape = (shape,) if type(shape) is int else shape
    require(
        type(shape) is tuple and len(shape) <= 32 and all(type(n) is int and 0 <= n < 2**62 for n in shape),
        "a numpy array's shape is no shape",
    )
    require(prod(shape) * dtype.itemsize == nbytes, f"a numpy array of shape {shape} with {nbytes} bytes of data")
    checked: tuple[int, ...] = shape
    return checked


def _numpy_reconstruct(_class: Any, _shape: Any, _typecode: Any) -> np.ndarray[Any, Any]:
    return np.empty(0, dtype=np.int8)


def _numpy_from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    require(type(raw) in (bytes, bytearray) and order in ("C", "F"), "a numpy array without data")
    dtype = _check_numpy_dtype(dtype)
    shape = _check_numpy_shape(shape, dtype, len(raw))
    if not raw:
        return np.empty(shape, dtype)
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def _numpy_scalar(dtype: Any, raw: Any) -> Any:
    dtype = _check_numpy_dtype(dtype)
    require(type(raw) is bytes and len(raw) == dtype.itemsize > 0, "a numpy number without value")
    return np.frombuffer(raw, dtype)[0]


def set_state(target: Any, state: Any) -> None:
    """Set a numpy array's or dtype's pickled state. No other object has state.

    Raises:
        UnfitError: the state does not fit; numpy itself would not check it.

    """
    require(type(state) is tuple, "a state that is not a tuple")
    if type(target) is np.ndarray:
        require(len(state) == 5 and target.size == 0 and target.base is None, "a numpy array is filled twice")
        _, shape, dtype, fortran, raw = state
        dtype = _check_numpy_dtype(dtype)
        require(type(raw) is bytes and type(fortran) is bool, "a numpy array without data")
        target.__setstate__((1, _check_numpy_shape(shape, dtype, len(raw)), dtype, fortran, raw))
        return
    dtype = _check_numpy_dtype(target)
    require(len(state) == 8 and state[0] == 3 and state[1] in ("<", ">", "|", "="), "an unknown kind of numpy dtype")
    sizes = state[5:]
    known = ((-1, -1, 0), (dtype.itemsize, dtype.alignment, dtype.flags))
    require(state[2:5] == (None, None, None) and sizes in known, "an unknown kind of numpy dtype")
    dtype.__setstate__(state)  # type: ignore[attr-defined]


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """Bytes as pickle protocol 2 writes them."""
    require(type(text) is str and encoding in ("latin1", "latin-1", "utf-8"), "bytes in an unknown encoding")
    return bytes(text, encoding)


def _bytearray(raw: Any = b"", encoding: Any = "latin-1") -> bytearray:
    require(type(raw) in (bytes, str), "a bytearray of something else than bytes")
    return bytearray(raw if type(raw) is bytes else _encode(raw, encoding))


def _bytes(*nothing: Any) -> bytes:
    require(not nothing, "bytes of something else")
    return b""


def _complex(real: Any, imaginary: Any) -> complex:
    require(type(real) is float and type(imaginary) is float, "a complex number of something else than floats")
    return complex(real, imaginary)


def _elements(items: Any) -> list[Any]:
    require(type(items) in (list, tuple), "a container of something else than a list")
    return list(items)


def _set(kind: type[Any]) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        elements = _elements(items)
        for element in elements:
            check_key(element)
        return kind(elements)

    return make


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    result: OrderedDict[Any, Any] = OrderedDict()
    for pair in _elements(items):
        require(type(pair) in (list, tuple) and len(pair) == 2, "an OrderedDict of something else than pairs")
        check_key(pair[0])
        result[pair[0]] = pair[1]
    return result


_OBJECT = Token("builtins.object")


def _reconstructor(stand_in: Any, base: Any, state: Any) -> Any:
    """Create an object as pickle protocols 0 and 1 do."""
    allowed = isinstance(stand_in, Token) and stand_in.stand_in and base is _OBJECT and state is None
    require(allowed, "copyreg._reconstructor of something else than a mapped class")
    return stand_in.call()


def _default_dict(factory: Any = None) -> dict[Any, Any]:
    """Return a ``defaultdict`` as a plain dict, without its factory, which is not run."""
    require(factory is None or isinstance(factory, Token), "a defaultdict of something that is no name")
    return {}


def _tokens(module: str, calls: Mapping[str, Callable[..., Any] | None]) -> Iterable[tuple[tuple[str, str], Token]]:
    for name, call in calls.items():
        yield (module, name), Token(f"{module}.{name}", call)


@cache
def admitted() -> Mapping[tuple[str, str], Any]:
    """Return the objects for names in a pickle: tokens, storage types and dtypes, by (module, name)."""
    result: dict[tuple[str, str], Any] = {("builtins", "object"): _OBJECT}
    plain: Mapping[str, Callable[..., Any]] = {
        "set": _set(set),
        "frozenset": _set(frozenset),
        "bytearray": _bytearray,
        "bytes": _bytes,
    }
    result.update(_tokens("builtins", dict.fromkeys(("dict", "list", "tuple", "int", "float", "str", "bool"))))
    plain = {**plain, "complex": _complex}
    result.update(_tokens("builtins", plain))
    result.update(_tokens("collections", {"OrderedDict": _ordered_dict, "defaultdict": _default_dict}))
    result.update(_tokens("_codecs", {"encode": _encode}))
    result.update(_tokens("copyreg", {"_reconstructor": _reconstructor}))
    result.update(_tokens("torch", {"Size": _size, "device": _device}))
    rebuild: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": _rebuild_tensor,
        "_rebuild_parameter": _rebuild_parameter,
    }
    rebuild |= {"_rebuild_tensor_v2": _rebuild_tensor_v2, "_rebuild_tensor_v3": _rebuild_tensor_v3}
    result.update(_tokens("torch._utils", rebuild))
    result.update(_tokens("numpy", {"dtype": _numpy_dtype, "ndarray": None}))
    for package in ("numpy.core", "numpy._core"):
        multiarray: dict[str, Callable[..., Any]] = {"_reconstruct": _numpy_reconstruct, "scalar": _numpy_scalar}
        result.update(_tokens(f"{package}.multiarray", multiarray))
        result.update(_tokens(f"{package}.numeric", {"_frombuffer": _numpy_from_buffer}))
    for name, dtype in dtypes().items():
        result["torch", name] = dtype
    for dtype, name in torch.storage._dtype_to_storage_type_map().items():
        if dtype in dtypes().values():
            result["torch", name] = StorageType(dtype, typed=True)
    for module in ("torch", "torch.storage"):
        result[module, "UntypedStorage"] = StorageType(torch.uint8, typed=False)
    return result
