"""Trajectories as columns: what every format stores, whatever the trajectory's kind. Pure; no I/O.

A :class:`Record` is one trajectory taken apart into contiguous CPU tensors, one per column of its
:class:`Schema`, plus an :class:`Extent` that says how many rows each axis has. Text and numbers that
are not tensors travel in one more column, ``_document``: the bytes of a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trajstore.arena import Lease
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
from trajstore.fields import DICT_FIELDS, TENSOR_FIELDS, Axis, axis_of, join_name, nest, walk
from trajstore.leaves import document_of, leaves_of
from trajstore.schema import DOCUMENT, Extent, Schema, dtypes, intern_schema
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward, Trajectory, get_model_weights_id

_TOKEN_COLUMNS = ("input_ids", "attention_mask", "loss_mask")
_RESPONSE_COLUMNS = ("old_log_probs", "entropys", "response_mask", "rollout_log_probs")
_DOCUMENT_FIELDS = tuple(
    field.name for field in fields(AgentTrajectory) if field.name not in (*_TOKEN_COLUMNS, *_RESPONSE_COLUMNS)
)


class BlockTensors(Sequence[torch.Tensor]):
    """Columns in one block of memory, made into tensors only where somebody asks for one.

    Most trajectories are written without anybody asking, and a tensor costs more than a small column's bytes.
    """

    __slots__ = ("_addresses", "_extent", "_lease", "_schema")

    def __init__(self, schema: Schema, extent: Extent, lease: Lease, addresses: npt.NDArray[np.int64]) -> None:
        self._schema = schema
        self._extent = extent
        self._lease = lease
        self._addresses = addresses

    def __len__(self) -> int:
        return len(self._addresses)

    def column_bytes(self, column: int) -> memoryview:
        """Return the bytes of a column, not copied."""
        start = int(self._addresses[column]) - self._lease.address
        rows = self._extent.rows(self._schema.columns[column].axis)
        return self._lease.data[start : start + rows * self._schema.row_nbytes[column]]

    @overload
    def __getitem__(self, at: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, at: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        spec = self._schema.columns[at]
        shape = (self._extent.rows(spec.axis), *spec.row_shape)
        data = self.column_bytes(at)
        if not data.nbytes:
            return torch.empty(shape, dtype=spec.torch_dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(spec.torch_dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory as columns.

    ``tensors[i]`` is contiguous, on the CPU, and holds ``extent.rows(axis) x row_shape`` values of
    ``schema.columns[i]``; its own shape may still be ``[T, B, ...]``.
    """

    schema: Schema
    extent: Extent
    tensors: Sequence[torch.Tensor]
    num_samples: int
    max_episode_length: int
    model_weights_id: str
    versions: tuple[int, int] | None
    """Lowest and highest policy version; ``None`` if unknown."""

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Record:
        """Return the same trajectory with its columns elsewhere."""
        return Record(
            self.schema,
            self.extent,
            tensors,
            self.num_samples,
            self.max_episode_length,
            self.model_weights_id,
            self.versions,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.schema.nbytes(self.extent)

    def column_bytes(self, column: int) -> memoryview:
        """Return the bytes of a column, not copied."""
        if isinstance(self.tensors, BlockTensors):
            return self.tensors.column_bytes(column)
        return raw_bytes(self.tensors[column])


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying. Works for every dtype."""
    flat = tensor.reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def record_of(trajectory: AnyTrajectory) -> Record:
    """Check a trajectory and return it as columns. Tensors are shared with the trajectory where they can be.

    Raises:
        InvalidTrajectoryError: fields do not fit together; the message names field and shapes.
    """
    if isinstance(trajectory, AgentTrajectory):
        return _record_of_agent(trajectory)
    return _record_of_step(trajectory)


@cache
def _plain_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of tensors that are neither quantized nor, perhaps, to be conjugated."""
    return frozenset(dtype for dtype in dtypes().values() if not dtype.is_complex)


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return ``value`` as a contiguous CPU tensor; numpy arrays are taken too."""
    if (  # what nearly every tensor is, told in a third of the time
        type(value) is torch.Tensor
        and value.dtype in _plain_dtypes()
        and value.is_cpu
        and not value.requires_grad
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.is_neg()
    ):
        return value
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise InvalidTrajectoryError(f"field {name}: must be a tensor, is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise InvalidTrajectoryError(f"field {name}: sparse and quantized tensors cannot be stored; make it dense")
    if value.requires_grad:
        value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    if value.dtype.is_complex or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    tensor: torch.Tensor = value if value.is_contiguous() else value.contiguous()
    return tensor


def _document_column(
    document: Mapping[str, Any],
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]],
    tensors: list[torch.Tensor],
) -> int:
    """Append the document's column, if there is anything to say, and return its number of bytes."""
    if not document:
        return 0
    try:
        text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError) as error:
        raise InvalidTrajectoryError(f"fields {sorted(document)}: not JSON: {error}") from error
    columns.append((DOCUMENT, torch.uint8, (), Axis.DOCUMENT))
    tensors.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return len(text)


def _leading_shape(trajectory: Any) -> tuple[int, int]:
    for name in ("prev_logprobs", "rewards"):
        value = getattr(trajectory, name, None)
        if value is not None:
            shape = tuple(value.shape)
            if len(shape) < 2:
                raise InvalidTrajectoryError(f"field {name}: shape {list(shape)}, must be [T, B, ...]")
            return shape[0], shape[1]
    raise InvalidTrajectoryError("a trajectory needs prev_logprobs or rewards: one of them gives T and B")


def _record_of_step(trajectory: Any) -> Record:
    steps, batch = _leading_shape(trajectory)
    if steps * batch == 0:
        raise InvalidTrajectoryError(f"trajectory has T = {steps}, B = {batch}: there is nothing in it to store")
    extra = 0
    extra_field = ""
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]] = []
    tensors: list[torch.Tensor] = []
    for name in TENSOR_FIELDS:
        value = getattr(trajectory, name, None)
        if value is None:
            continue
        tensor = _as_tensor(name, value)
        shape = tuple(tensor.shape)
        if len(shape) < 2 or shape[1] != batch:
            raise InvalidTrajectoryError(f"field {name}: shape {list(shape)}, must be [T, B, ...] with B = {batch}")
        axis, extra, extra_field = _axis_among(name, shape[0], steps, extra, extra_field)
        columns.append((name, tensor.dtype, shape[2:], axis))
        tensors.append(tensor)
    leaves: dict[str, Any] = {}
    for field in DICT_FIELDS:
        for path, value in walk(getattr(trajectory, field, None) or {}, (field,)):
            name = join_name(path)
            if not isinstance(value, torch.Tensor | np.ndarray):
                leaves[name] = value
                continue
            tensor = _as_tensor(name, value)
            shape = tuple(tensor.shape)
            if len(shape) < 2:
                leaves[name] = tensor  # no row for each step: given back, never sampled
                continue
            if shape[1] != batch:
                raise InvalidTrajectoryError(
                    f"field {name}: shape {list(shape)}, must begin with [T, B] = [{steps}, {batch}]"
                )
            axis, extra, extra_field = _axis_among(name, shape[0], steps, extra, extra_field)
            columns.append((name, tensor.dtype, shape[2:], axis))
            tensors.append(tensor)
    size = _document_column(document_of(leaves), columns, tensors)
    versions = next((tensor for (name, *_), tensor in zip(columns, tensors, strict=True) if name == "versions"), None)
    weights = trajectory.model_weights_id or get_model_weights_id(
        versions if versions is not None else torch.zeros(1, dtype=torch.float32)
    )
    return Record(
        intern_schema("step", columns),
        Extent(steps, batch, extra, size),
        tuple(tensors),
        num_samples=steps * batch,
        max_episode_length=int(trajectory.max_episode_length),
        model_weights_id=str(weights),
        versions=version_range(versions),
    )


def _axis_among(name: str, rows: int, steps: int, extra: int, extra_field: str) -> tuple[Axis, int, str]:
    """Return a column's axis, and the trajectory's E with the column that told it, as far as is known now."""
    if rows == steps:
        return Axis.SAMPLES, extra, extra_field
    axis, more = axis_of(name, rows, steps)
    if extra and more != extra:
        raise InvalidTrajectoryError(
            f"field {name}: has {rows} rows = T + {more}, but {extra_field} has {steps + extra} = T + {extra}"
        )
    return axis, more, name


_NUMPY_FLOATS = frozenset({torch.float16, torch.float32, torch.float64})


def version_range(versions: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the lowest and highest policy version of a trajectory; None if unknown.

    Args:
        versions: real numbers, on the CPU.

    Raises:
        InvalidTrajectoryError: a version is not a finite number.
    """
    if versions is None or versions.numel() == 0:
        return None
    if versions.is_floating_point() and versions.dtype not in _NUMPY_FLOATS:
        versions = versions.float()
    array = versions.numpy()  # torch's operators would let other threads have the interpreter, and wait for it again
    low, high = array.min(), array.max()
    if versions.is_complex() or not (np.isfinite(low) and np.isfinite(high)):
        raise InvalidTrajectoryError("field versions: not a finite number")
    return int(low), int(high)


def _record_of_agent(trajectory: AgentTrajectory) -> Record:
    values = vars(trajectory)
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]] = []
    tensors: list[torch.Tensor] = []
    tokens = _agent_columns(values, _TOKEN_COLUMNS, Axis.SAMPLES, columns, tensors)
    response_first = len(columns)
    response = _agent_columns(values, _RESPONSE_COLUMNS, Axis.RESPONSE, columns, tensors)
    start = trajectory.response_start
    if start is not None and tokens is not None:
        if not 0 <= start <= tokens:
            raise InvalidTrajectoryError(f"field response_start: {start}, must be in [0, L] with L = {tokens}")
        if response is not None and tokens - start != response:
            raise InvalidTrajectoryError(
                f"field {columns[response_first][0]}: has {response} entries, "
                f"must have L - response_start = {tokens - start}"
            )
    document = {name: values[name] for name in _DOCUMENT_FIELDS if values[name] is not None}
    if isinstance(trajectory.reward, Reward):
        document["reward"] = vars(trajectory.reward)
    size = _document_column(document, columns, tensors)
    version = trajectory.policy_version
    return Record(
        intern_schema("agent", columns),
        Extent(tokens or 0, 1, response or 0, size),
        tuple(tensors),
        num_samples=1,
        max_episode_length=0,
        model_weights_id=str(trajectory.metadata.get("model_weights_id", "")),
        versions=None if version is None else (int(version), int(version)),
    )


def _agent_columns(
    values: Mapping[str, Any],
    names: Sequence[str],
    axis: Axis,
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]],
    tensors: list[torch.Tensor],
) -> int | None:
    """Append those of the columns that are known, and return their length; None if none is."""
    length: int | None = None
    first = ""
    for name in names:
        value = values[name]
        if value is None:
            continue
        tensor = _as_tensor(name, value)
        if tensor.dim() != 1:
            raise InvalidTrajectoryError(f"field {name}: shape {list(tensor.shape)}, must have one dimension")
        size = tensor.shape[0]  # its len goes through Python
        if length is None:
            length, first = size, name
        elif length != size:
            raise InvalidTrajectoryError(f"field {name}: has {size} entries, but {first} has {length}")
        columns.append((name, tensor.dtype, (), axis))
        tensors.append(tensor)
    return length


def trajectory_of(schema: Schema, extent: Extent, tensors: Sequence[torch.Tensor], **known: Any) -> AnyTrajectory:
    """Return the trajectory of stored columns; inverse of :func:`record_of`.

    Args:
        schema: the columns.
        extent: rows per axis.
        tensors: one per column, ``[rows, *row_shape]`` or already ``[T, B, *row_shape]``.
        known: fields kept in the index (``max_episode_length``, ``model_weights_id``), which agent trajectories lack.

    Raises:
        CorruptStoreError: the JSON document is damaged.
    """
    document: dict[str, Any] = {}
    values: dict[str, torch.Tensor] = {}
    for column, tensor in zip(schema.columns, tensors, strict=True):
        if column.axis is Axis.DOCUMENT:
            document = parse_document(tensor)
        elif schema.kind == "step":
            rows = extent.rows(column.axis)
            values[column.name] = tensor.reshape(rows // max(extent.batch, 1), extent.batch, *column.row_shape)
        else:
            values[column.name] = tensor
    try:
        if schema.kind == "step":
            merged: dict[str, Any] = {**values, **leaves_of(document)}
            return Trajectory(**known, **nest(merged))
        return _agent_trajectory(values, document)
    except TypeError as error:  # names that are no fields, or values that are no objects
        raise CorruptStoreError(f"column {DOCUMENT}: does not describe a trajectory: {error}") from error


def _agent_trajectory(values: Mapping[str, torch.Tensor], document: dict[str, Any]) -> AgentTrajectory:
    reward = document.pop("reward", None)
    given: dict[str, Any] = {**values, **document}
    trajectory = AgentTrajectory(**given, reward=None if reward is None else Reward(**reward))
    if not isinstance(trajectory.metadata, dict) or not isinstance(trajectory.messages, list):
        raise TypeError("metadata must be an object, messages a list")
    return trajectory


def parse_document(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the JSON document of a trajectory.

    Raises:
        CorruptStoreError: it is none.
    """
    try:
        document = orjson.loads(tensor.numpy().tobytes())
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"column {DOCUMENT}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptStoreError(f"column {DOCUMENT}: not a JSON object")
    return document
