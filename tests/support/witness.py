"""Self-checking trajectories: every value is a function of its trajectory's key and its row.

Each row carries its *tag*, ``key · 2**20 + row``. A reader of a row, or of a whole trajectory, computes the expected
values from the tag and compares bit by bit; no record of the writes is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from tests.support.equality import same
from trajstore._core.columns.fields import join_name, unnest, walk
from trajstore.trajectory import AnyTrajectory, Trajectory

_ROW_BITS = 20
_MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX generator; any odd number that mixes well would do
_SKIPPED = -1
"""Value of bootstrap rows, which sampling must never return."""


class WitnessError(Exception):
    """Values read differ from those written."""


def rows_of(tags: torch.Tensor, columns: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the columns of the rows with these tags.

    Args:
        tags: ``[n]``, int64.
        columns: which; None for all.

    Returns:
        By dotted name, tensors ``[n, ...]``.
    """
    return {name: of(tags) for name, of in _COLUMNS.items() if columns is None or name in columns}


def _mixed(tags: torch.Tensor, salt: int, width: int) -> torch.Tensor:
    """Return ``[n, width]`` numbers in [0, 255] that depend on tag, salt and place."""
    places = torch.arange(width) + 1000 * salt
    return ((tags[:, None] + places) * _MULTIPLIER >> 40) & 255


_COLUMNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "actions": lambda tags: _mixed(tags, 1, 7).to(torch.float32),
    "rewards": lambda tags: (tags >> _ROW_BITS).to(torch.float64)[:, None] / 8,
    "dones": lambda tags: (_mixed(tags, 2, 1) & 1).bool(),
    "prev_logprobs": lambda tags: -_mixed(tags, 3, 7).to(torch.float32) / 64,
    "prev_values": lambda tags: tags.to(torch.float64)[:, None],
    "versions": lambda tags: (tags >> _ROW_BITS)[:, None],
    "forward_inputs.mask": lambda tags: _mixed(tags, 4, 2).to(torch.bfloat16),
    "curr_obs.image": lambda tags: _mixed(tags, 5, 6 * 6 * 3).to(torch.uint8).reshape(-1, 6, 6, 3),
    "curr_obs.tag": lambda tags: tags,
}


def extent_of(key: int, scale: int = 1) -> tuple[int, int, int]:
    """Return T, B and E of the trajectory with this key."""
    epochs = key % 3
    return scale * (1 + key % 4) * max(epochs, 1), 1 + key % 2, epochs


def witness(key: int, scale: int = 1, columns: Collection[str] | None = None) -> Trajectory:
    """Return the trajectory with this key; its T, B and E follow from the key too.

    Args:
        key: 0 <= key < 2**40.
        scale: T is multiplied by it.
        columns: those that it has; None for all.
    """
    steps, batch, epochs = extent_of(key, scale)
    rows = rows_of(torch.arange(steps * batch) + (key << _ROW_BITS), columns)
    values = {name: column.reshape(steps, batch, *column.shape[1:]) for name, column in rows.items()}
    for name, first in (("dones", True), ("prev_values", False)) if epochs else ():
        if name in values:
            values[name] = _with_extra(values[name], epochs, first=first)
    fields: dict[str, Any] = {}
    for name, value in values.items():
        field, _, leaf = name.partition(".")
        if leaf:
            fields.setdefault(field, {})[leaf] = value
        else:
            fields[field] = value
    return Trajectory(max_episode_length=steps + key % 5, **fields)


def _with_extra(value: torch.Tensor, epochs: int, *, first: bool) -> torch.Tensor:
    steps, *rest = value.shape
    parts = value.reshape(epochs, steps // epochs, *rest)
    extra = torch.full((epochs, 1, *rest), _SKIPPED).to(value.dtype)
    return torch.cat([extra, parts] if first else [parts, extra], dim=1).reshape(steps + epochs, *rest)


def check_batch(batch: Mapping[str, Any]) -> torch.Tensor:
    """Check sampled rows, with any columns besides the tag; return their keys.

    Raises:
        WitnessError: a column does not belong to its row's tag.
    """
    columns = unnest(batch)
    tags: torch.Tensor = columns["curr_obs.tag"]
    expected = rows_of(tags, columns)
    for name, value in columns.items():
        if value.shape != expected[name].shape:
            raise WitnessError(f"column {name}: has the shape {tuple(value.shape)}, not {tuple(expected[name].shape)}")
        if not torch.equal(value, expected[name]):
            bad = (value != expected[name]).reshape(len(tags), -1).any(dim=1).nonzero()[0, 0]
            raise WitnessError(f"column {name}: row with tag {int(tags[bad])} is not what was written")
    return tags >> _ROW_BITS


def key_of(trajectory: AnyTrajectory) -> int:
    """Return the key stored in a trajectory."""
    if not isinstance(trajectory, Trajectory) or "tag" not in trajectory.curr_obs:
        raise WitnessError("not a witness")
    return int(trajectory.curr_obs["tag"].reshape(-1)[0]) >> _ROW_BITS


def check_trajectory(trajectory: AnyTrajectory, scale: int = 1, columns: Collection[str] | None = None) -> int:
    """Check a whole trajectory, bootstrap rows included, as :func:`witness` made it; return its key.

    Raises:
        WitnessError: it differs from the trajectory for its key.
    """
    key = key_of(trajectory)
    differing = difference(trajectory, witness(key, scale, columns))
    if differing is not None:
        raise WitnessError(f"trajectory with key {key}: {differing} is not what was written")
    return key


def difference(left: AnyTrajectory, right: AnyTrajectory) -> str | None:
    """Return the first field in which two trajectories differ; None if they are equal bit by bit.

    ``model_weights_id`` is not compared: it is derived when a trajectory is added.
    """
    a, b = (dict(_leaves(item)) for item in (left, right))
    if a.keys() != b.keys():
        return ", ".join(sorted(a.keys() ^ b.keys()))
    for name, value in a.items():
        if not same(value, b[name]):
            return name
    return None


def _leaves(trajectory: AnyTrajectory) -> list[tuple[str, Any]]:
    # Late values were not written with it.
    values = {k: v for k, v in vars(trajectory).items() if v is not None and k not in ("model_weights_id", "notes")}
    return [(join_name(path), value) for path, value in walk(values)]
