"""Step trajectories ``[T, B, ...]`` as episodes ``[n, 1, ...]``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS, VALID, axis_of
from trajstore._core.columns.schema import Schema
from trajstore.interop.formats import logger
from trajstore.interop.rlinf.trajectory import each_tensor, steps_of, without_extra
from trajstore.trajectory import Trajectory

_OF_BLOCKS = ("max_episode_length", "model_weights_id", "notes")
"""Fields of which a joined episode has those of its first part."""

_FLAGS = ("terminations", "truncations", "dones")

_SEAM_BYTES = 64 << 10
"""Maximum number of bytes of an observation that are compared."""

_NEAR = 16
"""Number of trajectories after a block among which an episode's next part is looked for."""


@dataclass(slots=True)
class Part:
    """An episode, or the part of one in a block.

    Attributes:
        key: names it.
        trajectory: its steps ``[n, 1, ...]``.
        block: number of the newest block with steps of it.
    """

    key: str
    trajectory: Trajectory
    block: int


class Joiner:
    """Joins the parts of episodes that go on in later blocks, by ``dones`` and equal observations.

    An open part waits for the next :data:`_NEAR` blocks.
    """

    def __init__(self) -> None:
        self._waiting: list[Part] = []
        """In the order in which they began."""
        self._open: dict[bytes, Part] = {}
        self._blocks = 0
        self.crosses = False  # whether a block was open at its end

    def add(self, key: str, block: Trajectory) -> Iterator[Part]:
        """Add a block; yield the episodes that are complete.

        Args:
            key: names it.
            block: its steps.

        Raises:
            InvalidTrajectoryError: a field has neither T nor T + E rows.
        """
        border, found = _border(block), list(episodes_of(block))
        self._blocks += 1
        begun = {} if border is None else {environment: seen for seen, environment in border.first.items()}
        goes_on = {} if border is None else {environment: seen for seen, environment in border.open.items()}
        before = {environment: self._open.pop(seen, None) for environment, seen in begun.items()}
        newest: dict[int, Part] = {}
        for number, (environment, episode) in enumerate(found):
            part = Part(f"{key}, episode {number}", episode, self._blocks)
            earlier = before.pop(environment, None)
            if environment not in newest and earlier is not None and _append(earlier, part, key):
                part = earlier
            else:
                self._waiting.append(part)
            newest[environment] = part
        is_open = not all(has_ended(part.trajectory) for part in newest.values())
        self.crosses |= is_open
        if border is None and is_open:
            logger.warning(
                "convert: blocks lack dones, or observations in curr_obs and next_obs, which show whether an episode "
                "goes on in another block: each is taken to end with its block"
            )
        self._open |= {seen: newest[environment] for environment, seen in goes_on.items() if environment in newest}
        old = self._blocks - _NEAR
        self._open = {seen: part for seen, part in self._open.items() if part.block > old}
        held = {id(part) for part in self._open.values()}
        ready = [id(part) not in held for part in self._waiting]
        first = ready.index(False) if False in ready else len(ready)
        waiting, self._waiting = self._waiting, []
        for number, part in enumerate(waiting):
            if number < first or (ready[number] and part.block <= old):
                yield part
            else:
                self._waiting.append(part)

    def look(self, block: Trajectory) -> None:
        """Look whether a block that is left out is open at its end."""
        self.crosses |= not all(map(has_ended, dict(episodes_of(block)).values()))

    def rest(self) -> Iterator[Part]:
        """Yield the episodes that still wait."""
        yield from self._waiting


def has_ended(episode: Trajectory) -> bool:
    """Return whether the last step of an episode ends it."""
    ends = (getattr(episode, name) for name in _FLAGS)
    return any(bool(flags[-1].any()) for flags in ends if flags is not None)


@dataclass(frozen=True, slots=True)
class _Border:
    """The environments of a block by the observations that join it to others.

    Attributes:
        first: by the first observation.
        open: by the observation after the last step, of episodes that do not end there.
    """

    first: Mapping[bytes, int]
    open: Mapping[bytes, int]


def _border(block: Trajectory) -> _Border | None:
    """Return what joins a block to others; None without ``dones``, or observations before and after each step."""
    flat, dones = flatten(replace(block, notes={})), block.dones
    if dones is None and block.terminations is not None and block.truncations is not None:
        dones = block.terminations | block.truncations
    steps, batch = flat.extent.steps, flat.extent.batch
    names = _compared(flat.schema)
    if dones is None or not names or not steps * batch:
        return None
    tensors = dict(zip((column.name for column in flat.schema.columns), flat.tensors, strict=True))

    def keys(field: str, step: int) -> list[bytes]:
        return _row_keys([tensors[f"{field}.{name}"].reshape(steps, batch, -1)[step] for name in names])

    ended, last = dones[-1].reshape(batch, -1).any(dim=1), keys("next_obs", -1)
    if VALID in tensors:  # a last step that only resets is no part of an episode
        ended = ended | ~tensors[VALID].reshape(steps, batch)[-1].bool()
    counts = Counter(last)  # an observation that several environments have joins none
    is_open = [counts[key] == 1 and not end for key, end in zip(last, ended.tolist(), strict=True)]
    return _Border(
        {key: number for number, key in reversed([*enumerate(keys("curr_obs", 0))])},
        {key: number for number, key in enumerate(last) if is_open[number]},
    )


def _compared(schema: Schema) -> Sequence[str]:
    """Return the observations that are compared: the first ones, up to a number of bytes, at least one."""
    widths = {column.name: column.row_nbytes for column in schema.columns}
    totals = accumulate(widths[f"curr_obs.{name}"] for name in schema.observed_twice)
    return schema.observed_twice[: max(sum(total <= _SEAM_BYTES for total in totals), 1)]


def _row_keys(leaves: Sequence[torch.Tensor]) -> list[bytes]:
    """Return, per environment, the bytes of its rows of several tensors ``[B, ...]``."""
    flat = [leaf.contiguous().view(torch.uint8).numpy() for leaf in leaves]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]


def _append(one: Part, other: Part, key: str) -> bool:
    """Append the steps of another part to an episode; False, with a warning, if their fields differ."""
    try:
        one.trajectory = joined(one.trajectory, other.trajectory)
    except ValueError as error:
        logger.warning("convert: %s goes on in %s, but is cut there, because %s differs", one.key, key, error)
        return False
    one.key, one.block = f"{one.key}, and {key}", other.block
    return True


def joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """Return an episode of the steps of two parts, with the fields of blocks of the first.

    Raises:
        ValueError: they cannot be joined; names the field that differs.
    """
    names = [item.name for item in fields(Trajectory) if item.name not in _OF_BLOCKS]
    counts = steps_of(first), steps_of(second)
    return replace(first, **{name: _both(name, getattr(first, name), getattr(second, name), *counts) for name in names})


def _both(name: str, one: Any, other: Any, steps: int, more: int) -> Any:
    """Return a field's values of two parts of an episode, of ``steps`` and ``more`` steps.

    Raises:
        ValueError: they cannot be joined; names the field.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return {key: _both(f"{name}.{key}", value, other[key], steps, more) for key, value in one.items()}
    if isinstance(one, list) and isinstance(other, list) and (len(one), len(other)) == (steps, more):
        return [*one, *other]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        if type(one) is type(other) and one == other:
            return one
    elif min(one.dim(), other.dim()) < 2:
        if torch.equal(one, other):
            return one
    elif (one.dtype, one.shape[1:]) == (other.dtype, other.shape[1:]):
        field = name.split(".")[0]
        return torch.cat([without_extra(field, one, steps), without_extra(field, other, more)])
    raise ValueError(name)


def episodes_of(trajectory: Trajectory) -> Iterator[tuple[int, Trajectory]]:
    """Yield (environment, episode) of a trajectory: environment by environment, cut after each done and at epochs.

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
        yield 0, replace(trajectory, valid=None)
        return
    for environment in range(batch):
        numbers = np.arange(steps)
        cuts = np.flatnonzero(ends[:, environment].numpy()) + 1
        for part in np.split(numbers, cuts):
            chosen = torch.from_numpy(part[valid[:, environment].numpy()[part]])
            if len(chosen):
                yield environment, _part(trajectory, plain, steps, chosen, environment)


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
