"""Step trajectories ``[T, B, ...]`` as episodes ``[n, 1, ...]``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS, axis_of
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
from trajstore.interop.rlinf.trajectory import each_tensor, steps_of, without_extra
from trajstore.trajectory import Trajectory, get_model_weights_id

UNKNOWN_WEIGHTS = get_model_weights_id(torch.zeros(1))
"""``model_weights_id`` of steps without versions, as of :class:`trajstore.EmbodiedRolloutResult`."""

_FLAGS = ("terminations", "truncations", "dones")


def episodes_of(trajectory: Trajectory) -> Iterator[Trajectory]:
    """Yield the episodes of a trajectory: environment by environment, cut after each done and at epochs.

    Invalid steps and bootstrap rows are left out. A chunk of several actions is one step: its rewards are added, and
    it ends the episode if one of its actions does. A trajectory that is a single episode already is unchanged.

    Raises:
        InvalidTrajectoryError: a field has neither T nor T + E rows.
    """
    ended, cut = trajectory.terminations, trajectory.truncations
    if trajectory.dones is None and ended is not None and cut is not None:
        trajectory = replace(trajectory, dones=ended | cut)
    steps = steps_of(trajectory)
    tensors = {name: value for name in TENSOR_FIELDS if (value := getattr(trajectory, name)) is not None}
    epochs = max((axis_of(name, len(value), steps)[1] for name, value in tensors.items()), default=0) or 1
    plain = {name: without_extra(name, value, steps) for name, value in tensors.items()}
    for name in ("rewards", *_FLAGS):
        value = plain.get(name)
        if value is not None and value.shape[-1] > 1:
            plain[name] = value.sum(-1, keepdim=True) if name == "rewards" else value.any(-1, keepdim=True)
    batch = next(iter(plain.values())).shape[1]
    valid = plain.pop("valid", torch.ones(steps, batch, dtype=torch.bool)).reshape(steps, batch)
    ends = torch.zeros(steps, batch, dtype=torch.bool)
    ends[steps // epochs - 1 :: steps // epochs] = True
    for name in _FLAGS:
        if name in plain:
            ends |= plain[name].reshape(steps, batch).bool()
    if (
        batch == 1
        and bool(valid.all())
        and not bool(ends[:-1].any())
        and all(tensors.get(name) is plain.get(name) for name in ("rewards", *_FLAGS))
    ):
        yield replace(trajectory, valid=None)
        return
    for environment in range(batch):
        numbers = np.arange(steps)
        cuts = np.flatnonzero(ends[:, environment].numpy()) + 1
        for part in np.split(numbers, cuts):
            chosen = torch.from_numpy(part[valid[:, environment].numpy()[part]])
            if len(chosen):
                yield _part(trajectory, plain, steps, chosen, environment)


def _part(
    trajectory: Trajectory, plain: dict[str, torch.Tensor], steps: int, chosen: torch.Tensor, environment: int
) -> Trajectory:
    def rows(name: str, value: torch.Tensor) -> torch.Tensor:
        return without_extra(name, value, steps)[chosen][:, environment : environment + 1]

    part = Trajectory(trajectory.max_episode_length, trajectory.model_weights_id)
    for name, value in plain.items():
        setattr(part, name, value[chosen][:, environment : environment + 1])
    for name in DICT_FIELDS:
        setattr(part, name, each_tensor(getattr(trajectory, name), (name,), rows))
    return part


def arrays_of(value: Any, name: str) -> Any:
    """Return tensors ``[rows, 1, ...]`` of one environment as arrays ``[rows, ...]``, in the same nested dicts.

    Lists of texts are kept.

    Raises:
        InvalidTrajectoryError: a value has no rows, or a type that files of other programs lack; names it.
    """
    if isinstance(value, Mapping):
        return {key: arrays_of(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        raise InvalidTrajectoryError(f"{name}: has no row for each step")
    if value.dtype == torch.bfloat16 or value.is_complex():
        raise InvalidTrajectoryError(f"{name}: files of this format have no type {str(value.dtype)[6:]}; use float32")
    return value[:, 0].numpy()


def leaves(value: Any, separator: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their paths."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, separator, f"{path}{separator}{name}" if path else name)
    else:
        yield path, value


def images_as(name: str, images: Any, shape: Sequence[int], first: bool = False) -> Any:
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
