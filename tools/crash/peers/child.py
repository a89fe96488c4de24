"""The process that is killed: opens a store, reports its contents, and adds the missing rollouts until its end.

Runs with the peer's own Python, so it needs the standard library only. Its journal survives SIGKILL in the page cache.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP = 4
"""Rollouts per call, those of one prompt."""

PEERS = {
    "trajstore": "tools.crash.peers.stores:AddRollouts",
    "rollout-bank": "tools.crash.peers.stores:MegatronBank",
    "lance-context": "tools.crash.peers.stores:LanceRollouts",
    "transfer-queue": "tools.crash.peers.stores:QueueCheckpoint",
    "trinity-sql": "tools.crash.peers.stores:TrinitySql",
}


@dataclass(frozen=True)
class Rollout:
    """A finished rollout; everything follows from its number."""

    number: int
    prompt: int
    tokens: list[int]
    log_probs: list[float]
    """Of the response's tokens, in single precision."""
    version: int
    reward: float

    @property
    def fields(self) -> dict[str, Any]:
        """What a store should give back."""
        return {"tokens": self.tokens, "log_probs": self.log_probs, "version": self.version, "reward": self.reward}


def _single(value: float) -> float:
    """Round to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def rollout(number: int) -> Rollout:
    """Return the rollout of a number."""
    chance = random.Random(number)
    prompt, response = chance.randint(4, 64), chance.randint(16, 512)
    tokens = [chance.randrange(150_000) for _ in range(prompt + response)]
    log_probs = [_single(-chance.random() * 8) for _ in range(response)]
    return Rollout(number, prompt, tokens, log_probs, number // (64 * GROUP), float(number % 2))


class Peer(ABC):
    """A store under test; all calls are those of its users.

    Args:
        folder: for its files. The constructor imports the store and starts its services; this is not timed.
    """

    calls_per_settle = 0
    """Calls of :meth:`add` before each :meth:`settle`; 0 = :meth:`add` is all that the store offers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:  # noqa: B027  # optional
        """Open or create the store as its users do after a crash."""

    @abstractmethod
    def read(self) -> Iterable[tuple[int, Mapping[str, Any]]]:
        """Yield the number and the fields of each stored rollout."""

    @abstractmethod
    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add a group with one call."""

    def settle(self) -> None:  # noqa: B027  # optional
        """Flush or save the added rollouts, with the store's own call."""


def kept(number: int, found: Mapping[str, Any]) -> dict[str, str]:
    """Return ``exact``, ``rounded``, ``absent`` or ``changed`` for each field of a stored rollout."""
    return {name: _same(value, found.get(name)) for name, value in rollout(number).fields.items()}


def _same(expected: Any, found: Any) -> str:
    if found is None:
        return "absent"
    if found == expected:
        return "exact"
    if isinstance(expected, list) and isinstance(expected[0], float) and len(found) == len(expected):
        if [_single(value) for value in found] == expected:
            return "exact"
        near = all(
            abs(a - b) <= abs(a) * 2**-11 + 2**-24 for a, b in zip(expected, found, strict=True)
        )  # half precision
        return "rounded" if near else "changed"
    return "changed"


def main(peer: str, folder: str, journal: str, adding: str) -> None:
    """Run one life; ``adding`` is ``1``, or ``0`` only to read."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(event: str, **values: Any) -> None:
        os.write(descriptor, json.dumps({"event": event, **values}).encode() + b"\n")

    module, _, name = PEERS.get(peer, peer).partition(":")
    store: Peer = getattr(importlib.import_module(module), name)(Path(folder))
    note("opening")
    begin = time.monotonic()
    store.open()
    stored = list(store.read())
    seconds = time.monotonic() - begin
    fields = [(number, kept(number, found)) for number, found in stored]
    note(
        "ready",
        seconds=seconds,
        numbers=[number for number, _ in fields],
        changed=[number for number, states in fields if "changed" in states.values()],
        fields=Counter(f"{name} {state}" for _, states in fields for name, state in states.items()),
    )
    present = {number for number, _ in fields}
    calls = 0
    for first in itertools.count(0, GROUP) if int(adding) else ():
        missing = [rollout(number) for number in range(first, first + GROUP) if number not in present]
        if missing:
            store.add(missing)
            note("added", numbers=[rollout.number for rollout in missing], settled=not store.calls_per_settle)
            calls += 1
            if store.calls_per_settle and calls % store.calls_per_settle == 0:
                store.settle()
                note("settled")


if __name__ == "__main__":
    main(*sys.argv[1:])
