"""What every sampler is told, gives, and promises. Pure: no I/O, no clock, the generator is passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Unit = Literal["sample", "trajectory"]
"""What is drawn: transitions (one step of one environment), or whole trajectories."""

Fits = Callable[[IntArray, IntArray], npt.NDArray[np.bool_]]
"""Says of rows, by trajectory id and place, which of them may be drawn."""


@dataclass(frozen=True, slots=True)
class Additions:
    """Trajectories that a sampler hears of, in the order in which they were added.

    Attributes:
        ids: trajectory ids, ``[n]``.
        samples: transitions of each (T·B; 1 for an agent trajectory), ``[n]``.
        versions: newest policy version of each, ``[n]``; ``limits.UNKNOWN_VERSION`` where none is known.
        tasks: task of each, empty where it names none; only agent trajectories do. None where nobody asked.
        names: first half of the UUID of each, ``[n]``, 0 where it says nothing in another process; None = unknown.
    """

    ids: IntArray
    samples: IntArray
    versions: IntArray
    tasks: Sequence[str] | None = None
    names: IntArray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a sampler drew, ``n`` rows.

    Attributes:
        ids: trajectory id of each row, ``[n]``.
        samples: place of the row within its trajectory (``t * B + b``), ``[n]``; zeros where trajectories are drawn.
        weights: importance weight of each row, float32 ``[n]``, the largest of the batch is 1; None where every row
            stands for itself.
        buffer: which buffer shows these trajectories, as one of its names; None where that is not known.
        names: first half of the UUID of each row's trajectory, ``[n]``, 0 where it says nothing; None = unknown.
    """

    ids: IntArray
    samples: IntArray
    weights: npt.NDArray[np.float32] | None = None
    buffer: str | None = None
    names: IntArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, where: slice | npt.NDArray[Any]) -> Drawn:
        """Return some of the rows."""
        weights = None if self.weights is None else self.weights[where]
        names = None if self.names is None else self.names[where]
        return Drawn(self.ids[where], self.samples[where], weights, self.buffer, names)


class Sampler(ABC):
    """Chooses rows, for one caller at a time.

    A buffer calls its samplers with ``Contents.lock`` held; whoever else shares one between threads holds a lock.

    Attributes:
        unit: what one row is.
        needs_tasks: whether :attr:`Additions.tasks` must be told.
    """

    unit: Unit = "sample"
    needs_tasks: bool = False

    @property
    @abstractmethod
    def ids(self) -> IntArray:
        """Ids of the trajectories that were added and not evicted, in the order of addition."""

    @abstractmethod
    def added(self, additions: Additions) -> None:
        """Take trajectories in; each id is told once, unless it was evicted in between. Ids of a run need not ascend.

        Where a rank's commit is seen later than younger ones of others, these are evicted, and added again after it.
        """

    @abstractmethod
    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        """Draw these no more; unknown ids are passed over."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        """Draw rows.

        Args:
            count: how many; fewer come back only where the sampler's own rule says so.
            generator: where all chance comes from.
            first: id of the oldest trajectory of the window; None = all.
            fits: draw only rows of which it says so; None = any. Samplers of whole trajectories do not ask. It
                raises where 1,000 rows in a row do not fit, or a batch of more: do not insist on a few trajectories.

        Raises:
            EmptyBufferError: nothing can be drawn; says why.
        """

    def used(self, ids: IntArray, uses: IntArray) -> None:  # noqa: B027  # most count none
        """Count trajectories as drawn so often already, instead of what was counted so far.

        Args:
            ids: trajectories that were added, ``[n]``.
            uses: batches in which each was, ``[n]``.
        """

    def reached(self, version: int) -> None:  # noqa: B027  # most do not ask for age
        """Count ages from this policy version, if it is newer than that of every trajectory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened (the generator aside).

        What can be worked out from the trajectories that are told is not in it. Under :data:`~.states.OF_WHOM` stands
        what :func:`~.states.described` returns, and beside ids stand names, for what is refused when it is loaded.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; what it says of trajectories that are not there now is passed over.

        Call it after :meth:`added` was told of the trajectories.

        Raises:
            ConfigurationError: it is no state of such a sampler, or its ids stand for other trajectories here; nothing
                was changed.
        """

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics."""
        return {}


def uniform(count: int, generator: torch.Generator) -> FloatArray:
    """Return float64 numbers, uniform in ``[0, 1)``, ``[count]``."""
    drawn: FloatArray = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
    return drawn
