"""One optimizer step of a ledger, and its record as JSON values. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.base.arguments import INT64_MAX, whole, whole_or_none
from trajstore._core.store.json_arrays import array_from_json, array_to_json
from trajstore.errors import ConfigurationError, CorruptStoreError, listed

ROW = np.dtype(
    [
        ("trajectory", np.int64),
        ("row", np.int32),
        ("group", np.int32),
        ("advantage", np.float32),
        ("ratio", np.float32),
        ("tokens", np.int32),
        ("weight", np.float32),
        ("probability", np.float64),
        ("version", np.int32),
        ("replayed", np.uint8),
        ("token_digest", np.uint32),
        ("mask_digest", np.uint32),
        ("log_prob", np.float32),
    ]
)
"""The columns of a trained row.

``trajectory`` is its id in the store, or -1 - k for rollout k of the step's batch, which is in no store; ``row`` its
number in the rollout; ``group`` its number in the step. ``advantage`` and ``ratio`` (importance ratio) are means over
its trained tokens, whose number is ``tokens``; ``weight`` is its further factor in the loss, 0 if it has no loss.
``probability`` is its chance in the draw. Rows of a loader are transitions, sequences or whole trajectories: ``tokens``
is then the number of steps from ``row`` on, or of tokens, and ``weight`` the importance weight.
``version`` is the policy that sampled it, -1 if unknown; ``replayed`` 1 for a replayed row. ``token_digest`` is
:func:`digest` of its tokens, prompt and response; ``mask_digest`` that of the places of its trained tokens in the
response, 0 if they are the first ones. ``log_prob`` is the mean over its trained tokens of the log-probs that its
ratios are relative to.
"""

UNKNOWN = ("probability", "token_digest", "mask_digest", "log_prob")
"""Columns that a trainer may not know; the others have a value by default."""


def digest(numbers: npt.ArrayLike) -> int:
    """Return a 32-bit digest of whole numbers, the same on every machine."""
    data = np.asarray(numbers, "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


def mask_digest(mask: npt.ArrayLike) -> int:
    """Return ``mask_digest`` of a row; trailing zeros do not matter."""
    places = np.flatnonzero(mask)
    return digest(places) if len(places) and places[-1] >= len(places) else 0


def _stored(name: str) -> np.dtype[Any]:
    """Return the dtype of a column in a record: deltas of digests would only be larger."""
    return np.dtype("V4") if name.endswith("_digest") else ROW[name]


_ALWAYS_KNOWN = ("trajectory", "row", "version", "replayed")


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One optimizer step.

    Attributes:
        step: its number.
        rows: the trained rows, ``[n]`` of :data:`ROW`, in the order of the batch.
        tasks: the task of each group, by the group's number; empty if unknown.
        policy_before: policy version before the step; None if unknown.
        policy_after: policy version after it.
        loss: loss terms by name.
        data: data set identity and position, JSON values.
        seeds: seeds by name, JSON values.
        options: of padding, advantages and weights, by which the batch can be rebuilt; JSON values, empty if unknown.
        unknown: columns without values: not written, and read as 0 here and NaN in :meth:`LedgerContents.table`.
        config: the trainer's whole configuration, JSON values without credentials; empty if unknown. Written where it
            differs from that of the step before, and read into every step.
    """

    step: int
    rows: npt.NDArray[np.void]
    tasks: Sequence[str] = ()
    policy_before: int | None = None
    policy_after: int | None = None
    loss: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unknown: Sequence[str] = UNKNOWN
    config: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check that the step can be recorded exactly.

        Raises:
            ConfigurationError: a field has a wrong type or range; names step and field.
        """
        whole("step", self.step, 0)
        if not isinstance(self.rows, np.ndarray) or self.rows.dtype != ROW or self.rows.ndim != 1:
            raise ConfigurationError(f"step {self.step}: rows must be an array [n] of trajstore.ledger.ROW")
        if bad := [name for name in self.unknown if name not in (ROW.names or ()) or name in _ALWAYS_KNOWN]:
            raise ConfigurationError(f"step {self.step}: unknown: {bad[0]!r} is not a column that may be unknown")
        groups = self.rows["group"]
        if len(groups) and (groups.min() < 0 or (self.tasks and groups.max() >= len(self.tasks))):
            raise ConfigurationError(
                f"step {self.step}: groups are {groups.min()} to {groups.max()}, but there are {len(self.tasks)} tasks"
            )
        unstored = np.sort(self.rows[self.rows["trajectory"] < 0][["trajectory", "row"]])
        if (twice := unstored[1:] == unstored[:-1]).any():
            rollout, row = unstored[int(twice.argmax())]
            raise ConfigurationError(
                f"step {self.step}: row {row} of rollout {rollout} is there twice; rollout k of the batch has "
                "the trajectory -1 - k if it is in no store"
            )
        for name in ("policy_before", "policy_after"):
            whole_or_none(f"step {self.step}: {name}", getattr(self, name), -INT64_MAX)
        names = ("policy_before", "policy_after", "data", "seeds", "options", "config")
        header = {name: getattr(self, name) for name in names}
        for name, value in (*header.items(), ("tasks", list(self.tasks)), ("loss", list(self.loss))):
            try:
                same = orjson.loads(orjson.dumps(value)) == value
            except (TypeError, orjson.JSONDecodeError):
                same = False
            if not same:
                raise ConfigurationError(f"step {self.step}: {name} must be JSON values, without NaN: {value!r}")

    def to_json(self, after: int | None) -> dict[str, Any]:
        """Return the step's record.

        Args:
            after: the step that it continues from.
        """
        config = {"config": dict(self.config)} if self.config else {}
        names = [name for name in ROW.names or () if name not in self.unknown]
        return {
            **config,
            "step": self.step,
            "after": after,
            "tasks": list(self.tasks),
            "policy": [self.policy_before, self.policy_after],
            "loss": {"names": list(self.loss), "values": array_to_json(np.array([*self.loss.values()], np.float64))},
            "data": dict(self.data),
            "seeds": dict(self.seeds),
            "options": dict(self.options),
            "rows": {name: array_to_json(self.rows[name].view(_stored(name))) for name in names},
        }

    @staticmethod
    def from_json(record: Mapping[str, Any], source: str) -> TrainedStep:
        """Return the step of a record.

        Raises:
            CorruptStoreError: it is not a record of a ledger.
        """
        try:
            columns = {key: array_from_json(rows, _stored(key)).view(ROW[key]) for key, rows in record["rows"].items()}
            if absent := [name for name in _ALWAYS_KNOWN if name not in columns]:
                raise ValueError(f"column {absent[0]} is absent")
            if len({len(column) for column in columns.values()}) != 1:
                raise ValueError(f"columns {listed(columns)} differ in length")
            rows = np.zeros(len(columns["row"]), ROW)
            for name, column in columns.items():
                rows[name] = column
            values = array_from_json(record["loss"]["values"], np.float64).tolist()
            before, then = record["policy"]
            return TrainedStep(
                record["step"],
                rows,
                tuple(record["tasks"]),
                policy_before=before,
                policy_after=then,
                loss=dict(zip(record["loss"]["names"], values, strict=True)),
                data=record["data"],
                seeds=record["seeds"],
                options=record.get("options", {}),
                unknown=tuple(name for name in ROW.names or () if name not in columns),
                config=record.get("config", {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{source}: a record is not of a ledger: {error}") from error
