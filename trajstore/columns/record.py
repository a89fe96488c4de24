"""Trajectories as columns: what every format stores, whatever the trajectory's kind. Pure; no I/O.

A :class:`Record` is one trajectory taken apart into contiguous CPU tensors, one per column of its
:class:`Schema`, plus an :class:`Extent` that says how many rows each axis has. Text and numbers that
are not tensors travel in one more column, ``_document``: the bytes of a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from trajstore.columns.document import decode_document, encode_document
from trajstore.columns.fields import DICT_FIELDS, TENSOR_FIELDS, Axis, axis_of, join_name, nest, walk
from trajstore.columns.leaves import document_of, leaves_of
from trajstore.columns.limits import (
    MAX_SAMPLES,
    MAX_STEPS,
    RANGES,
    plain_name,
    shown,
    version_number,
    whole_number,
)
from trajstore.columns.memory import Lease
from trajstore.columns.schema import DOCUMENT, Extent, Schema, dtypes, intern_schema
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
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


class NothingToStoreError(InvalidTrajectoryError):
    """A trajectory has no fields, or no samples."""


def record_of(trajectory: AnyTrajectory) -> Record:
    """Check a trajectory and return it as columns. Tensors are shared with the trajectory where they can be.

    What this takes can be written, and read back equal; see ``limits`` and ``document`` beside this module.

    Raises:
        InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored; the message
            names the field, and its shape or value.
    """
    try:
        if isinstance(trajectory, AgentTrajectory):
            return _record_of_agent(trajectory)
        return _record_of_step(trajectory)
    except InvalidTrajectoryError as error:
        if str(error).isprintable():
            raise
        text = str(error).encode("unicode_escape").decode()  # names that nothing has checked yet
        raise InvalidTrajectoryError(text) from error


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
        value = _from_numpy(name, value)
    if not isinstance(value, torch.Tensor):
        raise InvalidTrajectoryError(f"field {name}: must be a tensor, is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise InvalidTrajectoryError(
            f"field {name}: sparse, nested and quantized tensors cannot be stored; make it dense"
        )
    if value.is_meta:
        raise InvalidTrajectoryError(f"field {name}: a tensor on the device 'meta' has no values to store")
    if value.requires_grad:
        value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    if value.dtype.is_complex or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    tensor: torch.Tensor = value if value.is_contiguous() else value.contiguous()
    return tensor


def _from_numpy(name: str, value: npt.NDArray[Any]) -> torch.Tensor:
    if not value.flags.c_contiguous or not value.flags.writeable:  # torch would warn of the latter
        value = value.copy(order="C")
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:  # texts, objects, the other byte order
        raise InvalidTrajectoryError(f"field {name}: numpy's dtype {value.dtype} cannot be stored") from error


def _document_column(
    document: dict[str, Any],
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]],
    tensors: list[torch.Tensor],
) -> int:
    """Append the document's column, if there is anything to say, and return its number of bytes."""
    if not document:
        return 0
    text = encode_document(document)
    columns.append((DOCUMENT, torch.uint8, (), Axis.DOCUMENT))
    tensors.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return len(text)


def _leading_shape(trajectory: Any) -> tuple[int, int]:
    for name in ("prev_logprobs", "rewards"):
        value = getattr(trajectory, name, None)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise InvalidTrajectoryError(f"field {name}: must be a tensor, is a {type(value).__name__}")
        shape = tuple(value.shape)
        if len(shape) < 2:
            raise InvalidTrajectoryError(f"field {name}: shape {list(shape)}, must be [T, B, ...]")
        return shape[0], shape[1]
    if not hasattr(trajectory, "max_episode_length"):
        raise InvalidTrajectoryError(
            f"{shown(trajectory)} is a {type(trajectory).__name__}, must be a Trajectory or an AgentTrajectory"
        )
    if all(getattr(trajectory, name, None) is None for name in TENSOR_FIELDS) and not any(
        getattr(trajectory, name, None) for name in DICT_FIELDS
    ):
        raise NothingToStoreError("trajectory has no fields: there is nothing in it to store")
    raise InvalidTrajectoryError("a trajectory needs prev_logprobs or rewards: one of them gives T and B")


def _check_extent(steps: int, batch: int) -> None:
    """Refuse more steps, environments or samples than the index has room for."""
    if steps * batch == 0:
        raise NothingToStoreError(f"trajectory has T = {steps}, B = {batch}: there is nothing in it to store")
    for name, value, most in (("T", steps, MAX_STEPS), ("B", batch, MAX_STEPS), ("T·B", steps * batch, MAX_SAMPLES)):
        if value > most:
            raise InvalidTrajectoryError(f"trajectory has {name} = {value}, must be in [1, {most}]; split it")


def _record_of_step(trajectory: Any) -> Record:
    steps, batch = _leading_shape(trajectory)
    if not 0 < steps * batch <= MAX_STEPS:  # in one comparison what nearly all trajectories pass
        _check_extent(steps, batch)
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
        given = getattr(trajectory, field, None)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise InvalidTrajectoryError(f"field {field}: must be a dict of tensors, is a {type(given).__name__}")
        for path, value in walk(given, (field,)):
            name = join_name(path)
            if not isinstance(value, torch.Tensor | np.ndarray):
                leaves[plain_name(shown(name), name)] = value
                continue
            tensor = _as_tensor(name, value)
            shape = tuple(tensor.shape)
            if len(shape) < 2:
                if tensor.dtype not in dtypes().values():
                    raise InvalidTrajectoryError(f"field {name}: dtype {tensor.dtype} cannot be stored")
                leaves[plain_name(shown(name), name)] = tensor  # no row for each step: given back, never sampled
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
    known = version_range(
        acting_rows(versions, steps)
    )  # first: versions that are no numbers have no bytes to make an id of
    weights = trajectory.model_weights_id
    if weights is None or (isinstance(weights, str) and not weights):
        weights = get_model_weights_id(versions if versions is not None else torch.zeros(1, dtype=torch.float32))
    return Record(
        intern_schema("step", columns),
        Extent(steps, batch, extra, size),
        tuple(tensors),
        num_samples=steps * batch,
        max_episode_length=whole_number(
            "max_episode_length", trajectory.max_episode_length, *RANGES["max_episode_length"]
        ),
        model_weights_id=plain_name("model_weights_id", weights),
        versions=known,
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


def acting_rows(versions: torch.Tensor | None, steps: int) -> torch.Tensor | None:
    """Return the rows of ``versions``, ``[T or T + E, B, ...]``, that belong to the T steps."""
    if versions is None or versions.shape[0] == steps or versions.numel() == 0:
        return versions
    epochs = versions.shape[0] - steps
    return versions.reshape(epochs, steps // epochs + 1, -1)[:, :-1]


def version_range(versions: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the lowest and highest policy version of a trajectory; None if unknown.

    Args:
        versions: real numbers, on the CPU.

    Raises:
        InvalidTrajectoryError: a version is not a finite number, or none of 64 bits.
    """
    if versions is None or versions.numel() == 0:
        return None
    if versions.is_complex():  # numpy has no equal of the shortest of these
        raise InvalidTrajectoryError("field versions: not a finite number")
    if versions.is_floating_point() and versions.dtype not in _NUMPY_FLOATS:
        versions = versions.float()
    array = versions.numpy()  # torch's operators would let other threads have the interpreter, and wait for it again
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise InvalidTrajectoryError("field versions: not a finite number")
    return version_number("versions", int(low)), version_number("versions", int(high))


_TEXTS = ("task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint")


def _record_of_agent(trajectory: AgentTrajectory) -> Record:
    values = vars(trajectory)
    columns: list[tuple[str, torch.dtype, tuple[int, ...], Axis]] = []
    tensors: list[torch.Tensor] = []
    tokens = _agent_columns(values, _TOKEN_COLUMNS, Axis.SAMPLES, columns, tensors)
    response_first = len(columns)
    response = _agent_columns(values, _RESPONSE_COLUMNS, Axis.RESPONSE, columns, tensors)
    document = {name: values[name] for name in _DOCUMENT_FIELDS if values[name] is not None}
    _check_document(values, document)
    start = document.get("response_start")
    if start is not None and tokens is not None:
        if start > tokens:
            raise InvalidTrajectoryError(f"field response_start: {start}, must be in [0, L] with L = {tokens}")
        if response is not None and tokens - start != response:
            raise InvalidTrajectoryError(
                f"field {columns[response_first][0]}: has {response} entries, "
                f"must have L - response_start = {tokens - start}"
            )
    size = _document_column(document, columns, tensors)
    version = document.get("policy_version")
    return Record(
        intern_schema("agent", columns),
        Extent(tokens or 0, 1, response or 0, size),
        tuple(tensors),
        num_samples=1,
        max_episode_length=0,
        model_weights_id=plain_name("metadata.model_weights_id", trajectory.metadata.get("model_weights_id", "")),
        versions=None if version is None else (version, version),
    )


def _check_document(values: Mapping[str, Any], document: dict[str, Any]) -> None:
    """Refuse fields of another type than their annotation says; whole numbers and the reward become plain ones.

    Args:
        values: all fields.
        document: those that are known and no tensors; changed.
    """
    for name in _TEXTS:
        if type(values[name]) is not str and not isinstance(values[name], str):
            raise _wrong_type(name, values[name], "a string")
    metadata, messages, reward = values["metadata"], values["messages"], values["reward"]
    if not isinstance(metadata, dict):
        raise _wrong_type("metadata", metadata, "a dict")
    if not isinstance(messages, list):
        raise _wrong_type("messages", messages, "a list of dicts")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong_type(f"messages[{at}]", message, "a dict")
    terminated = values["is_terminated"]
    if terminated is not None and not isinstance(terminated, bool | np.bool_):
        raise _wrong_type("is_terminated", terminated, "True, False or None")
    if (start := values["response_start"]) is not None:
        document["response_start"] = whole_number("response_start", start, 0, MAX_STEPS)
    if (version := values["policy_version"]) is not None:
        document["policy_version"] = version_number("policy_version", version)
    _check_real("entropy", values["entropy"])
    if reward is None:
        return
    if not isinstance(reward, Reward):
        hint = f"; write Reward(outcome={shown(reward)})" if isinstance(reward, int | float) else ""
        raise _wrong_type("reward", reward, f"a Reward or None{hint}")
    _check_real("reward.outcome", reward.outcome)
    _check_real("reward.success_rate", reward.success_rate)
    if not isinstance(reward.description, str):
        raise _wrong_type("reward.description", reward.description, "a string")
    if not isinstance(reward.metadata, dict):
        raise _wrong_type("reward.metadata", reward.metadata, "a dict")
    document["reward"] = vars(reward)


def _check_real(field: str, value: Any) -> None:
    if value is None or (type(value) is float and isfinite(value)):
        return
    if isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and isfinite(value)):
        return  # an int of more than 64 bits is refused with the document
    raise InvalidTrajectoryError(
        f"field {field}: {shown(value)} is a {type(value).__name__}, must be a finite number or None"
    )


def _wrong_type(field: str, value: Any, wanted: str) -> InvalidTrajectoryError:
    return InvalidTrajectoryError(f"field {field}: {shown(value)} is a {type(value).__name__}, must be {wanted}")


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
        if size > MAX_STEPS:
            raise InvalidTrajectoryError(f"field {name}: has {size} entries, must have at most {MAX_STEPS}")
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
    if isinstance(reward, int | float):  # earlier versions took a bare number for a reward
        reward = {"outcome": reward}
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
        return decode_document(tensor.numpy().tobytes())
    except CorruptStoreError as error:
        raise CorruptStoreError(f"column {DOCUMENT}: {error}") from error
