"""Kill a process that adds rollouts to a store, open the store in a new one, compare with the acknowledged rollouts."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.campaigns import Result, counted
from tools.crash.journal import entries
from tools.crash.peers.child import GROUP
from tools.crash.processes import ProcessTree

_PATIENCE = 400.0  # seconds; Ray starts slowly on a busy machine
_LATEST_SYNC = 80
_SOURCE = Path(__file__).with_name("synced.c")


@dataclass(kw_only=True)
class PeerResult(Result):
    """A result with times and fields.

    Attributes:
        seconds_to_read: from each call that opened the store until all rollouts were read.
        fields: number of values that the last process read, by field and state.
    """

    seconds_to_read: list[float] = field(default_factory=list)
    fields: Mapping[str, int] = field(default_factory=dict)


def summary(result: PeerResult) -> str:
    """Return counts, times and fields as lines."""
    times = result.seconds_to_read
    read = (
        f"{statistics.median(times):.2f} s until all was read (median), {max(times):.2f} s (longest)" if times else ""
    )
    fields = ", ".join(f"{name}: {count}" for name, count in sorted(result.fields.items()))
    return f"{counted(result)}\n{read}\nfields of the last reading: {fields}"


@dataclass
class Acknowledged:
    """Rollouts that a store has acknowledged and should still have."""

    added: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)
    """Groups read in part."""

    def take(self, journal: list[dict[str, Any]]) -> None:
        """Take the acknowledgements of one process."""
        for entry in journal:
            if entry["event"] == "added":
                self.added.update(entry["numbers"])
            if entry["event"] == "settled" or entry.get("settled"):
                self.settled |= self.added

    def compare(self, ready: Mapping[str, Any], result: PeerResult, where: str) -> None:
        """Count rollouts that a new process does not read, reads twice or reads changed; then expect those it reads."""
        present = Counter(ready["numbers"])
        lost = sorted(self.added - present.keys())
        settled = sorted(self.settled - present.keys())
        twice = sorted(number for number, count in present.items() if count > 1)
        sizes = Counter(number // GROUP for number in present)
        partial = {group for group, size in sizes.items() if size < GROUP} - self.incomplete
        for name, numbers in (
            ("lost after the last call", lost),
            ("lost", settled),
            ("read twice", twice),
            ("changed", ready["changed"]),
            ("groups in part", sorted(partial)),
        ):
            result.counts[name] += len(numbers)
            if numbers and name in ("lost", "read twice", "changed"):
                result.problems.append(f"{where}: {len(numbers)} {name}: {', '.join(map(str, numbers[:5]))}")
        result.seconds_to_read.append(ready["seconds"])
        result.fields = ready["fields"]
        self.incomplete |= partial
        self.added &= present.keys()
        self.settled &= present.keys()


def run_campaign(
    folder: Path,
    peer: str,
    kills: int,
    seed: int,
    *,
    python: str = sys.executable,
    moment: str = "random",
    power: bool = False,
    longest: float = 0.5,
    progress: Callable[[PeerResult], None] | None = None,
) -> PeerResult:
    """Kill ``kills`` processes that add rollouts to one store; each next one opens and reads it first.

    Args:
        folder: empty; store, journals and logs are left in it.
        peer: name of the store, or ``module:class`` of a :class:`~tools.crash.peers.child.Peer`.
        kills: number of kills.
        seed: of the moments.
        python: interpreter in which the store is installed.
        moment: ``random``, or ``sync`` right before a random one of the first calls of fsync.
        power: after each kill, files have only the content of their last fsync.
        longest: seconds of adding before a kill.
        progress: called after each kill.
    """
    chance, result, known = random.Random(seed), PeerResult(), Acknowledged()
    store, copies, library = folder / "store", folder / "copies", folder / "synced.so"
    for path in (store, copies):
        path.mkdir()
    if power or moment == "sync":
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl", "-lpthread"], check=True)
    for life in range(kills + 1):
        journal = folder / f"journal_{life:03d}"
        environment = {}
        if library.exists():
            environment = {"LD_PRELOAD": str(library), "SYNC_ROOT": str(store), "SYNC_COPIES": str(copies)}
        if moment == "sync" and life < kills:
            environment["SYNC_KILL"] = str(chance.randint(1, _LATEST_SYNC))
        command = [python, "-m", "tools.crash.peers.child", peer, str(store), str(journal), str(int(life < kills))]
        child = ProcessTree(command, folder / f"log_{life:03d}", environment)
        try:
            # Every fourth process is killed while it opens the store, or soon after.
            _wait(child, journal, "ready" if life == kills else "opening" if life % 4 == 3 else "added")
            if life < kills:
                end = time.monotonic() + (chance.uniform(0.0, longest) if moment == "random" else 10 * longest)
                while child.exit_code is None and time.monotonic() < end:
                    time.sleep(0.002)
            failed = child.exit_code not in (None, 0, -9)
        finally:
            child.kill()
        seen = entries(journal)
        for entry in seen:
            if entry["event"] == "ready":
                known.compare(entry, result, f"process {life}")
        if failed:
            result.counts["lost"] += len(known.settled)
            result.counts["lost after the last call"] += len(known.added)
            result.counts["stores that could not be opened"] += 1
            result.problems.append(f"process {life}: ended with an error: {child.tail(600)}")
            store.rename(folder / f"failed_{life:03d}")
            store.mkdir()
            known = Acknowledged()
            continue
        known.take(seen)
        result.counts["acknowledged"] += sum(len(entry["numbers"]) for entry in seen if entry["event"] == "added")
        result.counts["kills"] += life < kills
        if power:
            lose_power(store)
        if progress is not None:
            progress(result)
    shutil.rmtree(copies)
    return result


def lose_power(store: Path) -> None:
    """Give each file the content of its last fsync; a file that was never synced is empty. Names are kept."""
    for path in store.rglob("*"):
        if path.is_file():
            synced = os.listxattr(path)
            copy = os.getxattr(path, "user.synced") if "user.synced" in synced else b""
            path.write_bytes(Path(os.fsdecode(copy)).read_bytes() if copy else b"")


def _wait(child: ProcessTree, journal: Path, event: str) -> None:
    """Wait until a process has noted an event, or has ended.

    Raises:
        TimeoutError: it did neither.
    """
    end = time.monotonic() + _PATIENCE
    while child.exit_code is None and not any(entry["event"] == event for entry in entries(journal)):
        if time.monotonic() > end:
            raise TimeoutError(f"{journal}: no {event} after {_PATIENCE} s: {child.tail(600)}")
        time.sleep(0.005)
