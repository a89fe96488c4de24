"""Converts the tensors of many rollouts, as trainers hold them, to columns without an object for each rollout. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.agents import DOCUMENT_FIELDS, check_column, document_of, weights_of
from trajstore._core.columns.document import encode_document
from trajstore._core.columns.facts import GIVEN, facts_of, facts_to_json
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.columns.limits import MAX_STEPS, UNKNOWN_VERSION, shown
from trajstore._core.columns.schema import DOCUMENT, Schema, intern_schema
from trajstore._core.columns.values import NewColumn
from trajstore.errors import InvalidTrajectoryError, counted, listed
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory, Reward

Numbers = npt.NDArray[np.int64]

_EMPTY = vars(AgentTrajectory())
_FIELDS = frozenset(DOCUMENT_FIELDS) - {"response_start"}


def flatten_rollouts(
    columns: Mapping[str, Any], lengths: Any, documents: Sequence[Mapping[str, Any]], prompts: Any, starts: Any
) -> list[FlatTrajectories]:
    """Check rollouts and convert them to columns, which share the tensors where possible.

    The arguments are those of ``TrajectoryReplayBuffer.add_rollouts``.

    Raises:
        InvalidTrajectoryError: names the field, and the position of the rollout.
    """
    tokens = _counts("lengths", lengths, None)
    begins = np.zeros_like(tokens) if starts is None else _counts("starts", starts, len(tokens))
    first = None if prompts is None else _counts("prompts", prompts, len(tokens))
    if first is not None and (first > tokens).any():
        at = int(np.argmax(first > tokens))
        raise _refused(at, f"prompts: {first[at]}, must be in [0, L] with L = {tokens[at]}")
    if not isinstance(columns, Mapping):
        raise InvalidTrajectoryError(f"columns: must be a dict of tensors, is a {type(columns).__name__}")
    if unknown := columns.keys() - {*TOKEN_COLUMNS, *RESPONSE_COLUMNS}:
        names = listed(sorted(map(shown, unknown)))
        raise InvalidTrajectoryError(f"columns {names}: must be among {listed((*TOKEN_COLUMNS, *RESPONSE_COLUMNS))}")
    if isinstance(documents, str | bytes) or not isinstance(documents, Sequence) or len(documents) != len(tokens):
        raise InvalidTrajectoryError(f"documents: must be a list with a dict for each of {_rollouts(len(tokens))}")
    specs: list[NewColumn] = []
    tensors: list[torch.Tensor] = []
    addresses: list[Numbers] = []
    responses, right = tokens if first is None else tokens - first, np.zeros_like(tokens)
    for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS):
        if columns.get(name) is None:
            continue
        tensor, axis = check_column(name, columns[name], (1, 2)), Axis.SAMPLES
        counts, offsets = tokens, begins
        if name in RESPONSE_COLUMNS:
            counts, offsets, axis = responses, right, Axis.RESPONSE
            if first is None:
                raise InvalidTrajectoryError(f"field {name}: has a value per token of the response: give prompts")
        specs.append((name, tensor.dtype, (), axis))
        tensors.append(tensor)
        addresses.append(tensor.data_ptr() + tensor.itemsize * _rows(name, tensor, counts, offsets))
    if not len(tokens):
        return []
    specs.append((DOCUMENT, torch.uint8, (), Axis.DOCUMENT))
    schema = intern_schema("agent", specs)
    described = _Documents(documents, first)
    owner = np.frombuffer(b"".join(described.texts), np.uint8)
    sizes = np.array([*map(len, described.texts)], np.int64)
    addresses.append(owner.ctypes.data + np.cumsum(sizes) - sizes)
    axes = {spec[-1] for spec in specs}
    numbers = np.zeros((len(tokens), 9), np.int64)
    numbers[:, (0, 2)] = 1
    numbers[:, 1] = tokens if Axis.SAMPLES in axes else 0
    numbers[:, 3] = responses if Axis.RESPONSE in axes else 0
    numbers[:, 4] = sizes
    numbers[:, 5] = _nbytes(schema, numbers)
    numbers[:, 7:] = np.array(described.versions, np.int64)[:, None]
    facts = facts_to_json(described.facts)
    return [FlatTrajectories(schema, numbers, described.weights, facts, np.stack(addresses, axis=1), (tensors, owner))]


class _Documents:
    """The parts of rollouts that are not tensors, checked."""

    def __init__(self, documents: Sequence[Mapping[str, Any]], starts: Numbers | None) -> None:
        self.texts: list[bytes] = []
        self.facts: list[dict[str, Any]] = []
        self.weights: list[str] = []
        self.versions: list[int] = []
        begins = [None] * len(documents) if starts is None else starts.tolist()
        for at, (given, begin) in enumerate(zip(documents, begins, strict=True)):
            try:
                self._add(given, begin)
            except InvalidTrajectoryError as error:
                text = str(error) if str(error).isprintable() else str(error).encode("unicode_escape").decode()
                raise _refused(at, text) from error

    def _add(self, given: Mapping[str, Any], begin: int | None) -> None:
        if not isinstance(given, Mapping):
            raise InvalidTrajectoryError(f"document: must be a dict, is a {type(given).__name__}")
        if unknown := given.keys() - _FIELDS:
            raise InvalidTrajectoryError(
                f"document: {listed(sorted(map(shown, unknown)))}: must be among {listed(sorted(_FIELDS))}; "
                "response_start is given by prompts"
            )
        values = _EMPTY | {name: value for name, value in given.items() if value is not None}
        values["response_start"] = begin
        if isinstance(values["reward"], Mapping):
            try:
                values["reward"] = Reward(**values["reward"])
            except TypeError as error:
                raise InvalidTrajectoryError(f"field reward: {error}") from error
        document = document_of(values)
        if GIVEN in document["metadata"]:
            raise InvalidTrajectoryError(
                f"field metadata: {GIVEN}: late values are set again by add_trajectories, or with annotate()"
            )
        version = document.get("policy_version")
        self.weights.append(weights_of(document["metadata"]))
        self.texts.append(encode_document(document))
        self.facts.append(facts_of(document))
        self.versions.append(UNKNOWN_VERSION if version is None else version)


def _counts(name: str, value: Any, count: int | None) -> Numbers:
    """Return numbers of tokens, one for each rollout."""
    array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidTrajectoryError(f"{name}: must be a list of whole numbers, is {shown(value)}")
    if count is not None and len(array) != count:
        raise InvalidTrajectoryError(f"{name}: has {len(array)} entries, must have one for each of {_rollouts(count)}")
    wrong = (array < 0) | (array > MAX_STEPS)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise _refused(at, f"{name}: {array[at]}, must be in [0, {MAX_STEPS}]")
    return array.astype(np.int64)


def _rows(name: str, tensor: torch.Tensor, counts: Numbers, offsets: Numbers) -> Numbers:
    """Return the position of each rollout's first value in a packed or padded column."""
    if tensor.ndim == 1:
        ends = np.cumsum(counts)
        if tensor.shape[0] != counts.sum():
            raise InvalidTrajectoryError(
                f"field {name}: has {tensor.shape[0]} entries, must have {counts.sum()}, one for each token"
            )
        return ends - counts
    rows, width = tensor.shape
    if rows != len(counts):
        raise InvalidTrajectoryError(f"field {name}: shape {list(tensor.shape)}, must begin with {len(counts)}")
    wrong = offsets + counts > width
    if wrong.any():
        at = int(np.argmax(wrong))
        where = f" from {offsets[at]} on" if offsets[at] else ""
        raise _refused(at, f"field {name}: has {width} entries, must have {counts[at]}{where}")
    return np.arange(rows) * width + offsets


def _nbytes(schema: Schema, numbers: Numbers) -> Numbers:
    samples, _, _, response, text = schema.axis_nbytes
    return numbers[:, 1] * samples + numbers[:, 3] * response + numbers[:, 4] * text


def _refused(at: int, text: str) -> InvalidTrajectoryError:
    return InvalidTrajectoryError(f"rollout {at}: {text}", at)


def _rollouts(count: int) -> str:
    return counted(count, "rollout")
