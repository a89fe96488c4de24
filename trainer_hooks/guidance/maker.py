"""What a maker of experience is, and the trouble it may have."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trajstore.core.base import locks
from trajstore.errors import TrajstoreError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a maker found for a query.

    Attributes:
        text: what goes into the template; empty = nothing was found.
        names: of the experiences in it, best first, as the maker names them.
    """

    text: str
    names: tuple[str, ...] = ()


NOTHING = Retrieved("")


class MakerError(TrajstoreError):
    """A maker could not do what it was asked.

    Attributes:
        kind: what went wrong, in a word that metrics count by: ``timeout``, ``connection``, ``server``, ``refused``,
            ``garbage``, ``failed``, ``store``, ``resting``, ``closed``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Trouble:
    """Counts failures of one thing that is done again and again. Thread-safe.

    Args:
        what: what fails, as logs say it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        self._lock = locks.lock("Trouble._lock")

    def failed(self, error: MakerError) -> None:
        """Count a failure; log its cause unless the same kind of trouble is going on already."""
        with self._lock:
            self._counts[error.kind] += 1
            first = not self._since
            self._since[error.kind] = self._since.get(error.kind, 0) + 1
        if first:
            logger.warning("guidance: %s failed (%s), training goes on without: %s", self._what, error.kind, error)

    def succeeded(self) -> None:
        """Log the end of trouble that was going on."""
        with self._lock:
            kinds, self._since = self._since, {}
        if kinds:
            told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            logger.warning("guidance: %s works again, after failures: %s", self._what, told)

    def counts(self) -> dict[str, int]:
        """Return how many failures there were, by kind."""
        with self._lock:
            return dict(self._counts)


@runtime_checkable
class ExperienceMaker(Protocol):
    """Keeps experiences, finds them, and makes new ones of rollouts. Thread-safe."""

    def retrieve(self, query: str, k: int) -> Retrieved:
        """Return the up to ``k`` experiences most related to a query.

        Raises:
            MakerError: it could not.
        """

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        """Make experiences of rollouts, and return how many were new. They are safe when this returns.

        Args:
            rollouts: their messages hold no experience.

        Raises:
            MakerError: it could not.
        """

    def close(self) -> None:
        """Give up what it holds. A call that is under way ends soon, with an error."""
