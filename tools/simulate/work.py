"""The calls of a world's clients: chosen by the seed, and compared with the model after every call."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.witness import check_batch, check_trajectory, witness
from tools.simulate.judge import BrokenPromiseError, Given, Model
from trajstore import Mirror, Retention, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import own_id, rank_of_id
from trajstore._core.store.saved_points import Snapshot
from trajstore.errors import (
    CorruptStoreError,
    EmptyBufferError,
    IncompleteCheckpointError,
    StoreNotFoundError,
    StoreWriteError,
    TrajectoryUnavailableError,
)
from trajstore.loader import ReplayLoader
from trajstore.operations.conversion import convert
from trajstore.operations.copying import copy_store, repair_store
from trajstore.samplers import EpochSampler, Recency, WeightedSampler
from trajstore.trajectory import AnyTrajectory

WRITES = {"add": 30, "add_many": 8, "flush": 15, "evict": 8, "get": 10, "sample": 8, "listed": 6, "give": 8}
WRITES |= {"compact": 3, "save_point": 4, "back": 2, "checkpoint": 2, "stats": 2, "pin": 3, "unpin": 3}
WRITES |= {"whole": 3, "load": 3, "mirrored": 8, "copy": 1, "merged": 1}
THEMES = (
    *(("give", "evict"), ("pin", "unpin"), ("save_point", "pin", "back"), ("compact", "get", "sample")),
    *(("load", "whole", "evict"), ("copy", "merged", "evict", "compact")),
)
"""Calls that narrow worlds consist of, beside adding."""
READS = {"get": 20, "sample": 10, "listed": 20, "reopen": 3, "whole": 3, "load": 2, "copy": 1, "merged": 1}


_LONG = 0.9
"""Simulated seconds; a thread that is not woken looks again after one second."""

MOMENTS = ("any", "writev", "rename", "mkdir", "unlink", "fsync", "fdatasync", "before fsync", "before fdatasync")
"""Changes of the disk that a crash may follow, or come before."""
LEAVING = ("any", "writev", "rename", "mkdir", "unlink", "before fsync", "before fdatasync")
"""Those that leave something that is not durable."""


@dataclass(frozen=True)
class Plan:
    """The choices of a seed.

    Attributes:
        form: format of the store.
        writers: threads of the process that writes.
        readers: processes that read.
        annotators: processes that give late values.
        calls: of each client in a life.
        lives: how often the writer begins.
        crashes: what ends each life: ``"none"``, ``"kill"`` (the writer), ``"kill all"``, ``"power"`` or ``"node"``
            (the store is gone, and is restored from its mirror).
        moments: when, for each of them: ``""`` at a step, ``"soon"`` at one after the writer has opened, or right after
            one of the first changes of the disk, all or those of one kind.
        within: calls of which a change of the disk counts as a moment; empty for all.
        faults: which part of the disk's calls fails for a while; 0 for none.
        fresh: how often a call is of the newest trajectories.
        weights: of the writing clients' calls.
        reads: of the reading clients' calls.
        options: of the writer.
        cache: whether the buffer caches.
        mirror: whether the store has a mirror.
        unreadable: whether memory that was given back cannot be read.
        sessions: whether clients record sessions of agents, and nothing else.
        trains: whether the writer is a training loop (``training.py``).
        ranks: whether the store is rank 0 of a run, whose rank 1 another process writes; readers read both.
        limit: of retention, in trajectories; None for none.
        pauses: seconds between the calls of readers and annotators, of which one is chosen each time.
    """

    form: str
    writers: int
    readers: int
    annotators: int
    calls: int
    lives: int
    crashes: tuple[str, ...]
    moments: tuple[str, ...]
    within: tuple[str, ...]
    faults: float
    fresh: float
    weights: dict[str, int]
    reads: dict[str, int]
    options: dict[str, float]
    cache: bool
    mirror: bool
    unreadable: bool
    sessions: bool
    limit: int | None
    pauses: tuple[float, ...]
    ranks: bool
    trains: bool = False


def plan(chance: random.Random, training: random.Random) -> Plan:
    """Return the choices of a seed; each call and fault exists in a part of the seeds only."""
    chosen = _plan(chance)
    if chosen.mirror or chosen.sessions or chosen.faults or chosen.ranks or training.random() >= 0.06:
        return chosen
    crashes = *(training.choice(("kill", "kill all", "power")) for _ in range(2)), "none"
    reads = {name: weight for name, weight in chosen.reads.items() if name != "merged"}  # it adds again what it lost
    return replace(
        chosen, trains=True, writers=1, limit=None, lives=3, crashes=crashes, moments=("", "", ""), reads=reads
    )


def _plan(chance: random.Random) -> Plan:
    theme = chance.choice(THEMES) if chance.random() < 0.4 else ()
    kept = {
        name: weight * chance.choice((1, 1, 1, 5))
        for name, weight in (dict.fromkeys(theme, 20) or WRITES).items()
        if theme or chance.random() < 0.6
    }
    kept |= {name: WRITES[name] * chance.choice((1, 1, 1, 5)) for name in ("add", "flush")}
    faults, mirror = chance.choice((0.0, 0.0, 0.0, 0.05, 0.2)), chance.random() < 0.15
    sessions = not mirror and chance.random() < 0.2
    if sessions and chance.random() < 0.5:
        faults = chance.choice((0.05, 0.2, 0.5))
    if mirror:
        faults = 0.0
    if faults:
        kept.pop("back", None)  # one that fails half-way asks for the store to be opened again
    lives = chance.choice((1, 2, 2, 3))
    if not mirror:
        kept.pop("mirrored", None)
    crashes = ("kill", "kill all", "node", "node") if mirror else ("none", "kill", "kill", "kill all", "power", "power")
    ends = tuple(chance.choice(crashes) for _ in range(lives - 1))
    moments = tuple(chance.choice(("", "", *MOMENTS)) for _ in ends)
    if not mirror and chance.random() < 0.25:  # what a crash has left, and the next process took for durable
        lives, ends = 3, chance.choice((("kill", "power"), ("kill", "power"), ("power", "kill")))
        left = "unlink" if "unpin" in theme else chance.choice(LEAVING)  # else it is seldom the name of a pin
        moments = left, chance.choice(("soon", chance.choice(MOMENTS)))
    ends += (chance.choice(("none", "none" if mirror else "kill")),)
    return Plan(
        form=chance.choice(("pt", "pkl") * 6 + ("zarr",)),
        writers=chance.choice((2, 3) if "give" in theme else (1, 1, 2, 3)),
        readers=chance.choice((0, 0, 1, 2)),
        annotators=chance.choice((1, 2) if "give" in theme else (0, 0, 1, 2)),
        calls=(9 if {"give", "back"} & {*theme} else chance.choice((3, 6, 9))) - lives + 1,
        lives=lives,
        crashes=ends,
        moments=(*moments, ""),
        within=theme if chance.random() < 0.5 or "unpin" in theme else (),
        faults=faults,
        fresh=0.9 if "give" in theme else chance.choice((0.0, 0.5, 0.9)),
        weights=kept,
        reads={name: READS[name] for name in ("listed", *theme) if name in READS} if theme else READS,
        options={
            "threads": chance.choice((1, 2)),
            "commit_interval": chance.choice((0.0, 0.001, 0.05)),
            "shard_bytes": chance.choice((1 << 12, 1 << 14, 1 << 20)),
        },
        cache=chance.random() < 0.5,
        mirror=mirror,
        unreadable=chance.random() < 0.3,
        sessions=sessions,
        limit=chance.choice((2, 6)) if not mirror and chance.random() < 0.15 else None,
        ranks=not (mirror or sessions or faults or "power" in ends) and chance.random() < 0.25,
        pauses=chance.choice(((0.0,), (0.0, 0.0002), (0.0002, 0.001, 0.003))),
    )


COLUMNS = ("rewards", "dones", "prev_values", "curr_obs.tag")
"""Columns of added trajectories: few, as each takes time."""


def check(trajectory: AnyTrajectory) -> int:
    """Check a whole trajectory; return its key."""
    return check_trajectory(trajectory, columns=COLUMNS)


class Client:
    """Uses a store from one thread.

    Args:
        folder: of the world's disk.
        store: its path.
        model: of all clients.
        chance: random numbers, which choose the calls.
        faulty: whether the disk may fail now.
        note: takes a line for the trace.
        calling: entered for a call.
    """

    def __init__(
        self,
        folder: Path,
        store: Path,
        model: Model,
        chance: random.Random,
        faulty: Callable[[], bool],
        note: Callable[[str], None],
        calling: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.folder, self.store, self.model, self.chance = folder, store, model, chance
        self.faulty, self.note, self.calling = faulty, note, calling

    buffer: TrajectoryReplayBuffer
    keys: Iterator[int]
    """Keys of added trajectories, for all clients."""
    fresh = 0.0

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """Forgive errors of the disk while it may fail."""
        faulty = self.faulty()
        try:
            yield
        except (StoreWriteError, OSError):
            if not (faulty or self.faulty()):
                raise

    def some(self, most: int) -> list[int]:
        """Return ids that are shown, all or the newest."""
        ids: list[int] = self.buffer.trajectory_ids.tolist()
        if self.chance.random() < self.fresh:
            ids = ids[-most:]
        return sorted(self.chance.sample(ids, min(len(ids), self.chance.randint(1, most))))

    def get(self) -> None:
        """Read a trajectory."""
        for number in self.some(1):
            model, own = self.known(number)
            try:
                model.check_read(own, check(self.buffer.get(number)))
            except TrajectoryUnavailableError:
                if not model.may_be_gone([own]):
                    raise

    def known(self, number: int) -> tuple[Model, int]:
        """Return the model of a shown trajectory's store, and its id there."""
        return self.model, number

    def sample(self) -> None:
        """Draw rows."""
        sampler = self.chance.choice((None, EpochSampler(), WeightedSampler([Recency(8)])))
        self._drawn(lambda: check_batch(self.buffer.sample(self.chance.choice((1, 8, 64)), sampler=sampler)).tolist())

    def whole(self) -> None:
        """Draw trajectories."""
        self._drawn(lambda: map(check, self.buffer.sample_trajectories(3)))

    def load(self) -> None:
        """Draw batches ahead."""

        def read() -> list[int]:
            with closing(ReplayLoader(self.buffer, 8, prefetch=2, timeout=1.0)) as loader:
                return [key for _ in range(3) for key in check_batch(next(loader)).tolist()]

        if len(self.buffer):
            with contextlib.suppress(TimeoutError):  # everything was evicted meanwhile
                self._drawn(read, ahead=True)

    def copy(self) -> None:
        """Make a second directory of the store, beside its writer; what is there is one moment."""
        store, path = self.store, self.folder / f"copy-{next(self.keys)}"
        if not (store / "metadata.json").exists():
            return
        known = self.model.known()
        form = self.chance.choice(("pt", "pkl"))
        make = self.chance.choice((copy_store, repair_store, partial(convert, trajectory_format=form)))
        with self.may_fail():
            make(store, path)
            with TrajectoryReplayBuffer.open(path) as reader:
                self.model.check_seen(reader.trajectory_ids.tolist(), known)
                for number in reader.trajectory_ids.tolist()[:1]:
                    self.model.check_read(number, check(reader.get(number)))

    def merged(self) -> None:
        """Make one store of the store and earlier copies, beside its writer: each trajectory is there once."""
        store, path = self.store, self.folder / f"merged-{next(self.keys)}"
        whole = [one for one in sorted(self.folder.glob("copy-*")) if (one / "metadata.json").exists()]
        if not whole or not (store / "metadata.json").exists():
            return
        sources = [store, *self.chance.sample(whole, min(len(whole), 2))]
        known = self.model.known()
        run = self.folder / f"{path.name}-of"
        with self.may_fail():
            for rank, source in enumerate(self.chance.sample(sources, len(sources))):
                copy_store(source, run / f"rank_{rank}")
            convert(run, path, "pt")
            with TrajectoryReplayBuffer.open(path) as reader:
                keys = [check(reader.get(number)) for number in reader.trajectory_ids.tolist()]
            self.model.check_merged(keys, known)

    def _drawn(self, read: Callable[[], Iterable[int]], *, ahead: bool = False) -> None:
        """Compare keys that were drawn; ``ahead``: before some of them were evicted."""
        gone = {self.model.keys[number] for number in self.model.evicted if number in self.model.keys}
        try:
            keys = set(read())
        except EmptyBufferError:
            return
        if self.is_current and not ahead and gone & keys:
            raise BrokenPromiseError(f"evicted trajectories are not drawn: {sorted(gone & keys)}")
        unknown = keys - self.model.begun
        if unknown:
            raise BrokenPromiseError(f"nothing is drawn that was not added: {sorted(unknown)}")

    is_current = True
    """Whether the buffer shows every eviction at once."""


def points_in(catalog: Catalog) -> dict[int, list[int]]:
    """Return the ids in each saved point of the current line, by step."""
    return {head.step or 0: ids_in(head) for head in catalog.points()}


def heads_in(catalog: Catalog, kind: str) -> dict[str, list[int]]:
    """Return the ids in each snapshot of a kind, by name."""
    return {head.name: ids_in(head) for head in catalog.pins.heads.values() if head.kind == kind}


def ids_in(head: Snapshot) -> list[int]:
    """Return the ids that a snapshot names."""
    return [number for begin, end in head.ids.tolist() for number in range(begin, end + 1)]


class Writer(Client):
    """Shares a writing buffer with other threads."""

    number: int
    """Of the client, in its process."""

    def step(self, weights: dict[str, int]) -> None:
        """Do one thing."""
        (name,) = self.chance.choices([*weights], weights=[*weights.values()])
        with self.calling(name), self.may_fail():
            getattr(self, name)()

    def add(self, count: int = 1) -> None:
        """Add trajectories."""
        keys = [next(self.keys) for _ in range(count)]
        self.model.adding |= set(keys)
        self.model.begun |= set(keys)
        ids = self.buffer.add_trajectories([witness(key, columns=COLUMNS) for key in keys])
        self.note(f"ADDED {ids} {keys}")
        self.model.added(dict(zip(ids, keys, strict=True)))

    def add_many(self) -> None:
        """Add several at once."""
        self.add(self.chance.randint(2, 6))

    def flush(self) -> None:
        """Make everything durable."""
        before, begun = set(self.model.keys), time.monotonic()
        self.buffer.flush()
        if time.monotonic() - begun > _LONG and not self.faulty():
            raise BrokenPromiseError(f"a wake-up is not lost: flush waited {time.monotonic() - begun:.1f} s")
        self.model.durable |= before & self.model.keys.keys()

    def evict(self, ids: list[int] | None = None) -> None:
        """Evict these, or some."""
        chosen = self.some(3) if ids is None else ids
        self.note(f"EVICT {chosen}")
        self.model.evicting |= set(chosen)
        try:
            self.buffer.evict(chosen)
        except TrajectoryUnavailableError:
            return  # another thread was faster with one of them; whether the others are gone is open
        self.model.evicted |= set(chosen)

    def listed(self) -> None:
        """List the shown ids."""
        known = self.model.known()._replace(must={*self.model.keys})
        self.model.check_seen(self.buffer.trajectory_ids.tolist(), known)

    def stats(self) -> None:
        """Read figures."""
        self.buffer.get_stats()

    def give(self) -> None:
        """Give a late value."""
        chosen = self.some(3)
        if chosen:
            give(self.model, next(self.keys), chosen, self.buffer)

    def compact(self) -> None:
        """Rewrite shards."""
        self.buffer.compact()

    def save_point(self, step: int | None = None, state: dict[str, Any] | None = None) -> None:
        """Save a point; other clients wait, so its contents are certain."""
        with self.alone():
            step = max(self.model.points, default=0) + 1 if step is None else step
            ids = self.model.head
            if self.model.evicting - self.model.evicted:
                return  # its contents would not be certain
            self.model.saving.append({step: (ids, self.model.tick())})
            self.buffer.points.save(step, state, keep=2)
            self.model.durable |= ids
            self.model.points |= self.model.saving.pop()
            self.model.saving.clear()
            for old in sorted(self.model.points)[:-2]:
                del self.model.points[old]

    def back(self, to: int | None = None) -> Any:
        """Go to a saved point, a pin, or a head that was left, and return its state; other clients wait."""
        with self.alone():
            targets = self.model.targets()
            if not targets or self.model.evicting - self.model.evicted:
                return None
            target, aside = self.chance.choice(targets) if to is None else to, self.chance.random() < 0.5
            self.note(f"GO TO {target} {aside}")
            self.model.go_to(target, aside=aside)
            try:
                return self.buffer.points.go_to(target, aside=aside)
            finally:  # a failed one has changed all or nothing
                self.model.arrived(self.buffer.trajectory_ids.tolist())
                catalog = Catalog.open(open_directory(self.store))
                self.model.check_points(points_in(catalog), heads_in(catalog, "aside"))

    def pin(self) -> None:
        """Pin the store; other clients wait, so its contents are certain."""
        with self.alone():
            if not self.model.evicting - self.model.evicted:
                name, ids = f"pin-{next(self.keys)}", self.model.head
                self.model.pinning.add(name)
                self.buffer.points.pin(name)
                self.model.durable |= ids
                self.model.pins[name], self.model.lines[name] = ids, dict(self.model.points)
                self.model.pinning.remove(name)

    def unpin(self) -> None:
        """Remove a pin."""
        if self.model.pins:
            name = self.chance.choice(sorted(self.model.pins))
            self.model.pinning.add(name)
            del self.model.pins[name]
            self.buffer.points.remove(name)
            self.model.pinning.remove(name)

    def mirrored(self) -> None:
        """Wait for the mirror; other clients wait, so its contents are certain."""
        with self.alone():
            gone, there = frozenset(self.model.evicted), self.model.head
            if self.buffer.mirror.wait(timeout=30.0):
                self.model.mirrored = gone, there

    def checkpoint(self) -> None:
        """Save a checkpoint and read it."""
        known = self.model.known()
        path = self.folder / f"checkpoint-{self.number}"
        self.buffer.save_checkpoint(path)
        with TrajectoryReplayBuffer.open(path) as reader:
            seen = reader.trajectory_ids.tolist()
            before = {number for number in self.model.keys if number < max(seen, default=0)}  # it is one moment
            self.model.check_seen(seen, known._replace(must=known.must | before))
            for number in reader.trajectory_ids.tolist()[:1]:
                self.model.check_read(number, check(reader.get(number)))

    alone: Callable[[], contextlib.AbstractContextManager[object]]
    """Keeps the other writing clients out."""

    def close(self) -> None:
        """Close what belongs to this client alone."""


def give(model: Model, value: int, chosen: list[int], target: TrajectoryReplayBuffer | Path) -> None:
    """Give a late value through a buffer, or to a store's inbox."""
    one = Given(frozenset(chosen), value, model.tick())
    model.given.append(one)
    try:
        annotate(target, chosen, {"v": value})
    except TrajectoryUnavailableError as error:
        named = {int(number) for number in re.findall(r"\d+", str(error))}
        if not (model.may_be_gone(chosen) and named & set(chosen)):
            raise
        model.given.remove(one)
        return
    one.ended = model.tick()


class Reader(Client):
    """Reads the store from a process of its own."""

    is_current = False
    pauses: tuple[float, ...]
    may_be_unknown = False
    """Whether the disk may fail in its world."""
    others: Collection[int] | None = None
    """Durable ids of the other store of a run."""

    def run(self, calls: int, reads: dict[str, int]) -> None:
        """Open, and make ``calls`` calls."""
        self.reopen()
        for _ in range(calls):
            time.sleep(self.chance.choice(self.pauses))  # a step takes 1 µs
            if hasattr(self, "buffer"):
                (name,) = self.chance.choices([*reads], weights=[*reads.values()])
                with self.calling(name):
                    try:
                        getattr(self, name)()
                    except CorruptStoreError as error:  # a full disk may have kept its lease from being written
                        if not (self.may_be_unknown and "does not know of this reader" in str(error)):
                            raise
            else:
                self.reopen()
        if hasattr(self, "buffer"):
            self.buffer.close()

    def reopen(self) -> None:
        """Open the store, if there is one yet."""
        if hasattr(self, "buffer"):
            self.buffer.close()
            del self.buffer
        must_be_there = bool(self.model.durable) and bool(self.others is None or self.others)
        try:
            self.buffer = TrajectoryReplayBuffer.open(self.store)  # type: ignore[assignment]  # of a writer elsewhere
        except (StoreNotFoundError, IncompleteCheckpointError):
            if must_be_there:
                raise

    def listed(self) -> None:
        """Refresh, and list the shown ids."""
        known = self.model.known()
        self.buffer.refresh()
        self.model.check_seen(self.buffer.trajectory_ids.tolist(), known)


class RunReader(Reader):
    """Reads a run of two ranks from a process of its own; ``model`` is the one of rank 0."""

    sibling: Model

    def known(self, number: int) -> tuple[Model, int]:
        return (self.model, self.sibling)[rank_of_id(number)], own_id(number)

    def listed(self) -> None:
        known = [(model, model.known()) for model in (self.model, self.sibling)]
        self.buffer.refresh()
        ids = self.buffer.trajectory_ids
        for rank, (model, before) in enumerate(known):
            model.check_seen(own_id(ids[rank_of_id(ids) == rank]).tolist(), before)


class Annotator(Client):
    """Gives late values from a process of its own."""

    pauses: tuple[float, ...]

    def run(self, calls: int) -> None:
        """Give values to trajectories that are durable, all or the newest."""
        for _ in range(calls):
            time.sleep(self.chance.choice(self.pauses))  # a step takes 1 µs
            durable = sorted(self.model.durable - self.model.evicting)
            if self.chance.random() < self.fresh:
                durable = durable[-2:]
            if durable:
                chosen = self.chance.sample(durable, min(len(durable), 2))
                with self.may_fail():
                    give(self.model, next(self.keys), chosen, self.store)


def opened(folder: Path, store: Path, chosen: Plan) -> TrajectoryReplayBuffer:
    """Return a writing buffer."""
    return TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=store,
        trajectory_format=chosen.form,
        sample_window_size=0,
        seed=1,
        enable_cache=chosen.cache,
        cache_size=3,
        retention=Retention(max_trajectories=None if chosen.sessions else chosen.limit),
        writer=WriterOptions(**chosen.options),  # type: ignore[arg-type]
        mirror=Mirror(folder / "mirror", interval=0.01, close_timeout=0.0) if chosen.mirror else None,
    )
