"""Base class and data types of samplers. Pure: no I/O, no clock, the generator is passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.types import FloatArray, IntArray

Ids = Sequence[int | str] | IntArray
"""Ids of trajectories, as numbers or as they are shown: ``"3/17"``."""

Unit = Literal["sample", "trajectory"]
"""Unit of sampling: transitions (one step of one environment), or whole trajectories."""

NO_TRAJECTORY = -1
"""Id of a batch's rows that are not of the buffer drawn from: demonstrations."""

Fits = Callable[[IntArray, IntArray], npt.NDArray[np.bool_]]
"""Returns a mask of the rows that may be drawn, given trajectory ids and places."""


@dataclass(frozen=True, slots=True)
class Additions:
    """Trajectories added to a sampler, in order of addition.

    Attributes:
        ids: trajectory ids, ``[n]``.
        samples: valid transitions per trajectory (1 for an agent trajectory), ``[n]``.
        versions: newest policy version per trajectory, ``[n]``; ``limits.UNKNOWN_VERSION`` if unknown.
        tasks: task per trajectory; empty if unnamed, as for all but agent trajectories. None if not requested.
        names: first half of each UUID, ``[n]``, 0 if not valid across processes; None = unknown.
        sessions: for rows of agent sessions, id and number of rows of the session; an empty id for other trajectories.
            None if there are no sessions, or not requested (as tasks).
    """

    ids: IntArray
    samples: IntArray
    versions: IntArray
    tasks: Sequence[str] | None = None
    names: IntArray | None = None
    sessions: Sequence[tuple[str, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: npt.NDArray[np.intp]) -> Additions:
        """Return the trajectories at these places, in that order."""
        tasks = None if self.tasks is None else [self.tasks[at] for at in places.tolist()]
        names = None if self.names is None else self.names[places]
        sessions = None if self.sessions is None else [self.sessions[at] for at in places.tolist()]
        return Additions(self.ids[places], self.samples[places], self.versions[places], tasks, names, sessions)

    @staticmethod
    def joined(parts: Sequence[Additions]) -> Additions:
        """Concatenate additions."""
        tasks = None
        if all(part.tasks is not None for part in parts):
            tasks = [task for part in parts for task in part.tasks or ()]
        columns = ("ids", "samples", "versions")
        ids, samples, versions = (np.concatenate([getattr(part, name) for part in parts]) for name in columns)
        known = [part.names for part in parts if part.names is not None]
        names = np.concatenate(known) if len(known) == len(parts) else None
        sessions = None
        if any(part.sessions for part in parts):
            sessions = [session for part in parts for session in part.sessions or [("", 1)] * len(part)]
        return Additions(ids, samples, versions, tasks, names, sessions)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampler's draw of ``n`` rows.

    Attributes:
        ids: trajectory id of each row, ``[n]``; :data:`NO_TRAJECTORY` for demonstrations in a loader's batch.
        samples: place of each row among the valid ones of its trajectory, ``[n]``: ``t * B + b``, unless the trajectory
            has a field ``valid``; zeros for whole trajectories.
        weights: importance weights, float32 ``[n]``, at most 1 in each batch; None for unweighted draws.
        buffer: the name of a buffer with these trajectories; None if unknown.
        names: first half of the UUID of each row's trajectory, ``[n]``, 0 if not valid across processes; None =
            unknown.
        probabilities: the chance of each row to be drawn next, just before the batch was drawn, ``[n]``; NaN for
            demonstrations (or rollouts) without one. None if rows are not drawn independently (epochs, groups), and
            for whole sequences, whose starts are not counted.
        uses: batches that each row's trajectory has been in, this one included, ``[n]``; 0 = not counted. None
            without :class:`~trajstore.samplers.UseLimit`.
        chances: uniform numbers in ``[0, 1)`` that decide which rows hindsight relabels, and how, ``[n, 2]``; None for
            other draws.
    """

    ids: IntArray
    samples: IntArray
    weights: npt.NDArray[np.float32] | None = None
    buffer: str | None = None
    names: IntArray | None = None
    probabilities: FloatArray | None = None
    uses: IntArray | None = None
    chances: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def arrays(self) -> dict[str, Any]:
        """Attributes with an element per row, by name, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "buffer"}
        return {name: value for name, value in values.items() if value is not None}

    def at(self, where: slice | npt.NDArray[Any]) -> Drawn:
        """Return a subset of the rows."""
        return replace(self, **{name: values[where] for name, values in self.arrays.items()})

    @staticmethod
    def joined(first: Drawn, second: Drawn) -> Drawn:
        """Concatenate the rows of both; attributes that one lacks become None."""
        more = second.arrays
        both = {name: np.concatenate([values, more[name]]) for name, values in first.arrays.items() if name in more}
        return Drawn(**both, buffer=second.buffer)


class Sampler(ABC):
    """Chooses rows; not thread-safe.

    A buffer calls its samplers with ``Contents.lock`` held; other callers that share one need a lock.

    Attributes:
        unit: what each row is.
        needs_tasks: whether :attr:`Additions.tasks` is required.
        in_groups: whether a draw counts groups of rows.
        remembers: whether draws or updates change later draws; DataLoader workers cannot draw by copies of such a one.
    """

    unit: Unit = "sample"
    needs_tasks: bool = False
    in_groups: bool = False
    remembers: bool = False
    selection: Sampler | None = None
    """Passes to this sampler only the trajectories selected by ``where`` and ``ids``; None = it receives all."""

    @property
    @abstractmethod
    def ids(self) -> IntArray:
        """Ids of added and not evicted trajectories, in order of addition."""

    def follow(self, source: Any, *, where: str | None = None, ids: Ids | None = None) -> None:
        """Take over the trajectories of a buffer, a reader or a handle, as its next draw would.

        Call it before :meth:`load_state_dict`, so that the sampler finds the trajectories of the state.

        Args:
            source: a buffer, a reader or a handle.
            where: as for the sampler's draws.
            ids: as for the sampler's draws.

        Raises:
            ConfigurationError: the sampler follows another selection, or an argument is invalid.
        """
        source._update(self, where, ids)

    @abstractmethod
    def added(self, additions: Additions) -> None:
        """Add trajectories; an id may be added again only after eviction. Ids of a run need not ascend.

        If a rank's commit is seen after younger ones of other ranks, those are evicted and added again after it.
        """

    @abstractmethod
    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        """Stop drawing these trajectories; unknown ids are ignored."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        """Draw rows.

        Args:
            count: number of rows; fewer are returned only if the sampler's own rule says so.
            generator: the only source of randomness.
            first: id of the window's oldest trajectory; None = no limit.
            fits: filter for rows; None = no filter. Samplers of whole trajectories ignore it. After 1,000 rejected rows
                in a row (or a batch, if larger) this raises, so a filter must not select only a few trajectories.

        Raises:
            EmptyBufferError: nothing can be drawn; gives the reason.
        """

    def used(self, ids: IntArray, uses: IntArray) -> None:  # noqa: B027  # most count none
        """Replace the use counts of trajectories.

        Args:
            ids: ids of added trajectories, ``[n]``.
            uses: number of batches that each has been in, ``[n]``.
        """

    def reached(self, version: int) -> None:  # noqa: B027  # most do not ask for age
        """Count ages from this policy version if it is newer than all trajectories."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`, without the generator's.

        Facts that follow from the added trajectories are left out. The key :data:`~.states.OF_WHOM` holds the result of
        :func:`~.states.described`; ids come with names, so that loading can reject other trajectories.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; entries for absent trajectories are ignored.

        Call it after :meth:`added`.

        Raises:
            ConfigurationError: the state is invalid or of another sampler, or its ids are other trajectories here;
                nothing changed.
        """

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics."""
        return {}


def uniform(count: int, generator: torch.Generator) -> FloatArray:
    """Return uniform float64 numbers in ``[0, 1)``, ``[count]``."""
    drawn: FloatArray = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
    return drawn
