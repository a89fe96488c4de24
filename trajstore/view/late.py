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
    values = [_of_store(note, counts.get(note.name) == at) for at, note in enumerate(history)]
    sent = values[-MOST_VALUES:]
    _, refused = notes.foreseen(entry for entry in waiting if not entry.refused)
    for entry in waiting:
        if entry.source not in notes.sources and trajectory_id in entry.ids:
            why, at = entry.refused or refused.get(entry.source), entry.ids.index(trajectory_id)
            sent += [_of_inbox(entry, name, entry_values[at], why) for name, entry_values in entry.values.items()]
    return {"values": sent, "earlier": max(0, len(values) - MOST_VALUES), "names": list(notes.kinds.items())}


def _of_store(note: Note, latest: bool) -> Answer:
    return _told(note.name, note.value, note.who, note.time, "store") | {"latest": latest}


def _of_inbox(update: LateValues, name: str, value: Value, why: str | None) -> Answer:
    return _told(name, value, update.who, update.time, "inbox" if why is None else "refused") | {"why": why}


def _told(name: str, value: Value, who: str, time: int, place: str) -> Answer:
    answer = {"name": name, "value": value, "who": who, "time": time // 1000, "place": place}
    return answer | {"latest": False, "why": None}
