"""What a trajectory's metadata say of its guidance. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.checked import checked
from trajstore.errors import InvalidTrajectoryError
from trajstore.guidance.context import Insertion, TrainMode, take_out
from trajstore.trajectory import AgentTrajectory

GUIDANCE = "guidance"
"""Key of ``AgentTrajectory.metadata``."""


@checked
@dataclass(frozen=True, slots=True)
class Guidance:
    """What a rollout was shown. A rollout into which nothing was put has none.

    Attributes:
        train_mode: whether training keeps what was put in.
        experiences: names of the experiences shown, as the maker names them.
        insertions: what was put into the messages, in order.
        taken_out: whether ``messages`` and tokens are those without the insertions.
    """

    train_mode: TrainMode
    experiences: tuple[str, ...]
    insertions: tuple[Insertion, ...]
    taken_out: bool = False

    @property
    def is_discarded(self) -> bool:
        """Whether training discards what was put in."""
        return self.train_mode == "discard"

    def to_json(self) -> dict[str, Any]:
        """Return the guidance as JSON; inverse of :meth:`of`."""
        return {
            "train_mode": self.train_mode,
            "experiences": list(self.experiences),
            "insertions": [[one.message, one.text] for one in self.insertions],
            "taken_out": self.taken_out,
        }

    @classmethod
    def of(cls, trajectory: AgentTrajectory) -> Guidance | None:
        """Return the guidance that a trajectory has; ``None`` if nothing was put into its messages.

        Raises:
            InvalidTrajectoryError: what it has is no guidance.
        """
        return cls.of_json(trajectory.metadata.get(GUIDANCE))

    @classmethod
    def of_json(cls, value: Any) -> Guidance | None:
        """Return the guidance that :meth:`to_json` wrote; ``None`` of ``None``.

        Raises:
            InvalidTrajectoryError: it is no guidance.
        """
        if value is None:
            return None
        try:
            mode = value["train_mode"]
            if mode not in ("keep", "discard"):
                raise ValueError(f"train_mode {mode!r}")
            return cls(
                mode,
                tuple(str(name) for name in value["experiences"]),
                tuple(Insertion(int(index), str(text)) for index, text in value["insertions"]),
                bool(value["taken_out"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTrajectoryError(f"field metadata.{GUIDANCE}: not what guidance records: {error!r}") from error


@checked
def with_guidance(trajectory: AgentTrajectory, guidance: Guidance | None) -> AgentTrajectory:
    """Return a copy of the trajectory that records its guidance; the same one if there is none."""
    if guidance is None:
        return trajectory
    metadata = {**trajectory.metadata, GUIDANCE: guidance.to_json()}
    return dataclasses.replace(trajectory, metadata=metadata)


@checked
def plain_messages(trajectory: AgentTrajectory) -> Sequence[Mapping[str, Any]]:
    """Return a trajectory's messages without what guidance put in.

    Raises:
        InvalidTrajectoryError: they are not the messages that its insertions were made in.
    """
    guidance = Guidance.of(trajectory)
    if guidance is None or guidance.taken_out:
        return trajectory.messages
    return take_out(trajectory.messages, guidance.insertions)
