"""LeRobot's data sets of version 3 (``lerobot``): Parquet files, with images as PNG or videos. Does not import LeRobot.

Images are written as PNG in the Parquet files; videos are read with PyAV.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.errors import CorruptStoreError, InvalidTrajectoryError, MissingDependencyError, StoreNotFoundError
from trajstore.interop.episodes import UNKNOWN_WEIGHTS, arrays_of, leaves
from trajstore.interop.formats import FilesWriter, Format, Item, Source, append_durably
from trajstore.query.engine import polars
from trajstore.trajectory import Trajectory

logger = logging.getLogger(__name__)

_FPS = 30.0
"""Frames a second of episodes that do not have ``forward_inputs["fps"]``."""

_FLAGS = {
    "next.reward": "rewards",
    "next.done": "dones",
    "next.terminated": "terminations",
    "next.truncated": "truncations",
}
"""Features that are fields of a trajectory."""

_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Features that LeRobot numbers frames with."""

_FILE = "chunk-{:03d}/file-{:03d}.parquet"

_META = ("info.json", "stats.json", "tasks.parquet")
"""Files that complete a data set."""

_CHUNK = 1000
"""Files in a chunk."""


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "convert") from error
    return Image


def _pyarrow() -> Any:
    """Return the modules that write metadata for pandas into a Parquet file, which Polars does not."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "convert") from error
    return pyarrow, parquet


# -- writing ------------------------------------------------------------------------------------------


class _Writer(FilesWriter):
    """Writes a data set; the mark has what ``meta`` is made of."""

    def __init__(self, path: Path, mark: dict[str, Any] | None) -> None:
        _pyarrow()  # a missing package is reported before anything is written
        self._path = path
        new: dict[str, Any] = {
            "files": 0,
            "episodes": 0,
            "frames": 0,
            "tasks": [],
            "features": None,
            "fps": None,
            "stats": {},
        }
        self._mark = mark or new
        for folder in ("data", "meta/episodes"):
            (path / folder).mkdir(parents=True, exist_ok=True)
            for number, file in enumerate(sorted((path / folder).rglob("*.parquet"))):
                if number >= self._mark["files"]:
                    file.unlink()
        for name in _META:
            (path / "meta" / name).unlink(missing_ok=True)

    def encode(self, trajectory: Trajectory, facts: Mapping[str, Any]) -> dict[str, Any]:
        seen = dict(trajectory.curr_obs)
        task = seen.pop("task", "")
        if not isinstance(task, str):
            raise InvalidTrajectoryError(f"curr_obs.task: {task!r}, must be a text")
        if not seen or trajectory.actions is None:
            raise InvalidTrajectoryError("has no curr_obs or no actions, which this format needs")
        values = {"action": arrays_of(trajectory.actions, "actions")}
        for name, value in leaves(arrays_of(seen, "curr_obs"), "."):
            if isinstance(value, list):
                raise InvalidTrajectoryError(f"curr_obs.{name}: this format has no texts, except of curr_obs.task")
            values[f"observation.{'state' if name == 'states' else name}"] = value
        for feature, name in _FLAGS.items():
            if (flags := getattr(trajectory, name)) is not None and not bool(flags.isnan().all()):
                values[feature] = arrays_of(flags, name)[-len(values["action"]) :]
        features = {name: _feature(value) for name, value in values.items()}
        shapes = {"features": features, "scalars": [name for name, value in values.items() if value.ndim == 1]}
        fps = trajectory.forward_inputs.get("fps")
        fps = None if fps is None else float(fps)
        if self._mark["features"] is None:
            if fps is None:
                logger.warning(
                    "convert: %s: no forward_inputs.fps: time stamps are of %g frames a second", self._path, _FPS
                )
            self._mark |= {**shapes, "fps": fps or _FPS, "states": "states" in seen}
        elif {name: self._mark[name] for name in shapes} != shapes or (fps or _FPS) != self._mark["fps"]:
            raise InvalidTrajectoryError("its features or frames a second differ from those of the first episode")
        columns = {
            name: [_png(frame) for frame in value] if features[name]["dtype"] == "image" else value
            for name, value in values.items()
        }
        return {"task": task, "steps": len(values["action"]), "columns": columns, "stats": _statistics(values)}

    def append(self, encoded: Sequence[dict[str, Any]]) -> dict[str, Any]:
        pl, mark = polars(), self._mark
        mark["tasks"] += [task for task in dict.fromkeys(item["task"] for item in encoded) if task not in mark["tasks"]]
        lengths = [item["steps"] for item in encoded]
        frames = np.concatenate([np.arange(length) for length in lengths])
        numbers = np.arange(mark["episodes"], mark["episodes"] + len(encoded))
        tasks = np.array([mark["tasks"].index(item["task"]) for item in encoded])
        data = {
            **{name: _joined(name, [item["columns"][name] for item in encoded]) for name in mark["features"]},
            "timestamp": (frames / mark["fps"]).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.repeat(numbers, lengths),
            "index": mark["frames"] + np.arange(len(frames)),
            "task_index": np.repeat(tasks, lengths),
        }
        chunk = divmod(mark["files"], _CHUNK)
        ends = [mark["frames"] + end for end in accumulate(lengths)]
        episodes = {
            "episode_index": numbers,
            "tasks": [[item["task"]] for item in encoded],
            "length": lengths,
            "dataset_from_index": [end - length for end, length in zip(ends, lengths, strict=True)],
            "dataset_to_index": ends,
            **{
                f"{place}/{part}_index": [at] * len(encoded)
                for place in ("data", "meta/episodes")
                for part, at in zip(("chunk", "file"), chunk, strict=True)
            },
        }
        for folder, table in (("data", data), ("meta/episodes", episodes)):
            file = self._path / folder / _FILE.format(*chunk)
            file.parent.mkdir(exist_ok=True)
            part = BytesIO()
            pl.DataFrame(table).write_parquet(part)
            append_durably(file, [part.getbuffer()])
        for item in encoded:
            _add(mark["stats"], item["stats"])
        mark["files"] += 1
        mark["episodes"] += len(encoded)
        mark["frames"] += len(frames)
        return mark

    def finish(self) -> None:
        mark, meta = self._mark, self._path / "meta"
        own = {
            name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None} for name in _OWN
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": mark["episodes"],
            "total_frames": mark["frames"],
            "total_tasks": len(mark["tasks"]),
            "chunks_size": _CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(fps) if (fps := mark["fps"] or _FPS) == int(fps) else fps,
            "splits": {"train": f"0:{mark['episodes']}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": None,
            "features": {**(mark["features"] or {}), **own},
            "trajstore": {"states": mark.get("states", False), "scalars": mark.get("scalars", [])},
        }
        append_durably(meta / "info.json", [orjson.dumps(info, option=orjson.OPT_INDENT_2)])
        stats = {name: _summary(sums) for name, sums in mark["stats"].items()}
        append_durably(meta / "stats.json", [json.dumps(stats, indent=2).encode()])  # NaN stays, as LeRobot writes it
        part, (arrow, parquet) = BytesIO(), _pyarrow()
        tasks = arrow.table(
            {"task_index": range(len(mark["tasks"])), "task": arrow.array(mark["tasks"], arrow.string())}
        )
        parquet.write_table(tasks.replace_schema_metadata({"pandas": _PANDAS}), part)
        append_durably(meta / "tasks.parquet", [part.getbuffer()])


_PANDAS = orjson.dumps(
    {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
        ],
        "pandas_version": "2.2",
    }
).decode()
"""Says to pandas that the tasks are the index of ``tasks.parquet``, where LeRobot looks for them."""


def _feature(value: Any) -> dict[str, Any]:
    is_image = value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] in (1, 3, 4)
    names = ["height", "width", "channels"] if is_image else None
    return {"dtype": "image" if is_image else str(value.dtype), "shape": list(value.shape[1:]) or [1], "names": names}


def _png(frame: Any) -> dict[str, Any]:
    image = BytesIO()
    _pillow().fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame).save(image, "PNG")
    return {"bytes": image.getvalue(), "path": None}


def _joined(name: str, parts: Sequence[Any]) -> Any:
    pl = polars()
    if isinstance(parts[0], list):
        return pl.Series(
            name, [row for part in parts for row in part], pl.Struct({"bytes": pl.Binary, "path": pl.String})
        )
    value = np.concatenate(parts)
    return pl.Series(name, value.reshape(-1) if value.shape[1:] == (1,) else value)


def _statistics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return count, least, greatest, sum and sum of squares of each feature; of each channel for images, in [0, 1]."""
    stats = {}
    for name, value in values.items():
        rows = value.astype(np.float64).reshape(len(value), -1)
        if _feature(value)["dtype"] == "image":
            rows = rows.reshape(-1, value.shape[-1]) / 255
        parts = {"min": rows.min(0), "max": rows.max(0), "sum": rows.sum(0), "squares": (rows**2).sum(0)}
        stats[name] = {"count": len(value), "weight": len(rows)} | {key: part.tolist() for key, part in parts.items()}
    return stats


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, part in more.items():
        if (sums := total.get(name)) is None:
            total[name] = part
            continue
        for key, least_or_most in (("min", np.minimum), ("max", np.maximum), ("sum", np.add), ("squares", np.add)):
            sums[key] = least_or_most(sums[key], part[key]).tolist()
        sums["count"] += part["count"]
        sums["weight"] += part["weight"]


def _summary(sums: Mapping[str, Any]) -> dict[str, Any]:
    mean = np.array(sums["sum"]) / sums["weight"]
    deviation = np.sqrt(np.maximum(np.array(sums["squares"]) / sums["weight"] - mean**2, 0))
    values = {"min": sums["min"], "max": sums["max"], "mean": mean.tolist(), "std": deviation.tolist()}
    is_image = sums["weight"] != sums["count"]
    return {key: [[[x]] for x in value] if is_image else value for key, value in values.items()} | {
        "count": [sums["count"]]
    }


# -- reading ------------------------------------------------------------------------------------------


def _read(path: Path) -> Source:
    pl = polars()
    if not (path / "meta" / "info.json").is_file():
        raise StoreNotFoundError(f"{path}: has no meta/info.json: it is no data set of LeRobot")
    try:
        info = orjson.loads((path / "meta" / "info.json").read_bytes())
        version, count = info["codebase_version"], int(info["total_episodes"])
        files = sorted((path / "meta" / "episodes").rglob("*.parquet"))
        if not version.startswith("v3"):
            raise CorruptStoreError(f"{path}: is of version {version}; convert it to v3.0 with LeRobot first")
        table = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed") if files else None
        names = [] if table is None else [name for name in table.columns if not name.startswith("stats/")]
        rows = [] if table is None else table.select(names).sort("episode_index").to_dicts()
        tasks = pl.read_parquet(path / "meta" / "tasks.parquet")
        texts = dict(zip(tasks["task_index"], tasks[next(n for n in tasks.columns if n != "task_index")], strict=True))
        firsts: dict[Any, int] = {}
        for row in rows:
            firsts.setdefault((row["data/chunk_index"], row["data/file_index"]), row["dataset_from_index"])
    except (ValueError, KeyError, TypeError, StopIteration, OSError, pl.exceptions.PolarsError) as error:
        raise CorruptStoreError(f"{path / 'meta'}: is no metadata of LeRobot: {error!r}") from error

    def episode(row: Mapping[str, Any]) -> Trajectory:
        try:
            start = row["dataset_from_index"] - firsts[row["data/chunk_index"], row["data/file_index"]]
            place = info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            frames = pl.scan_parquet(path / place).slice(start, row["length"]).collect()
            if set(frames["episode_index"]) != {row["episode_index"]} or len(frames) != row["length"]:
                raise CorruptStoreError(f"{place}: its frames are not those of the episode")
            return _trajectory(path, info, texts, row, frames)
        except (KeyError, ValueError, TypeError, IndexError, pl.exceptions.PolarsError) as error:
            raise CorruptStoreError(f"is no episode of LeRobot: {error!r}") from error

    def items() -> Iterator[Item]:
        for row in rows:
            number = row["episode_index"]
            yield Item(f"episode {number}", lambda row=row: episode(row), number + 1)  # type: ignore[misc]

    return Source(items(), count)


def _trajectory(
    path: Path, info: Mapping[str, Any], texts: Mapping[int, str], row: Mapping[str, Any], frames: Any
) -> Trajectory:
    seen: dict[str, Any] = {}
    inputs: dict[str, Any] = {"fps": torch.tensor(float(info["fps"]), dtype=torch.float64)}
    fields: dict[str, Any] = {}
    for name, feature in info["features"].items():
        if name in _OWN:
            continue
        value = torch.from_numpy(_values(path, info, name, feature, row, frames))[:, None]
        if name in info.get("trajstore", {}).get("scalars", ()):
            value = value[..., 0]
        if name == "action":
            fields["actions"] = value
        elif name in _FLAGS:
            fields[_FLAGS[name]] = value.reshape(len(value), 1, -1)
        elif name.startswith("observation."):
            key = name.removeprefix("observation.")
            *outer, last = ["states"] if key == "state" and info.get("trajstore", {}).get("states") else key.split(".")
            inner = seen
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = value
        else:
            inputs[name] = value
    fields.setdefault("rewards", torch.full((len(frames), 1, 1), torch.nan))  # unknown
    task = texts[frames["task_index"][0]]
    return Trajectory(
        model_weights_id=UNKNOWN_WEIGHTS,
        curr_obs=seen | ({"task": task} if task else {}),
        forward_inputs=inputs,
        **fields,
    )


def _values(
    path: Path, info: Mapping[str, Any], name: str, feature: Mapping[str, Any], row: Mapping[str, Any], frames: Any
) -> Any:
    """Return the values of a feature, ``[frames, ...]``."""
    shape = (len(frames), *feature["shape"])
    if feature["dtype"] == "video":
        numbers = {part: row[f"videos/{name}/{part}_index"] for part in ("chunk", "file")}
        place = info["video_path"].format(video_key=name, chunk_index=numbers["chunk"], file_index=numbers["file"])
        return _video(path / place, row[f"videos/{name}/from_timestamp"], len(frames), float(info["fps"]))
    if feature["dtype"] == "image":
        pictures = [_pillow().open(BytesIO(picture["bytes"])) for picture in frames[name]]
        return np.stack([np.array(picture) for picture in pictures]).reshape(shape)
    return np.array(frames[name].to_list(), feature["dtype"]).reshape(shape)


def _video(path: Path, start: float, count: int, fps: float) -> Any:
    """Return the frames of an episode, ``[count, height, width, 3]``."""
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("av", "convert") from error
    frames: list[Any] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(int(start / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time >= start - 0.5 / fps:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == count:
                return np.stack(frames)
    raise CorruptStoreError(f"{path}: has {len(frames)} frames of the episode, must be {count}")


FORMATS = (
    Format(
        "lerobot",
        "episodes",
        (
            *("max_episode_length", "model_weights_id", "intervene_flags", "prev_logprobs", "prev_values", "versions"),
            *("next_obs", "forward_inputs", "late values"),
        ),
        ("robot_type", "splits", "names of features", "subtasks", "time stamps that are not frame_index / fps"),
        _read,
        lambda path, mark, _: _Writer(path, mark),
    ),
)
