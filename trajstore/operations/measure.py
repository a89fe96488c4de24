"""Read the rewards and episodes of step trajectories, which the index lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.fields import VALID
from trajstore._core.columns.schema import Extent, Schema
from trajstore._core.reading.shard_access import ShardAccess
from trajstore._core.store.catalog import Catalog
from trajstore.errors import CorruptStoreError
from trajstore.operations.statistics import RewardStatistics, Seam
from trajstore.operations.verification import Progress

Rows = Callable[[str, int, int], torch.Tensor | None]
"""Returns rows of a column, by name, from the first row to before the second."""

_SEAM_BYTES = 64 << 10
"""Maximum number of bytes of an observation that are compared."""

NEAR = 16
"""Number of trajectories after a block among which an episode's next part is looked for."""


def measure(
    catalog: Catalog, blocks: npt.NDArray[np.bool_], count: int, progress: Progress | None
) -> tuple[RewardStatistics, int, int]:
    """Read the rewards of the newest step trajectories.

    Args:
        catalog: catalog of the store.
        blocks: mask of its index entries that are step trajectories.
        count: number of trajectories; 0 = all.
        progress: called with (done, total) trajectories read.

    Returns:
        The statistics, and the numbers of trajectories that were read and that cannot be.
    """
    index, access = catalog.index, ShardAccess(catalog)
    positions = index.first + np.flatnonzero(blocks)
    chosen = positions[-count:] if count else positions
    statistics, unreadable = RewardStatistics(whole=len(chosen) == len(positions)), 0
    for done, position in enumerate(chosen.tolist()):
        try:
            columns = access.columns(index, position, ("rewards", "dones", VALID))
            number, extent = int(index.at("trajectory_id", position)), index.extent(position)
            rows = partial(access.rows, index, position)
            add_block(statistics, number, access.schema(index, position), extent, columns, rows)
        except CorruptStoreError:
            unreadable += 1
        if progress is not None:
            progress(done + 1, len(chosen))
    access.close()
    return statistics, len(chosen) - unreadable, unreadable


def add_block(
    statistics: RewardStatistics,
    number: int,
    schema: Schema,
    extent: Extent,
    columns: Mapping[str, torch.Tensor],
    rows: Rows,
) -> None:
    """Add a step trajectory to the statistics.

    Args:
        statistics: of its store.
        number: its id.
        schema: its columns.
        extent: its rows.
        columns: ``rewards``, ``dones`` and ``valid``, each ``[T (+ E), B, ...]``, where it has them.
        rows: reads rows of its observations.
    """
    if "rewards" in columns and extent.batch:
        dones = columns.get("dones")
        seam = None if dones is None else _seam(number, schema, extent, rows)
        broken = _broken_epochs(schema, extent, rows)
        statistics.add(columns["rewards"], dones, seam, broken, columns.get(VALID))


@dataclass(frozen=True, slots=True)
class Border:
    """The environments of a block by the observations that join it to others.

    Attributes:
        first: by the first observation.
        open: by the observation after the last step, of episodes that do not end there.
    """

    first: Mapping[bytes, int]
    open: Mapping[bytes, int]


def border_of(schema: Schema, extent: Extent, rows: Rows, dones: torch.Tensor | None) -> Border | None:
    """Return what joins a trajectory to others.

    Args:
        schema: its columns.
        extent: its rows.
        rows: reads rows of its observations, and of ``valid``.
        dones: ``[T (+ E), B, C]``.

    Returns:
        None without ``dones``, or without observations before and after each step.
    """
    if schema.kind != "step" or dones is None or not extent.batch:
        return None
    seam = _seam(0, schema, extent, rows)
    if seam is None:
        return None
    counts, ended = Counter(seam.last), dones[-1].reshape(extent.batch, -1).any(dim=1)
    last = (extent.steps - 1) * extent.batch
    if (valid := rows(VALID, last, last + extent.batch)) is not None:
        ended = ended | ~valid.reshape(-1).bool()  # a last step that only resets is no part of an episode
    is_open = [counts[key] == 1 and not end for key, end in zip(seam.last, ended.tolist(), strict=True)]  # if unique
    return Border(
        {key: number for number, key in reversed([*enumerate(seam.first)])},
        {key: number for number, key in enumerate(seam.last) if is_open[number]},
    )


def _seam(number: int, schema: Schema, extent: Extent, rows: Rows) -> Seam | None:
    """Return the keys that join a trajectory to others, from the first observations up to a number of bytes."""
    widths = {column.name: column.row_nbytes for column in schema.columns}
    totals = accumulate(widths[f"curr_obs.{name}"] for name in schema.observed_twice)
    names = schema.observed_twice[: max(sum(total <= _SEAM_BYTES for total in totals), 1)]
    if not names or not extent.steps:
        return None
    last = (extent.steps - 1) * extent.batch
    firsts = [rows(f"curr_obs.{name}", 0, extent.batch) for name in names]
    lasts = [rows(f"next_obs.{name}", last, last + extent.batch) for name in names]
    return Seam(_row_keys(firsts), _row_keys(lasts), number)


def _broken_epochs(schema: Schema, extent: Extent, rows: Rows) -> npt.NDArray[np.bool_] | None:
    """Return a mask ``[T, B]`` of the steps that begin a rollout epoch whose environment does not continue.

    It continues if the observation before such a step equals the one after the step before. None without such steps.
    """
    steps, batch, epochs, _ = extent
    if epochs < 2 or not steps * batch:
        return None
    mask = np.zeros((steps, batch), np.bool_)
    for start in range(steps // epochs, steps, steps // epochs):
        firsts = [rows(f"curr_obs.{name}", start * batch, (start + 1) * batch) for name in schema.observed_twice]
        lasts = [rows(f"next_obs.{name}", (start - 1) * batch, start * batch) for name in schema.observed_twice]
        pairs = zip(_row_keys(firsts), _row_keys(lasts), strict=True) if firsts else ()
        mask[start] = [first != last for first, last in pairs] or True
    return mask


def _row_keys(leaves: list[torch.Tensor | None]) -> list[bytes]:
    """Return, per environment, the bytes of its rows of several tensors ``[B, ...]``."""
    flat = [leaf.contiguous().reshape(len(leaf), -1).view(torch.uint8).numpy() for leaf in leaves if leaf is not None]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]
