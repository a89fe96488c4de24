"""How draws go on where ranks load what ranks saved: as many as before take up theirs, of others no two draw alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.stores import reader_of
from trajstore import Trajectory, TrajectoryReplayBuffer

SAVED = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of four ranks, with 60 trajectories of one sample each."""
    path = tmp_path_factory.mktemp("run")
    for rank in range(SAVED):
        with TrajectoryReplayBuffer(seed=rank) as buffer:
            buffer.add_trajectories([Trajectory(rewards=torch.zeros(1, 1, 1)) for _ in range(60)])
            buffer.sample(3)
            buffer.save_checkpoint(path / f"rank_{rank}")
    return path


def drawn(path: Path, rank: int, ranks: int, seed: int | None) -> tuple[int, ...]:
    """Return which places of its share a rank draws."""
    with TrajectoryReplayBuffer(seed=seed, sample_window_size=0) as buffer:
        buffer.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=ranks)
        return tuple((buffer.draw(8).ids - buffer.trajectory_ids[0]).tolist())


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_no_two_ranks_of_another_number_draw_alike(run: Path, ranks: int) -> None:
    for seeds in ([1000 + rank for rank in range(ranks)], [1234] * ranks, [-1] * ranks, [None] * ranks):
        each = [drawn(run, rank, ranks, seed) for rank, seed in enumerate(seeds)]
        assert len(set(each)) == ranks
        assert each == [drawn(run, rank, ranks, seed) for rank, seed in enumerate(seeds)], "and the same every time"
    assert drawn(run, 0, ranks, 77) != drawn(run, 0, ranks, 78), "by its own seed"


def test_one_store_shared_out(run: Path) -> None:
    assert len({drawn(run / "rank_0", rank, 3, 1234) for rank in range(3)}) == 3


def test_as_many_ranks_as_before_take_up_where_each_was(run: Path) -> None:
    for rank in range(SAVED):
        with reader_of(run / f"rank_{rank}") as buffer:
            own = tuple(buffer.draw(8).ids.tolist())
        assert drawn(run, rank, SAVED, 77) == drawn(run, rank, SAVED, 78) == own


def test_a_share_that_is_opened(run: Path) -> None:
    def opened(rank: int, seed: int | None) -> list[int]:
        with TrajectoryReplayBuffer.open(run, share=(rank, 2), seed=seed) as reader:
            return (reader.draw(8).ids - reader.trajectory_ids[0]).tolist()

    assert opened(0, None) == opened(0, None) != opened(1, None)
    assert opened(0, 5) == opened(1, 5), "a seed that is given is kept as it is"


def test_of_a_directory_of_rlinf_every_rank_draws_as_rlinf_does(run: Path, tmp_path: Path) -> None:
    with reader_of(run) as buffer:
        buffer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    assert drawn(tmp_path / "rlinf", 0, 2, 77) == drawn(tmp_path / "rlinf", 1, 2, 78)
