"""Constructor arguments are checked by name; values of common configurations are accepted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stores import add_each
from tests.support.witness import witness
from trajstore import Retention, Trajectory, TrajectoryReplayBuffer, WriterOptions
from trajstore._core.store.sealed import unseal
from trajstore.errors import ConfigurationError, SchemaMismatchError


def test_a_number_as_retention_names_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"Retention\(max_trajectories=1000\)"):
        TrajectoryReplayBuffer(retention=1000)  # type: ignore[arg-type]


def test_what_configurations_hold_is_taken(tmp_path: Path) -> None:
    """Workers pass numpy numbers, YAML reads ``1e3`` as a float, and some configurations use 0 for false."""
    with TrajectoryReplayBuffer(
        seed=np.int64(7),  # type: ignore[arg-type]
        enable_cache=np.bool_(True),  # type: ignore[arg-type]
        cache_size=np.int32(5),  # type: ignore[arg-type]
        sample_window_size=1e3,  # type: ignore[arg-type]
        auto_save=1,  # type: ignore[arg-type]
        auto_save_path=str(tmp_path),
        cache_bytes=1e9,  # type: ignore[arg-type]
        retention=Retention(max_trajectories=2.0, max_bytes=np.int64(10**9)),  # type: ignore[arg-type]
        writer=WriterOptions(threads=np.int64(1), commit_interval=0),  # type: ignore[arg-type]
    ) as buffer:
        add_each(buffer, range(4))
        assert (buffer.seed, buffer.sample_window_size) == (7, 1000)
        assert type(buffer.sample_window_size) is int
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        assert buffer.trajectory_ids.tolist() == [2, 3]


@pytest.mark.parametrize("path", ["x", Path("x")])
def test_a_path_without_auto_save_is_told_to_have_no_effect(path: Any) -> None:
    with pytest.warns(UserWarning, match=r"auto_save_path='x' has no effect without auto_save=True"):
        TrajectoryReplayBuffer(auto_save_path=path)
    assert not Path("x").exists()


def test_the_defaults_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrajectoryReplayBuffer()
        TrajectoryReplayBuffer(auto_save_path=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="auto_save_path: must be given"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=None)  # type: ignore[arg-type]


def test_retention_by_age_with_the_lowest_versions_there_are() -> None:
    rollouts = [witness(1), witness(2)]
    for rollout in rollouts:
        assert rollout.versions is not None
        rollout.versions.fill_(-(2**63) + 1)
    buffer = TrajectoryReplayBuffer(retention=Retention(max_policy_age=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.add_trajectories(rollouts)
    assert len(buffer) == 2


# -- columns that change ------------------------------------------------------------------------------


def rollout(**fields: Any) -> Trajectory:
    return Trajectory(**{"rewards": torch.ones(2, 1, 1), "actions": torch.ones(2, 1, 3), **fields})


def test_columns_that_change_are_told_when_they_are_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([rollout(), rollout()])
        assert caplog.text == ""
        buffer.add_trajectories([rollout(curr_obs={"note": "text"})])  # no drawable rows
        assert caplog.text == ""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, sample_window_size=0) as buffer:
        changed = rollout(actions=torch.ones(2, 1, 4), prev_values=torch.ones(2, 1, 1))
        buffer.add_trajectories([changed])
        (record,) = caplog.records
        assert (
            "actions ([T, B, 3] before, [T, B, 4] now), prev_values (absent before, [T, B, 1] now)"
            in record.getMessage()
        )
        buffer.evict([2])
        with pytest.raises(SchemaMismatchError, match=r"actions.*prev_values"):
            buffer.sample(100)
        caplog.clear()
        buffer.add_trajectories([changed, changed])
        assert caplog.text == ""
        buffer.add_trajectories([rollout(), changed, rollout(), changed])
        assert len(caplog.records) == 1  # one warning for the change back, no second for the change itself


def test_the_index_is_written_whole_after_many_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore._core.writing.commit_log._MAX_RECORDS", 3)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        for _ in range(9):
            buffer.add_trajectories([rollout()])
            buffer.flush()
        assert unseal("snapshot", (tmp_path / "trajectory_index.json").read_bytes(), "")["generation"] == 8
