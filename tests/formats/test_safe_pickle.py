"""Foreign pickles: data is restored unchanged, and code is refused without running."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import same
from tests.support.formats import random_tensor
from trajstore._core.columns.schema import dtypes
from trajstore._core.formats.pickles.safe_pickle import safe_loads
from trajstore._core.formats.pickles.safe_values import MAX_DEPTH
from trajstore.errors import CorruptStoreError, StoreError, UnsafeContentError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def unicode(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


# -- data is restored --------------------------------------------------------------------------------

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.binary()
values = st.recursive(
    leaves | st.sets(keys) | st.frozensets(keys) | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5) | st.dictionaries(keys, inner, max_size=5).map(OrderedDict)
    ),
    max_leaves=20,
)  # fmt: skip


@given(value=values, protocol=st.sampled_from(PROTOCOLS))
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    result = safe_loads(data)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_text_that_is_not_unicode_comes_back(protocol: int) -> None:
    value = ["\ud800", "line\nbreak \\ backslash", "é", 2**5000]
    if protocol == 0:
        value = value[:-1]  # ``int()`` refuses that many digits
    assert safe_loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", dtypes())
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_come_back(name: str, protocol: int) -> None:
    whole = random_tensor((4, 6), dtypes()[name], torch.Generator().manual_seed(0))
    for tensor in (whole, whole[1:, :3], whole.t(), whole[:0], whole[0, 0]):
        result = safe_loads(pickle.dumps({"t": tensor}, protocol))["t"]
        assert same(result, tensor)
        assert result.stride() == tensor.stride()


def test_lazily_conjugated_and_negated_tensors_come_back() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(safe_loads(pickle.dumps(tensor.conj())), tensor.conj())
    assert torch.equal(safe_loads(pickle.dumps(tensor.conj().imag)), tensor.conj().imag)


def test_gradients_are_left_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    result = safe_loads(pickle.dumps([parameter, torch.ones(3, requires_grad=True)]))
    assert all(torch.equal(tensor, torch.ones(3)) and not tensor.requires_grad for tensor in result)


@pytest.mark.parametrize("value", [torch.float8_e5m2, torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda", 1)])
def test_small_torch_values_come_back(value: Any) -> None:
    result = safe_loads(pickle.dumps(value))
    assert result == value
    assert type(result) is type(value)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_come_back() -> None:
    tensor = torch.arange(5, dtype=torch.int16)
    assert safe_loads(pickle.dumps(tensor.untyped_storage())).tolist() == tensor.untyped_storage().tolist()
    typed = safe_loads(pickle.dumps(tensor.storage()))
    assert typed.dtype == torch.int16
    assert typed.tolist() == tensor.tolist()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i8").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(True),
        np.zeros((0, 3), np.complex64),
        np.float64(2.5),
        np.int8(-3),
        np.arange(12).reshape(3, 4)[::2, 1:],
    ],
    ids=str,
)
def test_numpy_comes_back(array: Any, protocol: int) -> None:
    result = safe_loads(pickle.dumps(array, protocol))
    assert type(result) is type(array)
    assert result.dtype == pickle.loads(pickle.dumps(array, protocol)).dtype  # numpy may swap bytes while pickling
    assert np.array_equal(result, array)
    assert result.shape == array.shape


def test_numpy_spelling_of_version_one() -> None:
    data = pickle.dumps(np.arange(3), 2).replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy._core" not in data
    assert np.array_equal(safe_loads(data), np.arange(3))


def test_shared_objects_stay_shared() -> None:
    shared = [1]
    first, second = safe_loads(pickle.dumps((shared, shared)))
    assert first is second


def test_any_buffer_is_read_and_what_follows_is_ignored() -> None:
    assert safe_loads(memoryview(bytearray(pickle.dumps([1, 2]) + b"tail"))) == [1, 2]


# -- stand-ins and persistent ids --------------------------------------------------------------------


@dataclass
class Plain:
    a: int = 0
    b: Any = None


class WithSetState:
    def __setstate__(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_are_replaced(protocol: int) -> None:
    data = pickle.dumps([Plain(1, torch.ones(2)), Plain(2)], protocol)
    key = (Plain.__module__, "Plain")
    first, second = safe_loads(data, classes={key: WithSetState})
    assert first.seen["a"] == 1
    assert second.seen == {"a": 2, "b": None}
    again = safe_loads(data, classes={key: Plain})
    assert (again[0].a, again[1]) == (1, Plain(2))
    with pytest.raises(UnsafeContentError, match="Plain"):
        safe_loads(data)


# -- code is refused ---------------------------------------------------------------------------------


class Calls:
    """Pickled as a call of ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def calling(module: str, name: str, *arguments: Any, protocol: int = 2) -> bytes:
    """Return a pickle that calls ``module.name(*arguments)``, which need not exist."""
    packed = pickle.dumps(arguments, 2)[2:-1]
    if protocol >= 4:
        return b"\x80\x04" + unicode(module) + unicode(name) + b"\x93" + packed + b"R."
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + packed + b"R."


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "getoutput"),
        ("builtins", "eval"), ("__builtin__", "eval"), ("builtins", "exec"), ("builtins", "__import__"),
        ("builtins", "getattr"), ("builtins", "open"), ("builtins", "map"), ("builtins", "type"),
        ("builtins", "object.__subclasses__"), ("builtins", "set.__init__"), ("builtins", "object"),
        ("functools", "partial"), ("operator", "attrgetter"), ("operator", "methodcaller"),
        ("copyreg", "__newobj__"), ("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor"),
        ("copyreg", "add_extension"), ("pickle", "loads"), ("_pickle", "loads"), ("torch", "load"),
        ("torch.serialization", "load"), ("torch.storage", "pickle.loads"), ("torch", "os.system"),
        ("torch._utils", "torch.load"), ("torch.hub", "load"), ("torch.jit", "load"), ("numpy", "load"),
        ("numpy", "fromfile"), ("numpy", "ndarray"), ("numpy", "memmap"), ("collections", "OrderedDict.fromkeys"),
        ("torch", "Tensor"), ("torch", "from_file"), ("torch", "FloatStorage"), ("torch", "float32"),
        ("runpy", "run_path"), ("importlib", "import_module"), ("ctypes", "CDLL"), ("", ""), ("trajstore", "x"),
    ],
)  # fmt: skip
def test_no_other_name_is_called(tmp_path: Path, module: str, name: str, protocol: int) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(StoreError) as raised:
        safe_loads(calling(module, name, f"touch {marker}", protocol=protocol), source="evil.pkl")
    assert "evil.pkl" in str(raised.value)
    assert not marker.exists()


def test_names_are_not_values() -> None:
    for value in (set, torch.storage._load_from_bytes, np.ndarray, torch.FloatStorage):
        with pytest.raises(UnsafeContentError):
            safe_loads(pickle.dumps({"x": [value]}))


def storage_pickle(payload: bytes) -> bytes:
    return calling("torch.storage", "_load_from_bytes", payload, protocol=4)


def test_pickles_within_storages(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    attack = pickle.dumps(Calls(os.system, f"touch {marker}"), 2)
    legacy = io.BytesIO()
    torch.save(Calls(os.system, f"touch {marker}"), legacy, _use_new_zipfile_serialization=False)
    zipped = io.BytesIO()
    torch.save(Calls(os.system, f"touch {marker}"), zipped)
    nested = storage_pickle(legacy.getvalue())
    for payload in (attack, legacy.getvalue(), zipped.getvalue(), nested, storage_pickle(nested)):
        with pytest.raises(StoreError):
            safe_loads(storage_pickle(payload))
    with pytest.raises(UnsafeContentError, match="system"):
        safe_loads(storage_pickle(legacy.getvalue()))
    assert not marker.exists()


@pytest.mark.parametrize(
    "target",
    [
        b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n", b"ctorch\nFloatStorage\n", b"ctorch\nfloat32\n", b"}",
        b"]", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n)R", b"K\x01", b"cnumpy\ndtype\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", [b"}X\x0c\x00\x00\x00__setstate__K\x01s", b"N}X\x01\x00\x00\x00xK\x01s\x86"])
def test_state_is_given_to_stand_ins_only(target: bytes, state: bytes) -> None:
    with pytest.raises(StoreError):
        safe_loads(b"\x80\x02" + target + state + b"b.")
    assert not hasattr(OrderedDict, "x")
    assert OrderedDict(a=1)["a"] == 1


def test_a_stand_in_class_cannot_be_changed() -> None:
    key = (Plain.__module__, "Plain")
    data = b"\x80\x02c" + f"{key[0]}\n{key[1]}\n".encode() + b"N}X\x01\x00\x00\x00aK\x07s\x86b."
    with pytest.raises(StoreError):
        safe_loads(data, classes={key: Plain})
    assert Plain().a == 0


# -- damage and false claims -------------------------------------------------------------------------


HOSTILE = {
    "empty": b"",
    "text": b"hello, world",
    "huge bytes": b"\x80\x05\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
    "huge bytearray": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "huge text": b"\x80\x05\x8d" + (1 << 50).to_bytes(8, "little") + b"x.",
    "huge number": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "memo beyond the end": b"\x80\x02h\xff.",
    "empty stack": b"\x80\x02R.",
    "no mark": b"\x80\x02t.",
    "stop at once": b".",
    "unknown protocol": b"\x80\x63N.",
    "old class": b"(ios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "out of band": b"\x80\x05\x97.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "unterminated line": b"cos",
    "append to dict": b"\x80\x02}K\x01a.",
    "odd items": b"\x80\x02}(K\x01K\x02K\x03u.",
    "negative get": b"g-1\n.",
    "not utf-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "bytearray of a size": calling("builtins", "bytearray", 1 << 40),
    "bytes of a size": calling("builtins", "bytes", 1 << 40),
    "dtype of a size": calling("numpy", "dtype", "V999999999999"),
    "records": calling("numpy", "dtype", [("a", "f4")]),
    "size of text": calling("torch", "Size", ("a",)),
    "device of text": calling("torch", "device", "nowhere"),
    "complex of text": calling("builtins", "complex", "1j"),
    "cycle": b"\x80\x02]q\x00h\x00a.",
    "cycle through a tuple": b"\x80\x02]q\x00h\x00\x85a.",
    "deep lists": b"\x80\x02" + b"]" * (MAX_DEPTH + 1) + b"a" * MAX_DEPTH + b".",
    "very deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "very deep tuples": b"\x80\x02)" + b"\x85" * 100_000 + b".",
    "deep key": b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.",
    "deep element": b"\x80\x04\x8f()" + b"\x85" * 100_000 + b"\x90.",
    "wide key": b"\x80\x02})" + b"2\x86" * 64 + b"K\x01s.",
    "wide tree": b"\x80\x02]" + b"2\x86" * 64 + b".",
    "key of tensors": b"\x80\x02}" + pickle.dumps(torch.ones(1), 2)[2:-1] + b"K\x01s.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="some file"):
        safe_loads(data, source="some file")


def test_nesting_up_to_the_limit_is_read() -> None:
    safe_loads(b"\x80\x02" + b"]" * MAX_DEPTH + b"a" * (MAX_DEPTH - 1) + b".")


def test_a_huge_memo_index_costs_nothing() -> None:
    assert safe_loads(b"\x80\x02K\x05r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 5


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_object_arrays_are_refused(protocol: int) -> None:
    with pytest.raises(UnsafeContentError, match="O8"):
        safe_loads(pickle.dumps(np.array([1, "a"], dtype=object), protocol))
    with pytest.raises(UnsafeContentError, match="dtype"):
        safe_loads(pickle.dumps(np.zeros(2, dtype=[("a", "f4")]), protocol))


def rebuilding(offset: Any, size: Any, stride: Any) -> bytes:
    """Return the pickle of a tensor of four float32 with a forged offset, size and stride."""

    class Lying(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                function, arguments = obj.__reduce_ex__(2)
                return function, (arguments[0], offset, size, stride, *arguments[4:])
            return NotImplemented

    target = io.BytesIO()
    Lying(target, 2).dump(torch.arange(4, dtype=torch.float32))
    return target.getvalue()


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (1, (4,), (1,)), (0, (5,), (1,)), (0, (1 << 40,), (1,)), (0, (2, 2), (3, 1)), (-1, (2,), (1,)),
        (0, (2,), (-1,)), (0, (2,), ()), (0, (1 << 62, 0), (1, 1)), ("0", (2,), (1,)), (0, (2.0,), (1,)), (0, 4, 1),
        (True, (2,), (1,)), (0, (-1,), (1,)), (0, (1 << 40,), (0,)), (0, (5,), (0,)),
    ],
)  # fmt: skip
def test_tensors_stay_within_their_storage(offset: Any, size: Any, stride: Any) -> None:
    with pytest.raises(StoreError):
        safe_loads(rebuilding(offset, size, stride))


def test_tensors_within_their_storage_are_read() -> None:
    assert safe_loads(rebuilding(1, (2,), (2,))).tolist() == [1.0, 3.0]
    assert safe_loads(rebuilding(0, (2,), (0,))).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("raw", [b"", b"\x00" * 11, b"\x00" * 13])
@pytest.mark.parametrize("shape", [(3,), (1 << 40,), (3, -1), (-1,)])
def test_numpy_shapes_must_fit_their_data(raw: bytes, shape: tuple[int, ...]) -> None:
    dtype = pickle.dumps(np.dtype("f4"), 2)[2:-1]
    for name, arguments in (
        (
            "numeric\n_frombuffer",
            pickle.dumps(raw, 2)[2:-1] + dtype + pickle.dumps(shape, 2)[2:-1] + b"X\x01\x00\x00\x00C",
        ),
        ("multiarray\nscalar", dtype + pickle.dumps(raw, 2)[2:-1]),
    ):
        with pytest.raises(CorruptStoreError):
            safe_loads(b"\x80\x02cnumpy._core." + name.encode() + b"\n(" + arguments + b"tR.")


SAMPLE = pickle.dumps(
    {"a": [1, 2.5, None, "text" * 9, b"raw" * 9], "t": torch.arange(7), "n": np.arange(3), "s": {1, (2, 3)}, "x": 1j}, 4
)


@pytest.mark.parametrize("length", range(0, len(SAMPLE) - 1, 7))
def test_every_truncation_is_damage(length: int) -> None:
    with pytest.raises(CorruptStoreError):
        safe_loads(SAMPLE[:length])


@given(changes=st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_changed_bytes_raise_nothing_else(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for position, value in changes:
        data[position] = value
    read_or_refuse(data)


def read_or_refuse(data: bytes | bytearray) -> None:
    """Read ``data``; any error other than the store's own fails the test."""
    with contextlib.suppress(StoreError):
        safe_loads(data)
