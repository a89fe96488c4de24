"""What a maker of experience is, and the trouble it may have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trajstore.checked import checked
from trajstore.errors import TrajstoreError
from trajstore.trajectory import AgentTrajectory


@checked
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


@runtime_checkable
class ExperienceMaker(Protocol):
    """Keeps experiences, finds them, and makes new ones of rollouts. Thread-safe."""

    def retrieve(self, query: str, k: int, without: Collection[str] = ()) -> Retrieved:
        """Return the up to ``k`` experiences most related to a query, but none of those ``without`` names.

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
