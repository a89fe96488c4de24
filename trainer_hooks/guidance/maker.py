"""An experience, the interface of its makers, and the counting of their failures."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from trajstore._core.base import locks
from trajstore._core.base.arguments import finite
from trajstore.errors import CorruptStoreError, TrajstoreError
from trajstore.trajectory import AgentTrajectory

EXPERIENCE = "experience"
"""Key of ``metadata`` of a trajectory that is an experience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A lesson from past rollouts of a task, as text.

    Attributes:
        when_to_use: the situation it is for; retrieval compares queries with it.
        content: the text put into the prompt.
        query: text of the task's first messages.
        task_id: task of its rollouts.
        score: outcome of the rollout that it was made of; ``None`` = unknown.
        sources: ids of the rollouts that it was made of.
    """

    when_to_use: str
    content: str
    query: str = ""
    task_id: str = ""
    score: float | None = None
    sources: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.score is not None:
            finite("score", self.score)

    @property
    def digest(self) -> str:
        """Identifies task and text: experiences with equal digests are duplicates."""
        joined = "\0".join((self.task_id, self.query, self.when_to_use, self.content))
        return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def index_text(self) -> str:
        """The text that retrieval compares queries with."""
        return f"{self.query}\n{self.when_to_use}"

    def to_trajectory(self, step: int | None = None) -> AgentTrajectory:
        """Return the trajectory that stores it; inverse of :meth:`of_trajectory`."""
        fields = {"kind": "experience", **msgspec.to_builtins(self)}
        names = {name: fields.pop(name) for name in ("task_id", "query")}
        return AgentTrajectory(**names, policy_version=step, metadata={EXPERIENCE: fields})

    @classmethod
    def of_trajectory(cls, trajectory: AgentTrajectory) -> Experience | None:
        """Return the experience stored in a trajectory; ``None`` if it is something else.

        Raises:
            CorruptStoreError: it is marked as an experience, but lacks fields.
        """
        fields = trajectory.metadata.get(EXPERIENCE)
        if not isinstance(fields, dict) or fields.get("kind") != "experience":
            return None
        try:
            return msgspec.convert({**fields, "task_id": trajectory.task_id, "query": trajectory.query}, cls)
        except ValueError as error:
            raise CorruptStoreError(f"trajectory of an experience (task {trajectory.task_id!r}): {error!r}") from error


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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

    def outcome_of(self, call: Callable[[], Result]) -> Result | None:
        """Return the result of a maker's call; ``None`` if it failed. Logs the end of a series of failures."""
        try:
            result = call()
        except MakerError as error:
            self.failed(error)
            return None
        except Exception as error:  # makers are user code; training goes on without
            logger.exception("guidance: %s failed", self._what)
            self.failed(MakerError("failed", repr(error)))
            return None
        with self._lock:
            kinds, self._since = self._since, {}
        if kinds:
            summary = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            logger.warning("guidance: %s works again, after failures: %s", self._what, summary)
        return result

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the number of failures by kind, with a prefix."""
        with self._lock:
            return {f"{prefix}{kind}": float(count) for kind, count in self._counts.items()}


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
