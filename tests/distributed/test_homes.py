"""A node gets the store whose directory it has, whatever Ray calls the node. No Ray is needed."""

from __future__ import annotations

import pytest

from trajstore.distributed.homes import one_each


@pytest.mark.parametrize(
    ("found", "taken", "given"),
    [
        ({"a": set(), "b": set()}, [], {"a": 0, "b": 1}),
        ({"a": {1}, "b": {0}}, [], {"a": 1, "b": 0}),  # the machines have other ids than when the stores were made
        ({"a": {0, 1}, "b": {0, 1}}, [], {"a": 0, "b": 1}),  # one disk for all
        ({"a": {0, 1}, "b": {0}}, [], {"a": 1, "b": 0}),
        ({"a": set(), "b": {1}}, [0], {"a": 2, "b": 1}),
        ({"a": set(), "b": {2}}, [], {"a": 0, "b": 2}),
        ({"a": {0}}, [0], {"a": 1}),
    ],
)
def test_a_node_gets_the_store_whose_directory_it_has(
    found: dict[str, set[int]], taken: list[int], given: dict[str, int]
) -> None:
    assert one_each(list(found), found, taken) == given
