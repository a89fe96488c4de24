"""Guidance messages between the trainer's process and agent loops. Pure.

An offer is sent with a prompt, as a text column; a report is returned with each row, in its ``extra_fields``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trainer_hooks.guidance import Guidance, Insertion, TrainMode

GUIDED_LOOP = "trajstore_guided"
"""Name of the agent loop for guided rollouts in verl's registry."""

OFFER = "trajstore_guidance"
"""Column of a prompt, and key of a row's ``extra_fields``."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Experience for some of the rollouts of a prompt."""

    loop: str
    """Agent loop of the rollouts."""
    sessions: tuple[int, ...]
    """Sessions to guide."""
    train_mode: TrainMode
    insertion: Insertion
    """Text and the message of the prompt before which it is inserted."""
    names: tuple[str, ...]
    """Names of the inserted experiences."""

    def to_text(self) -> str:
        """Return the offer as column text; inverse of :meth:`of_text`."""
        return json.dumps(msgspec.to_builtins(self))  # takes unpaired surrogates

    @classmethod
    def of_text(cls, text: str) -> Offer:
        """Return the offer in a column's text."""
        return msgspec.convert(json.loads(text), cls)


@dataclass(frozen=True, slots=True)
class Report:
    """Result of an offer in one row."""

    guidance: Guidance | None = None
    """Experience that the rollout was shown, or ``None``."""
    exchanged: bool = False
    """True if the row's prompt differs from the one it was sampled with."""
    trouble: str = ""
    """Reason for showing nothing: ``too_long``, ``not_taken_out``, ``not_seen``."""

    def to_json(self) -> Any:
        """Return the report for a row's ``extra_fields``; inverse of :meth:`of`."""
        return msgspec.to_builtins(self)

    @classmethod
    def of(cls, extra_fields: Mapping[str, Any] | None) -> Report | None:
        """Return the report in a row's ``extra_fields``; ``None`` if the row had no offer."""
        return msgspec.convert((extra_fields or {}).get(OFFER), cls | None)


def is_exchanged(extra_fields: Mapping[str, Any] | None) -> bool:
    """Return whether a row's prompt differs from the one it was sampled with, by its ``extra_fields``."""
    report = Report.of(extra_fields)
    return report is not None and report.exchanged
