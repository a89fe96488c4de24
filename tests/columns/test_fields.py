"""Column names, the arithmetic of extra rows, and portions."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore._core.columns.fields import Axis, join_name, nest, skip_extra_rows, walk
from trajstore._core.columns.portions import portions


def test_leaves_come_in_the_order_of_the_dicts() -> None:
    value = {"b": {"y": 1, "x.z": {"k": 2}}, "a": 3, "empty": {}}
    assert list(walk(value)) == [(("b", "y"), 1), (("b", "x.z", "k"), 2), (("a",), 3), (("empty",), {})]
    assert nest({join_name(path): leaf for path, leaf in walk(value)}) == value


@settings(max_examples=30, deadline=None)
@given(epochs=st.integers(1, 4), steps_each=st.integers(1, 4), batch=st.integers(1, 3), data=st.data())
def test_extra_rows_are_skipped(epochs: int, steps_each: int, batch: int, data: Any) -> None:
    """Each row is labelled with its sample, extra rows with None, as in the written form."""
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


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=20), limit=st.integers(0, 20), most=st.integers(1, 5))
def test_portions_are_the_list_within_their_bounds_and_as_long_as_they_can_be(
    sizes: list[int], limit: int, most: int
) -> None:
    cut = list(portions(sizes, limit, int, most=most))
    assert [size for portion, _ in cut for size in portion] == sizes
    for at, (portion, total) in enumerate(cut):
        assert total == sum(portion)
        assert len(portion) == 1 or (total <= limit and len(portion) <= most)
        if at + 1 < len(cut):
            assert total + cut[at + 1][0][0] > limit or len(portion) == most
