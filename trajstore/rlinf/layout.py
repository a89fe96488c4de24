"""RLinf's directories: their index and metadata, and trajectory files as columns. Pure; no I/O.

One file per trajectory, ``trajectory_{id}_{model_weights_id}.pt`` (or ``.pkl``): a dict of the trajectory's
fields, tensors ``[T, B, ...]``, nested dicts for observations; fields that are None are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson
import torch

from trajstore.errors import ConfigurationError, CorruptStoreError, InvalidTrajectoryError
from trajstore.fields import DICT_FIELDS, TENSOR_FIELDS, axis_of, join_name, nest, walk
from trajstore.formats.base import EncodedFile
from trajstore.formats.torch_zip import TensorPlace, TensorSlot, write_torch_zip
from trajstore.record import Record, raw_bytes, trajectory_of
from trajstore.schema import DOCUMENT, ColumnSpec, Extent, Schema, dtypes
from trajstore.storage import check_name
from trajstore.trajectory import Trajectory

INDEX_NAMES = ("trajectory_index.json", "trajector_index.json")
"""The index, and how early versions of RLinf misspelt it."""

METADATA_NAME = "metadata.json"
SUFFIXES = ("pt", "pkl")

TRAJECTORY_CLASSES: Mapping[tuple[str, str], Any] = {
    ("rlinf.data.schema.embodied_types", "Trajectory"): Trajectory,
    ("rlinf.data.embodied_io_struct", "Trajectory"): Trajectory,
}
"""RLinf's class, by the modules in which it has lived, and what stands in for it."""


@dataclass(frozen=True, slots=True)
class RLinfEntry:
    """One trajectory as RLinf's index describes it. ``shape`` begins with T and B."""

    trajectory_id: int
    num_samples: int
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str

    def file_name(self, suffix: str) -> str:
        """Return the name of the trajectory's file.

        Raises:
            UnsafeContentError: ``model_weights_id`` would make it leave the directory.
        """
        return check_name(f"trajectory_{self.trajectory_id}_{self.model_weights_id}.{suffix}", one_part=True)


def parse_metadata(data: bytes, source: str) -> dict[str, Any]:
    """Return RLinf's ``metadata.json``: format, size, total_samples, trajectory_counter, seed.

    Raises:
        CorruptStoreError: it is not a JSON object, or a value is of the wrong kind.
    """
    value = _object(data, source)
    wanted = {"trajectory_format": str, "trajectory_counter": int, "seed": int}
    for key, kind in wanted.items():
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise CorruptStoreError(f"{source}: {key} is {value[key]!r}, must be {kind.__name__}")
    if value.get("trajectory_format", "pt") not in SUFFIXES:
        raise CorruptStoreError(f"{source}: trajectory_format {value['trajectory_format']!r} is not one of RLinf's")
    return value


def parse_index(data: bytes, source: str) -> list[RLinfEntry]:
    """Return the entries of RLinf's index in the order of its id list.

    Raises:
        CorruptStoreError: it is no index, or an entry is incomplete.
    """
    value = _object(data, source)
    try:
        entries = {int(key): item for key, item in value["trajectory_index"].items()}
        listed = [_entry(number, entries[int(number)]) for number in value["trajectory_id_list"]]
        if len({entry.trajectory_id for entry in listed}) < len(listed):
            raise ValueError("an id is listed twice")
        return listed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStoreError(f"{source}: not an index of RLinf ({error!r}); restore it from a copy") from error


def _entry(number: Any, item: Mapping[str, Any]) -> RLinfEntry:
    shape = tuple(int(n) for n in item["shape"])
    samples = int(item["num_samples"])
    if len(shape) < 2 or min(shape) < 0 or shape[0] * shape[1] != samples or int(number) < 0:
        raise ValueError(f"trajectory {number}: shape {list(shape)}, num_samples {samples}")
    return RLinfEntry(int(number), samples, shape, int(item["max_episode_length"]), str(item["model_weights_id"]))


def _object(data: bytes, source: str) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{source}: {error}; a crash may have torn it: restore it from a copy") from error
    if not isinstance(value, dict):
        raise CorruptStoreError(f"{source}: not a JSON object")
    return value


Leaf = TensorPlace | torch.Tensor


def columns_of_file(content: Any, source: str) -> tuple[Schema, Extent, list[Leaf]]:
    """Return columns, extent and, per column, where or what the tensor is, of one trajectory file.

    Tensors that do not begin with T (or T + E) and B, and leaves that are no tensors, are left out, as RLinf
    leaves them out when it samples.

    Args:
        content: the file's dict, or RLinf's object, with tensors or their places as leaves.
        source: the file's name, for messages.

    Raises:
        CorruptStoreError: it is not a trajectory.
    """
    if isinstance(content, Trajectory):
        content = vars(content)
    if not isinstance(content, dict):
        raise CorruptStoreError(f"{source}: not a trajectory, but a {type(content).__name__}")
    steps, batch = _leading(content, source)
    extra = 0
    columns: list[ColumnSpec] = []
    leaves: list[Leaf] = []
    for field in (*TENSOR_FIELDS, *DICT_FIELDS):
        value = content.get(field)
        items = [((field,), value)] if field in TENSOR_FIELDS else _items(value, (field,))
        for path, leaf in items:
            if not _is_plain(leaf) or len(leaf.shape) < 2 or leaf.shape[1] != batch:
                continue
            dtype = str(leaf.dtype).removeprefix("torch.")
            try:
                axis, more = axis_of(path[0] if len(path) == 1 else "", leaf.shape[0], steps)
            except InvalidTrajectoryError:
                continue
            if dtype not in dtypes() or (more and extra and more != extra):
                continue
            extra = more or extra
            columns.append(ColumnSpec(join_name(path), dtype, tuple(leaf.shape[2:]), axis))
            leaves.append(leaf)
    return Schema("step", tuple(columns)), Extent(steps, batch, extra), leaves


def fields_of_file(content: Any) -> dict[str, Any]:
    """Return what a trajectory file says besides tensors and also stands in the index."""
    values = vars(content) if isinstance(content, Trajectory) else content
    return {name: values[name] for name in ("model_weights_id", "max_episode_length") if values.get(name)}


def _items(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a nested dict that somebody else wrote; what has no text for a key is left out."""
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if not isinstance(key, str):
            continue
        if isinstance(item, Mapping):
            yield from _items(item, (*path, key))
        else:
            yield (*path, key), item


def _is_plain(leaf: Any) -> TypeGuard[Leaf]:
    """Return whether a leaf is a tensor whose elements all lie in memory or in the file.

    An expanded tensor of a few bytes can claim any size, at which it would be copied.
    """
    if not isinstance(leaf, torch.Tensor):
        return isinstance(leaf, TensorPlace)
    if leaf.layout is not torch.strided or leaf.is_quantized:
        return False
    return leaf.numel() * leaf.itemsize <= leaf.untyped_storage().nbytes()


def _leading(content: Mapping[str, Any], source: str) -> tuple[int, int]:
    for name in ("prev_logprobs", "rewards"):
        leaf = content.get(name)
        if _is_plain(leaf) and len(leaf.shape) >= 2:
            return leaf.shape[0], leaf.shape[1]
    raise CorruptStoreError(f"{source}: not a trajectory (neither prev_logprobs nor rewards)")


def encode_trajectory(record: Record, trajectory_id: int, suffix: str) -> tuple[RLinfEntry, EncodedFile]:
    """Return a step trajectory as RLinf's index and file have it.

    Raises:
        ConfigurationError: it is an agent trajectory, which RLinf does not know.
        UnsafeContentError: its ``model_weights_id`` cannot be part of a file name.
    """
    schema, extent = record.schema, record.extent
    if schema.kind != "step":
        raise ConfigurationError(
            "layout 'rlinf': agent trajectories cannot be written, RLinf has step trajectories only"
        )
    values: dict[str, Any] = {}
    for column, tensor in zip(schema.columns, record.tensors, strict=True):
        if column.name != DOCUMENT:
            rows = extent.rows(column.axis)
            values[column.name] = tensor.reshape(rows // extent.batch, extent.batch, *column.row_shape)
    leaves = trajectory_of(schema, extent, record.tensors) if extent.document else Trajectory()
    for field in DICT_FIELDS:
        for path, leaf in walk(getattr(leaves, field), (field,)):
            values.setdefault(join_name(path), leaf)
    nested = nest(values)
    content: dict[str, Any] = {
        "max_episode_length": record.max_episode_length,
        "model_weights_id": record.model_weights_id,
        **{name: nested[name] for name in TENSOR_FIELDS if name in nested},
        # RLinf has these always, empty or not, and in this order
        **{name: nested.get(name, {}) for name in ("forward_inputs", "curr_obs", "next_obs")},
    }
    shape = tuple(content["prev_logprobs" if "prev_logprobs" in content else "rewards"].shape)
    entry = RLinfEntry(trajectory_id, record.num_samples, shape, record.max_episode_length, record.model_weights_id)
    if suffix == "pkl":
        pieces: Sequence[Any] = [pickle.dumps(_changed(content, lambda t: t.clone()))]
    else:
        pieces, _ = write_torch_zip(_changed(content, lambda t: TensorSlot([raw_bytes(t)], t.dtype, tuple(t.shape))))
    return entry, EncodedFile(entry.file_name(suffix), pieces)


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    return change(value) if isinstance(value, torch.Tensor) else value


def index_json(entries: Iterable[RLinfEntry]) -> bytes:
    """Return RLinf's ``trajectory_index.json``."""
    listed = list(entries)
    return orjson.dumps(
        {
            "trajectory_index": {
                str(entry.trajectory_id): {
                    "num_samples": entry.num_samples,
                    "trajectory_id": entry.trajectory_id,
                    "max_episode_length": entry.max_episode_length,
                    "shape": list(entry.shape),
                    "model_weights_id": entry.model_weights_id,
                }
                for entry in listed
            },
            "trajectory_id_list": [entry.trajectory_id for entry in listed],
        }
    )


def metadata_json(entries: Sequence[RLinfEntry], trajectory_counter: int, seed: int | None, suffix: str) -> bytes:
    """Return RLinf's ``metadata.json``."""
    return orjson.dumps(
        {
            "trajectory_format": suffix,
            "size": len(entries),
            "total_samples": sum(entry.num_samples for entry in entries),
            "trajectory_counter": trajectory_counter,
            "seed": seed,
        }
    )
