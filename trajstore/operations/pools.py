"""The extension point for experience pools, whose state only packages above the store understand.

A package registers one object under the entry point group ``trajstore.pools``; see :class:`PoolSupport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from trajstore._core.buffer.reader import Reader
from trajstore._core.store.catalog import Catalog
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query

Report = dict[str, Any]


class Pool(Protocol):
    """The contents of a pool at one moment."""

    @property
    def buffer(self) -> Reader:
        """A reader whose trajectories include the pool's histories."""

    def __len__(self) -> int:
        """Return the number of histories."""

    def query(self) -> Query:
        """Return a query over the histories."""

    def get(self, shown: str) -> AgentTrajectory:
        """Return a history by its id as shown.

        Raises:
            TrajectoryUnavailableError: the pool has none with this id.
            CorruptStoreError: it is damaged.
        """

    def overview(self) -> dict[str, Any]:
        """Return figures of the pool: tasks per difficulty now and by step, demonstrations, skipped tasks."""


class Records(Protocol):
    """The trajectories of a pool's store, each read once, and its state."""

    def look(self) -> Pool | None:
        """Return the pool as the reader shows it now; None if the reader shows several stores, or one without a pool.

        Raises:
            CorruptStoreError: its state cannot be read.
        """

    def is_current(self) -> bool:
        """Return whether no point was saved or removed since :meth:`look`."""


class PoolSupport(Protocol):
    """The functions with which operations and the viewer read pools."""

    facts: Mapping[str, str]
    """Names and meanings of the facts that only pools have."""

    def report(self, catalog: Catalog) -> tuple[Report, npt.NDArray[np.bool_]] | None:
        """Return figures of a pool's store and a mask of its histories; None if it is not one."""

    def records(self, reader: Reader) -> Records:
        """Return the trajectories of a pool's store."""


@cache
def pool_support() -> PoolSupport | None:
    """Return the registered object; None if no installed package registers one."""
    for point in entry_points(group="trajstore.pools"):
        return cast(PoolSupport, point.load())
    return None
