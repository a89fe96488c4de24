"""robomimic's data sets (``robomimic``): HDF5 files of demonstrations, read only. Does not import robomimic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.errors import listed
from trajstore.interop.episodes import UNKNOWN_WEIGHTS, leaves
from trajstore.interop.formats import Format, Item, Source, logger, optional, unreadable
from trajstore.trajectory import Trajectory

_FIELDS = ("actions", "rewards", "dones", "obs", "next_obs")


def _read(path: Path) -> Source:
    h5py = optional("h5py", "h5py")
    with unreadable(f"{path}: is no data set of robomimic"), h5py.File(path) as file:
        data = file["data"]
        names = sorted(data, key=_number)  # as texts, demo_10 would come before demo_2
        samples = [int(data[name].attrs.get("num_samples", 0)) for name in names]
        total = int(data.attrs.get("total", sum(samples)))
        masks = {
            name: {text.decode() if isinstance(text, bytes) else text for text in split[()]}
            for name, split in (file["mask"].items() if "mask" in file else ())
        }
    if total != sum(samples):
        logger.warning("%s: data counts %s samples, its demonstrations %s", path, f"{total:,}", f"{sum(samples):,}")
    for split, named in masks.items():
        if absent := sorted(named.difference(names)):
            logger.warning("%s: mask/%s names demonstrations that are not there: %s", path, split, listed(absent))

    @unreadable("is no demonstration of robomimic")
    def demonstration(name: str) -> Trajectory:
        with h5py.File(path) as file:
            return _trajectory(file["data"][name], sorted(split for split, names in masks.items() if name in names))

    def items() -> Iterator[Item]:
        for done, name in enumerate(names, start=1):
            yield Item(name, lambda name=name: demonstration(name), done)  # type: ignore[misc]

    return Source(items(), len(names))


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"(\d+)$", name)
    return (int(digits[1]) if digits else -1, name)


def _trajectory(group: Any, splits: list[str]) -> Trajectory:
    actions = _tensors(group["actions"])
    if not (steps := len(actions)):
        raise ValueError("it has no actions")
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
    for name, values in (("obs", trajectory.curr_obs), ("next_obs", trajectory.next_obs)):
        lengths = {len(value) for _, value in leaves(values, "/")}
        if lengths - {steps}:
            raise ValueError(f"{name} of {sorted(lengths)} steps, must be of {steps}")
    if (samples := int(group.attrs.get("num_samples", steps))) != steps:
        raise ValueError(f"num_samples is {samples}, but there are {steps} actions")
    return trajectory


def _tensors(node: Any) -> Any:
    """Return datasets ``[rows, ...]`` as tensors ``[rows, 1, ...]``, nested like their groups."""
    if hasattr(node, "items"):
        return {name: _tensors(item) for name, item in node.items()}
    values = np.array(node[()])
    return _plain(values) if values.dtype.kind in "SUO" else torch.from_numpy(values)[:, None]


def _others(node: Any, steps: int) -> Any:
    """Return tensors as :func:`_tensors`; a single row of numbers, such as Isaac Lab's initial state, as ``[...]``."""
    if hasattr(node, "items"):
        return {name: _others(item, steps) for name, item in node.items()}
    if node.ndim == 0:
        return _plain(node[()])
    values = _tensors(node)
    is_single = not isinstance(values, list) and values.dim() < 4 and len(values) == 1 != steps
    return values.flatten() if is_single else values


def _plain(value: Any) -> Any:
    """Return an attribute, a scalar or an array of texts as a JSON value; None if it is empty."""
    if isinstance(value, optional("h5py", "h5py").Empty):
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


FORMATS = (Format("robomimic", "episodes", (), ("env_args",), _read),)
