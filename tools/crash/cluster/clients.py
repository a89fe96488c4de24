"""The clients of a run with faults: producers, judges, and one that draws. Each notes its calls in a file."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tests.support.witness import WitnessError, check_batch, witness
from tools.crash.cluster.timeline import Span
from trajstore import annotate
from trajstore.distributed import DistributedReplayBuffer
from trajstore.errors import EmptyBufferError, TrajstoreError

T = TypeVar("T")

NAME = "campaign"
STOP = "stop"
DEADLINE, PATIENCE = 60.0, 5.0
_KEYS = 1 << 20  # of one producer
_OPEN = 8  # receipts that a producer waits for together


class Notes:
    """A log of a client's calls and results, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")

    def write(self, **note: object) -> None:
        """Write a line."""
        self._file.write(json.dumps(note) + "\n")

    def timed(self, kind: str, call: Callable[[], T]) -> tuple[Span, T | None]:
        """Make a call, and note how long it took; None, and a span without end, for an error of the store."""
        begin = time.monotonic()
        try:
            value = call()
        except EmptyBufferError:
            return Span(begin, math.inf), None
        except TrajstoreError as error:
            self.write(call=kind, seconds=time.monotonic() - begin, error=f"{type(error).__name__}: {error}"[:200])
            return Span(begin, math.inf), None
        span = Span(begin, time.monotonic())
        self.write(call=kind, seconds=span.end - span.begin)
        return span, value


def notes_of(folder: Path, clients: str) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of clients, as ``producer-*``."""
    for path in sorted(folder.glob(f"{clients}.notes")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def value_of(key: int, judge: int) -> float:
    """Return the only value that a judge gives to the trajectory of a key."""
    return float((key * 31 + judge) % 1009)


def acknowledged(folder: Path) -> dict[int, tuple[int, float]]:
    """Return id and time of each acknowledged trajectory, by key, in the order of the files."""
    return {
        key: (number, note["end"])
        for note in notes_of(folder, "producer-*")
        if "ids" in note
        for key, number in zip(note["keys"], note["ids"], strict=True)
    }


def _connected() -> DistributedReplayBuffer:
    return DistributedReplayBuffer.connect(NAME, patience=PATIENCE, deadline=DEADLINE)


def produce(number: int, folder: Path) -> None:
    """Add one to three trajectories at a time until told to stop, then wait for the receipts."""
    notes, chance, key = Notes(folder / f"producer-{number}.notes"), random.Random(number), number * _KEYS
    waiting: list[tuple[float, list[int], Any]] = []

    def settle() -> None:
        begin, keys, receipt = waiting[0]
        _, ids = notes.timed("committed", receipt.committed)
        if ids is not None:
            notes.write(keys=keys, ids=list(ids), begin=begin, end=time.monotonic())
            waiting.pop(0)

    with _connected() as handle:
        while not (folder / STOP).exists():
            keys = list(range(key, key + 1 + key % 3))
            key = keys[-1] + 1
            notes.write(begun=keys, begin=time.monotonic())
            span, receipt = notes.timed("add_trajectories", partial(handle.add_trajectories, map(witness, keys)))
            if receipt is not None:
                waiting.append((span.begin, keys, receipt))
            while len(waiting) >= _OPEN:
                settle()
            time.sleep(chance.uniform(0.0, 0.4))
        while waiting:
            settle()


def judge(number: int, folder: Path) -> None:
    """Give acknowledged trajectories one value each."""
    notes, chance, told = Notes(folder / f"judge-{number}.notes"), random.Random(number), set[int]()
    with _connected() as handle:
        while not (folder / STOP).exists():
            time.sleep(chance.uniform(0.5, 2.0))
            known = acknowledged(folder)
            fresh = [key for key in [*known][-2000:] if key not in told]
            if not fresh:
                continue
            chosen = chance.sample(fresh, min(len(fresh), chance.randint(1, 4)))
            told.update(chosen)
            ids, values = [known[key][0] for key in chosen], [value_of(key, number) for key in chosen]
            notes.write(begun=chosen, begin=time.monotonic())
            span, _ = notes.timed("annotate", partial(annotate, handle, ids, {f"score_{number}": values}))
            if span.end < math.inf:
                notes.write(told=chosen, begin=span.begin, end=span.end)


def draw(number: int, folder: Path) -> None:
    """Draw transitions, those with a value and any, and look for acknowledged trajectories that are not shown."""
    notes, chance = Notes(folder / f"learner-{number}.notes"), random.Random(number)
    with _connected() as handle:
        while not (folder / STOP).exists():
            time.sleep(chance.uniform(0.2, 1.0))
            where = chance.choice(["score_0 >= 0", "score_1 < 500", None])
            _, batch = notes.timed(f"sample{' where' if where else ''}", partial(handle.sample, 64, where=where))
            if batch is not None:
                try:
                    check_batch(batch)
                except WitnessError as error:
                    notes.write(problem=f"a drawn row: {error}")
                notes.write(drawn=1)
            if chance.random() < 0.2:
                _look(handle, folder, notes)


def _look(handle: DistributedReplayBuffer, folder: Path, notes: Notes) -> None:
    """Note which acknowledged trajectories a refreshed handle does not show; check the values of the others.

    They are known by their keys, not their ids: of one that was sent again, and is in two stores, either may be shown.
    """
    known = acknowledged(folder)
    span, _ = notes.timed("refresh", handle.refresh)
    _, table = notes.timed("query", handle.query().rows)
    if table is None or span.end == math.inf:
        return
    shown = {row["version_low"]: row for row in table}
    lacking = [key for key, (_, end) in known.items() if end < span.begin and key not in shown]
    notes.write(looked=len(known), lacking=lacking, absent=handle.absent, begin=span.begin, end=time.monotonic())
    for key, row in shown.items():
        if row.get("score_0") not in (None, value_of(key, 0)):
            notes.write(problem=f"key {key}: score_0 is {row['score_0']}")


CLIENTS: dict[str, Callable[[int, Path], None]] = {"producer": produce, "judge": judge, "learner": draw}
