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
        pins: ids and keys that each pin holds; None while it is uncertain whether the pin is there.
        checkpoints: whether ``save_checkpoint`` ever returned.
    """

    flushed: dict[int, int] = field(default_factory=dict)
    evicted: set[int] = field(default_factory=set)
    pins: dict[str, dict[int, int] | None] = field(default_factory=dict)
    checkpoints: bool = False

    def gone_rightly(self, number: int, present: Iterable[int]) -> bool:
        """Return whether a flushed trajectory may be absent: it was evicted, or enough newer ones were committed."""
        if number in self.evicted:
            return True
        newer = {other for other in (*present, *self.evicted) if other > number}
        return len(newer) >= KEEP

    def forget(self, present: Mapping[int, int]) -> None:
        """Forget what is rightly gone, so that checking does not grow with the campaign."""
        self.flushed = {number: key for number, key in self.flushed.items() if number in present}
        oldest = min(present, default=0)
        self.evicted = {number for number in self.evicted if number > oldest}


def read_journal(path: Path, promises: Promises) -> Promises:
    """Take a child's journal in; a last line that its death cut short was no promise."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        entry = orjson.loads(line)
        event = entry.pop("event")
        if event == "flushed":
            promises.flushed |= {int(number): key for number, key in entry["keys"].items()}
        elif event == "evicting":
            promises.evicted |= set(entry["ids"])
        elif event == "pinned":
            promises.pins[entry["name"]] = {int(number): key for number, key in entry["keys"].items()}
        elif event in ("pinning", "unpinning"):
            promises.pins[entry["name"]] = None
        elif event == "unpinned":
            del promises.pins[entry["name"]]
        elif event == "checkpointed":
            promises.checkpoints = True
    return promises
