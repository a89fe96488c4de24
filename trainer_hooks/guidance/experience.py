"""An experience, and its storage as a trajectory. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from trajstore._core.base.arguments import finite
from trajstore.errors import CorruptStoreError
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
