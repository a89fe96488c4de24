"""Which trajectories are the newest that can be read, also where one run of them has left memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.sampling.draws import Window
from trajstore.store.index import COLUMNS, TrajectoryIndex


def index_of(sizes: list[int], dropped: int = 0) -> TrajectoryIndex:
    """Return an index of trajectories with so many samples each, of which the oldest were dropped."""
    index = TrajectoryIndex()
    columns = {name: np.zeros(len(sizes), dtype) for name, dtype in COLUMNS.items()}
    index.append(columns | {"num_samples": np.array(sizes, np.int64), "trajectory_id": np.arange(len(sizes))})
    index.drop(np.arange(dropped))
    return index


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=9), size=st.integers(0, 10))
def test_it_is_the_end_of_the_list_of_what_can_be_read(data: st.DataObject, sizes: list[int], size: int) -> None:
    dropped = data.draw(st.integers(0, len(sizes)))
    index = index_of(sizes, dropped)
    start = data.draw(st.integers(dropped, len(sizes)))
    low = data.draw(st.integers(start, len(sizes)))
    gap = range(low, data.draw(st.integers(low, len(sizes))))
    readable = [at for at in range(start, len(sizes)) if at not in gap]
    wanted = readable[-size:] if size else readable
    window = Window.newest(index, size, gap, start)
    assert [at for at in range(window.first, window.end) if at not in window.gap] == wanted
    assert window.samples == sum(sizes[at] for at in wanted)
    assert window.before == sum(sizes[at] for at in wanted if at < window.gap.start)
    assert window.skipped == sum(sizes[at] for at in window.gap)
    assert len(window) == len(wanted)
