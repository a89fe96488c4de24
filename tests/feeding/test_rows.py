"""Sequences, n-step transitions and hindsight goals in a loader are those of the direct call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.feeding.test_memory import Slow
from tests.stores import stored
from tests.support.equality import same
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sequences import (
    Hindsight,
    NStep,
    Rows,
    Sequences,
    sample_hindsight,
    sample_n_step,
    sample_sequences,
)
from trajstore._core.columns.fields import unnest
from trajstore._core.feeding.memory import DeviceMemory
from trajstore.errors import ConfigurationError
from trajstore.loader import ReplayLoader, Share
from trajstore.samplers import EpochSampler, Priorities, Sampler, UseLimit, WeightedSampler

SIZE = 12


def reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved - goal).sum(-1, keepdim=True)


GOALS: dict[str, Any] = {"goal": "curr_obs.goal", "achieved": "next_obs.state", "reward": reward, "share": 0.6}

KINDS: dict[str, tuple[Rows, Callable[..., Any]]] = {
    "padded": (
        Sequences(4, pad=True, burn_in=2),
        lambda b, **o: sample_sequences(b, SIZE, 4, pad=True, burn_in=2, **o),
    ),
    "whole": (Sequences(3), lambda b, **o: sample_sequences(b, SIZE, 3, **o)),
    "n-step": (NStep(3, 0.9), lambda b, **o: sample_n_step(b, SIZE, 3, 0.9, **o)),
    "hindsight": (Hindsight(**GOALS), lambda b, **o: sample_hindsight(b, SIZE, **GOALS, **o)),
}
SAMPLERS: dict[str, Callable[[], Sampler | None]] = {
    "uniform": lambda: None,
    "weighted": lambda: WeightedSampler([UseLimit()], Priorities()),
    "epochs": EpochSampler,
}


def block(key: int) -> Trajectory:
    generator = torch.Generator().manual_seed(key)
    states = torch.rand(9, 2, 3, generator=generator)
    dones = torch.rand(8, 2, 1, generator=generator) < 0.15
    goals = torch.rand(8, 2, 3, generator=generator)
    return Trajectory(
        rewards=torch.rand(8, 2, 1, generator=generator),
        dones=dones,
        terminations=dones & (torch.rand(8, 2, 1, generator=generator) < 0.5),
        curr_obs={"state": states[:-1], "goal": goals},
        next_obs={"state": states[1:], "goal": goals},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("rows") / "store", [block(key) for key in range(6)])


def copied(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a batch and its draw, apart from memory that is used again."""
    values = {name: tensor.clone().numpy() for name, tensor in unnest(batch).items()}
    return values | {f"drawn {name}": array for name, array in batch.drawn.arrays.items()}


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_loader_has_the_batches_of_the_direct_call(path: Path, kind: str, sampler: str) -> None:
    """Prefetched, in memory used again, divided among ranks, and resumed."""
    rows, direct = KINDS[kind]
    own = SAMPLERS[sampler]()
    with TrajectoryReplayBuffer.open(path, seed=5) as plain:
        expected = [copied(direct(plain, sampler=own)) for _ in range(9)]

    def loader(**options: Any) -> ReplayLoader:
        reader = TrajectoryReplayBuffer.open(path, seed=5)
        return ReplayLoader(reader, SIZE, rows=rows, sampler=SAMPLERS[sampler](), **options)

    with loader(prefetch=1, reuse=True) as first:
        batches = [copied(next(first)) for _ in range(4)]
        state = first.state_dict()
    with loader(prefetch=3) as second:
        second.load_state_dict(state)
        batches += [copied(next(second)) for _ in range(5)]
    assert [same(*pair) for pair in zip(batches, expected, strict=True)] == [True] * 9
    if sampler == "weighted":  # its priorities change differently on each rank
        return
    parts = []
    for rank in range(3):
        with loader(rank=(rank, 3)) as of_rank:
            parts.append([copied(next(of_rank)) for _ in range(9)])
    for number, whole in enumerate(expected):
        joined = {name: np.concatenate([part[number][name] for part in parts]) for name in whole}
        assert same(joined, whole)


@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_several_buffers_and_only_some_columns(path: Path, on_device: bool) -> None:
    """In memory used again, or in pinned memory of a simulated device, whose copies arrive on demand."""
    rows, direct = KINDS["hindsight"]
    device = Slow()
    with (
        TrajectoryReplayBuffer.open(path, seed=5) as one,
        TrajectoryReplayBuffer.open(path, seed=6) as other,
        TrajectoryReplayBuffer.open(path, seed=5) as plain,
    ):
        shares = {"online": Share(one, count=SIZE), "demos": Share(other, count=3)}
        columns = ["rewards", "curr_obs.goal", "next_obs.state"]
        with ReplayLoader(shares, SIZE + 3, rows=rows, columns=columns, reuse=not on_device) as loader:
            if on_device:
                loader._memory = lambda: DeviceMemory(device, 2)  # type: ignore[method-assign]
            for _ in range(8):
                batch, expected = next(loader), direct(plain, columns=columns)
                assert unnest(batch).keys() == {*columns, "relabelled"}
                assert torch.equal(batch["rewards"][:SIZE], expected["rewards"])
                assert batch.sources.tolist() == [0] * SIZE + [1] * 3
            state = loader.state_dict()
        assert device.pinned == (2 if on_device else 0)  # one block for each of two batches
        with (
            ReplayLoader(shares, SIZE + 3, rows=NStep(2, 0.5)) as changed,
            pytest.raises(ConfigurationError, match=r"rows \{'kind': 'Hindsight'.*\(here \{'kind': 'NStep', 'n': 2"),
        ):
            changed.load_state_dict(state)
        with pytest.raises(ConfigurationError, match=r"rows: .* must be Sequences, NStep or Hindsight"):
            ReplayLoader(one, 4, rows="n-step")  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", list(KINDS))
def test_they_arrive_on_the_device(path: Path, kind: str) -> None:
    rows, direct = KINDS[kind]
    with TrajectoryReplayBuffer.open(path, seed=5) as plain, TrajectoryReplayBuffer.open(path, seed=5) as reader:
        shares = {"online": Share(reader, count=SIZE), "demos": Share(TrajectoryReplayBuffer.open(path), count=4)}
        with ReplayLoader(shares, SIZE + 4, rows=rows, device="cuda", prefetch=3) as loader:
            for _ in range(20):
                batch, expected = unnest(next(loader)), unnest(direct(plain))
                assert all(tensor.is_cuda for tensor in batch.values())
                assert all(torch.equal(tensor[:SIZE].cpu(), expected[name]) for name, tensor in batch.items())
