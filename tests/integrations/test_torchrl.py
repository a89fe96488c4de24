"""TorchRL's replay buffers over a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages import run_section
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, TrajectoryUnavailableError

pytest.importorskip("torchrl", reason="torchrl is not installed")

from tensordict import TensorDict
from torchrl.data import SliceSampler

from trainer_hooks.integrations.torchrl import StoreStorage, replay_buffer


def steps(first: int, count: int, **more: Any) -> TensorDict:
    """Return transitions that count up."""
    numbers = torch.arange(first, first + count, dtype=torch.float32)[:, None]
    flags = torch.zeros(count, 1, dtype=torch.bool)
    after = {"observation": numbers + 1, "reward": numbers, "done": flags, "terminated": flags, "extra": {"x": numbers}}
    return TensorDict(
        {"observation": numbers, "action": numbers.long(), "log_prob": -numbers[:, 0], "next": after, **more}, [count]
    )


def store(path: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)


def test_rows_come_back_after_reopening_and_feed_own_samplers(tmp_path: Path) -> None:
    with store(tmp_path) as buffer:
        replay = replay_buffer(buffer, batch_size=8)
        assert replay.extend(steps(0, 5)).tolist() == [0, 1, 2, 3, 4]
        replay.add(steps(5, 1)[0])
        state = replay.state_dict()
    with store(tmp_path) as buffer:
        assert buffer.sample(4)["next_obs"]["observation"].shape == (4, 1)
        replay = replay_buffer(buffer, batch_size=8)
        replay.load_state_dict(state)
        replay.extend(steps(6, 4))
        assert (replay.storage[:].exclude("index") == steps(0, 10)).all()
        assert (replay.storage[7].exclude("index") == steps(7, 1)[0]).all()
        assert replay.storage[[9, -1]]["observation"].tolist() == [[9], [9]]
        batch = replay.sample()
        assert (batch.exclude("index") == steps(0, 10)[batch["index"]]).all()
        with pytest.raises(ConfigurationError, match=r"roll it back"):
            replay.load_state_dict(state)
        with pytest.raises(IndexError, match="there are 10 rows"):
            replay.storage[10]


def test_the_newest_rows_are_shown(tmp_path: Path) -> None:
    with store(tmp_path) as buffer:
        replay = replay_buffer(buffer, max_size=4, batch_size=2)
        for first in (0, 3, 6):
            replay.extend(steps(first, 3))
        assert len(replay) == 4
        assert replay.storage[:]["observation"][:, 0].tolist() == [8, 5, 6, 7]
        assert buffer.total_samples == 9
        slices = SliceSampler(slice_len=2, end_key=("next", "done"))
        drawn = replay_buffer(buffer, max_size=4, sampler=slices, batch_size=64)
        with pytest.raises(ConfigurationError, match=r"must be \[1\]"):
            drawn.storage.set(0, steps(9, 1)[0])
        drawn.extend(steps(9, 2))
        first, second = drawn.sample()["observation"].reshape(-1, 2).T
        assert torch.equal(second, first + 1), "no slice leads from the newest row to the oldest"
        buffer.evict([int(buffer.trajectory_ids[-1])])
        buffer.evict([1])
        with pytest.raises(TrajectoryUnavailableError):
            replay.storage[1]
        replay.empty()
        assert (len(replay), buffer.total_samples) == (0, 0)
        replay.extend(steps(0, 2))
        assert replay.storage[:]["observation"][:, 0].tolist() == [0, 1]


def test_what_a_store_cannot_do_is_refused(tmp_path: Path) -> None:
    with store(tmp_path) as buffer:
        storage = StoreStorage(buffer, 10)
        storage.set(range(3), steps(0, 3))
        for cursor, in_place in ((0, False), (4, True)):
            with pytest.raises(ConfigurationError, match=r"must be \[3\]: rows of a store are appended and never repl"):
                storage.set(cursor, steps(0, 1)[0], set_cursor=in_place)
        with pytest.raises(ConfigurationError, match="data: Tensor, must be a TensorDict"):
            storage.set(3, torch.zeros(1))
        with pytest.raises(InvalidTrajectoryError, match=r"deep\.text: list, must be a tensor"):
            storage.set(3, steps(0, 1, deep=TensorDict({"text": "a"}))[0])
        assert (len(storage), 2 in storage, 3 in storage) == (3, True, False)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_section("trainers.md", "TorchRL")
    assert len(names["buffer"]) == 4
    names["buffer"].close()
