"""Items in portions."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.columns.portions import portions


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
