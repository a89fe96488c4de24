from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer_hooks.verl.placement import spread, surplus


@given(
    histories=st.lists(st.integers(1, 3), max_size=8),
    fresh=st.integers(1, 40),
    planned=st.integers(1, 40),
    multiple=st.integers(1, 24),
)
def test_histories_make_no_mini_batch_and_as_many_stay_as_fit(
    histories: list[int], fresh: int, planned: int, multiple: int
) -> None:
    without = math.ceil(max(fresh, planned) / multiple)
    kept = histories[: len(histories) - surplus(histories, fresh, planned, multiple)]
    assert math.ceil((fresh + sum(kept)) / multiple) <= without
    if kept != histories:
        assert math.ceil((fresh + sum(histories[: len(kept) + 1])) / multiple) > without


@given(ranks=st.integers(1, 4), mini_batches=st.integers(1, 5), size=st.integers(1, 4), data=st.data())
def test_every_mini_batch_has_its_share(ranks: int, mini_batches: int, size: int, data: st.DataObject) -> None:
    each = mini_batches * size
    count = ranks * each
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    order = spread(kinds, ranks, mini_batches)
    for rank in range(ranks):
        mine = range(rank * each, (rank + 1) * each)
        assert sorted(order[place] for place in mine) == list(mine)
    parts = [
        [kinds[order[rank * each + part * size + place]] for rank in range(ranks) for place in range(size)]
        for part in range(mini_batches)
    ]
    for kind, most in ((0, 1), (1, ranks), (2, ranks)):
        counts = [part.count(kind) for part in parts]
        assert max(counts) - min(counts) <= most
