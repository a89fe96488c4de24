"""Packed arrays and string tables, byte by byte. Random ones, and hostile ones, are in the tests of the index."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import pytest

from trajstore.errors import CorruptStoreError
from trajstore.store.packing import StringTable, declared_rows, pack, unpack


def test_integers_are_differences_deflated_in_base64() -> None:
    value = pack(np.array([5, 7, 4], np.int32))
    assert (value["dtype"], value["shape"]) == ("<i4", [3])
    inflated = zlib.decompress(base64.b64decode(value["data"]))
    assert np.frombuffer(inflated, "<i8").tolist() == [5, 2, -3]
    assert unpack(value, np.int32).tolist() == [5, 7, 4]


def test_differences_run_along_the_first_axis() -> None:
    value = pack(np.array([[1, 10], [3, 10]], np.int64))
    inflated = zlib.decompress(base64.b64decode(value["data"]))
    assert np.frombuffer(inflated, "<i8").tolist() == [1, 10, 2, 0]


def test_raw_bytes_stay_as_they_are() -> None:
    value = pack(np.frombuffer(b"abcd", "V2"))
    assert zlib.decompress(base64.b64decode(value["data"])) == b"abcd"
    assert unpack(value, "V2").tobytes() == b"abcd"


def test_the_bounds_of_64_bits_come_back() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert unpack(pack(np.array([high, low, high])), np.int64).tolist() == [high, low, high]


def test_nothing_comes_back_as_nothing() -> None:
    assert unpack(pack(np.zeros((0, 3), np.int64)), np.int64, 2).shape == (0, 3)


@pytest.mark.parametrize(("dtype", "dimensions"), [(np.int32, 1), (np.int64, 2), ("V8", 1)])
def test_another_dtype_or_number_of_dimensions_is_refused(dtype: Any, dimensions: int) -> None:
    with pytest.raises(CorruptStoreError, match="packed array"):
        unpack(pack(np.arange(4)), dtype, dimensions)


def test_a_claim_beyond_what_deflate_can_do_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(CorruptStoreError, match="claims"):
        unpack(pack(np.arange(4)) | {"shape": [1 << 50]}, np.int64)


def test_bytes_too_many_or_too_few_are_refused() -> None:
    for shape in ([3], [5]):
        value = pack(np.arange(4)) | {"shape": shape}
        if shape == [5]:
            with pytest.raises(CorruptStoreError, match="holds 32 bytes, not 40"):
                unpack(value, np.int64)
        else:
            assert unpack(value, np.int64).tolist() == [0, 1, 2]  # what lies behind is not looked at


def test_declared_rows() -> None:
    assert declared_rows(pack(np.zeros((2, 3)))) == 2
    for shape in ([], [-1], ["2"], None):
        with pytest.raises((IndexError, TypeError, ValueError)):
            declared_rows({"shape": shape})


# -- string tables ------------------------------------------------------------------------------------


def test_strings_have_numbers_in_the_order_in_which_they_came() -> None:
    table = StringTable()
    assert [table.add(text) for text in ("a", "", "\N{TEACUP WITHOUT HANDLE}", "a")] == [0, 1, 2, 0]
    assert [table[number] for number in range(len(table))] == ["a", "", "\N{TEACUP WITHOUT HANDLE}"]


def test_a_copy_grows_on_its_own() -> None:
    table = StringTable()
    table.add("a")
    other = table.copy()
    assert (table.add("b"), other.add("c")) == (1, 1)
    assert (table[1], other[1]) == ("b", "c")


def test_numbers_of_another_table_become_its_own() -> None:
    ours, theirs = StringTable(), StringTable()
    ours.add("x")
    for text in ("a", "x", "b"):
        theirs.add(text)
    assert ours.extend(theirs, [2, 1, 2]).tolist() == [1, 0, 1]
    assert (len(ours), ours[1]) == (2, "b")


def test_many_strings_keep_their_numbers() -> None:
    table = StringTable()
    numbers = [table.add(f"text {at}") for at in range(3000)]
    again = StringTable.from_json(table.to_json())
    assert numbers == list(range(3000))
    assert [again[at] for at in (0, 1024, 2999)] == ["text 0", "text 1024", "text 2999"]


def test_a_table_that_is_continued_knows_what_it_holds() -> None:
    table = StringTable()
    for text in ("", "step 1"):
        table.add(text)
    for _ in range(50):
        table = StringTable.from_json(table.to_json()).copy()
        assert (table.add(""), table.add("step 1")) == (0, 1)
    assert len(table) == 2


def test_a_table_with_one_string_many_times_is_read() -> None:
    """Earlier versions wrote such: the empty string once more each time that a store was opened."""
    for text, times in ((b"", 5000), (b"a name of weights that is as long as a name may be", 5000)):
        blob = np.frombuffer(text * times, "V1")
        again = StringTable.from_json({"bytes": pack(blob), "ends": pack(np.arange(1, times + 1) * len(text))})
        assert len(again) == times
        assert again[times - 1] == text.decode()


@pytest.mark.parametrize("ends", [[1, 0, 3], [1, 2], [1, 2, 4], [-1, 2, 3]])
def test_ends_that_do_not_fit_the_text_are_refused(ends: list[int]) -> None:
    value = {"bytes": pack(np.frombuffer(b"abc", "V1")), "ends": pack(np.array(ends))}
    with pytest.raises(CorruptStoreError, match="string table"):
        StringTable.from_json(value)


@pytest.mark.parametrize(("text", "ends"), [(b"\xff", [1]), ("\N{EURO SIGN}".encode(), [1, 3])])
def test_what_is_no_text_is_refused(text: bytes, ends: list[int]) -> None:
    with pytest.raises(CorruptStoreError, match="string table"):
        StringTable.from_json({"bytes": pack(np.frombuffer(text, "V1")), "ends": pack(np.array(ends))})
