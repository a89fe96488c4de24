"""Windows whose trajectories do not all have the same columns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.errors import SchemaMismatchError


def block(start: int, dtype: torch.dtype, **fields: torch.Tensor) -> Trajectory:
    rewards = torch.arange(start, start + 6, dtype=torch.float64).reshape(3, 2, 1)
    return Trajectory(rewards=rewards.to(dtype), curr_obs={"copy": rewards.clone()}, **fields)


def options(path: Path, form: str) -> dict[str, Any]:
    saved = {"auto_save": True, "auto_save_path": path, "trajectory_format": form}
    return {"sample_window_size": 0, "enable_cache": False, **(saved if form != "memory" else {})}


@pytest.mark.parametrize("form", ["memory", "pt", "pkl", "zarr"])
def test_a_dtype_that_changes_is_cast_to_the_oldest_ones_and_told_once(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TrajectoryReplayBuffer(**options(tmp_path / "store", form)) as buffer:
        for start, dtype in ((0, torch.float32), (6, torch.float64), (12, torch.float16), (18, torch.float32)):
            buffer.add_trajectories([block(start, dtype)])
        if form != "memory":
            buffer.flush()
        with caplog.at_level(logging.WARNING):
            batches = [buffer.sample(count) for count in (1, 2, 24) for _ in range(8)]
        for batch in batches:
            assert batch["rewards"].dtype == torch.float32
            assert torch.equal(batch["rewards"].double(), batch["curr_obs"]["copy"])
        said = [record.message for record in caplog.records if "column rewards" in record.message]
        assert sorted(text.split(": ", 1)[1].split(" are ")[0] for text in said) == ["float16 rows", "float64 rows"]
        assert all("cast to float32" in text for text in said)
        out = {"rewards": torch.zeros(9, 1)}
        assert buffer.sample(9, columns=["rewards"], out=out)["rewards"].data_ptr() == out["rewards"].data_ptr()
        buffer.sample_window_size = 2
        assert buffer.sample(6)["rewards"].dtype == torch.float16


@pytest.mark.parametrize("form", ["memory", "pt"])
def test_what_else_differs_is_refused_with_column_and_trajectories(tmp_path: Path, form: str) -> None:
    with TrajectoryReplayBuffer(**options(tmp_path / "store", form)) as buffer:
        buffer.add_trajectories([block(0, torch.float32, actions=torch.zeros(3, 2, 4))])
        buffer.add_trajectories([block(6, torch.float32)])
        buffer.add_trajectories([block(12, torch.float64, actions=torch.zeros(3, 2, 5))])
        if form != "memory":
            buffer.flush()
        with pytest.raises(SchemaMismatchError, match=r"differ in actions \(absent from trajectory 1\); name"):
            buffer.sample(18)
        buffer.evict([1])
        with pytest.raises(SchemaMismatchError, match=r"actions \(\[4\] in trajectory 0, \[5\] in trajectory 2\)"):
            buffer.sample(12)
        batch = buffer.sample(12, columns=["curr_obs.copy", "rewards"])
        assert torch.equal(batch["rewards"].double(), batch["curr_obs"]["copy"])
        assert batch["rewards"].dtype == torch.float32
