"""What a child was promised, written down where its death cannot take it back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

KEEP = 48
"""Retention of the store that is tortured, in trajectories."""


class Journal:
    """An append-only file of JSON lines; each is durable before the writer goes on."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, **values: Any) -> None:
        """Write one line durably."""
        os.write(self._descriptor, orjson.dumps({"event": event, **values}) + b"\n")
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass
class Promises:
    """What all children so far were promised.

    Attributes:
        flushed: id and key of every trajectory that was there when a ``flush`` returned.
        evicted: ids whose eviction was begun; they may be there or not.
        surely_evicted: of these, the ids whose eviction has returned; they never come back.
        pins: ids and keys that each pin holds; None while it is uncertain whether the pin is there.
        unpinned: names of pins that were let go of and not taken again.
        checkpoint: ids and keys of the last checkpoint of which ``save_checkpoint`` returned; None before the first.
        saving: ids and keys of checkpoints of which saving was begun since.
        annotated: by id, the highest value that ``annotate`` returned of.
        annotating: by id, the highest one that was begun.
    """

    flushed: dict[int, int] = field(default_factory=dict)
    evicted: set[int] = field(default_factory=set)
    surely_evicted: set[int] = field(default_factory=set)
    pins: dict[str, dict[int, int] | None] = field(default_factory=dict)
    unpinned: set[str] = field(default_factory=set)
    checkpoint: dict[int, int] | None = None
    saving: list[dict[int, int]] = field(default_factory=list)
    annotated: dict[int, int] = field(default_factory=dict)
    annotating: dict[int, int] = field(default_factory=dict)

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Take in what a child noted."""
        if event == "flushed":
            self.flushed |= _keys(values)
        elif event == "evicting":
            self.evicted |= set(values["ids"])
        elif event == "evicted":
            self.surely_evicted |= set(values["ids"])
        elif event == "pinned":
            self.pins[values["name"]] = _keys(values)
        elif event in ("pinning", "unpinning"):
            self.pins[values["name"]] = None
            self.unpinned.discard(values["name"])  # a name may be taken again, when nothing was added between
        elif event == "unpinned":
            del self.pins[values["name"]]
            self.unpinned.add(values["name"])
        elif event == "saving":
            self.saving.append(_keys(values))
        elif event == "saved":
            self.checkpoint, self.saving = self.saving[-1], []
        elif event in ("annotating", "annotated"):
            target = self.annotating if event == "annotating" else self.annotated
            target |= dict.fromkeys(values["ids"], values["value"])

    def gone_rightly(self, number: int, present: Iterable[int]) -> bool:
        """Return whether a flushed trajectory may be absent: it was evicted, or enough newer ones were committed."""
        if number in self.evicted:
            return True
        newer = {other for other in (*present, *self.evicted) if other > number}
        return len(newer) >= KEEP

    def forget(self, present: Mapping[int, int]) -> None:
        """Forget what was rightly evicted, so that checking does not grow with the campaign."""
        self.flushed = {number: key for number, key in self.flushed.items() if number in present}
        self.annotated = {number: value for number, value in self.annotated.items() if number in present}
        self.annotating = {number: value for number, value in self.annotating.items() if number in present}
        oldest = min(present, default=0)
        self.evicted = {number for number in self.evicted if number > oldest}
        self.surely_evicted = {number for number in self.surely_evicted if number > oldest}


def read_journal(path: Path, promises: Promises) -> Promises:
    """Take a child's journal in."""
    for entry in entries(path):
        promises.take(entry.pop("event"), entry)
    return promises


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, none if it is not there yet; a last one that a death cut short was no promise."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else ()
    return [orjson.loads(line) for line in lines]


def _keys(values: Mapping[str, Any]) -> dict[int, int]:
    return {int(number): key for number, key in values["keys"].items()}
