"""What other packages of trajstore ask of a buffer, and its users do not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import check_instance, whole
from trajstore.buffer.backing import Backing, ReaderBacking
from trajstore.buffer.choices import Choices
from trajstore.buffer.retention import Retention
from trajstore.buffer.view import View
from trajstore.columns.flat import FlatTrajectory
from trajstore.columns.limits import MAX_ID
from trajstore.errors import ConfigurationError
from trajstore.querying.relations import Asked, Found, late_columns, read_rows
from trajstore.reading.contents import Contents
from trajstore.reading.late import outcomes_given
from trajstore.sampling.draws import Draws
from trajstore.store.catalog import Catalog

T = TypeVar("T")
I_co = TypeVar("I_co", covariant=True)

_MOST_RANKS = 1 << 31


class HasInternals(Protocol[I_co]):
    """A buffer, or a handle of stores."""

    @property
    def _internals(self) -> I_co: ...


def internals_of(buffer: HasInternals[I_co]) -> I_co:
    """Return what packages of trajstore ask of a buffer, or of a handle of stores. It may change with any release."""
    return buffer._internals


class Internals(Choices):
    """Identity and ids of a buffer; and, of draws, what arrays of ids ask for.

    Args:
        view: what the buffer shows.
        draws: its generator.
        backing: what stands behind the view.
    """

    def __init__(self, view: View, draws: Draws, backing: Backing) -> None:
        super().__init__(view, draws)
        self.backing = backing

    # -- what it is -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed: loaders give no more of its batches."""
        return self._view.released

    @property
    def grows(self) -> bool:
        """Whether more trajectories may come: of all buffers but those of ``open(pin=...)``."""
        request = self._view.request
        return not isinstance(self.backing, ReaderBacking) or request is None or request.pin is None

    @property
    def generator(self) -> torch.Generator:
        """Generator of all draws; part of ``state_dict``."""
        return self._draws.generator

    @property
    def retention(self) -> Retention:
        """Limits, beyond which the oldest trajectories go."""
        return self._view.retention

    @property
    def share(self) -> tuple[int, int] | None:
        """(local_rank, world_size), if the buffer shows one rank's share of what was loaded; else None."""
        request = self._view.request
        return None if request is None else request.share

    @property
    def store_id(self) -> str | None:
        """UUID of the directory that the buffer writes to; None in memory only."""
        return self.backing.store_id

    @property
    def store_ids(self) -> list[str]:
        """UUIDs of the stores that are shown: the buffer's own, and those that were loaded."""
        return self._view.store_ids

    def stores_by_rank(self) -> dict[int, tuple[str, int]]:
        """Return UUID and next id of the stores that were loaded, by rank; a directory of RLinf has neither."""
        return self._view.stores_by_rank()

    def catalogs_by_rank(self) -> dict[int, Catalog]:
        """Return the catalogs of the stores that were loaded, by rank; read them while nothing is refreshed."""
        return self._view.catalogs_by_rank()

    @property
    def trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self.backing.intake.counter

    @property
    def trajectory_uuids(self) -> npt.NDArray[np.void]:
        """UUIDs of all trajectories, oldest first, as an array of 16 bytes each."""
        with self._view.contents.lock:
            return np.array(self._view.contents.index["uuid"])

    def outcomes_given(self) -> dict[int, float]:
        """Return the outcomes that trajectories were given late, by id."""

        def look(contents: Contents) -> dict[int, float]:
            given = outcomes_given(contents.index, np.arange(contents.index.first, contents.index.end))
            there = np.flatnonzero(~np.isnan(given))
            ids = contents.index["trajectory_id"][there]
            return dict(zip(ids.tolist(), given[there].tolist(), strict=True))

        return self._view.locked(look)

    def rows(self, asked: Asked) -> Found:
        """Return messages, tokens or steps of some trajectories."""
        return read_rows(self._view.locked, asked)

    def late_rows(self, relation: str) -> dict[str, bool]:
        """Return which values by row are columns of a relation; see :data:`trajstore.querying.relations.Late`."""
        return late_columns(self._view.locked, relation)

    # -- adding -----------------------------------------------------------------------------------

    def add_flattened(self, flats: Sequence[FlatTrajectory], uuids: bytes) -> list[int]:
        """Add what another process has checked and taken apart into columns; return the ids.

        Args:
            flats: see :func:`trajstore.columns.conversion.flatten`; copied before this returns.
            uuids: UUID of each, 16 bytes; where directories are united, of those with the same UUID one counts.

        Raises:
            StoreWriteError, UnwritableTrajectoryError, PendingFullError: as by ``add_trajectories``.
            ConfigurationError: there are not as many UUIDs as trajectories.
        """
        check_instance("flats", flats, Sequence, "a list of what flatten returns")
        check_instance("uuids", uuids, bytes, "bytes, 16 for each trajectory")
        if isinstance(flats, str) or not all(isinstance(flat, FlatTrajectory) for flat in flats):
            raise ConfigurationError("flats: must be a list of what flatten returns")
        if len(uuids) != 16 * len(flats):
            raise ConfigurationError(f"uuids: {len(uuids)} bytes, must be 16 for each of {len(flats)} trajectories")
        return self.backing.add_flattened(flats, uuids)

    def share_ids(self, rank: int, ranks: int, *, at_least: int = 0) -> int:
        """Give out only ids that are ``rank`` modulo ``ranks`` from now on, so that several stores keep apart.

        Args:
            rank: of this store.
            ranks: how many there may be.
            at_least: no lower id is given out from now on.

        Returns:
            The next id that is given out. What got a lower one is shown already, or never will be.

        Raises:
            ConfigurationError: ``rank`` is not in ``[0, ranks)``, or ``at_least`` in ``[0, 2**61]``.
            StoreError: the buffer has no store (``auto_save=False``).
        """
        rank, ranks = whole("rank", rank, 0), whole("ranks", ranks, 1, _MOST_RANKS)
        if not rank < ranks:
            raise ConfigurationError(f"rank: {rank}, must be less than ranks, {ranks}")
        least = whole("at_least", at_least, 0, MAX_ID // 2)
        return self.backing.share_ids(least + (rank - least) % ranks, ranks)
