"""Names of columns and the arithmetic of extra rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.columns.fields import Axis, axis_of, join_name, nest, skip_extra_rows, split_name, walk
from trajstore.columns.portions import portions

KEYS = st.lists(st.text(max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("actions",), "actions"),
        (("curr_obs", "states"), "curr_obs.states"),
        (("a.b", "c"), "a\\.b.c"),
        (("a\\", "b"), "a\\\\.b"),
        (("", ""), "."),
    ],
)
def test_dotted_names(path: tuple[str, ...], name: str) -> None:
    assert join_name(path) == name
    assert split_name(name) == path


@settings(max_examples=80, deadline=None)
@given(path=KEYS)
def test_every_path_comes_back(path: list[str]) -> None:
    assert split_name(join_name(path)) == tuple(path)


def test_leaves_come_in_the_order_of_the_dicts() -> None:
    value = {"b": {"y": 1, "x.z": {"k": 2}}, "a": 3, "empty": {}}
    assert list(walk(value)) == [(("b", "y"), 1), (("b", "x.z", "k"), 2), (("a",), 3), (("empty",), {})]
    assert nest({join_name(path): leaf for path, leaf in walk(value)}) == value


@pytest.mark.parametrize(
    ("field", "rows", "expected"),
    [
        ("rewards", 12, (Axis.SAMPLES, 0)),
        ("dones", 12, (Axis.SAMPLES, 0)),
        ("dones", 13, (Axis.FIRST_EXTRA, 1)),
        ("truncations", 16, (Axis.FIRST_EXTRA, 4)),
        ("prev_values", 24, (Axis.LAST_EXTRA, 12)),
        ("forward_inputs.tokens.ids", 14, (Axis.LAST_EXTRA, 2)),
    ],
)
def test_axis_by_field_and_rows(field: str, rows: int, expected: tuple[Axis, int]) -> None:
    assert axis_of(field, rows, 12) == expected


@settings(max_examples=60, deadline=None)
@given(epochs=st.integers(1, 4), steps_each=st.integers(1, 4), batch=st.integers(1, 3), data=st.data())
def test_extra_rows_are_skipped(epochs: int, steps_each: int, batch: int, data: Any) -> None:
    """Rows are labelled with the sample that they belong to, None in extra rows, as they are written."""
    first: list[int | None] = []
    last: list[int | None] = []
    for epoch in range(epochs):
        samples: list[int | None] = list(range(epoch * steps_each * batch, (epoch + 1) * steps_each * batch))
        first += [None] * batch + samples
        last += samples + [None] * batch
    sample = data.draw(st.integers(0, epochs * steps_each * batch - 1))
    assert first[skip_extra_rows(Axis.FIRST_EXTRA, sample, batch, steps_each * batch)] == sample
    assert last[skip_extra_rows(Axis.LAST_EXTRA, sample, batch, steps_each * batch)] == sample
    assert skip_extra_rows(Axis.SAMPLES, sample, batch, 0) == sample


# -- Items in portions --


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=20), limit=st.integers(0, 20), most=st.integers(1, 5))
def test_portions_are_the_list_within_their_bounds_and_as_long_as_they_can_be(
    sizes: list[int], limit: int, most: int
) -> None:
    found = list(portions(sizes, limit, int, most=most))
    assert [size for portion, _ in found for size in portion] == sizes
    for at, (portion, total) in enumerate(found):
        assert total == sum(portion)
        assert len(portion) == 1 or (total <= limit and len(portion) <= most)
        if at + 1 < len(found):
            assert total + found[at + 1][0][0] > limit or len(portion) == most


def test_items_are_taken_as_portions_are_asked_for() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    assert next(portions(items(), 100, lambda number: 50)) == ([0, 1], 100)
    assert taken == [0, 1, 2]
