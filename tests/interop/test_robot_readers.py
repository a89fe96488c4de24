"""Robot data sets against other readers: pyarrow, h5py and Pillow, and Minari and LeRobot if installed."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.test_formats import read_all
from tests.stores import stored
from tests.support.equality import same
from trajstore import EmbodiedRolloutResult, Trajectory
from trajstore.errors import InvalidTrajectoryError
from trajstore.interop.convert import convert_from, convert_to
from trajstore.interop.gymnasium import VectorSteps

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")
h5py = pytest.importorskip("h5py", reason="needs the extra 'convert'")
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
        self.info = ((int(rng.integers(1, 4)), 3), np.float64)

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
            "infos": {"deep": {"noise": self.values(steps + 1, self.info)}},
        }

    def some(self) -> list[Values]:
        return [self.one() for _ in range(int(self.rng.integers(1, 5)))]


def column(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))[:, None]


def trajectory_of(episode: Values, **observations: Any) -> Trajectory:
    seen = episode["observations"]
    flags = {name: column(episode[name])[..., None] for name in ("terminations", "truncations")}
    texts = episode["texts"]
    return Trajectory(
        actions=column(episode["actions"]),
        rewards=column(episode["rewards"])[..., None],
        dones=flags["terminations"] | flags["truncations"],
        curr_obs={name: column(value[:-1]) for name, value in seen.items()} | (observations or {"text": texts[:-1]}),
        next_obs={name: column(value[1:]) for name, value in seen.items()}
        | ({} if observations else {"text": texts[1:]}),
        forward_inputs={"deep": {"noise": column(episode["infos"]["deep"]["noise"])}},
        **flags,
    )


# -- Minari -------------------------------------------------------------------------------------------


def flat(rows: Any, like: Any) -> Any:
    """Return rows of Arrow lists with the shape and dtype of an array."""
    return np.array(rows.to_pylist(), like.dtype).reshape(like.shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_pyarrow_and_minari_read_what_was_written(seed: int, tmp_path: Path) -> None:
    episodes = Episodes(seed).some()
    path = stored(tmp_path / "store", [trajectory_of(episode) for episode in episodes])
    convert_to(path, tmp_path / "out-v0", "minari", check=True)
    for number, episode in enumerate(episodes):
        table = pq.ParquetFile(tmp_path / f"out-v0/data/{number}/part-0.parquet").read().combine_chunks()
        seen = table["observations"].combine_chunks()
        for name, value in episode["observations"].items():
            assert same(flat(seen.field(name), value), value)
        assert seen.field("text").to_pylist() == episode["texts"]
        for name in ("actions", "rewards", "terminations", "truncations"):
            assert same(flat(table[name][:-1], episode[name]), episode[name])
        expected = episode["infos"]["deep"]["noise"]
        assert same(flat(table["infos"].combine_chunks().field("deep").field("noise"), expected), expected)
    minari = pytest.importorskip("minari", reason="minari is not installed; pyarrow agreed")
    for read, episode in zip(minari.MinariDataset(tmp_path / "out-v0/data").iterate_episodes(), episodes, strict=True):
        for name, value in episode["observations"].items():
            assert same(read.observations[name], value)
        assert read.observations["text"] == episode["texts"]
        for name in ("actions", "rewards", "terminations", "truncations"):
            assert same(getattr(read, name), episode[name])


def minari_hdf5(path: Path, episodes: list[Values]) -> None:
    """Write a data set as Minari writes HDF5 files."""
    first = episodes[0]["observations"]
    spaces = {name: {"type": "Box", "shape": list(value.shape[1:])} for name, value in first.items()}
    pair = {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 99}, {"type": "Box", "shape": [1]}]}
    metadata = {
        "observation_space": json.dumps(
            {"type": "Dict", "subspaces": spaces | {"text": {"type": "Text"}, "pair": pair}}
        ),
        "action_space": json.dumps({"type": "Box", "shape": list(episodes[0]["actions"].shape[1:])}),
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": len(episodes),
        "total_steps": sum(len(episode["rewards"]) for episode in episodes),
    }
    (path / "data").mkdir(parents=True)
    (path / "data/metadata.json").write_text(json.dumps(metadata))
    with h5py.File(path / "data/main_data.hdf5", "w") as file:
        for number, episode in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs["total_steps"] = len(episode["rewards"])
            for name in ("actions", "rewards", "terminations", "truncations"):
                group[name] = episode[name]
            for name, value in episode["observations"].items():
                group[f"observations/{name}"] = value
            group.create_dataset("observations/text", data=episode["texts"], dtype=h5py.string_dtype())
            group["infos/deep/noise"] = episode["infos"]["deep"]["noise"]
            numbers = np.arange(len(episode["texts"]))
            group["observations/pair/_index_0"], group["observations/pair/_index_1"] = numbers, numbers[:, None] / 2


def minari_own(path: Path, episodes: list[Values], form: str) -> None:
    """Let Minari write a data set."""
    minari = pytest.importorskip("minari", reason="minari is not installed")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    def box(value: Any) -> Any:
        limits = (0, 1) if value.dtype == np.bool_ else (-np.inf, np.inf) if value.dtype.kind == "f" else (0, 255)
        return spaces.Box(*limits, value.shape[1:], value.dtype)

    first = episodes[0]
    minari.create_dataset_from_buffers(
        "made-v0",
        [
            EpisodeBuffer(
                id=number,
                observations=episode["observations"] | {"text": episode["texts"]},
                **{name: episode[name] for name in ("actions", "rewards", "terminations", "truncations", "infos")},
            )
            for number, episode in enumerate(episodes)
        ],
        observation_space=spaces.Dict(
            {name: box(value) for name, value in first["observations"].items()} | {"text": spaces.Text(9_999)}
        ),
        action_space=box(first["actions"]),
        data_format=form,
        jpeg_encoding=False,
    )
    shutil.move(path.parent / "made-v0", path)


def is_same_episode(read: Trajectory, episode: Values) -> None:
    for name, value in episode["observations"].items():
        assert same(read.curr_obs[name][:, 0].numpy(), value[:-1])
        assert same(read.next_obs[name][:, 0].numpy(), value[1:])
    assert (read.curr_obs["text"], read.next_obs["text"]) == (episode["texts"][:-1], episode["texts"][1:])
    assert same(read.actions[:, 0].numpy(), episode["actions"])
    for name in ("rewards", "terminations", "truncations"):
        assert same(getattr(read, name)[:, 0, 0].numpy(), episode[name])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("writer", ["h5py", "hdf5", "arrow", "parquet"])
def test_data_sets_of_minari_are_read_as_they_were_made(
    seed: int, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    episodes = Episodes(seed).some()
    if writer == "h5py":
        minari_hdf5(tmp_path / "their-v0", episodes)
    else:
        minari_own(tmp_path / "their-v0", episodes, writer)
    done = convert_from(tmp_path / "their-v0", tmp_path / "store", "minari", check=True)
    assert (done.written, done.problems) == (len(episodes), {})
    for read, episode in zip(read_all(tmp_path / "store"), episodes, strict=True):
        is_same_episode(read, episode)
        if writer == "h5py":
            numbers = np.arange(len(episode["rewards"]))
            assert same(read.curr_obs["pair"]["0"][:, 0].numpy(), numbers)
            assert same(read.next_obs["pair"]["1"][:, 0, 0].numpy(), (numbers + 1) / 2)


@pytest.mark.parametrize("long", [False, True], ids=["images of different sizes", "images of one size"])
def test_jpeg_images_in_hdf5_are_decoded(long: bool, tmp_path: Path) -> None:
    """HDF5 has them as lists of bytes, or as one array if all have as many bytes."""
    episode = Episodes(0).one()
    frames = [np.full((40, 48, 3), 0 if long else 30 * at, np.uint8) for at in range(len(episode["rewards"]) + 1)]
    if not long:
        frames[0][::2] = 255
    encoded = []
    for frame in frames:
        Image.fromarray(frame).save(file := io.BytesIO(), "JPEG")
        encoded.append(np.frombuffer(file.getvalue(), np.uint8))
    assert (len({len(code) for code in encoded}) == 1) == long
    minari_hdf5(tmp_path / "made", [episode | {"observations": {"top": np.zeros((len(frames), 40, 48, 3), np.uint8)}}])
    metadata = tmp_path / "made/data/metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"jpeg_encoding": True}))
    with h5py.File(tmp_path / "made/data/main_data.hdf5", "a") as file:
        del file["episode_0/observations/top"]
        dtype = None if long else h5py.vlen_dtype(np.uint8)
        data = np.stack(encoded) if long else encoded
        file["episode_0/observations"].create_dataset("top", data=data, dtype=dtype)
    convert_from(tmp_path / "made", tmp_path / "store", "minari", check=True)
    (read,) = read_all(tmp_path / "store")
    assert isinstance(read, Trajectory)
    expected = [np.array(Image.open(io.BytesIO(code.tobytes()))) for code in encoded]
    assert same(read.curr_obs["top"][:, 0].numpy(), np.stack(expected)[:-1])


def test_rows_of_another_shape_than_the_space_are_named(tmp_path: Path) -> None:
    """As many numbers are not enough: they would be of other axes."""
    episodes = [Episodes(0).one() for _ in range(2)]
    minari_hdf5(tmp_path / "made", episodes)
    with h5py.File(tmp_path / "made/data/main_data.hdf5", "a") as file:
        grid = file["episode_1/observations/grid"][()]
        del file["episode_1/observations/grid"]
        file["episode_1/observations/grid"] = grid.swapaxes(1, 2)
    done = convert_from(tmp_path / "made", tmp_path / "store", "minari", check=True)
    assert (done.written, list(done.problems)) == (1, ["episode 1"])
    assert f"rows of shape {list(grid.shape[:0:-1])}, the space declares" in done.problems["episode 1"]


@pytest.mark.parametrize("form", ["hdf5", "parquet"])
@pytest.mark.parametrize(
    ("change", "written", "problems"),
    [({"total_episodes": 5}, 3, ["episodes 3 to 4"]), ({"total_episodes": 2}, 3, []), ({"total_steps": 1}, 3, [])],
)
def test_counts_of_minari_that_differ_are_named(
    form: str, change: Values, written: int, problems: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    episodes = [Episodes(0).one() for _ in range(3)]
    if form == "hdf5":
        minari_hdf5(tmp_path / "made", episodes)
    else:
        convert_to(stored(tmp_path / "first", [trajectory_of(e) for e in episodes]), tmp_path / "made", "minari")
    metadata = tmp_path / "made/data/metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    done = convert_from(tmp_path / "made", tmp_path / "store", "minari", check=True)
    assert (done.written, list(done.problems)) == (written, problems)
    assert "numbers of episodes differ: data/metadata.json" in caplog.text


# -- LeRobot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_pyarrow_and_lerobot_read_what_was_written(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = Episodes(seed)
    episodes = made.some()
    fps = torch.tensor(10.0)
    blocks = [trajectory_of(episode, task=[text or "t" for text in episode["texts"][:-1]]) for episode in episodes]
    for block in blocks:
        block.forward_inputs = {"fps": fps}
    convert_to(stored(tmp_path / "store", blocks), tmp_path / "out", "lerobot", check=True)
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


# -- files and arrays ---------------------------------------------------------------------------------


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
