"""A trajectory's late values, as sent to the page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trajstore._core.store.late_values import LateValues, Value
from trajstore._core.store.notes import Note, Notes

Answer = dict[str, Any]

MOST_VALUES = 200
"""Maximum number of stored values that are sent; the newest."""


def late_values(trajectory_id: int, notes: Notes, waiting: Sequence[LateValues]) -> Answer:
    """Return ``{"values", "earlier", "names"}``: values, earliest first; the number omitted before; kinds by name.

    A value is ``{"name", "value", "who", "time", "place", "latest", "why"}``. The time is in milliseconds since 1970.
    ``place`` is ``"store"``, ``"inbox"`` (waiting for the writer) or ``"refused"`` (contradicts the store, for the
    reason ``why``). ``latest`` marks the value in force for its name.

    Args:
        trajectory_id: id of the trajectory in its store.
        notes: late values of the store.
        waiting: entries read from the inbox just before, including those set aside, oldest first.
    """
    history = notes.history(trajectory_id)
    counts = {note.name: at for at, note in enumerate(history)}
    values = [
        _told(note.name, note.value, note, "store") | {"latest": counts[note.name] == at}
        for at, note in enumerate(history)
    ]
    sent = values[-MOST_VALUES:]
    _, refused = notes.foreseen(entry for entry in waiting if not entry.refused)
    for entry in waiting:
        if entry.source not in notes.sources and trajectory_id in entry.ids:
            why, at = entry.refused or refused.get(entry.source), entry.ids.index(trajectory_id)
            place = "inbox" if why is None else "refused"
            sent += [_told(name, given[at], entry, place) | {"why": why} for name, given in entry.values.items()]
    return {"values": sent, "earlier": max(0, len(values) - MOST_VALUES), "names": list(notes.kinds.items())}


def _told(name: str, value: Value, given: Note | LateValues, place: str) -> Answer:
    answer = {"name": name, "value": value, "who": given.who, "time": given.time // 1000, "place": place}
    return answer | {"latest": False, "why": None}
