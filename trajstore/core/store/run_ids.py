"""Ids of a run directory: rank and the id that the rank's own store gave, in one number. Pure.

Rank 0's are those of its store, and so are the ids of a store that is read alone.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.core.base.arguments import INT64_MAX, whole, whole_numbers
from trajstore.errors import ConfigurationError, CorruptStoreError

_ID_BITS = 42

ID_LIMIT = 1 << _ID_BITS
"""Ids of the store of a rank are below it."""

RANK_LIMIT = 1 << 19
"""Ranks are below it."""

_T = TypeVar("_T", int, npt.NDArray[np.int64])


def in_run(rank: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ids that trajectories of a rank have in its run, ``[n]``.

    Raises:
        CorruptStoreError: the store's ids, or the rank, are too high for it.
    """
    if rank >= RANK_LIMIT or (len(ids) and int(ids.max()) >= ID_LIMIT):
        highest = int(ids.max(initial=0))
        raise CorruptStoreError(
            f"rank_{rank}: ranks of a run are below {RANK_LIMIT:,} and the ids of their stores below {ID_LIMIT:,}, "
            f"here up to {highest:,}; load the rank's folder by its own path"
        )
    return ids + (rank << _ID_BITS)


def rank_of_id(number: _T) -> _T:
    """Return the rank of an id, or of each."""
    return number >> _ID_BITS


def own_id(number: _T) -> _T:
    """Return the id within the store of its rank, of one id or of each."""
    return number & (ID_LIMIT - 1)


def shown_id(number: int) -> str:
    """Return an id as messages and commands say it: ``3/17``; ``17`` for that of rank 0, or of a store read alone."""
    return f"{rank_of_id(number)}/{own_id(number)}" if number >= ID_LIMIT else str(number)


def id_from(field: str, value: Any) -> int:
    """Return an id that a user gave: a whole number, as text too, or what :func:`shown_id` makes of it.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, str):
        return whole(field, value, -INT64_MAX)
    rank, _, own = value.rpartition("/") if "/" in value else ("0", "", value)
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in (rank, own)):
        raise ConfigurationError(f"{field}: {value!r}, must be an id (17), or rank and id as they are shown ('3/17')")
    highest = ID_LIMIT if "/" in value else RANK_LIMIT * ID_LIMIT
    if int(rank) >= RANK_LIMIT or int(own) >= highest:
        raise ConfigurationError(f"{field}: {value!r} is too high for an id")
    return int(rank) << _ID_BITS | int(own)


def ids_from(field: str, values: Any) -> list[int]:
    """Return ids that a user gave, each as :func:`id_from` takes it.

    Raises:
        ConfigurationError: one is no id.
    """
    if isinstance(values, list | tuple) and any(isinstance(value, str) for value in values):
        return [id_from(field, value) for value in values]
    found: list[int] = whole_numbers(field, values).tolist()
    return found
