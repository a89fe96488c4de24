"""Read many trajectories, skipping and recording unreadable ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from trajstore._core.base.types import IntArray
from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.reading.address_table import UNAVAILABLE
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.tokens import TokenRows, token_rows
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError, TrajstoreError, listed, trajectories

logger = logging.getLogger(__name__)

T = TypeVar("T")


TOGETHER = 1024
"""Trajectories read per lock hold; additions and draws wait no longer than this."""

Faults = list[tuple[int, str]]
"""(id, reason) of unreadable trajectories."""


class Locked(Protocol):
    """Calls a function with a buffer's contents, under their lock."""

    def __call__(self, call: Callable[[Contents], T]) -> T:
        """Return the result of the call."""


def readable(ids: IntArray, read: Callable[[IntArray], T], faults: Faults) -> Iterator[tuple[IntArray, T]]:
    """Yield (ids, result): all together, or one by one if a joint read fails.

    Args:
        ids: ids of trajectories, ``[n]``.
        read: reads some of them.
        faults: receives the unreadable ones.
    """
    try:
        result = read(ids)
    except (TrajstoreError, OSError) as error:
        if len(ids) == 1:
            faults.append((int(ids[0]), str(error)))
            return
    else:
        yield ids, result
        return
    for at in range(len(ids)):
        yield from readable(ids[at : at + 1], read, faults)


def log_faults(faults: Faults, relation: str) -> None:
    """Log a warning about unreadable trajectories, if there are any, whose rows of a relation are omitted."""
    if faults:
        names = listed(shown_id(number) for number, _ in faults)
        count = trajectories(len(faults))
        logger.warning(
            "%s cannot be read, so the answer lacks %s: %s; the first: %s", count, relation, names, faults[0][1]
        )


def positions_of(contents: Contents, ids: IntArray) -> IntArray:
    """Return the positions of trajectories in the index, ``[n]``.

    Raises:
        TrajectoryUnavailableError: a trajectory was evicted meanwhile, or its files are absent.
    """
    positions: IntArray = contents.index.find_many(ids)
    if len(gone := ids[positions < 0]):
        raise TrajectoryUnavailableError(f"trajectory {shown_id(int(gone[0]))} has been evicted meanwhile")
    if len(gone := ids[contents.index.at("slot", positions) == UNAVAILABLE]):
        raise TrajectoryUnavailableError(
            f"trajectory {shown_id(int(gone[0]))}: its files are not there, or it was in memory only and has been "
            "dropped"
        )
    return positions


def of_documents(locked: Locked, ids: IntArray, of: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return the result of a function for the document of each rollout.

    Raises:
        TrajectoryUnavailableError: a rollout was evicted meanwhile.
        CorruptStoreError, OSError: a rollout is unreadable, or the function fails on its document.
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
