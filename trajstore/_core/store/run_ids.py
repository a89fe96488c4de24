"""Trajectory ids: numbering, formatting and parsing. Pure.

A single store numbers its trajectories from 0. In a run directory an id consists of the rank and the id in the rank's
store, written ``2/1`` and stored as one number. Numbers of a run are at least :data:`ID_LIMIT`, so the two kinds are
distinguishable.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore._core.base.arguments import INT64_MAX, whole, whole_numbers
from trajstore.errors import ConfigurationError, CorruptStoreError, TrajectoryUnavailableError, listed

_ID_BITS = 42

ID_LIMIT = 1 << _ID_BITS
"""Exclusive limit of the ids in one store."""

RANK_LIMIT = 1 << 19
"""Exclusive limit of ranks."""

ALONE = -1
"""Rank of a single store."""

SINGLE_EXAMPLE, RUN_EXAMPLE = "17", "0/17"

_T = TypeVar("_T", int, npt.NDArray[np.int64])


def in_run(rank: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a rank's trajectory ids as ids of its run, ``[n]``; for :data:`ALONE` they are unchanged.

    Raises:
        CorruptStoreError: the rank is too high, or the store has used up the ids of a run.
    """
    if rank >= RANK_LIMIT:
        raise CorruptStoreError(
            f"rank_{rank}: ranks of a run are below {RANK_LIMIT:,}; load the rank's folder by its own path"
        )
    if len(ids) and (highest := int(ids.max())) >= ID_LIMIT:
        raise CorruptStoreError(
            f"rank_{rank}: its ids go up to {highest:,}, and those of a run's stores are below {ID_LIMIT:,} (each "
            "restore skips some; `trajstore inspect` shows how many are left): load the rank's folder by its own "
            "path, and save a checkpoint of it, whose ids are lower"
        )
    return ids + (rank + 1 << _ID_BITS)


def rank_of_id(number: _T) -> _T:
    """Return the rank of an id or an array of ids; :data:`ALONE` for ids of a single store."""
    return (number >> _ID_BITS) - 1


def own_id(number: _T) -> _T:
    """Return the id within its rank's store, of an id or an array of ids."""
    return number & (ID_LIMIT - 1)


def shown_id(number: int) -> str:
    """Return an id as text: ``2/1`` of a run, ``17`` of a single store."""
    return f"{rank_of_id(number)}/{own_id(number)}" if number >= ID_LIMIT else str(number)


def written_id(number: int) -> int | str:
    """Return an id as written in JSON, CSV and Parquet: ``"2/1"`` of a run, the number 17 of a single store."""
    return shown_id(number) if number >= ID_LIMIT else number


def compared_id(number: int) -> int | str:
    """Return an id as written in conditions: ``'2/1'`` with its quotes, or the number 17."""
    return f"'{shown_id(number)}'" if number >= ID_LIMIT else number


def parsed_id(text: str) -> int | None:
    """Return the number of an id written as text, ``17`` or ``2/1``; None if it is neither."""
    rank, slash, own = text.rpartition("/")
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in (rank or "0", own)) or (
        slash and (not rank or int(rank) >= RANK_LIMIT or int(own) >= ID_LIMIT)
    ):
        return None
    number = (int(rank) + 1 << _ID_BITS | int(own)) if slash else int(own)
    return number if number < (RANK_LIMIT + 1) * ID_LIMIT else None


def id_from(field: str, value: Any) -> int:
    """Return the number of a user's id: an integer, or text in the format of :func:`shown_id`.

    Raises:
        ConfigurationError: it is neither.
    """
    if type(value) is int and abs(value) <= INT64_MAX:
        return value
    if not isinstance(value, str):
        return whole(field, value, -INT64_MAX)
    number = parsed_id(value)
    if number is None:
        raise ConfigurationError(
            f"{field}: {value!r}, must be an id as it is shown: {SINGLE_EXAMPLE} in a single store, '{RUN_EXAMPLE}' "
            f"(rank and id) in a run directory; ranks are below {RANK_LIMIT:,} and their ids below {ID_LIMIT:,}"
        )
    return number


def ids_from(field: str, values: Any) -> npt.NDArray[np.int64]:
    """Return the numbers of a user's ids, see :func:`id_from`, ``[n]``.

    Raises:
        ConfigurationError: one is not an id.
    """
    if isinstance(values, list | tuple) and any(issubclass(kind, str) for kind in {*map(type, values)}):
        values = [id_from(field, value) for value in values]
    return whole_numbers(field, values)


def no_rank(path: str | Path, number: int, ranks: Collection[int]) -> TrajectoryUnavailableError:
    """Return the error for an id whose rank is not among those at a path (``ALONE``: that of a single store)."""
    rank = rank_of_id(number)
    there = listed(f"rank_{other}" for other in sorted(ranks))
    why = spelling_hint(number) if ALONE in (rank, *ranks) else f"there is no rank_{rank}, only {there}"
    return TrajectoryUnavailableError(f"{path}: no trajectory has the id {shown_id(number)}; {why}")


def spelling_hint(number: int) -> str:
    """Return a hint for an id of the wrong kind: a plain one in a run, or vice versa."""
    if number < ID_LIMIT:
        return f"in a run directory an id is rank and id, such as '0/{max(number, 0)}'"
    return f"in a single store an id is a number, such as {SINGLE_EXAMPLE}"
