"""The values of a trajectory that came late, as the page is told them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trajstore.core.store.given import Said, Value
from trajstore.core.store.notes import Note, Notes

Answer = dict[str, Any]

MOST_VALUES = 200
"""Values in the store that are told, the newest."""


def late_values(trajectory_id: int, notes: Notes, waiting: Sequence[Said]) -> Answer:
    """Return ``{"values", "earlier", "names"}``: values, the earliest first; how many came before; kinds by name.

    A value is ``{"name", "value", "who", "time", "place", "latest", "why"}``: the time in milliseconds since 1970,
    ``place`` one of ``"store"``, ``"inbox"`` (it waits for the writer) and ``"refused"`` (it contradicts the store, and
    ``why`` says how). ``latest`` is the one that counts for its name.

    Args:
        trajectory_id: of the trajectory, in its store.
        notes: of the store.
        waiting: what the inbox had a moment before, also what was set aside there, the oldest first.
    """
    history = notes.history(trajectory_id)
    counts = {note.name: at for at, note in enumerate(history)}
    values = [_of_store(note, counts.get(note.name) == at) for at, note in enumerate(history)]
    told = values[-MOST_VALUES:]
    _, refused = notes.foreseen(said for said in waiting if not said.refused)
    for said in waiting:
        if said.source not in notes.sources and trajectory_id in said.ids:
            why, at = said.refused or refused.get(said.source), said.ids.index(trajectory_id)
            told += [_of_inbox(said, name, some[at], why) for name, some in said.values.items()]
    return {"values": told, "earlier": max(0, len(values) - MOST_VALUES), "names": list(notes.kinds.items())}


def _of_store(note: Note, latest: bool) -> Answer:
    return _told(note.name, note.value, note.who, note.time, "store") | {"latest": latest}


def _of_inbox(said: Said, name: str, value: Value, why: str | None) -> Answer:
    return _told(name, value, said.who, said.time, "inbox" if why is None else "refused") | {"why": why}


def _told(name: str, value: Value, who: str, time: int, place: str) -> Answer:
    told = {"name": name, "value": value, "who": who, "time": time // 1000, "place": place}
    return told | {"latest": False, "why": None}
