"""Data sets of LeRobot, written here by another way than the converter's: pyarrow, PIL and PyAV."""

from __future__ import annotations

import io
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.test_formats import ODD, read_all
from trajstore import TrajectoryReplayBuffer
from trajstore.interop.convert import convert_from, convert_to
from trajstore.samplers import WeightedSampler, sample_sequences
from trajstore.trajectory import Trajectory

pa = pytest.importorskip("pyarrow", reason="needs the extra 'convert'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")
av = pytest.importorskip("av", reason="needs the extra 'convert'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra 'convert'")

HEIGHT, WIDTH, FPS = 48, 64, 10


def picture(number: int, channels: int) -> np.ndarray[Any, Any]:
    """Return ``[height, width, channels]``, different in each pixel and channel."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    layers = [rows * 3 + columns + 40 * channel + 7 * number for channel in range(channels)]
    return np.stack(layers, -1).astype(np.uint8)


def png(pixels: np.ndarray[Any, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_video(path: Path, frames: Sequence[np.ndarray[Any, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=FPS, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())


def write(
    path: Path,
    lengths: Sequence[int],
    *,
    shape: Sequence[int] = (HEIGHT, WIDTH, 3),
    kind: str = "image",
    names: Sequence[str] | None = None,
    tasks: Callable[[int, int], str] = lambda episode, frame: "stack",
    change: Callable[[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]], None] = lambda *_: None,
) -> list[np.ndarray[Any, Any]]:
    """Write a data set; return its pictures ``[height, width, channels]`` by frame."""
    channels = next((size for size in (shape[0], shape[-1]) if size in (1, 3, 4)), 1)
    frames, episodes, pictures, texts = [], [], [], []
    for episode, length in enumerate(lengths):
        start = len(frames)
        for frame in range(length):
            text = tasks(episode, frame)
            texts += [text] if text not in texts else []
            pictures.append(picture(len(frames), channels))
            row = {
                "observation.state": [float(episode), float(frame)],
                "action": [float(len(frames))],
                "timestamp": np.float32(frame / FPS),
                "frame_index": frame,
                "episode_index": episode,
                "index": len(frames),
                "task_index": texts.index(text),
            }
            frames.append(row | ({"observation.images.top": png(pictures[-1])} if kind == "image" else {}))
        of_videos = {
            "chunk_index": 0,
            "file_index": 0,
            "from_timestamp": start / FPS,
            "to_timestamp": len(frames) / FPS,
        }
        episodes.append(
            {
                "episode_index": episode,
                "tasks": sorted({tasks(episode, frame) for frame in range(length)}),
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": start,
                "dataset_to_index": len(frames),
            }
            | {f"videos/observation.images.top/{name}": value for name, value in of_videos.items() if kind == "video"}
        )
    one = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "total_episodes": len(lengths),
        "total_frames": len(frames),
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "observation.images.top": {"dtype": kind, "shape": list(shape), "names": names},
            "observation.state": {"dtype": "float32", "shape": [2], "names": None},
            "action": {"dtype": "float32", "shape": [1], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), one),
        },
    }
    change(frames, episodes, info)
    for place, table in (
        ("data/chunk-000/file-000.parquet", pa.Table.from_pylist(frames)),
        ("meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(episodes)),
        ("meta/tasks.parquet", pa.table({"task_index": range(len(texts)), "__index_level_0__": texts})),
    ):
        (path / place).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path / place)
    (path / "meta" / "info.json").write_text(json.dumps(info))
    if kind == "video":
        write_video(path / "videos/observation.images.top/chunk-000/file-000.mp4", pictures)
    return pictures


def blocks_of(path: Path) -> list[Trajectory]:
    return [block for block in read_all(path) if isinstance(block, Trajectory)]


def images_of(path: Path) -> np.ndarray[Any, Any]:
    return np.concatenate([block.curr_obs["images"]["top"][:, 0].numpy() for block in blocks_of(path)])


@pytest.mark.parametrize(
    ("channels", "order"), [*itertools.product([1, 3, 4], ["first", "last", "first unnamed"]), (1, "none")]
)
def test_images_keep_their_pixels_in_either_order_of_axes(tmp_path: Path, channels: int, order: str) -> None:
    shape = {"last": (HEIGHT, WIDTH, channels), "none": (HEIGHT, WIDTH)}.get(order, (channels, HEIGHT, WIDTH))
    names = ["channels", "height", "width"] if order == "first" else None
    pictures = write(tmp_path / "set", [3, 2], shape=shape, names=names)
    assert convert_from(tmp_path / "set", tmp_path / "store", "lerobot").written == 2
    back = images_of(tmp_path / "store")
    expected = [np.moveaxis(image, -1, 0) if "first" in order else image.reshape(shape) for image in pictures]
    assert np.array_equal(back, np.stack(expected))
    convert_to(tmp_path / "store", tmp_path / "again", "lerobot")
    convert_from(tmp_path / "again", tmp_path / "second", "lerobot")
    again = [
        image for block in blocks_of(tmp_path / "second") for image in block.curr_obs["images"]["top"][:, 0].numpy()
    ]
    assert np.array_equal(again, np.stack(expected))


@pytest.mark.parametrize("first", [False, True])
def test_videos_keep_their_frames_in_either_order_of_axes(tmp_path: Path, first: bool) -> None:
    shape = (3, HEIGHT, WIDTH) if first else (HEIGHT, WIDTH, 3)
    pictures = write(tmp_path / "set", [3, 4], shape=shape, kind="video")
    assert convert_from(tmp_path / "set", tmp_path / "store", "lerobot").written == 2
    back = images_of(tmp_path / "store")
    assert np.array_equal(back, np.stack([np.moveaxis(one, -1, 0) if first else one for one in pictures]))


def test_images_of_another_size_are_named(tmp_path: Path) -> None:
    write(tmp_path / "set", [2], shape=(HEIGHT, WIDTH + 1, 3))
    with pytest.raises(Exception, match=r"images of 48 x 64 and 3 channels; declared: \[48, 65"):
        convert_from(tmp_path / "set", tmp_path / "store", "lerobot")


def test_frames_keep_their_own_tasks(tmp_path: Path) -> None:
    write(tmp_path / "set", [4, 2], tasks=lambda episode, frame: "go" if episode or frame < 3 else "grasp")
    convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert [block.curr_obs["task"] for block in blocks_of(tmp_path / "store")] == [["go", "go", "go", "grasp"], "go"]
    convert_to(tmp_path / "store", tmp_path / "again", "lerobot")
    table = pq.read_table(next((tmp_path / "again" / "data").rglob("*.parquet"))).to_pydict()
    assert table["task_index"] == [0, 0, 0, 1, 0, 0]


def states_of(path: Path) -> list[list[float]]:
    return [block.curr_obs["state"][:, 0].tolist() for block in blocks_of(path)]


def test_frames_are_taken_by_their_numbers_not_by_their_places(tmp_path: Path) -> None:
    def shuffle(frames: list[dict[str, Any]], *_: Any) -> None:
        frames[:] = [frames[at] for at in (5, 2, 0, 4, 1, 3)]

    write(tmp_path / "set", [2, 4], change=shuffle)
    convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert states_of(tmp_path / "store") == [[[0.0, 0.0], [0.0, 1.0]], [[1.0, float(frame)] for frame in range(4)]]


def test_recordings_without_flags_end_with_done(tmp_path: Path) -> None:
    write(tmp_path / "set", [2, 3])
    convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert [block.dones.flatten().tolist() for block in blocks_of(tmp_path / "store")] == [
        [False, True],
        [False] * 2 + [True],
    ]
    with TrajectoryReplayBuffer.open(tmp_path / "store", seed=1) as reader:
        batch = sample_sequences(reader, 40, 3, pad=True, sampler=WeightedSampler())
    assert set(batch["mask"].sum(1).tolist()) == {1, 2, 3}


def test_an_empty_store_becomes_a_set_without_episodes(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store"):
        pass
    assert convert_to(tmp_path / "store", tmp_path / "set", "lerobot").written == 0


def without(*numbers: int) -> Callable[..., None]:
    def change(frames: Any, episodes: list[dict[str, Any]], info: Any) -> None:
        episodes[:] = [row for row in episodes if row["episode_index"] not in numbers]

    return change


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_episode_absent_from_the_metadata_is_named_and_the_others_come(
    tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write(tmp_path / "set", [2, 2, 2], change=without(lost))
    done = convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert (done.written, list(done.problems)) == (2, [f"episode {lost}"])
    assert "is in data/, but not in meta/episodes" in done.problems[f"episode {lost}"]
    kept = [number for number in range(3) if number != lost]
    assert [states[0][0] for states in states_of(tmp_path / "store")] == kept
    assert "numbers of episodes differ" in caplog.text


def test_episodes_that_only_the_metadata_counts_are_named(tmp_path: Path) -> None:
    def more(frames: Any, episodes: Any, info: dict[str, Any]) -> None:
        info["total_episodes"] = 8

    write(tmp_path / "set", [2] * 5, change=more)
    done = convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert (done.written, list(done.problems)) == (5, ["episodes 5 to 7"])


def test_hidden_files_beside_the_data_are_no_data(tmp_path: Path) -> None:
    write(tmp_path / "set", [2, 2])
    for name in ("data/chunk-000/._file-000.parquet", "meta/episodes/chunk-000/._file-000.parquet", "data/.DS_Store"):
        (tmp_path / "set" / name).write_bytes(b"\x00\x05\x16\x07")
    done = convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
    assert (done.written, done.problems) == (2, {})


@pytest.mark.parametrize("name", ODD)
def test_odd_names_of_folders_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    for decoy in ("lr=1", "ab", "runs", "x0", "x1"):
        write(tmp_path / decoy, [1, 1, 1])
    write(tmp_path / name, [2, 2])
    assert convert_from(tmp_path / name, tmp_path / "store", "lerobot").written == 2
    assert [len(states) for states in states_of(tmp_path / "store")] == [2, 2]


def test_frames_a_second_may_be_a_column_with_one_value(tmp_path: Path) -> None:
    """As ``VectorSteps.add(forward_inputs={"fps": ...})`` records them."""

    def block(rates: torch.Tensor) -> Trajectory:
        ones = torch.ones(4, 1, 1)
        return Trajectory(rewards=ones, actions=ones, curr_obs={"states": ones}, forward_inputs={"fps": rates})

    steady, uneven = torch.full((4, 1, 1), 50.0), torch.tensor([50.0, 50.0, 25.0, 50.0]).reshape(4, 1, 1)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([block(steady), block(uneven)])
    done = convert_to(tmp_path / "store", tmp_path / "set", "lerobot")
    assert done.written == 1
    assert [*done.problems.values()] == ["forward_inputs.fps: must be one number for the whole episode"]
    assert "forward_inputs" not in done.lost
    assert json.loads((tmp_path / "set/meta/info.json").read_text())["fps"] == 50
