"""Contents that a run must have at a moment, from the times of calls and rollbacks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Presence = Literal["must", "may", "not"]


class Span(NamedTuple):
    """A call: when it began, and when it returned; infinite if it raised or never returned."""

    begin: float
    end: float


class Rollback(NamedTuple):
    """A rollback to a saved point, and the call that saved the point."""

    call: Span
    saved: Span


def presence(change: Span, moment: Span, rollbacks: Sequence[Rollback]) -> Presence:
    """Return whether an acknowledged change is there at some moment of a span.

    Args:
        change: the call that made it.
        moment: that of a read, or of a save; no rollback overlaps it.
        rollbacks: all, the earliest first.
    """
    last = max((back for back in rollbacks if back.call.end <= moment.begin), key=lambda back: back.call, default=None)
    if last is None or change.begin > last.call.end:
        if change.begin > moment.end:
            return "not"
        return "must" if change.end < moment.begin else "may"
    if change.end < last.call.begin:
        return presence(change, last.saved, rollbacks)
    return "may"
