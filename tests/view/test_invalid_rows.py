"""Blocks with invalid steps: one colour for each step and environment, wherever rows are shown, drawn or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stores import writer_to
from tests.view.conftest import Serve
from tests.view.test_bundle import bundled, serve_files  # noqa: F401
from tests.view.test_server import ask, get, trajectory
from tools.browser import Page
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.interop.convert import convert_from, convert_to
from trajstore.interop.rlinf.trajectory import flatten_trajectory
from trajstore.loader import PreloadReplayBufferDataset, ReplayBufferDataset, ReplayLoader
from trajstore.samplers import EpochSampler, WeightedSampler

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
        buffer.points.pin("both")
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


@pytest.mark.parametrize("pin", [None, "both"])
def test_the_page_shows_each_step_of_each_environment(serve: Serve, path: Path, pin: str | None) -> None:
    if pin:
        with writer_to(path) as writer:
            writer.evict([0, 1])
    address = serve(path, pin=pin)
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


PLAY = """
window.pixels = () => [...document.querySelectorAll('.large')]
  .map((one) => one.getContext('2d').getImageData(2, 1, 1, 1).data[0]).join();
(async (expected) => {
  const said = [];
  for (const colours of expected) {
    while (pixels() !== colours) await new Promise(requestAnimationFrame);
    said.push(document.querySelector('.step').textContent);
    document.body.dispatchEvent(new KeyboardEvent('keydown', { key: '.', bubbles: true }));  // the next step
  }
  window.told = said;
})(arguments[0]);
"""
"""Goes on when the page has painted the expected colours of a step; ``told`` is what it says of each."""


@pytest.mark.parametrize("path", ["zarr"], indirect=True)  # what it is sent from each format is compared above
@pytest.mark.parametrize("bundle", [False, True])
def test_the_browser_paints_each_step_of_each_environment(
    path: Path,
    tmp_path: Path,
    serve: Serve,
    serve_files: Serve,  # noqa: F811
    page: Page,
    bundle: bool,
) -> None:
    address = serve_files(bundled(path, tmp_path / "out")) if bundle else f"{serve(path)}/"
    page.expected_errors.append("willReadFrequently")  # this test looks at pixels
    for number in range(2):
        for environment in range(BATCH):
            page.open(f"{address}#/trajectory/{number}?environment={environment}")
            page.until("document.querySelector('[data-curve=rewards] canvas')")
            here = [colour(number, step, environment) for step in range(STEPS)]
            page.run(PLAY, [f"{value},{value + BATCH}" for value in here])
            for step, said in enumerate(page.until("window.told")):
                assert said.startswith(f"step {step} (0 to 19) · reward {here[step]} · action {here[step]}")
                assert (" · reset, no step" in said) == ((step, environment) in (INVALID, FIRST)[number])
    page.run(
        "window.seen = []; const step = document.querySelector('.step');"
        "new MutationObserver(() => seen.push(step.textContent.split(' ')[1])).observe(step, { childList: true })"
    )
    page.keys("body", "s")  # plays from the beginning, and stops at the end
    page.until("seen.join() === arguments[0]", ",".join(map(str, range(STEPS))))
    page.until("pixels() === arguments[0]", f"{here[-1]},{here[-1] + BATCH}")


def test_the_pages_counts_are_those_of_valid_steps(serve: Serve, path: Path) -> None:
    address = serve(path)
    assert ask(address, "overview")["samples"] == len(VALID)
    assert [row["samples"] for row in ask(address, "page")["rows"]] == [36, 37]
    assert ask(address, "facts", id="1")["samples"] == 37


@pytest.mark.parametrize("make", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_rlinfs_datasets_have_valid_steps_alone(reader: TrajectoryReplayBuffer, make: Callable[..., Any]) -> None:
    dataset = make(reader, reader, 64, 1, 1)
    batches = iter(dataset)
    seen = {one for _ in range(20) for one in colours_of(next(batches))}
    dataset.close()
    assert seen <= set(VALID)
    assert len(seen) > 60
    flat = flatten_trajectory(BLOCKS[0])
    assert flat["actions"].flatten().tolist() == [colour(0, t, b) for t in range(STEPS) for b in range(BATCH)]
    assert flat["actions"][flat["valid"]].flatten().tolist() == VALID[:36]


def test_rows_read_through_ray_are_valid_steps_alone(
    tmp_path: Path, small_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trajstore.distributed import DistributedReplayBuffer

    options: dict[str, Any] = {"actor_options": {"num_cpus": 0.1}, "deadline": 600.0, "patience": 600.0}
    with DistributedReplayBuffer.create("colours", tmp_path / "run", stores=1, **options) as handle:
        ids = [number for one in BLOCKS for number in handle.add_trajectories([one]).committed(120)]
        handle.refresh()
        assert set(colours_of(handle.sample(500))) <= set(VALID)  # reads the files
        with monkeypatch.context() as patch, DistributedReplayBuffer.connect("colours") as distant:
            patch.setattr("trajstore.distributed.reads._open", lambda about: None)
            assert set(colours_of(distant.sample(500))) <= set(VALID)  # asks the store
        assert set(colours_of(handle.sample(500, sampler=WeightedSampler()))) <= set(VALID)
        with ReplayLoader(handle, batch_size=10, sampler=EpochSampler(epochs=1)) as loader:
            assert sorted(one for batch in loader for one in colours_of(batch)) == VALID
        assert sorted(handle.query("steps").where("valid").table()["rewards"].to_list()) == VALID
        for number, made in zip(ids, BLOCKS, strict=True):
            assert torch.equal(handle.get(number).rewards, made.rewards)
        handle.stop()


def test_files_of_other_programs_have_valid_steps_alone(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'convert'")
    there = tmp_path / "there"
    convert_to(path, there, "lerobot")
    convert_from(there, tmp_path / "back", "lerobot")
    with TrajectoryReplayBuffer.open(tmp_path / "back", sample_window_size=0) as back:
        seen = [int(value) for number in back.trajectory_ids for value in back.get(int(number)).rewards.flatten()]
    assert sorted(seen) == VALID
