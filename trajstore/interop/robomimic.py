"""robomimic's data sets (``robomimic``): HDF5 files of demonstrations, read only. Does not import robomimic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.errors import CorruptStoreError
from trajstore.interop.episodes import UNKNOWN_WEIGHTS
from trajstore.interop.formats import Format, Item, Source
from trajstore.interop.minari import h5py_module
from trajstore.trajectory import Trajectory

_FIELDS = ("actions", "rewards", "dones", "obs", "next_obs")


def _read(path: Path) -> Source:
    h5py = h5py_module()
    try:
        with h5py.File(path) as file:
            names = sorted(file["data"], key=_number)  # as texts, demo_10 would come before demo_2
            masks = {
                name: {text.decode() if isinstance(text, bytes) else text for text in split[()]}
                for name, split in (file["mask"].items() if "mask" in file else ())
            }
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise CorruptStoreError(f"{path}: is no data set of robomimic: {error!r}") from error

    def demonstration(name: str) -> Trajectory:
        try:
            with h5py.File(path) as file:
                return _trajectory(file["data"][name], sorted(split for split, names in masks.items() if name in names))
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise CorruptStoreError(f"is no demonstration of robomimic: {error!r}") from error

    def items() -> Iterator[Item]:
        for done, name in enumerate(names, start=1):
            yield Item(name, lambda name=name: demonstration(name), done)  # type: ignore[misc]

    return Source(items(), len(names))


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"(\d+)$", name)
    return (int(digits[1]) if digits else -1, name)


def _trajectory(group: Any, splits: list[str]) -> Trajectory:
    actions = _tensors(group["actions"])
    steps = len(actions)
    rewards = _tensors(group["rewards"]) if "rewards" in group else torch.full((steps, 1), torch.nan)
    dones = _tensors(group["dones"]).bool() if "dones" in group else None
    others = {name: _others(group[name], steps) for name in group if name not in _FIELDS}
    trajectory = Trajectory(
        model_weights_id=UNKNOWN_WEIGHTS,
        actions=actions[..., None] if actions.dim() == 2 else actions,
        rewards=rewards.reshape(len(rewards), 1, -1),
        dones=None if dones is None else dones.reshape(len(dones), 1, -1),
        curr_obs=_tensors(group["obs"]) if "obs" in group else {},
        next_obs=_tensors(group["next_obs"]) if "next_obs" in group else {},
        forward_inputs={
            **others,
            "splits": splits,
            "attributes": {name: _plain(group.attrs[name]) for name in group.attrs},
        },
    )
    for name in ("obs", "next_obs"):
        lengths = {len(value) for value in _rows(trajectory.curr_obs if name == "obs" else trajectory.next_obs)}
        if lengths - {steps}:
            raise ValueError(f"{name} of {sorted(lengths)} steps, must be of {steps}")
    return trajectory


def _tensors(node: Any) -> Any:
    """Return datasets ``[rows, ...]`` as tensors ``[rows, 1, ...]``, nested like their groups."""
    if hasattr(node, "items"):
        return {name: _tensors(item) for name, item in node.items()}
    return torch.from_numpy(np.array(node[()]))[:, None]


def _others(node: Any, steps: int) -> Any:
    """Return tensors as :func:`_tensors`; a single row of numbers, such as Isaac Lab's initial state, as ``[...]``."""
    if hasattr(node, "items"):
        return {name: _others(item, steps) for name, item in node.items()}
    if node.ndim == 0:
        return _plain(node[()])
    tensor = _tensors(node)
    return tensor.flatten() if tensor.dim() < 4 and len(tensor) == 1 != steps else tensor


def _plain(value: Any) -> Any:
    """Return an attribute or a scalar as a JSON value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode() if isinstance(value, bytes) else value


def _rows(value: Any) -> Iterator[torch.Tensor]:
    for item in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(item, Mapping):
            yield from _rows(item)
        else:
            yield item


FORMATS = (
    Format(
        "robomimic",
        "episodes",
        (),
        ("env_args",),
        _read,
    ),
)
