"""What the trainer's process tells agent loops of guidance, and what they tell back. Pure.

An offer goes with a prompt, as a column of text; a report comes back with each row, among its ``extra_fields``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_hooks.guidance import Guidance, Insertion, TrainMode

GUIDED_LOOP = "trajstore_guided"
"""Name of the agent loop that makes guided rollouts, for verl's registry."""

OFFER = "trajstore_guidance"
"""Column of a prompt, and key of a row's ``extra_fields``."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Experience for some of the rollouts of a prompt."""

    loop: str
    """Agent loop that makes the rollouts."""
    sessions: tuple[int, ...]
    """Those that are to be guided."""
    train_mode: TrainMode
    insertion: Insertion
    """What goes in front of which message of the prompt."""
    names: tuple[str, ...]
    """Of the experiences in it."""

    def to_text(self) -> str:
        """Return the offer as a column holds it; inverse of :meth:`of_text`."""
        one = self.insertion
        return json.dumps([self.loop, self.sessions, self.train_mode, one.message, one.text, self.names])

    @classmethod
    def of_text(cls, text: str) -> Offer:
        """Return the offer that a column holds."""
        loop, sessions, train_mode, message, inserted, names = json.loads(text)
        return cls(loop, tuple(sessions), train_mode, Insertion(message, inserted), tuple(names))


@dataclass(frozen=True, slots=True)
class Report:
    """What became of an offer in one row."""

    guidance: Guidance | None = None
    """What the rollout was shown; ``None`` = nothing."""
    exchanged: bool = False
    """Whether the row has another prompt than the one it was sampled with."""
    trouble: str = ""
    """Why nothing was shown: ``too_long``, ``not_taken_out``, ``not_seen``."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a row holds it; inverse of :meth:`of`."""
        told = None if self.guidance is None else self.guidance.to_json()
        return {"guidance": told, "exchanged": self.exchanged, "trouble": self.trouble}

    @classmethod
    def of(cls, extra_fields: Mapping[str, Any] | None) -> Report | None:
        """Return the report among a row's ``extra_fields``; ``None`` if nothing was offered to it."""
        told = (extra_fields or {}).get(OFFER)
        if told is None:
            return None
        return cls(Guidance.of_json(told["guidance"]), bool(told["exchanged"]), str(told["trouble"]))


def is_exchanged(extra_fields: Mapping[str, Any] | None) -> bool:
    """Return whether a row has another prompt than it was sampled with, as its ``extra_fields`` say."""
    report = Report.of(extra_fields)
    return report is not None and report.exchanged
