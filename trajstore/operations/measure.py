"""Read data from trajectories that the index lacks: rewards, episodes, outcomes, turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.fields import VALID, Axis
from trajstore._core.columns.schema import DOCUMENT, Extent, Schema
from trajstore._core.reading.late import outcomes_given
from trajstore._core.reading.shard_access import ShardAccess
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import CorruptStoreError
from trajstore.operations.statistics import RewardStatistics, Seam, agents_report
from trajstore.operations.verification import Progress
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]

_SEAM_BYTES = 64 << 10
"""Maximum number of bytes of an observation that are compared."""


def measure(
    catalog: Catalog, count: int, progress: Progress | None, counted: npt.NDArray[np.bool_] | None = None
) -> Report:
    """Read rewards, episodes and outcomes of the newest trajectories.

    Args:
        catalog: catalog of the store.
        count: number of trajectories; 0 = all.
        progress: called with (done, total) trajectories read.
        counted: mask of the index entries to include; None = all.

    Returns:
        The measured part of a report, and ``response_lengths``: R of each rollout without a column along its response.
    """
    index = catalog.index
    some = counted is not None and not counted.all()
    places = np.flatnonzero(counted) if counted is not None and some else np.arange(len(index))
    places = places[-count:] if count else places
    count = len(places)
    access = ShardAccess(catalog)
    result = _Measurement(whole=count == len(index))
    unreadable = done = 0
    wanted = set(places.tolist()) if some else None
    first = index.first + int(places[0]) if count else index.end
    for position, number in _alike(catalog, first, index.end):
        if wanted is not None and position - index.first not in wanted:
            continue  # only agent trajectories are left out, and they come singly
        try:
            result.add(access, index, position, number)
        except CorruptStoreError:
            unreadable += number
        done += number
        if progress is not None:
            progress(done, count)
    access.close()
    return {"measured": count - unreadable, "unreadable": unreadable, **result.report()}


def _alike(catalog: Catalog, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (position, count) of runs of adjacent step trajectories of one shape; all others singly."""
    if first == end:
        return
    columns = catalog.index.take(slice(first, end))
    of_steps = catalog.shards.of_steps()[columns["shard"]]
    steps, batch, extra = (columns[name].astype(np.int64) for name in ("steps", "batch", "extra"))
    breaks = ~of_steps[1:] | (steps * batch == 0)[1:]
    for name in ("shard", "steps", "batch", "extra"):
        breaks |= columns[name][1:] != columns[name][:-1]
    for name, rows in (("start_samples", steps * batch), ("start_extra", (steps + extra) * batch)):
        breaks |= columns[name][1:] != (columns[name] + rows)[:-1]
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), end - first]
    for a, b in pairwise(edges):
        yield first + a, b - a


class _Measurement:
    """Figures accumulated over trajectories of both kinds."""

    def __init__(self, *, whole: bool) -> None:
        self._rewards = RewardStatistics(whole=whole)
        self._outcomes: list[float] = []
        self._tasks: set[str] = set()
        self._nameless = 0
        self._turns: list[int] = []
        self._responses: list[int] = []
        self._messages = 0
        self._agents = 0
        self._experiences = 0

    def add(self, access: ShardAccess, index: TrajectoryIndex, position: int, count: int) -> None:
        """Add ``count`` trajectories of one shape from ``position`` on."""
        schema = access.schema(index, position)
        if schema.kind == "agent":
            self._add_agent(access, index, position, schema)
            return
        if not index.extent(position).batch:
            return
        columns = access.stacked(index, position, count, ("rewards", "dones", VALID))
        rewards, dones, valid = (columns.get(name) for name in ("rewards", "dones", VALID))
        if rewards is None:
            return
        if dones is None or not schema.observed_twice:  # then no episode continues in another trajectory or epoch
            broken = broken_epochs(schema, index.extent(position), lambda *_: None)
            side_by_side = None if broken is None else np.tile(broken, (1, count))
            self._rewards.add(
                _side_by_side(rewards),
                None if dones is None else _side_by_side(dones),
                broken=side_by_side,
                valid=None if valid is None else _side_by_side(valid),
            )
            return
        for at in range(position, position + count):
            broken = broken_epochs(schema, index.extent(at), partial(access.rows, index, at))
            here = at - position
            seam, of_it = self._seam(access, index, at, schema), None if valid is None else valid[here]
            self._rewards.add(rewards[here], dones[here], seam, broken, of_it)

    def _seam(self, access: ShardAccess, index: TrajectoryIndex, position: int, schema: Schema) -> Seam | None:
        names = seam_names(schema)
        extent = index.extent(position)
        if not names or not extent.steps:
            return None
        last = (extent.steps - 1) * extent.batch
        firsts = [access.rows(index, position, f"curr_obs.{name}", 0, extent.batch) for name in names]
        lasts = [access.rows(index, position, f"next_obs.{name}", last, last + extent.batch) for name in names]
        return Seam(row_keys(firsts), row_keys(lasts), int(index.at("trajectory_id", position)))

    def _add_agent(self, access: ShardAccess, index: TrajectoryIndex, position: int, schema: Schema) -> None:
        trajectory = access.trajectory(index, position, (DOCUMENT, "response_mask"))
        if not isinstance(trajectory, AgentTrajectory):
            return
        if "experience" in trajectory.metadata:  # an entry of a store of guided rollouts
            self._experiences += 1
            return
        self._agents += 1
        if trajectory.task_id:
            self._tasks.add(trajectory.task_id)
        else:
            self._nameless += 1
        if trajectory.response_start is not None and not any(c.axis is Axis.RESPONSE for c in schema.columns):
            self._responses.append(index.extent(position).steps - trajectory.response_start)
        self._messages += bool(trajectory.messages)
        turns = turns_of(trajectory)
        if turns is not None:
            self._turns.append(turns)
        outcome = float(outcomes_given(index, np.array([position]))[0])
        if math.isnan(outcome) and trajectory.reward is not None and trajectory.reward.outcome is not None:
            outcome = trajectory.reward.outcome
        if not math.isnan(outcome):
            self._outcomes.append(outcome)

    def report(self) -> Report:
        counted = self._agents, len(self._tasks), self._nameless, self._outcomes, self._turns, self._messages
        return {
            "rewards": self._rewards.rewards_report(),
            "episodes": self._rewards.episodes_report(),
            "agents": agents_report(*counted) if self._agents else None,
            "experiences": self._experiences,
            "response_lengths": np.array(self._responses, np.int64),
        }


def _side_by_side(values: torch.Tensor) -> torch.Tensor:
    """Return ``[n, T, B, ...]`` as ``[T, n * B, ...]``."""
    count, steps, batch, *rest = values.shape
    return values.transpose(0, 1).reshape(steps, count * batch, *rest)


def turns_of(trajectory: AgentTrajectory) -> int | None:
    """Return the number of the model's turns, by messages or else by runs of its tokens; None if unknown."""
    if trajectory.messages:
        return len([m for m in trajectory.messages if isinstance(m, dict) and m.get("role") == "assistant"])
    mask = trajectory.response_mask
    if mask is None or mask.is_complex():
        return None
    ones = np.concatenate([[False], mask.ne(0).numpy()])
    return int(np.count_nonzero(ones[1:] & ~ones[:-1]))


def seam_names(schema: Schema) -> list[str]:
    """Return the observation names (without ``curr_obs.``) used to link trajectories."""
    widths = {column.name: column.row_nbytes for column in schema.columns}
    totals = accumulate(widths[f"curr_obs.{name}"] for name in schema.observed_twice)
    few = sum(total <= _SEAM_BYTES for total in totals)
    return list(schema.observed_twice[: max(few, 1)])


def broken_epochs(
    schema: Schema, extent: Extent, rows: Callable[[str, int, int], torch.Tensor | None]
) -> npt.NDArray[np.bool_] | None:
    """Return a mask ``[T, B]`` of the steps that begin a rollout epoch whose environment does not continue.

    It continues if the observation before such a step equals the one after the step before. None without such steps.

    Args:
        schema: columns of a step trajectory.
        extent: its rows.
        rows: returns rows of one of its columns, by name, from the first row to before the second.
    """
    steps, batch, epochs, _ = extent
    if epochs < 2 or not steps * batch:
        return None
    mask = np.zeros((steps, batch), np.bool_)
    for start in range(steps // epochs, steps, steps // epochs):
        firsts = [rows(f"curr_obs.{name}", start * batch, (start + 1) * batch) for name in schema.observed_twice]
        lasts = [rows(f"next_obs.{name}", (start - 1) * batch, start * batch) for name in schema.observed_twice]
        pairs = zip(row_keys(firsts), row_keys(lasts), strict=True) if firsts else ()
        mask[start] = [first != last for first, last in pairs] or True
    return mask


def row_keys(leaves: list[torch.Tensor | None]) -> list[bytes]:
    """Return, per environment, the bytes of its rows of several tensors ``[B, ...]``."""
    flat = [leaf.contiguous().reshape(len(leaf), -1).view(torch.uint8).numpy() for leaf in leaves if leaf is not None]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]
