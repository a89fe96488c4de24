"""The sum tree against numpy's running sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore._core.sampling.tree import SumTree
from trajstore.errors import ConfigurationError

weight = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sums_and_searches_are_those_of_a_plain_array(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    tree, plain = SumTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 4))):
        leaves = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=40)), np.int64)
        weights = np.array(data.draw(st.lists(weight, min_size=len(leaves), max_size=len(leaves))))
        tree.set(leaves, weights)
        for leaf, value in zip(leaves.tolist(), weights.tolist(), strict=True):
            plain[leaf] = value
    assert np.array_equal(tree.leaves, plain)
    assert tree.total == pytest.approx(plain.sum())
    low = data.draw(st.integers(0, size))
    plain[:low] = 0
    assert tree.total_from(low) == pytest.approx(plain.sum())
    if tree.total_from(low) > 0:
        targets = np.array(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=30))) * tree.total_from(low)
        found_leaves = tree.find(targets, low)
        assert np.all(plain[found_leaves] > 0)
        ends = np.cumsum(plain)
        room = 1e-9 * tree.total_from(low)
        assert np.all(ends[found_leaves] >= targets - room)
        assert np.all(ends[found_leaves] - plain[found_leaves] <= targets + room)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none_is_refused_and_nothing_is_set(bad: float) -> None:
    tree = SumTree(4)
    with pytest.raises(ConfigurationError, match="at least 0"):
        tree.set(np.array([0, 1]), np.array([1.0, bad]))
    assert tree.total == 0
