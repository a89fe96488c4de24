"""One experience, and the trajectory of a store that keeps it. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from trajstore.core.base.arguments import finite
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AgentTrajectory

EXPERIENCE = "experience"
"""Key of ``metadata`` of a trajectory that is an experience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What past rollouts of a task teach, in text.

    Attributes:
        when_to_use: the situation it is for; retrieval compares queries with it.
        content: what is put into the prompt.
        query: what the task's first messages say.
        task_id: task whose rollouts it was made of.
        score: outcome of the rollout it was made of; ``None`` = unknown.
        sources: ids of the rollouts it was made of.
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
        """Identifies what it says, for whom: two experiences with the same digest are one."""
        said = "\0".join((self.task_id, self.query, self.when_to_use, self.content))
        return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def index_text(self) -> str:
        """What retrieval compares queries with."""
        return f"{self.query}\n{self.when_to_use}"

    def to_trajectory(self, step: int | None = None) -> AgentTrajectory:
        """Return the trajectory that keeps it; inverse of :meth:`of_trajectory`."""
        said: dict[str, Any] = {
            "kind": "experience",
            "when_to_use": self.when_to_use,
            "content": self.content,
            "score": self.score,
            "sources": list(self.sources),
        }
        return AgentTrajectory(task_id=self.task_id, query=self.query, policy_version=step, metadata={EXPERIENCE: said})

    @classmethod
    def of_trajectory(cls, trajectory: AgentTrajectory) -> Experience | None:
        """Return the experience that a trajectory keeps; ``None`` if it is something else.

        Raises:
            CorruptStoreError: it says that it is one, and lacks what one has.
        """
        said = trajectory.metadata.get(EXPERIENCE)
        if not isinstance(said, dict) or said.get("kind") != "experience":
            return None
        try:
            return cls(
                when_to_use=str(said["when_to_use"]),
                content=str(said["content"]),
                query=trajectory.query,
                task_id=trajectory.task_id,
                score=None if said["score"] is None else float(said["score"]),
                sources=tuple(str(name) for name in said["sources"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"trajectory of an experience (task {trajectory.task_id!r}): {error!r}") from error
