"""Which stores ranks draw from: one that they share, or each its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.feeding.test_loader import fill, reader, rewards
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError
from trajstore.feeding import ReplayLoader
from trajstore.sampling import Priorities, WeightedSampler


def test_ranks_with_a_store_each_draw_their_part_of_the_batch_from_it(tmp_path: Path) -> None:
    sizes = []
    for rank in range(3):
        fill(tmp_path / f"rank_{rank}", range(10 * rank, 10 * rank + 5)).close()
        options: dict[str, Any] = {"rank": (rank, 3), "stores": "per_rank"}
        sampler = WeightedSampler(priorities=Priorities())  # nobody else has to draw the same
        with ReplayLoader(reader(tmp_path / f"rank_{rank}"), 10, sampler=sampler, **options) as loader:
            values = rewards(next(loader))
            state = loader.state_dict()
            expected = rewards(next(loader))
        assert {int(value) // 10_000 for value in values} == {rank}
        sizes.append(len(values))
        sampler = WeightedSampler(priorities=Priorities())
        with ReplayLoader(reader(tmp_path / f"rank_{rank}"), 10, sampler=sampler, **options) as again:
            again.load_state_dict(state)
            assert rewards(next(again)) == expected
    assert sizes == [3, 3, 4]


def test_a_state_of_other_stores_or_of_another_rank_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, range(5)).close()

    def loader(rank: tuple[int, int], stores: Any) -> ReplayLoader:
        return ReplayLoader(reader(tmp_path), 10, rank=rank, stores=stores)

    shared, own = loader((0, 2), "shared").state_dict(), loader((0, 2), "per_rank").state_dict()
    loader((2, 3), "shared").load_state_dict(shared)
    for rank, stores, state in (((0, 2), "per_rank", shared), ((0, 2), "shared", own), ((1, 2), "per_rank", own)):
        with pytest.raises(ConfigurationError, match="the state is of a loader with"):
            loader(rank, stores).load_state_dict(state)


def test_a_share_is_not_drawn_from_as_if_it_were_the_whole_store(tmp_path: Path) -> None:
    fill(tmp_path, range(6)).close()
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=1, world_size=2)
    with pytest.raises(ConfigurationError, match=r"shows the share \(1, 2\) alone"):
        ReplayLoader(buffer, 8, rank=(1, 2))
    with ReplayLoader(buffer, 8, rank=(1, 2), stores="per_rank") as loader:
        assert len(rewards(next(loader))) == 4
    with pytest.raises(ConfigurationError, match="stores: 'mine', must be one of 'shared', 'per_rank'"):
        ReplayLoader(buffer, 8, stores="mine")  # type: ignore[arg-type]
