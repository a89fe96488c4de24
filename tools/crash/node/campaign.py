"""Kills a process that writes a mirrored store, removes its disk, restores the store from the mirror, and looks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.witness import WitnessError
from tools.campaigns import Result, s3_server, start, wait_for
from tools.crash.journal import entries
from tools.crash.node.child import work
from tools.crash.range_reader import RangeReader, Seen, read_all
from trajstore import TrajectoryReplayBuffer
from trajstore._core.store.sealed import METADATA_NAME, RESTORE_NAME
from trajstore.errors import TrajstoreError
from trajstore.operations.verify import verify
from trajstore.remote.mirror.restoring import restore

_KEYS = 1 << 20  # of one round
_LOCK_TTL = 1.0  # of the mirror: a node that is frozen for longer is taken for lost


@dataclass
class _Known:
    """What the journals say: keys by id, ids that may be gone, the watermark."""

    keys: dict[int, int] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    may_be_gone: set[int] = field(default_factory=set)
    watermark: int = -1

    def read(self, journal: Path, *, woken: bool = False) -> None:
        """Take in what a round has noted; its watermark is the one that counts now.

        Args:
            journal: of the round.
            woken: it was read before, and its process was only frozen. What that has noted since was promised only as
                far as its own mirror went.
        """
        keys: dict[int, int] = {}
        shown: set[int] = set()
        for said in entries(journal):
            if said["event"] == "adding":
                self.offered.update(said["keys"])
            elif said["event"] == "added":
                keys |= {int(number): key for number, key in said["keys"].items()}
            elif said["event"] == "evicting":
                self.may_be_gone.update(said["ids"])
            elif said["event"] == "rolling_back":
                shown = set(said["ids"]) - self.may_be_gone
                self.may_be_gone |= shown
            elif said["event"] == "rolled_back":  # before it, these are there as well
                self.may_be_gone -= shown & set(said["ids"])
        watermark = _watermark(journal)
        if woken:
            self.keys.update((number, key) for number, key in keys.items() if number <= watermark)
        else:
            self.keys.update(keys)
            self.watermark = watermark


@contextmanager
def s3() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of a bucket in an S3 server on the loopback interface, and its storage options."""
    import s3fs

    with s3_server() as options:
        bucket = f"bucket-{uuid.uuid4()}"
        s3fs.S3FileSystem(**options).mkdir(bucket)
        yield f"s3://{bucket}", options


def run(folder: Path, mirrors: str, storage_options: dict[str, Any], rounds: int, seed: int) -> Result:
    """Lose a node ``rounds`` times.

    Args:
        folder: for stores and journals; empty.
        mirrors: path or URL below which the mirror lies.
        storage_options: of the mirror.
        rounds: how often.
        seed: of what is done when.
    """
    result = Result()
    rng, known = random.Random(seed), _Known()
    disks, mirror, before = folder / "disks", f"{mirrors}/store", set[int]()
    options = {**storage_options, "lock_ttl": _LOCK_TTL} if storage_options else {}
    frozen: Any = None
    with closing(RangeReader(storage_options, result)) if storage_options else nullcontext() as ranges:
        for number in range(rounds):
            journal = folder / f"journal_{number}"
            journal.touch()
            store = disks / str(number)
            given = (str(store), mirror, options, str(journal), seed * 1000 + number, number * _KEYS)
            child = start(work, *given)
            if ranges is not None and number % 2 == 0:  # else nobody reads, for whom evicted shards would stay
                ranges.follow(mirror)
            wait_for(child, lambda journal=journal: journal.stat().st_size > 0)
            if frozen is not None:  # the one that was believed lost wakes up, while this one has the mirror
                child.join(rng.random())
                os.kill(frozen.pid, signal.SIGCONT)
            if rng.random() < 0.75:  # however slow the machine is, there must be something to compare
                wait_for(child, lambda journal=journal: _watermark(journal) > known.watermark)
            child.join(0.05 + 2.0 * rng.random() ** 2)
            if child.exitcode is not None:
                result.problems.append(f"round {number}: the process ended by itself with {child.exitcode}")
            if frozen is not None:
                frozen.kill()
                frozen.join()
                frozen = None
                known.read(folder / f"journal_{number - 1}", woken=True)
            if storage_options and rng.random() < 0.4 and child.exitcode is None:
                os.kill(child.pid, signal.SIGSTOP)
                frozen = child
                result.counts["of them only frozen"] += 1
                time.sleep(2 * _LOCK_TTL)
            else:
                child.kill()
                child.join()
            known.read(journal)
            if frozen is None:
                shutil.rmtree(disks)
            result.counts["nodes lost"] += 1
            if known.watermark < 0 and not before:
                mirror = f"{mirrors}/store_{number + 1}"  # lost before anything was on the mirror
                continue
            store = disks / str(number + 1)
            if rng.random() < 0.3:
                result.counts["restores killed and taken up"] += _killed_restore(mirror, storage_options, store, rng)
            try:
                restore(mirror, store, storage_options=storage_options)
                there = _look(store, known, before, result, number)
                if ranges is not None:
                    seen, troubles = ranges.look(mirror)
                    result.problems += [f"round {number}: {trouble}" for trouble in troubles]
                    if differing := [one for one in there.keys() | seen.keys() if there.get(one) != seen.get(one)]:
                        text = f"ids {sorted(differing)} are others by ranges, or absent"
                        result.problems.append(f"round {number}: {text}")
                before = set(there)
            except (TrajstoreError, WitnessError) as error:
                result.problems.append(f"round {number}: {type(error).__name__}: {error}")
                break
    if frozen is not None:
        frozen.kill()
        frozen.join()
    if rounds and not result.counts["trajectories below the watermark"]:
        result.problems.append("no trajectory was on a mirror: nothing was tested")
    return result


def _watermark(journal: Path) -> int:
    """Return the watermark that a journal noted last; -1 if none."""
    return max([said["watermark"] for said in entries(journal) if said["event"] == "mirrored"], default=-1)


def _killed_restore(mirror: str, options: dict[str, Any], store: Path, rng: random.Random) -> bool:
    """Kill a restore at a random moment; return whether it had not ended."""
    child = start(partial(restore, storage_options=options), mirror, str(store))
    child.join(0.02 + 0.4 * rng.random())
    alive = child.exitcode is None
    if alive and child.pid is not None:
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    ended = not alive or ((store / METADATA_NAME).exists() and not (store / RESTORE_NAME).exists())
    if ended:  # it was quicker: the store is whole, and a second restore would be refused
        shutil.rmtree(store)
    return not ended


def _look(store: Path, known: _Known, before: set[int], result: Result, number: int) -> dict[int, Seen]:
    """Compare a restored store with what is known; return its trajectories."""
    found = verify(store)
    result.problems += [f"round {number}: verify: {problem.file}: {problem.message}" for problem in found.problems]
    result.problems += [f"round {number}: verify: {note}" for note in found.notes]
    with TrajectoryReplayBuffer.open(store) as reader:
        seen = read_all(reader)
    there = {one: trajectory.key for one, trajectory in seen.items()}
    for one, key in there.items():
        if known.keys.get(one, key) != key or key not in known.offered:
            result.problems.append(f"round {number}: id {one} has key {key}, not {known.keys.get(one)}")
    if len(set(there.values())) < len(there):
        result.problems.append(f"round {number}: a trajectory is there twice")
    promised = {one for one in known.keys if one <= known.watermark} | before
    absent = sorted(promised - there.keys() - known.may_be_gone)
    if absent:
        result.problems.append(f"round {number}: ids {absent[:10]} were on the mirror ({known.watermark}) and are lost")
    known.may_be_gone -= there.keys()  # this is the store now
    result.counts["compared in all"] += len(there)
    result.counts["trajectories below the watermark"] += len(promised & there.keys())
    lost = [one for one in known.keys if one not in there]
    result.counts["lost above the watermark"] += len([one for one in lost if one > known.watermark])
    for one in lost:
        del known.keys[one]
    return seen
