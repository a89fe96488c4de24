"""LeRobot's data sets of version 3 (``lerobot``): Parquet files, with images as PNG or videos. Does not import LeRobot.

Images are written as PNG in the Parquet files; videos are read with PyAV.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.errors import CorruptStoreError, InvalidTrajectoryError, StoreNotFoundError, listed
from trajstore.interop.formats import (
    Format,
    Item,
    Source,
    Writer,
    append_durably,
    damaged,
    files_below,
    logger,
    optional,
    pyarrow_modules,
    unreadable,
)
from trajstore.query.engine import pl
from trajstore.trajectory import Trajectory, get_model_weights_id

_UNKNOWN_WEIGHTS = get_model_weights_id(torch.zeros(1))
"""``model_weights_id`` of steps without versions, as of :class:`trajstore.EmbodiedRolloutResult`."""

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

_BY_STEP = "trajstore/task_by_step"
"""Column of an episode: its tasks are a list, even if all are equal."""

_CHUNK = 1000
"""Files in a chunk."""


# -- writing ------------------------------------------------------------------------------------------


class _Writer(Writer):
    """Writes a data set; what ``meta`` is made of is collected until the end."""

    def __init__(self, path: Path) -> None:
        pyarrow_modules()  # a missing package is reported before anything is written
        self._path = path
        self._files = self._episodes = self._frames = 0
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, list[dict[str, Any]]] = {}
        self._fps = _FPS
        self._first: dict[str, Any] = {"features": {}, "scalars": [], "states": False}
        """Features of the first episode, which all others must have."""
        self._begun = False
        for folder in ("data", "meta/episodes"):
            (path / folder).mkdir(parents=True)

    def encode(self, trajectory: Trajectory, facts: Mapping[str, Any]) -> dict[str, Any]:
        seen = dict(trajectory.curr_obs)
        task = seen.pop("task", "")
        if not seen or trajectory.actions is None:
            raise InvalidTrajectoryError("has no curr_obs or no actions, which this format needs")
        values = {"action": _array("actions", trajectory.actions)}
        steps = len(values["action"])
        tasks = [task] * steps if isinstance(task, str) else task
        if not (isinstance(tasks, list) and len(tasks) == steps and all(isinstance(text, str) for text in tasks)):
            raise InvalidTrajectoryError(f"curr_obs.task: {task!r}, must be a text, or one for each of {steps} steps")
        renamed = "states" in seen and "state" not in seen
        for name, value in _leaves(seen):
            feature = f"observation.{'state' if renamed and name == 'states' else name}"
            if feature in values or "/" in feature:
                why = "is in two observations" if feature in values else "has a slash, which LeRobot refuses"
                raise InvalidTrajectoryError(f"curr_obs.{name}: the feature's name {feature!r} {why}; rename it")
            values[feature] = _array(f"curr_obs.{name}", value)
        for feature, name in _FLAGS.items():
            if (flags := getattr(trajectory, name)) is not None and not bool(flags.isnan().all()):
                values[feature] = _array(name, flags)[-steps:]
        features = {name: _feature(value) for name, value in values.items()}
        shapes = {"features": features, "scalars": [name for name, value in values.items() if value.ndim == 1]}
        given = trajectory.forward_inputs.get("fps")
        fps = _FPS if given is None else _frame_rate(given) or _FPS
        if not self._begun:
            if given is None:
                logger.warning("convert: no forward_inputs.fps: time stamps are of %g frames a second", _FPS)
            self._first, self._fps, self._begun = shapes | {"states": renamed}, fps, True
        elif self._first != shapes | {"states": self._first["states"]} or fps != self._fps:
            raise InvalidTrajectoryError("its features or frames a second differ from those of the first episode")
        columns = {
            name: value if (images := _channels_last(value)) is None else [_png(image) for image in images]
            for name, value in values.items()
        }
        return {"tasks": tasks, "by_step": tasks is task, "columns": columns, "stats": _statistics(values)}

    def append(self, encoded: Sequence[dict[str, Any]]) -> None:
        lengths = [len(item["tasks"]) for item in encoded]
        frames = np.concatenate([np.arange(length) for length in lengths])
        numbers = np.arange(self._episodes, self._episodes + len(encoded))
        data = {
            **{name: _joined(name, [item["columns"][name] for item in encoded]) for name in self._first["features"]},
            "timestamp": (frames / self._fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.repeat(numbers, lengths),
            "index": self._frames + np.arange(len(frames)),
            "task_index": [
                self._tasks.setdefault(text, len(self._tasks)) for item in encoded for text in item["tasks"]
            ],
        }
        chunk = divmod(self._files, _CHUNK)
        ends = [self._frames + end for end in accumulate(lengths)]
        episodes = {
            "episode_index": numbers,
            "tasks": [list(dict.fromkeys(item["tasks"])) for item in encoded],
            "length": lengths,
            "dataset_from_index": [end - length for end, length in zip(ends, lengths, strict=True)],
            "dataset_to_index": ends,
            _BY_STEP: [item["by_step"] for item in encoded],
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
        for name, stats in ((name, stats) for item in encoded for name, stats in item["stats"].items()):
            self._stats.setdefault(name, []).append(stats)
        self._files += 1
        self._episodes += len(encoded)
        self._frames += len(frames)

    def finish(self) -> None:
        meta = self._path / "meta"
        own = {
            name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None} for name in _OWN
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps == int(self._fps) else self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": None,
            "features": {**self._first["features"], **own},
            "trajstore": {name: self._first[name] for name in ("states", "scalars")},
        }
        append_durably(meta / "info.json", [orjson.dumps(info, option=orjson.OPT_INDENT_2)])
        stats = {name: _summary(episodes) for name, episodes in self._stats.items()}
        append_durably(meta / "stats.json", [json.dumps(stats, indent=2).encode()])  # NaN stays, as LeRobot writes it
        part, (arrow, parquet) = BytesIO(), pyarrow_modules()
        texts = arrow.array([*self._tasks], arrow.string())
        tasks = arrow.table({"task_index": range(len(self._tasks)), "task": texts})
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


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their dotted names."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{path}{name}.")
        else:
            yield f"{path}{name}", item


def _array(name: str, value: Any) -> Any:
    """Return a tensor ``[rows, 1, ...]`` of one environment as an array ``[rows, ...]``.

    Raises:
        InvalidTrajectoryError: it is no tensor with rows, or of a type that these files lack; names it.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        raise InvalidTrajectoryError(f"{name}: has no numbers for each step; texts have a place in curr_obs.task alone")
    if value.dtype == torch.bfloat16 or value.is_complex():
        raise InvalidTrajectoryError(f"{name}: files of this format have no type {str(value.dtype)[6:]}; use float32")
    return value[:, 0].numpy()


def _frame_rate(value: Any) -> float:
    """Return frames a second that are given as one number, or as the same one for each step.

    Raises:
        InvalidTrajectoryError: they are not.
    """
    try:
        (rate,) = set(np.asarray(value, np.float64).reshape(-1).tolist())
    except (TypeError, ValueError) as error:
        raise InvalidTrajectoryError("forward_inputs.fps: must be one number for the whole episode") from error
    return float(rate)


def _channels_last(value: Any) -> Any:
    """Return images as ``[rows, height, width, channels]``; None for other values.

    Images are ``uint8`` with 1, 3 or 4 channels, last or else first.
    """
    if value.dtype != np.uint8 or value.ndim != 4 or not value.size:
        return None
    return next((np.moveaxis(value, at, -1) for at in (-1, 1) if value.shape[at] in (1, 3, 4)), None)


def _feature(value: Any) -> dict[str, Any]:
    dtype, names, images = str(value.dtype), None, _channels_last(value)
    if images is not None:
        dtype = "image"
        names = ["height", "width", "channels"]
        names = names if images.shape == value.shape else [names[-1], *names[:2]]
    return {"dtype": dtype, "shape": list(value.shape[1:]) or [1], "names": names}


def _png(frame: Any) -> dict[str, Any]:
    image = BytesIO()
    optional("PIL.Image", "pillow").fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame).save(image, "PNG")
    return {"bytes": image.getvalue(), "path": None}


def _joined(name: str, parts: Sequence[Any]) -> Any:
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
        if (images := _channels_last(value)) is not None:
            rows = images.reshape(-1, images.shape[-1]) / 255
        stats[name] = {"count": len(value), "weight": len(rows), "min": rows.min(0), "max": rows.max(0)}
        stats[name] |= {"sum": rows.sum(0), "squares": (rows**2).sum(0)}
    return stats


def _summary(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a feature in all episodes, of which each has :func:`_statistics`."""
    count, weight, sums, squares = (
        sum(episode[name] for episode in episodes) for name in ("count", "weight", "sum", "squares")
    )
    mean = sums / weight
    values = {name: extreme([episode[name] for episode in episodes], 0) for name, extreme in _EXTREMES.items()}
    values |= {"mean": mean, "std": np.sqrt(np.maximum(squares / weight - mean**2, 0))}
    shape = (-1,) if weight == count else (-1, 1, 1)  # of images, a number for each channel
    return {key: value.reshape(shape).tolist() for key, value in values.items()} | {"count": [count]}


_EXTREMES: Mapping[str, Any] = {"min": np.min, "max": np.max}


# -- reading ------------------------------------------------------------------------------------------


def _read(path: Path) -> Source:
    meta = path / "meta"
    if not (meta / "info.json").is_file():
        raise StoreNotFoundError(f"{path}: has no meta/info.json: it is no data set of LeRobot")
    with unreadable(f"{meta}: is no metadata of LeRobot", StopIteration, pl.exceptions.PolarsError):
        info = orjson.loads((meta / "info.json").read_bytes())
        version, count = info["codebase_version"], int(info["total_episodes"])
        if not version.startswith("v3"):
            raise CorruptStoreError(f"{path}: is of version {version}; convert it to v3.0 with LeRobot first")
        tables = [pl.read_parquet(file, glob=False) for file in files_below(meta / "episodes", "parquet")]
        table = (
            pl.concat(tables, how="diagonal_relaxed")
            if tables
            else pl.DataFrame(schema={"episode_index": pl.Int64, "length": pl.Int64})
        )
        rows = {row["episode_index"]: row for row in table.select(pl.exclude("^stats/.*$")).to_dicts()}
        tasks = pl.read_parquet(meta / "tasks.parquet", glob=False)
        texts = dict(zip(tasks["task_index"], tasks[next(n for n in tasks.columns if n != "task_index")], strict=True))
        features = {name: _known(path, name, feature) for name, feature in info["features"].items()}
        info["features"] = {name: feature for name, feature in features.items() if feature and name not in _OWN}
        folder = path / Path(info["data_path"]).parts[0]
        counts = {"meta/info.json": (count, info.get("total_frames"))}
        counts["meta/episodes"] = (len(table), int(table["length"].sum()))
    files: dict[int, list[Path]] = {}
    failed, total = [], 0

    @lru_cache(maxsize=2)
    def numbers_in(file: Path) -> Any:
        return pl.read_parquet(file, columns=["episode_index"], glob=False)["episode_index"].to_numpy()

    for file in files_below(folder, "parquet"):
        try:
            found, many = np.unique(numbers_in(file), return_counts=True)
            for number in found.tolist():
                files.setdefault(number, []).append(file)
            total += int(many.sum())
        except (OSError, pl.exceptions.PolarsError) as error:
            failed.append(f"{file.relative_to(path)}: {error}")
    counts[folder.name] = (len(files), total)
    if len(set(counts.values())) > 1:
        each = [f"{place} {episodes:,} with {frames} frames" for place, (episodes, frames) in counts.items()]
        logger.warning("%s: numbers of episodes differ: %s", path, "; ".join(each))
    also = f"; unreadable: {listed(failed)}" if failed else ""

    @unreadable(f"is no episode of LeRobot{also}", pl.exceptions.PolarsError)
    def episode(number: int) -> Trajectory:
        if number not in rows:
            raise CorruptStoreError(f"is in {folder.name}/, but not in meta/episodes")
        parts = [_frames(file, numbers_in(file), number) for file in files.get(number, [])]
        frames = pl.concat(parts).sort("frame_index")
        if frames["frame_index"].to_list() != list(range(rows[number]["length"])):
            raise CorruptStoreError(
                f"has {len(frames)} frames, must have those from 0 to {rows[number]['length'] - 1}, once each"
            )
        values = {
            name: _values(path, info, name, feature, rows[number], frames) for name, feature in info["features"].items()
        }
        if unknown := set(frames["task_index"]) - texts.keys():
            raise CorruptStoreError(f"task_index: {unknown} is not in meta/tasks.parquet")
        tasks = [texts[task] for task in frames["task_index"]]
        return _trajectory(info, values, tasks, bool(rows[number].get(_BY_STEP)))

    return _numbered({*rows, *files}, count, episode)


def _numbered(known: Iterable[int], count: int, load: Callable[[int], Trajectory]) -> Source:
    """Return episodes that have numbers; numbers without an episode are damaged items.

    Args:
        known: numbers of the episodes.
        count: how many the data set's own metadata counts.
        load: returns an episode by its number.
    """
    numbers = sorted(known)
    end = max(count, numbers[-1] + 1 if numbers else 0)

    def items() -> Iterator[Item]:
        begin = 0
        for number in [*numbers, end]:
            if number > begin:
                key = f"episode {begin}" if number == begin + 1 else f"episodes {begin} to {number - 1}"
                yield damaged(key, "missing, though the metadata or the numbers of the others count it", number)
            if number < end:
                yield Item(f"episode {number}", lambda number=number: load(number), number + 1)  # type: ignore[misc]
            begin = number + 1

    return Source(items(), end)


def _frames(file: Path, numbers: Any, number: int) -> Any:
    """Return the rows of an episode in a file, whose rows are of these episodes."""
    at = np.flatnonzero(numbers == number)
    rows = pl.scan_parquet(file, glob=False).slice(int(at[0]), int(at[-1] - at[0]) + 1).collect()
    return rows if len(rows) == len(at) else rows[(at - at[0]).tolist()]


def _known(path: Path, name: str, feature: dict[str, Any]) -> dict[str, Any] | None:
    """Return a feature; None with a warning if it has an unknown type."""
    kind = feature["dtype"]
    if kind in ("image", "video", "string") or kind in np.sctypeDict:
        return feature
    logger.warning(
        "%s: the feature %s of type %s is left out; it is not numbers, texts, images or video", path, name, kind
    )
    return None


def _trajectory(info: Mapping[str, Any], values: Mapping[str, Any], tasks: Sequence[str], by_step: bool) -> Trajectory:
    """Return the episode with these values of features and tasks of frames."""
    seen: dict[str, Any] = {}
    inputs: dict[str, Any] = {"fps": torch.tensor(float(info["fps"]), dtype=torch.float64)}
    fields: dict[str, Any] = {}
    own = info.get("trajstore", {})
    for name, value in values.items():
        if not isinstance(value, list):
            value = torch.from_numpy(value)[:, None]
            value = value[..., 0] if name in own.get("scalars", ()) else value
        if name == "action":
            fields["actions"] = value
        elif name in _FLAGS:
            fields[_FLAGS[name]] = value[..., None] if value.dim() == 2 else value
        elif name.startswith("observation."):
            key = name.removeprefix("observation.")
            *outer, last = ["states"] if key == "state" and own.get("states") else key.split(".")
            inner = seen
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = value
        else:
            inputs[name] = value
    fields.setdefault("rewards", torch.full((len(tasks), 1, 1), torch.nan))  # unknown
    if not own and not fields.keys() & {"dones", "terminations", "truncations"}:  # a recording, ended somehow
        fields["dones"] = torch.arange(1, len(tasks) + 1)[:, None, None] == len(tasks)
    task = tasks[0] if len(set(tasks)) == 1 and not by_step else tasks
    return Trajectory(
        model_weights_id=_UNKNOWN_WEIGHTS,
        curr_obs=seen | ({"task": task} if task else {}),
        forward_inputs=inputs,
        **fields,
    )


def _values(
    path: Path, info: Mapping[str, Any], name: str, feature: Mapping[str, Any], row: Mapping[str, Any], frames: Any
) -> Any:
    """Return the values of a feature, ``[frames, ...]``; a list of texts."""
    if feature["dtype"] == "video":
        numbers = {part: row[f"videos/{name}/{part}_index"] for part in ("chunk", "file")}
        place = info["video_path"].format(video_key=name, chunk_index=numbers["chunk"], file_index=numbers["file"])
        fps = float(info["fps"])
        times = (
            frames["timestamp"].to_numpy().astype(np.float64) if "timestamp" in frames else np.arange(len(frames)) / fps
        )
        images = _video(path / place, row[f"videos/{name}/from_timestamp"] + times, fps)
    elif feature["dtype"] == "image":
        images = np.stack([_picture(name, picture) for picture in frames[name]])
    else:
        images = None
    if images is not None:
        names = feature.get("names") or [""]
        return _images_as(name, images, feature["shape"], str(names[0]).startswith("channel"))
    values = frames[name].to_list()
    if feature["dtype"] == "string":
        return values
    value, shape = np.array(values, feature["dtype"]), (len(frames), *feature["shape"])
    if value.shape != shape and (value.shape, shape[1:]) != (shape[:1], (1,)):
        raise CorruptStoreError(f"{name}: rows of shape {list(value.shape[1:])}, info.json declares {feature['shape']}")
    return value.reshape(shape)  # one number as [1]


def _images_as(name: str, images: Any, shape: Sequence[int], first: bool = False) -> Any:
    """Return decoded images with the axes of a declared shape.

    Args:
        name: of the values, for errors.
        images: ``[rows, height, width, channels]``.
        shape: ``[height, width, channels]``, ``[channels, height, width]``, or ``[height, width]`` of gray ones.
            One channel may be declared where three have equal values, as in videos of gray images.
        first: channels are first if both orders fit.

    Raises:
        CorruptStoreError: the images have another size or number of channels.
    """
    last, wanted = images, tuple(shape)
    if 1 in (wanted[0], wanted[-1]) or len(wanted) == 2:
        last = images[..., :1] if bool((images == images[..., :1]).all()) else images
    orders = [last, np.moveaxis(last, -1, 1)]
    for found in [*(reversed(orders) if first else orders), last[..., 0]]:
        if found.shape[1:] == wanted:
            return np.ascontiguousarray(found)
    height, width, channels = images.shape[1:]
    raise CorruptStoreError(f"{name}: images of {height} x {width} and {channels} channels; declared: {list(shape)}")


def _picture(name: str, picture: Mapping[str, Any]) -> Any:
    """Return the pixels of an image, ``[height, width, channels]``."""
    if not picture["bytes"]:
        raise CorruptStoreError(f"{name}: the image {picture['path']} is not in the Parquet file")
    image = optional("PIL.Image", "pillow").open(BytesIO(picture["bytes"]))
    if image.mode in ("P", "1", "CMYK", "YCbCr", "PA"):
        raise CorruptStoreError(f"{name}: has an image of mode {image.mode}, must be gray, RGB or RGBA")
    pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _video(path: Path, times: Any, fps: float) -> Any:
    """Return the frames at these times in seconds, ``[times, height, width, 3]``."""
    av = optional("av", "av")
    frames: list[Any] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        if str(stream.codec_context.pix_fmt).startswith("gray1"):
            raise CorruptStoreError(f"{path}: has pixels of {stream.codec_context.pix_fmt}, must have 8 bits a channel")
        container.seek(int(times[0] / stream.time_base), stream=stream)
        before = None
        for frame in chain(container.decode(stream), [None]):
            while before is not None and len(frames) < len(times):
                away = abs(before.time - times[len(frames)])
                if frame is not None and abs(frame.time - times[len(frames)]) < away:
                    break
                if away >= 0.5 / fps:
                    raise CorruptStoreError(
                        f"{path}: has no frame at {times[len(frames)]:.3f} s, only {away:.3f} s off"
                    )
                frames.append(before.to_ndarray(format="rgb24"))
            if len(frames) == len(times):
                return np.stack(frames)
            before = frame
    raise CorruptStoreError(f"{path}: has no frames")


FORMATS = (
    Format(
        "lerobot",
        "episodes",
        (
            *("max_episode_length", "model_weights_id", "intervene_flags", "prev_logprobs", "prev_values", "versions"),
            *("next_obs", "forward_inputs", "late values"),
        ),
        ("robot_type", "splits", "names of features", "subtasks", "time stamps that are not frame_index / fps"),
        lambda path, _: _Writer(path),
        _read,
        carries=("forward_inputs.fps",),
    ),
)
