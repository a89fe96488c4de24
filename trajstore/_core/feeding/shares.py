"""Shares of several buffers in each batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trajstore._core.base.arguments import check_instance, finite, text, whole
from trajstore._core.columns.limits import shown
from trajstore._core.feeding.options import Replay, RowLedger, check_replay, check_values
from trajstore._core.sampling.base import Ids, Sampler
from trajstore.errors import ConfigurationError, listed

ALONE = "replay"
"""Name of a loader's only buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A buffer's share of each batch, for a loader that mixes several: ``{name: Share(buffer, weight=...), ...}``.

    Attributes:
        buffer: buffer or handle to draw from.
        weight: its part of the rows without a ``count``, relative to the other weights; all batches have the same
            whole numbers of rows (1).
        count: number of its rows in each global batch, instead of a weight.
        sampler: sampler to use instead of uniform draws.
        where: draw only trajectories that match this condition on facts.
        ids: draw only these trajectories.
        min_size: minimum trajectories in the buffer before the first batch (1).
        ledger: a :class:`trajstore.ledger.Ledger` for the rows of this buffer.
    """

    buffer: Replay
    weight: float | None = None
    count: int | None = None
    sampler: Sampler | None = None
    where: str | None = None
    ids: Ids | None = None
    min_size: int = 1
    ledger: RowLedger | None = None


OF_SHARES = tuple(field.name for field in fields(Share) if field.name not in ("buffer", "weight", "count"))
"""Options of a loader that with several buffers belong to their shares."""


def shares_of(replay: Replay | Mapping[str, Share], options: Mapping[str, Any]) -> dict[str, Share]:
    """Return the shares of a loader's buffers by name; one if it has a single buffer.

    Raises:
        ConfigurationError: an argument is invalid; names it.
    """
    if not isinstance(replay, Mapping):
        check_replay("replay", replay)
        return {ALONE: Share(replay, **{name: options[name] for name in OF_SHARES if name in options})}
    for name in OF_SHARES:
        if options.get(name) is not None:
            raise ConfigurationError(f"{name}: has no effect with several buffers; pass it to the Share of one")
    if not replay:
        raise ConfigurationError("replay: {} has no buffers")
    for name, share in replay.items():
        check_instance(f"replay[{text('name of a share', name)!r}]", share, Share, "a Share(buffer, weight=...)")
        check_replay(f"replay[{name!r}]", share.buffer)
        check_values({part: getattr(share, part) for part in OF_SHARES})
    return dict(replay)


def counts_of(batch_size: int, shares: Mapping[str, Share]) -> list[int]:
    """Return the number of rows of each share in a batch.

    Weights divide the rows that counts leave, rounded by the largest remainders.

    Raises:
        ConfigurationError: a share would have no rows, or the counts do not fit the batch.
    """
    weights = np.zeros(len(shares))
    counts = np.zeros(len(shares), np.int64)
    for place, (name, share) in enumerate(shares.items()):
        if share.count is not None:
            if share.weight is not None:
                raise ConfigurationError(f"{name}: has a weight and a count; pass one of both")
            counts[place] = whole(f"{name}: count", share.count, 1)
        else:
            weights[place] = finite(f"{name}: weight", 1.0 if share.weight is None else share.weight, 0, above=True)
    rest = batch_size - int(counts.sum())
    if rest < 0 or (rest and not weights.any()):
        raise ConfigurationError(f"count: {listed(map(str, counts.tolist()))} rows do not add up to {batch_size}")
    if weights.any():
        weights /= weights.max()  # so that their sum is finite
        wanted = rest * weights / weights.sum()
        counts += np.floor(wanted).astype(np.int64)
        remainders = np.where(weights > 0, np.floor(wanted) - wanted, 1.0)
        counts[np.argsort(remainders, kind="stable")[: batch_size - int(counts.sum())]] += 1
    if not counts.all():
        name = list(shares)[int(np.argmin(counts))]
        raise ConfigurationError(
            f"{name}: its weight, {shown(shares[name].weight)}, leaves it without rows of a batch of {batch_size}"
        )
    return [int(count) for count in counts]


def parts_of(counts: Sequence[int], rank: tuple[int, int]) -> list[slice]:
    """Return the rows of each buffer that one rank reads: equally many rows per rank, each buffer evenly spread.

    Args:
        counts: number of rows of each buffer in the global batch.
        rank: (r, W).
    """
    low, high = (sum(counts) * number // rank[1] for number in (rank[0], rank[0] + 1))
    places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    of_place = np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]
    first, last = (np.bincount(of_place[:end], minlength=len(counts)).tolist() for end in (low, high))
    return [slice(begin, end) for begin, end in zip(first, last, strict=True)]
