"""RLinf's directories: index, metadata, and trajectory files as columns. Pure; no I/O.

One file per trajectory, ``trajectory_{id}_{model_weights_id}.pt`` (or ``.pkl``): a dict of the trajectory's
fields, tensors ``[T, B, ...]``, nested dicts for observations; fields that are None are omitted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson
import torch

from trajstore._core.columns.conversion import trajectory_of
from trajstore._core.columns.document import decode_document
from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS, VALID, Axis, axis_of, join_name, nest, walk
from trajstore._core.columns.flat import FlatTrajectory, raw_bytes
from trajstore._core.columns.limits import MAX_STEPS, RANGES, shown
from trajstore._core.columns.schema import DOCUMENT, ColumnSpec, Extent, Schema, dtypes
from trajstore._core.columns.values import document_of, is_json
from trajstore._core.files.base import EncodedFile, check_name
from trajstore._core.formats.torch_zip import TensorPlace, TensorSlot, write_torch_zip
from trajstore._core.store.sealed import FROM_A_COPY
from trajstore.errors import ConfigurationError, CorruptStoreError, InvalidTrajectoryError
from trajstore.trajectory import Trajectory

INDEX_NAMES = ("trajectory_index.json", "trajector_index.json")
"""The index's name, and its misspelling in early versions of RLinf."""

SUFFIXES = ("pt", "pkl")

TRAJECTORY_CLASSES: Mapping[tuple[str, str], Any] = {
    ("rlinf.data.schema.embodied_types", "Trajectory"): Trajectory,
    ("rlinf.data.embodied_io_struct", "Trajectory"): Trajectory,
}
"""RLinf's class, by the modules that have contained it, and its replacement."""


@dataclass(frozen=True, slots=True)
class RLinfEntry:
    """One entry of RLinf's index. ``shape`` begins with T and B."""

    trajectory_id: int
    num_samples: int
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str

    def __post_init__(self) -> None:
        for name in ("trajectory_id", "max_episode_length"):
            low, high = RANGES[name]
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"trajectory {self.trajectory_id}: {name} {shown(getattr(self, name))}")

    def file_name(self, suffix: str) -> str:
        """Return the name of the trajectory's file.

        Raises:
            UnsafeContentError: with this ``model_weights_id`` it would leave the directory.
        """
        return check_name(f"trajectory_{self.trajectory_id}_{self.model_weights_id}.{suffix}", one_part=True)


def parse_metadata(data: bytes, source: str) -> dict[str, Any]:
    """Return RLinf's ``metadata.json``: format, size, total_samples, trajectory_counter, seed.

    Raises:
        CorruptStoreError: it is not a JSON object, or a value is of the wrong kind.
    """
    value = _object(data, source)
    types = {"trajectory_format": str, "trajectory_counter": int, "seed": int}
    for key, kind in types.items():
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise CorruptStoreError(f"{source}: {key} is {value[key]!r}, must be {kind.__name__}")
    if value.get("trajectory_format", "pt") not in SUFFIXES:
        raise CorruptStoreError(f"{source}: trajectory_format {value['trajectory_format']!r} is not one of RLinf's")
    return value


def parse_index(data: bytes, source: str) -> list[RLinfEntry]:
    """Return the entries of RLinf's index in the order of its id list.

    Raises:
        CorruptStoreError: it is not an index, or an entry is incomplete.
    """
    value = _object(data, source)
    try:
        entries = {int(key): item for key, item in value["trajectory_index"].items()}
        listed = [_entry(number, entries[int(number)]) for number in value["trajectory_id_list"]]
        if len({entry.trajectory_id for entry in listed}) < len(listed):
            raise ValueError("an id is listed twice")
        return listed
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptStoreError(f"{source}: not an index of RLinf ({error!r}){FROM_A_COPY}") from error


def _entry(number: Any, item: Mapping[str, Any]) -> RLinfEntry:
    shape = tuple(int(n) for n in item["shape"])
    samples = int(item["num_samples"])
    fits = len(shape) >= 2 and min(shape) >= 0 and max(shape[:2]) <= MAX_STEPS and shape[0] * shape[1] == samples
    if not fits:
        raise ValueError(f"trajectory {number}: shape {list(shape)}, num_samples {samples}")
    return RLinfEntry(int(number), samples, shape, int(item["max_episode_length"]), str(item["model_weights_id"]))


def _object(data: bytes, source: str) -> dict[str, Any]:
    try:
        return decode_document(data)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: {error}; a crash may have torn it{FROM_A_COPY}") from error


Leaf = TensorPlace | torch.Tensor


@dataclass(frozen=True, slots=True)
class FileContent:
    """One trajectory file as columns.

    Attributes:
        schema: its columns; other values are in the document.
        extent: its rows.
        leaves: the tensor of each column, or its place.
        kept: fields kept in the document and not sampled, though RLinf would sample them, and why.
        left_out: fields that cannot be represented, and why.
    """

    schema: Schema
    extent: Extent
    leaves: list[Leaf]
    kept: dict[str, str]
    left_out: dict[str, str]


def columns_of_file(content: Any, source: str, read: Callable[[TensorPlace], torch.Tensor]) -> FileContent:
    """Return one trajectory file as columns.

    Tensors that begin with T (or T + E) and B become columns; other tensors and JSON values go into the document.

    Args:
        content: the file's dict, or RLinf's object, with tensors or their places as leaves.
        source: the file's name, for messages.
        read: returns the tensor at a place.

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
    others: dict[str, Any] = {}
    kept: dict[str, str] = {}
    left_out = {str(name): "no field of a trajectory" for name in content if name not in _FILE_FIELDS}
    for name, leaf in _items(content, left_out):
        if not isinstance(leaf, torch.Tensor | TensorPlace):
            if is_json(leaf):
                others[name] = leaf
            else:
                left_out[name] = f"a {type(leaf).__name__} that is neither a tensor nor JSON"
            continue
        dtype = str(leaf.dtype).removeprefix("torch.")
        if not _is_plain(leaf) or dtype not in dtypes():
            left_out[name] = f"a tensor of {dtype} whose values do not lie one beside the other"
            continue
        shape = tuple(leaf.shape)
        try:
            if len(shape) < 2 or shape[1] != batch:
                raise InvalidTrajectoryError("")
            axis, more = axis_of(name, shape[0], steps)
            if more and extra and more != extra:
                raise InvalidTrajectoryError("")
        except InvalidTrajectoryError:
            others[name] = leaf
            if len(shape) >= 2 or name in RLINF_FIELDS:
                kept[name] = f"shape {list(shape)} does not begin with [T, B] = [{steps}, {batch}]"
            continue
        extra = more or extra
        columns.append(ColumnSpec(name, dtype, shape[2:], axis))
        leaves.append(leaf if isinstance(leaf, torch.Tensor) or leaf.is_contiguous else read(leaf))
    others = {
        name: read(leaf)
        if isinstance(leaf, TensorPlace)
        else leaf.contiguous()
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in others.items()
    }
    document = document_of(others)
    text = orjson.dumps(document) if document else b""
    if text:
        columns.append(ColumnSpec(DOCUMENT, "uint8", (), Axis.DOCUMENT))
        leaves.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return FileContent(Schema("step", tuple(columns)), Extent(steps, batch, extra, len(text)), leaves, kept, left_out)


RLINF_FIELDS = tuple(name for name in TENSOR_FIELDS if name != VALID)
"""Tensor fields that RLinf's trajectories have."""

_FILE_FIELDS = frozenset({*RLINF_FIELDS, *DICT_FIELDS, "max_episode_length", "model_weights_id"})


def fields_of_file(content: Any) -> dict[str, Any]:
    """Return the non-tensor values of a trajectory file that are also in the index."""
    values = vars(content) if isinstance(content, Trajectory) else content
    return {name: values[name] for name in ("model_weights_id", "max_episode_length") if values.get(name)}


def _items(content: Mapping[Any, Any], left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an untrusted trajectory by dotted name; invalid fields are added to ``left_out``."""
    for field in RLINF_FIELDS:
        if isinstance(content.get(field), Mapping):
            left_out[field] = "a dict, must be a tensor"
        elif content.get(field) is not None:
            yield field, content[field]
    for field in DICT_FIELDS:
        value = content.get(field)
        if isinstance(value, Mapping):
            yield from _nested(value, (field,), left_out)
        elif value is not None:
            left_out[field] = f"a {type(value).__name__}, must be a dict"


def _nested(value: Mapping[Any, Any], path: tuple[str, ...], left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = join_name((*path, str(key)))
        if not isinstance(key, str):
            left_out[name] = f"key {key!r} is a {type(key).__name__}, must be text"
        elif isinstance(item, Mapping) and item:
            yield from _nested(item, (*path, key), left_out)
        else:
            yield name, item


def _is_plain(leaf: Any) -> TypeGuard[Leaf]:
    """Return whether a leaf is a tensor with all its elements in memory or in the file.

    An expanded tensor of a few bytes can claim any size, and copying it would allocate that size.
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


def encode_trajectory(flat: FlatTrajectory, trajectory_id: int, suffix: str) -> tuple[RLinfEntry, EncodedFile]:
    """Return a step trajectory as RLinf's index entry and file.

    Raises:
        ConfigurationError: it is an agent trajectory, which RLinf does not support.
        UnsafeContentError: its ``model_weights_id`` cannot be part of a file name.
    """
    schema, extent = flat.schema, flat.extent
    if schema.kind != "step":
        raise ConfigurationError(
            "layout 'rlinf': agent trajectories cannot be written, RLinf has step trajectories only"
        )
    values: dict[str, Any] = {}
    for column, tensor in zip(schema.columns, flat.tensors, strict=True):
        if column.name not in (DOCUMENT, VALID):
            rows = extent.rows(column.axis)
            values[column.name] = tensor.reshape(rows // extent.batch, extent.batch, *column.row_shape)
    leaves = trajectory_of(schema, extent, flat.tensors) if extent.document else Trajectory()
    for path, leaf in walk({name: getattr(leaves, name) for name in (*RLINF_FIELDS, *DICT_FIELDS)}):
        if len(path) > 1 or (leaf is not None and path[0] in RLINF_FIELDS):
            values.setdefault(join_name(path), leaf)
    nested = nest(values)
    content: dict[str, Any] = {
        "max_episode_length": flat.max_episode_length,
        "model_weights_id": flat.model_weights_id,
        **{name: nested[name] for name in RLINF_FIELDS if name in nested},
        # RLinf always has these, even if empty, in this order
        **{name: nested.get(name, {}) for name in ("forward_inputs", "curr_obs", "next_obs")},
    }
    shape = tuple(content["prev_logprobs" if "prev_logprobs" in content else "rewards"].shape)
    samples = extent.steps * extent.batch
    entry = RLinfEntry(trajectory_id, samples, shape, flat.max_episode_length, flat.model_weights_id)
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
