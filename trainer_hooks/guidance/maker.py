"""The interface of makers of experience, and the counting of their failures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trajstore._core.base import locks
from trajstore.errors import TrajstoreError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A maker's result for a query.

    Attributes:
        text: text for the template; empty = nothing was found.
        names: the maker's names of the experiences in it, best first.
    """

    text: str
    names: tuple[str, ...] = ()


NOTHING = Retrieved("")


class MakerError(TrajstoreError):
    """A maker failed.

    Attributes:
        kind: kind of failure, used in metrics: ``timeout``, ``connection``, ``server``, ``refused``, ``garbage``,
            ``failed``, ``store``, ``resting``, ``closed``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Trouble:
    """Counts failures of a repeated operation. Thread-safe.

    Args:
        what: the operation, for logs.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        self._lock = locks.lock("Trouble._lock")

    def failed(self, error: MakerError) -> None:
        """Count a failure; log it unless failures are going on already."""
        with self._lock:
            self._counts[error.kind] += 1
            first = not self._since
            self._since[error.kind] = self._since.get(error.kind, 0) + 1
        if first:
            logger.warning("guidance: %s failed (%s), training continues without: %s", self._what, error.kind, error)

    def succeeded(self) -> None:
        """Log the end of a series of failures."""
        with self._lock:
            kinds, self._since = self._since, {}
        if kinds:
            summary = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            logger.warning("guidance: %s works again, after failures: %s", self._what, summary)

    def counts(self) -> dict[str, int]:
        """Return the number of failures by kind."""
        with self._lock:
            return dict(self._counts)


@runtime_checkable
class ExperienceMaker(Protocol):
    """Stores and finds experiences, and makes new ones of rollouts. Thread-safe."""

    def retrieve(self, query: str, k: int) -> Retrieved:
        """Return up to ``k`` experiences most related to a query.

        Raises:
            MakerError: retrieval failed.
        """

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        """Make experiences of rollouts, and return the number of new ones, which are then safely stored.

        Args:
            rollouts: their messages hold no experience.

        Raises:
            MakerError: summarizing failed.
        """

    def close(self) -> None:
        """Release resources. A running call ends soon, with an error."""
