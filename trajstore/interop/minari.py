"""Minari's data sets (``minari``): episodes of Gymnasium environments, with T + 1 observations. Does not import Minari.

They are written as Parquet files, one folder for each episode; data sets of Parquet, Arrow and HDF5 files are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore._core.columns.fields import DICT_FIELDS, nest, unnest
from trajstore._core.columns.values import document_of, leaves_of
from trajstore.errors import ConfigurationError, CorruptStoreError, InvalidTrajectoryError, StoreNotFoundError
from trajstore.interop.episodes import UNKNOWN_WEIGHTS, arrays_of, images_as, leaves
from trajstore.interop.formats import (
    Format,
    Source,
    Writer,
    append_durably,
    files_below,
    numbered,
    optional,
    pyarrow_modules,
    unreadable,
    warn_if_counts_differ,
)
from trajstore.query.engine import pl
from trajstore.trajectory import Trajectory

_STATES = "states"
"""Key of observations that are arrays, as in ``trajstore.interop.gymnasium``."""

_ACTIONS = "actions"
"""Key of actions that are dicts or texts, in ``forward_inputs``."""

_PADDED = "trajstore_padded"
"""Metadata of an episode: names of infos without a value after the last step."""

_FIXED = "trajstore_values"
"""Metadata of an episode: its values without a row for each step, as JSON text."""

_JPEG = np.array([0xFF, 0xD8], np.uint8)
"""First bytes of a JPEG image."""

_NEEDED = ("rewards", "terminations", "truncations")


# -- writing ------------------------------------------------------------------------------------------


def _joined(before: Any, after: Any, name: str) -> Any:
    """Return T + 1 observations: those before each step and the last one after.

    Raises:
        InvalidTrajectoryError: the observation after a step is not the one before the next.
    """
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return {key: _joined(item, after[key], f"{name}.{key}".lstrip(".")) for key, item in before.items()}
    if isinstance(before, list) and isinstance(after, list):
        same, joined = before[1:] == after[:-1], [*before, *after[-1:]]
        return joined if same else _break(name)
    if isinstance(before, dict | list) or isinstance(after, dict | list) or before.shape != after.shape:
        raise InvalidTrajectoryError(f"curr_obs and next_obs differ in {name or 'their keys'}")
    same = np.array_equal(before[1:], after[:-1], equal_nan=before.dtype.kind == "f")
    return np.concatenate([before, after[-1:]]) if same else _break(name)


def _break(name: str) -> Any:
    raise InvalidTrajectoryError(f"next_obs.{name} of a step is not curr_obs.{name} of the step after it")


def _space(value: Any) -> dict[str, Any]:
    """Return a space that has these values, as Minari writes spaces."""
    if isinstance(value, dict):
        return {"type": "Dict", "subspaces": {key: _space(item) for key, item in value.items()}}
    if isinstance(value, list):
        return {"type": "Text", "max_length": 1 << 20, "min_length": 0, "charset": ""}
    kind, shape = value.dtype, value.shape[1:]
    if kind.kind == "b":
        return {"type": "MultiBinary", "n": list(shape)}
    bounds = np.iinfo(kind) if kind.kind in "iu" else np.finfo(kind)
    low, high = (np.full(shape, bound, kind).tolist() for bound in (bounds.min, bounds.max))
    return {"type": "Box", "dtype": str(kind), "shape": list(shape), "low": low, "high": high}


def _has_rows(value: Any, steps: int) -> bool:
    if isinstance(value, list):
        return len(value) in (steps, steps + 1) and all(isinstance(item, str) for item in value)
    return isinstance(value, torch.Tensor) and value.dim() >= 2


def _padded(value: Any, rows: int) -> Any:
    """Return an array or texts with zeros or empty texts appended up to a number of rows."""
    if isinstance(value, list):
        return [*value, *[""] * (rows - len(value))]
    return np.concatenate([value, np.zeros((rows - len(value), *value.shape[1:]), value.dtype)])


def _series(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return pl.DataFrame([_series(key, item) for key, item in value.items()]).to_struct(name)
    flat = value if isinstance(value, list) or value.ndim == 1 else value.reshape(len(value), -1)
    return pl.Series(name, flat)


class _Writer(Writer):
    """Writes a data set."""

    def __init__(self, path: Path) -> None:
        self._path, self._data = path, path / "data"
        self._episodes = self._steps = 0
        self._spaces: dict[str, Any] | None = None  # of the first episode
        self._data.mkdir(parents=True)

    def encode(self, trajectory: Trajectory, facts: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        for name in _NEEDED:
            if getattr(trajectory, name) is None:
                also = "; dones do not tell terminations from truncations" if name != "rewards" else ""
                raise InvalidTrajectoryError(f"has no {name}, which this format needs{also}")
        columns = {name: arrays_of(getattr(trajectory, name), name).reshape(-1) for name in _NEEDED}
        steps = len(columns["rewards"])
        given = unnest({name: getattr(trajectory, name) for name in DICT_FIELDS})
        plain = {name: value for name, value in given.items() if name in DICT_FIELDS or _has_rows(value, steps)}
        fixed = {name: value for name, value in given.items() if name not in plain}
        trajectory = replace(trajectory, **({name: {} for name in DICT_FIELDS} | nest(plain)))
        if not trajectory.curr_obs or not trajectory.next_obs:
            raise InvalidTrajectoryError("has no curr_obs and next_obs, which this format needs")
        inputs = arrays_of(trajectory.forward_inputs, "forward_inputs")
        actions = inputs.pop(_ACTIONS, None) if trajectory.actions is None else arrays_of(trajectory.actions, "actions")
        if actions is None:
            raise InvalidTrajectoryError("has no actions, which this format needs")
        before, after = arrays_of(trajectory.curr_obs, "curr_obs"), arrays_of(trajectory.next_obs, "next_obs")
        observations = _joined(before, after, "")
        if list(observations) == [_STATES]:
            observations = observations[_STATES]
        ended = columns["terminations"] | columns["truncations"]
        if not np.array_equal(arrays_of(trajectory.dones, "dones").reshape(-1)[-steps:], ended):
            raise InvalidTrajectoryError(
                "dones: differ from terminations or truncations, which are all this format has"
            )
        spaces = {"observation_space": _space(observations), "action_space": _space(actions)}
        if self._spaces is None:
            self._spaces = spaces
        elif spaces != self._spaces:
            raise InvalidTrajectoryError(
                "its observations or actions have other names, shapes or dtypes than the first"
            )
        values = {"observations": observations, "actions": actions, **columns, "infos": inputs}
        padded = [name for name, value in leaves(inputs, "/") if len(value) == steps]
        table = pl.DataFrame(
            [
                _series(name, _each(value, partial(_padded, rows=steps + 1)))
                for name, value in values.items()
                if not _is_empty(value)
            ]
        )
        part = BytesIO()
        arrow, parquet = pyarrow_modules()
        whole = table.to_arrow()
        kinds = [_with_shapes(field, values.get(field.name)) for field in whole.schema]
        # Minari takes an episode to be one batch
        parquet.write_table(whole.cast(arrow.schema(kinds)), part, row_group_size=steps + 1)
        metadata = {"total_steps": steps, _PADDED: padded}
        return part.getvalue(), metadata | ({_FIXED: orjson.dumps(document_of(fixed)).decode()} if fixed else {})

    def append(self, encoded: Sequence[tuple[bytes, dict[str, Any]]]) -> None:
        for content, metadata in encoded:
            folder = self._data / str(self._episodes)
            folder.mkdir()
            append_durably(folder / "part-0.parquet", [content])
            append_durably(folder / "metadata.json", [orjson.dumps({"id": self._episodes, **metadata})])
            self._episodes += 1
            self._steps += metadata["total_steps"]

    def finish(self) -> None:
        spaces = self._spaces or {"observation_space": _space({}), "action_space": _space({})}
        size = sum(file.stat().st_size for file in self._data.rglob("*") if file.is_file())
        metadata = {
            **{name: orjson.dumps(space).decode() for name, space in spaces.items()},
            "data_format": "parquet",
            "jpeg_encoding": False,
            "total_episodes": self._episodes,
            "total_steps": self._steps,
            "dataset_size": size / 1e6,
            "dataset_id": self._path.name,
            "minari_version": "0.5.4",
        }
        append_durably(self._data / "metadata.json", [orjson.dumps(metadata)])


def _with_shapes(field: Any, value: Any) -> Any:
    """Return an Arrow field with the shapes of the rows of infos, which Minari keeps in its metadata."""
    if isinstance(value, dict):
        arrow, _ = pyarrow_modules()
        return field.with_type(arrow.struct([_with_shapes(inner, value[inner.name]) for inner in field.type]))
    shape = () if isinstance(value, list) or value is None else value.shape[1:]
    return field.with_metadata({"shape": ",".join(map(str, shape))}) if shape else field


def _is_empty(value: Any) -> bool:
    return not any(True for _ in leaves(value, "/"))


# -- reading ------------------------------------------------------------------------------------------


def _read(path: Path) -> Source:
    data = path / "data" if (path / "data").is_dir() else path
    if not (data / "metadata.json").is_file():
        raise StoreNotFoundError(f"{path}: has no data/metadata.json: it is no data set of Minari")
    with unreadable(f"{data / 'metadata.json'}: is no metadata of Minari"):
        metadata = json.loads((data / "metadata.json").read_bytes())  # has Infinity, which orjson refuses
        count, form = int(metadata["total_episodes"]), metadata.get("data_format", "hdf5")
        spaces = [json.loads(metadata.get(name) or "{}") for name in ("observation_space", "action_space")]
    if form not in ("hdf5", "arrow", "parquet"):
        raise ConfigurationError(f"{data}: data_format {form!r} is unknown")
    jpeg = bool(metadata.get("jpeg_encoding", True))
    steps, load = _hdf5(data / "main_data.hdf5") if form == "hdf5" else _tables(data, form)
    counts = {"data/metadata.json": (count, metadata.get("total_steps")), "data": (len(steps), sum(steps.values()))}
    warn_if_counts_differ(path, "steps", counts)

    @unreadable("is no episode of Minari", pl.exceptions.PolarsError)
    def episode(number: int) -> Trajectory:
        return _trajectory(*load(number), spaces[0], spaces[1], jpeg)

    return numbered(steps, count, episode)


Loaded = tuple[dict[str, Any], dict[str, Any]]
"""Nested columns and metadata of an episode."""

Episodes = tuple[dict[int, int], Callable[[int], Loaded]]
"""Number of steps by number of an episode, as its own metadata counts them, and a function that loads one."""


def _tables(data: Path, form: str) -> Episodes:
    def metadata_of(number: int) -> dict[str, Any]:
        with unreadable(f"{data / str(number)}: has no metadata of an episode"):
            metadata: dict[str, Any] = json.loads((data / str(number) / "metadata.json").read_bytes())
        return metadata

    def steps_of(number: int) -> int:
        try:
            return int(metadata_of(number)["total_steps"])
        except (CorruptStoreError, KeyError, TypeError, ValueError):
            return 0  # loading names it

    def load(number: int) -> Loaded:
        (arrow, parquet), folder = pyarrow_modules(), data / str(number)
        files = files_below(folder, form)
        if not files:
            raise CorruptStoreError(f"{folder}: has no {form} file")
        contents = [BytesIO(file.read_bytes()) for file in files]  # a path may be read as a pattern
        if form == "parquet":
            tables = [parquet.ParquetFile(content).read() for content in contents]
        else:
            tables = [arrow.ipc.open_file(content).read_all() for content in contents]
        whole = arrow.concat_tables(tables)
        columns = {field.name: _nested(pl.Series(whole[field.name]), field) for field in whole.schema}
        for name in ("actions", *_NEEDED):
            columns[name] = _each(columns[name], lambda value: value[:-1])
        return columns, metadata_of(number)

    numbers = [int(folder.name) for folder in data.iterdir() if folder.name.isdigit()]
    return {number: steps_of(number) for number in numbers}, load


def _nested(series: Any, field: Any) -> Any:
    """Return a column as arrays, nested like its structs; texts and bytes are lists.

    Args:
        series: the column.
        field: its Arrow field, with the shape of a row of infos in its metadata.
    """
    if series.dtype == pl.Struct:
        return {inner.name: _nested(series.struct.field(inner.name), inner) for inner in field.type}
    if series.dtype in (pl.String, pl.Binary):
        return series.to_list()
    values = np.stack(series.to_list()) if series.dtype == pl.List else np.array(series.to_numpy())
    shape = (field.metadata or {}).get(b"shape")
    return values.reshape(len(values), *map(int, shape.split(b","))) if shape else values


def _hdf5(path: Path) -> Episodes:
    h5py = optional("h5py", "h5py")

    def tree(node: Any) -> Any:
        if isinstance(node, h5py.Group):
            return {name.removeprefix("_index_"): tree(item) for name, item in node.items()}
        value = node[()]
        return [bytes(item) for item in value] if value.dtype == object else value

    def load(number: int) -> Loaded:
        with h5py.File(path) as file:
            group = file[f"episode_{number}"]
            return tree(group), dict(group.attrs)

    try:
        with h5py.File(path) as file:
            groups = {int(n): group for name, group in file.items() if (n := name.removeprefix("episode_")).isdigit()}
            return {number: int(group.attrs.get("total_steps", 0)) for number, group in groups.items()}, load
    except OSError as error:
        raise CorruptStoreError(f"{path}: is no HDF5 file of Minari: {error}") from error


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return {key: _each(item, change) for key, item in value.items()} if isinstance(value, dict) else change(value)


def _shaped(value: Any, space: Mapping[str, Any], jpeg: bool) -> Any:
    """Return columns with the shapes of a space, images decoded."""
    inner = space.get("subspaces")
    if isinstance(value, dict):
        named = dict(enumerate(inner)) if isinstance(inner, list) else inner or {}
        return {
            key: _shaped(item, {str(k): v for k, v in named.items()}.get(key, {}), jpeg) for key, item in value.items()
        }
    shape = space.get("shape")
    if space.get("type") == "MultiBinary":
        shape = [space["n"]] if isinstance(space["n"], int) else space["n"]
    elif space.get("type") == "MultiDiscrete":
        shape = np.shape(space["nvec"])
    encoded = jpeg and shape and len(shape) > 1 and not isinstance(value, list) and value.ndim == 2
    if encoded and value.dtype == np.uint8 and bool((value[:, :2] == _JPEG).all()):
        value = [bytes(item) for item in value]  # HDF5 has an array of bytes if all images have as many
    if isinstance(value, list):
        if space.get("type") == "Text" or not shape:
            return [item.decode() if isinstance(item, bytes) else item for item in value]
        pillow = optional("PIL.Image", "pillow")
        images = np.stack([np.asarray(pillow.open(BytesIO(item))) for item in value])
        return images_as("images", images if images.ndim == 4 else images[..., None], shape)
    if shape is None or value.shape[1:] == tuple(shape):
        return value
    if value.ndim > 2 or value.size != len(value) * prod(shape):
        raise ValueError(f"rows of shape {list(value.shape[1:])}, the space declares {shape}")
    return value.reshape(len(value), *shape)  # Parquet and Arrow have flat rows


def _tensors(value: Any, rows: slice) -> Any:
    """Return arrays ``[rows, ...]`` as tensors ``[rows, 1, ...]``; texts are lists."""

    def tensor(array: Any) -> Any:
        array = array[rows] if isinstance(array, list) else np.ascontiguousarray(array[rows])
        return array if isinstance(array, list) else torch.from_numpy(np.require(array, requirements="W"))[:, None]

    return _each(value, tensor)


def _trajectory(
    columns: dict[str, Any],
    metadata: Mapping[str, Any],
    space: Mapping[str, Any],
    action_space: Mapping[str, Any],
    jpeg: bool,
) -> Trajectory:
    steps = len(columns["rewards"])
    if (total := int(metadata.get("total_steps", steps))) != steps:
        raise ValueError(f"has {steps} steps, its metadata counts {total}")
    observations = _shaped(columns["observations"], space, jpeg)
    lengths = {len(value) for _, value in leaves(observations, "/")}
    if lengths != {steps + 1}:
        raise ValueError(f"{sorted(lengths)} observations for {steps} steps, must be {steps + 1}")
    columns |= {"observations": observations, "actions": _shaped(columns["actions"], action_space, jpeg)}
    columns |= {name: columns[name].astype(bool) for name in _NEEDED[1:]}
    infos = _tensors(columns.get("infos") or {}, slice(None))
    actions = _tensors(columns["actions"], slice(None))
    observations = observations if isinstance(observations, dict) else {_STATES: observations}
    by_step = {
        "curr_obs": _tensors(observations, slice(0, steps)),
        "next_obs": _tensors(observations, slice(1, None)),
        "forward_inputs": _cut(infos, set(metadata.get(_PADDED, ())), steps),
    }
    if isinstance(actions, dict | list):
        by_step["forward_inputs"] |= {_ACTIONS: actions}
        actions = None
    elif actions.dim() == 2:
        actions = actions[..., None]
    columns["dones"] = columns["terminations"] | columns["truncations"]
    return Trajectory(
        model_weights_id=UNKNOWN_WEIGHTS,
        actions=actions,
        **{name: _tensors(columns[name], slice(None))[..., None] for name in (*_NEEDED, "dones")},
        **nest(unnest(by_step) | leaves_of(json.loads(metadata.get(_FIXED, "{}")))),
    )


def _cut(value: Any, padded: set[str], steps: int, path: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _cut(item, padded, steps, f"{path}/{key}" if path else key) for key, item in value.items()}
    return value[:steps] if path in padded else value


FORMATS = (
    Format(
        "minari",
        "episodes",
        (
            *("max_episode_length", "model_weights_id", "intervene_flags", "prev_logprobs", "prev_values", "versions"),
            "late values",
        ),
        ("spaces", "env_spec", "seeds and options of episodes", "metadata of the data set"),
        _read,
        lambda path, _: _Writer(path),
    ),
)
