"""Blocks with invalid steps: one colour for each step and environment, wherever rows are shown, drawn or written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stores import writer_to
from tests.view.conftest import Serve
from tests.view.test_server import ask, get, trajectory
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.interop.convert import convert_from, convert_to
from trajstore.loader import ReplayLoader
from trajstore.samplers import (
    EpochSampler,
    Priorities,
    Sampler,
    WeightedSampler,
    sample_n_step,
    sample_sequences,
)

STEPS, BATCH = 20, 2
INVALID = {(0, 1), (7, 0), (8, 0), (19, 1)}
FIRST = {(0, 1), (19, 1), (3, 0)}
"""Invalid steps of the second block."""


def colour(block: int, step: int, environment: int) -> int:
    return 1 + block * 100 + step * BATCH + environment


def block(number: int, invalid: set[tuple[int, int]]) -> Trajectory:
    """Return a block whose values are its colours; those of invalid steps too."""
    colours = torch.tensor([[colour(number, t, b) for b in range(BATCH)] for t in range(STEPS)])
    valid = torch.ones(STEPS, BATCH, dtype=torch.bool)
    for at in invalid:
        valid[at] = False
    dones = torch.zeros(STEPS, BATCH, 1, dtype=torch.bool)
    for t, b in invalid:  # as in Gymnasium's NEXT_STEP mode, the step before a reset ends an episode
        if t and (t - 1, b) not in invalid:
            dones[t - 1, b] = True
    pictures = colours.to(torch.uint8).reshape(STEPS, BATCH, 1, 1, 1).expand(-1, -1, 6, 5, 3).clone()
    return Trajectory(
        actions=colours.float().unsqueeze(-1),
        rewards=colours.float().unsqueeze(-1),
        dones=dones,
        terminations=dones.clone(),
        truncations=torch.zeros_like(dones),
        valid=valid,
        curr_obs={"image": pictures, "states": colours.float().unsqueeze(-1)},
        next_obs={"image": pictures + BATCH, "states": colours.float().unsqueeze(-1) + BATCH},
    )


BLOCKS = [block(0, INVALID), block(1, FIRST)]
VALID = [
    colour(number, t, b)
    for number, invalid in enumerate((INVALID, FIRST))
    for t in range(STEPS)
    for b in range(BATCH)
    if (t, b) not in invalid
]


@pytest.fixture(params=["pt", "pkl", "zarr"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with writer_to(tmp_path / "store", trajectory_format=request.param) as buffer:
        buffer.add_trajectories(BLOCKS)
        buffer.flush()
    return tmp_path / "store"


@pytest.fixture
def reader(path: Path) -> Iterator[TrajectoryReplayBuffer]:
    with TrajectoryReplayBuffer.open(path, sample_window_size=0) as opened:
        yield opened


def colours_of(batch: Any) -> list[int]:
    """Return the colours of a batch's rows; all columns of a row have the same one."""
    seen = batch["rewards"].flatten().long()
    assert torch.equal(batch["actions"].flatten().long(), seen)
    assert torch.equal(batch["curr_obs"]["states"].flatten().long(), seen)
    pictures = batch["curr_obs"]["image"].reshape(len(seen), -1).long()
    assert (pictures == seen.unsqueeze(1)).all()
    return seen.tolist()


def test_the_page_shows_each_step_of_each_environment(serve: Serve, path: Path) -> None:
    address = serve(path)
    for number, made in enumerate(BLOCKS):
        header, arrays = trajectory(address, str(number))
        assert torch.equal(torch.from_numpy(arrays["rewards"].copy()), made.rewards)
        assert (header["steps"], header["batch"]) == (STEPS, BATCH)
        for environment in range(BATCH):
            asked = "&".join(f"step={step}" for step in range(STEPS))
            status, _, body = get(
                address, f"/api/frames?id={number}&name=curr_obs.image&environment={environment}&{asked}"
            )
            assert status == 200, body
            frames = np.frombuffer(body, np.uint8).reshape(STEPS, -1)
            expected = np.array([[colour(number, step, environment)] for step in range(STEPS)])
            assert (frames == expected).all()
    assert get(address, "/api/frames?id=0&name=rewards&step=0")[0] == 400


def test_the_pages_curves_and_counts_are_those_of_valid_steps(serve: Serve, path: Path) -> None:
    address = serve(path)
    curve = ask(address, "sampled", over="time", name="reward")
    assert curve["reward"] == [pytest.approx(np.mean(VALID))]
    assert curve["unread"] == 0
    assert ask(address, "overview")["samples"] == len(VALID)
    assert [row["samples"] for row in ask(address, "page")["rows"]] == [36, 37]
    assert ask(address, "facts", id="1")["samples"] == 37


def test_inspect_shows_each_step_by_its_number(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        for row in (0, 1, 13, 14, 39):
            assert main(["inspect", str(path), "--trajectory", str(number), "--sample", str(row), "--json"]) == 0
            values = json.loads(capsys.readouterr().out)["values"]
            here = colour(number, row // BATCH, row % BATCH)
            assert values["rewards"] == [here]
            assert np.unique(values["curr_obs.image"]).tolist() == [here]
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["invalid_steps"]) == (len(VALID), 7)
    assert report["rewards"]["mean"] == pytest.approx(np.mean(VALID))


@pytest.mark.parametrize("make", [EpochSampler, WeightedSampler, lambda: WeightedSampler(priorities=Priorities())])
def test_every_draw_has_valid_steps_alone(reader: TrajectoryReplayBuffer, make: Callable[[], Sampler]) -> None:
    sampler, seen = make(), []
    for _ in range(9):  # 73 valid rows: an epoch of 8 batches of 9 and one row
        batch = reader.sample(9, sampler=sampler)
        seen += colours_of(batch)
    assert set(seen) <= set(VALID)
    if isinstance(sampler, EpochSampler):
        assert sorted(seen[: len(VALID)]) == VALID
    assert set(colours_of(reader.sample(500))) <= set(VALID)


def test_sequences_and_transitions_have_valid_steps_alone(reader: TrajectoryReplayBuffer) -> None:
    sequences = sample_sequences(reader, 200, 3, burn_in=1, pad=True)
    kept = sequences["rewards"][sequences["mask"]].flatten().long()
    assert set(kept.tolist()) <= set(VALID)
    steps = sample_n_step(reader, 200, 3, gamma=0.5)
    assert set(steps["curr_obs"]["states"].flatten().long().tolist()) <= set(VALID)
    assert set(steps["curr_obs"]["image"].flatten().tolist()) <= set(VALID)


def test_a_loaders_epoch_has_each_valid_step_once(path: Path) -> None:
    with TrajectoryReplayBuffer.open(path, sample_window_size=0) as opened:
        loader = ReplayLoader(opened, batch_size=10, sampler=EpochSampler(epochs=1))
        with loader:
            seen = [one for batch in loader for one in colours_of(batch)]
    assert sorted(seen) == VALID


def test_queries_have_every_step_and_say_which_are_valid(reader: TrajectoryReplayBuffer) -> None:
    every = reader.query("steps").select("trajectory_id", "step", "environment", "rewards", "valid").table().rows()
    assert [colour(*at) for *at, _, _ in every] == [reward for *_, reward, _ in every]
    assert [reward for *_, reward, valid in every if valid] == VALID
    table = reader.query("steps").where("valid").select("rewards").table()
    assert table["rewards"].to_list() == VALID


@pytest.mark.parametrize("name", ["minari", "lerobot"])
def test_files_of_other_programs_have_valid_steps_alone(path: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("h5py", reason="needs the extra 'convert'")
    there = tmp_path / "there"
    convert_to(path, there, name, check=True)
    convert_from(there, tmp_path / "back", name)
    with TrajectoryReplayBuffer.open(tmp_path / "back", sample_window_size=0) as back:
        seen = [int(value) for number in back.trajectory_ids for value in back.get(int(number)).rewards.flatten()]
    assert sorted(seen) == VALID
