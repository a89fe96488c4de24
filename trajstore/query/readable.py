"""Reading many trajectories of which some may not be readable: those are noted and left out, their neighbours come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.schema import DOCUMENT
from trajstore.core.reading.contents import Contents
from trajstore.core.reading.slots import UNAVAILABLE
from trajstore.core.reading.tokens import TokenRows, token_rows
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError, TrajstoreError, listed

logger = logging.getLogger(__name__)

T = TypeVar("T")

IntArray = npt.NDArray[np.int64]

TOGETHER = 1024
"""Trajectories that are read at a time; those that add or draw meanwhile wait no longer than for these."""

Faults = list[tuple[int, str]]
"""Ids of trajectories that could not be read, and why."""


class Locked(Protocol):
    """Calls with the contents of a buffer, whose lock is held meanwhile."""

    def __call__(self, call: Callable[[Contents], T]) -> T:
        """Return what the call returns."""


def readable(ids: IntArray, read: Callable[[IntArray], T], faults: Faults) -> Iterator[tuple[IntArray, T]]:
    """Yield ids and what is read of them: together, or one by one where one spoils it for all.

    Args:
        ids: of trajectories, ``[n]``.
        read: reads some of them.
        faults: is told of those that cannot be read.
    """
    try:
        found = read(ids)
    except (TrajstoreError, OSError) as error:
        if len(ids) == 1:
            faults.append((int(ids[0]), str(error)))
            return
    else:
        yield ids, found
        return
    for at in range(len(ids)):
        yield from readable(ids[at : at + 1], read, faults)


def tell(faults: Faults, what: str) -> None:
    """Warn of trajectories that could not be read.

    Args:
        faults: none is no warning.
        what: happened to how many: with ``%d``.
    """
    if faults:
        names = listed(shown_id(number) for number, _ in faults)
        logger.warning(f"{what}: %s; the first: %s", len(faults), names, faults[0][1])


def positions_of(contents: Contents, ids: IntArray) -> IntArray:
    """Return where trajectories are in the index, ``[n]``.

    Raises:
        TrajectoryUnavailableError: one has been evicted meanwhile, or its files are not there.
    """
    positions: IntArray = contents.index.find_many(ids)
    if len(gone := ids[positions < 0]):
        raise TrajectoryUnavailableError(f"trajectory {shown_id(int(gone[0]))} has been evicted meanwhile")
    if len(gone := ids[contents.index.at("slot", positions) == UNAVAILABLE]):
        raise TrajectoryUnavailableError(
            f"trajectory {shown_id(int(gone[0]))}: its files are not there, or it was in memory only and has left it"
        )
    return positions


def of_documents(locked: Locked, ids: IntArray, of: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what a function makes of the document of each rollout.

    Raises:
        TrajectoryUnavailableError: one has been evicted meanwhile.
        CorruptStoreError, OSError: one cannot be read, or the function cannot use it.
    """

    def find(contents: Contents) -> TokenRows:
        return token_rows(contents, positions_of(contents, ids), [DOCUMENT])

    rows = locked(find)
    try:
        return [of(document) for document in rows.documents()]
    except (TypeError, AttributeError, ValueError) as error:
        raise CorruptStoreError(f"a document of trajectories {listed(map(shown_id, ids.tolist()))}: {error}") from error
    finally:
        rows.end()
