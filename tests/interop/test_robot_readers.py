"""Data sets of LeRobot against other readers: pyarrow and Pillow, and LeRobot if installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stores import stored
from tests.support.equality import same
from trajstore import EmbodiedRolloutResult, Trajectory
from trajstore.errors import InvalidTrajectoryError
from trajstore.interop.convert import convert_to
from trajstore.interop.gymnasium import VectorSteps

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra 'convert'")

Values = dict[str, Any]
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(3, 200))]
KINDS = [np.float32, np.float64, np.int64, np.uint8, np.bool_]
TEXTS = ["", "stack the red cube", "ö\u202e\U0001f916", "x" * 5_000, "{'a': 1}"]


class Episodes:
    """Random episodes, with the same names, shapes and dtypes in each."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        size, channels = [int(n) for n in rng.integers(8, 40, 2)], int(rng.choice([1, 3, 4]))
        self.order = str(rng.choice(["first", "last"]))
        self.image = (channels, *size) if self.order == "first" else (*size, channels)
        self.kinds = {
            "joints": ((int(rng.integers(1, 5)),), KINDS[rng.integers(len(KINDS))]),
            "grid": ((2, int(rng.integers(3, 6))), KINDS[rng.integers(2)]),
            "top": (self.image, np.uint8),
        }
        self.action = ((int(rng.integers(1, 4)),), KINDS[rng.integers(3)])

    def values(self, rows: int, kind: Any) -> Any:
        shape, dtype = (rows, *kind[0]), np.dtype(kind[1])
        if dtype.kind == "f":
            return self.rng.normal(size=shape).astype(dtype)
        return self.rng.integers(0, 2 if dtype.kind == "b" else 256, shape).astype(dtype)

    def one(self) -> Values:
        steps = int(self.rng.integers(1, 7))
        ends = np.zeros((2, steps), np.bool_)
        ends[:, -1] = self.rng.integers(0, 2, 2)
        return {
            "observations": {name: self.values(steps + 1, kind) for name, kind in self.kinds.items()},
            "texts": [TEXTS[number] for number in self.rng.integers(len(TEXTS), size=steps + 1)],
            "actions": self.values(steps, self.action),
            "rewards": self.values(steps, ((), np.float32)),
            "terminations": ends[0],
            "truncations": ends[1],
        }

    def some(self) -> list[Values]:
        return [self.one() for _ in range(int(self.rng.integers(1, 5)))]


def column(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))[:, None]


def trajectory_of(episode: Values) -> Trajectory:
    seen = episode["observations"]
    flags = {name: column(episode[name])[..., None] for name in ("terminations", "truncations")}
    tasks = [text or "t" for text in episode["texts"][:-1]]
    return Trajectory(
        actions=column(episode["actions"]),
        rewards=column(episode["rewards"])[..., None],
        dones=flags["terminations"] | flags["truncations"],
        curr_obs={name: column(value[:-1]) for name, value in seen.items()} | {"task": tasks},
        next_obs={name: column(value[1:]) for name, value in seen.items()},
        forward_inputs={"fps": torch.tensor(10.0)},
        **flags,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_pyarrow_and_lerobot_read_what_was_written(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = Episodes(seed)
    episodes = made.some()
    blocks = [trajectory_of(episode) for episode in episodes]
    convert_to(stored(tmp_path / "store", blocks), tmp_path / "out", "lerobot")
    files = sorted((tmp_path / "out/data").rglob("*.parquet"))
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    texts = pq.ParquetFile(tmp_path / "out/meta/tasks.parquet").read().to_pylist()
    tasks = {row["task_index"]: row["task"] for row in texts}
    frames = [(number, episode, at) for number, episode in enumerate(episodes) for at in range(len(episode["rewards"]))]
    for row, (number, episode, at) in zip(rows, frames, strict=True):
        assert (row["episode_index"], row["frame_index"]) == (number, at)
        assert tasks[row["task_index"]] == (episode["texts"][at] or "t")
        for name, value in episode["observations"].items():
            found = row[f"observation.{name}"]
            if name == "top":
                pixels = np.array(Image.open(io.BytesIO(found["bytes"])))
                pixels = pixels if pixels.ndim == 3 else pixels[..., None]
                assert same(pixels.transpose(2, 0, 1) if made.order == "first" else pixels, value[at])
            else:
                assert same(np.array(found, value.dtype).reshape(value.shape[1:]), value[at])
        assert same(np.array(row["action"], episode["actions"].dtype).reshape(-1), episode["actions"][at])
        assert row["next.reward"] == episode["rewards"][at]
        assert (row["next.terminated"], row["next.truncated"]) == (
            episode["terminations"][at],
            episode["truncations"][at],
        )

    def known(value: Any) -> Any:
        return value.astype(np.float32) if value.dtype == np.float64 else value  # LeRobot reads float32

    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="lerobot is not installed")
    data = lerobot.LeRobotDataset("local/out", root=tmp_path / "out")
    for at, (_, episode, step) in enumerate(frames):
        read = data[at]
        assert read["task"] == (episode["texts"][step] or "t")
        for name, value in episode["observations"].items():
            found = read[f"observation.{name}"].numpy()
            if name == "top":
                pixels = value[step] if made.order == "first" else value[step].transpose(2, 0, 1)
                assert same((found * 255).round().astype(np.uint8), np.ascontiguousarray(pixels))
            else:
                assert np.array_equal(found.reshape(-1), known(value[step]).reshape(-1))
        assert np.array_equal(read["action"].numpy().reshape(-1), known(episode["actions"][step]))


def test_arrays_with_masked_values_are_refused(tmp_path: Path) -> None:
    """Their values under the mask would be stored as if they were known."""

    def array(mask: bool) -> Any:
        return np.ma.masked_array(np.ones((2, 1, 1), np.float32), mask=[[[mask]], [[False]]])

    def stored_as(values: Any) -> None:
        stored(tmp_path / "store", [Trajectory(actions=torch.zeros(2, 1, 1), rewards=values)])

    def appended(values: Any) -> None:
        EmbodiedRolloutResult().append_transitions({"states": values}, {"states": values})

    def reset(values: Any) -> None:
        VectorSteps(None, autoreset="next_step").reset({"states": values})

    for use in (stored_as, appended, reset):
        use(array(False))
        with pytest.raises(InvalidTrajectoryError, match=r"a masked array would lose its mask; give its filled"):
            use(array(True))
