"""Which trajectories are the newest that can be read, also where one run of them has left memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.sampling.draws import Window
from trajstore.store.index import COLUMNS, TrajectoryIndex

NONE = range(0)


def index_of(sizes: list[int], dropped: int = 0) -> TrajectoryIndex:
    """Return an index of trajectories with so many samples each, of which the oldest were dropped."""
    index = TrajectoryIndex()
    columns = {name: np.zeros(len(sizes), dtype) for name, dtype in COLUMNS.items()}
    index.append(columns | {"num_samples": np.array(sizes, np.int64), "trajectory_id": np.arange(len(sizes))})
    index.drop(np.arange(dropped))
    return index


def test_the_newest_ones() -> None:
    window = Window.newest(index_of([10, 20, 30, 40]), 2, NONE)
    assert (window.first, window.end, window.samples, len(window)) == (2, 4, 70, 2)
    assert (len(window.gap), window.before, window.skipped) == (0, 0, 0)


@pytest.mark.parametrize("size", [0, 4, 9])
def test_all_of_them(size: int) -> None:
    window = Window.newest(index_of([10, 20, 30, 40]), size, NONE)
    assert (window.first, window.end, window.samples, len(window)) == (0, 4, 100, 4)


def test_what_was_dropped_is_not_counted() -> None:
    window = Window.newest(index_of([10, 20, 30, 40], dropped=2), 0, NONE)
    assert (window.first, window.end, window.samples, len(window)) == (2, 4, 70, 2)


def test_a_gap_within_the_window_is_left_out() -> None:
    window = Window.newest(index_of([10, 20, 30, 40, 50]), 3, range(2, 4))
    assert (window.first, window.gap, window.end) == (0, range(2, 4), 5)
    assert (window.before, window.skipped, window.samples, len(window)) == (30, 70, 80, 3)


def test_a_gap_before_the_window_does_not_matter() -> None:
    window = Window.newest(index_of([10, 20, 30, 40, 50]), 2, range(0, 2))
    assert (window.first, window.end, window.samples, len(window)) == (3, 5, 90, 2)


def test_none_before_the_start() -> None:
    window = Window.newest(index_of([10, 20, 30]), 0, NONE, start=1)
    assert (window.first, window.samples, len(window)) == (1, 50, 2)


def test_nothing_is_an_empty_window() -> None:
    window = Window.newest(index_of([]), 5, NONE)
    assert (len(window), window.samples) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9), size=st.integers(0, 10))
def test_it_is_the_end_of_the_list_of_what_can_be_read(data: st.DataObject, sizes: list[int], size: int) -> None:
    dropped = data.draw(st.integers(0, len(sizes) - 1))
    index = index_of(sizes, dropped)
    low = data.draw(st.integers(dropped, len(sizes)))
    gap = range(low, data.draw(st.integers(low, len(sizes))))
    readable = [at for at in range(dropped, len(sizes)) if at not in gap]
    wanted = readable[-size:] if size else readable
    window = Window.newest(index, size, gap)
    assert [at for at in range(window.first, window.end) if at not in window.gap] == wanted
    assert window.samples == sum(sizes[at] for at in wanted)
    assert window.before == sum(sizes[at] for at in wanted if at < window.gap.start)
    assert window.skipped == sum(sizes[at] for at in window.gap)
    assert len(window) == len(wanted)
