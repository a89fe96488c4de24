"""One process in which contents are replaced and changed while threads read them; it ends with what was found."""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tools.campaigns import Result
from tools.threads.readers import ID_BITS, READERS, check, made
from tools.threads.released import released_is_unreadable
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore.errors import EmptyBufferError, StoreClosedError, TrajectoryUnavailableError

REPLACERS = ("rollback", "go_to", "load", "refresh", "close")

_FIRST = 16
"""Trajectories of a store before anything is replaced."""

FOUND, TOLD = "found.json", "told.txt"
"""Files of a session: what it found, and what its process wrote."""

_HANGS = 180
"""Seconds beyond its time after which a session says where each thread is, and ends."""


class Stage:
    """A store of one kind, what reads it, and what replaces what is shown.

    Args:
        folder: of the store, and of those that are loaded.
        kind: ``"steps"`` or ``"agents"``.
        form: format of the store.
        seed: of all that is random here.
        found: takes what is found.
        ended: whether the session is over.
    """

    def __init__(self, folder: Path, kind: str, form: str, seed: int, found: Result, ended: Callable[[], bool]) -> None:
        self.folder, self.kind, self.form, self.found, self.ended = folder, kind, form, found, ended
        self._seeds = itertools.count(1000 * seed)
        self._random = Random(next(self._seeds))
        self.still = threading.Lock()
        """Held by whoever evicts, and by whoever compares what is shown with what is there."""
        self.gone: frozenset[int] = frozenset()
        """Keys that nobody may read at present: their trajectories were let go of."""
        self.given: set[int] = set()
        self.has_read: set[str] = set()
        """Which readers have read."""
        self.path = folder / "store"
        self.writer = self._opened(self.path)
        self.add(self.writer, 0, _FIRST)
        self.writer.flush()
        self.shown = self.writer
        """What the readers read."""

    def _opened(self, path: Path) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=path,
            trajectory_format=self.form,
            sample_window_size=0,
            cache_size=3,
            writer=WriterOptions(threads=1, shard_bytes=1 << 14, commit_interval=0.0),
        )

    def add(self, buffer: TrajectoryReplayBuffer, store: int, count: int) -> None:
        """Add trajectories whose keys say which store and which id is theirs; nobody else adds to this buffer."""
        first = buffer._trajectory_counter
        keys = [(store << ID_BITS) + first + at for at in range(count)]
        self.given.update(keys)
        ids = buffer.add_trajectories([made(self.kind, key) for key in keys])
        if ids != [first + at for at in range(count)]:
            raise AssertionError(f"ids {ids} were given, not those from {first} on")

    def guard(self, work: Callable[[Random], object]) -> Callable[[], None]:
        """Return what a thread runs: the work again and again, whose errors are problems."""
        random = Random(next(self._seeds))

        def run() -> None:
            while not self.ended():
                try:
                    work(random)
                except Exception:
                    self.found.problems.append(f"{self.kind}: {traceback.format_exc()}")
                    return

        return run

    def reader(self, name: str) -> Callable[[Random], None]:
        """Return what one reader does."""

        def read(random: Random) -> None:
            buffer, before = self.shown, self.gone
            try:
                for keys in READERS[self.kind][name](buffer, random):
                    self.found.counts["readings"] += 1
                    self.has_read.add(name)
                    stale = before & self.gone & set(keys)
                    if stale:
                        raise AssertionError(f"{name} read {sorted(stale)}, which had been let go of before")
                    before = self.gone
                    if self.ended():
                        return
            except EmptyBufferError:
                return
            except StoreClosedError:
                if not buffer._closed:
                    raise
            except TrajectoryUnavailableError:
                if self.path == self.folder / "store" or "loader" not in name:
                    raise  # else rows that were drawn ahead of another store, which was shown before

        return read

    def change(self, random: Random) -> None:
        """Evict something, or rewrite shards."""
        with self.still:
            buffer = self.writer
            try:
                ids = buffer.trajectory_ids.tolist()
                if random.random() < 0.2:
                    buffer.compact()
                elif len(ids) > _FIRST // 2:
                    buffer.evict(random.sample(ids, 2))
                self.found.counts["evictions and rewritings"] += 1
            except TrajectoryUnavailableError:  # let go of since it was listed
                return
            except StoreClosedError:
                if not buffer._closed:
                    raise
        time.sleep(0.002 * random.random())  # else nobody else ever comes to hold it

    # -- replacing --------------------------------------------------------------------------------

    def replacer(self, name: str) -> Callable[[Random], None]:
        """Return what replaces contents once, and compares what is shown now and then."""
        steps: Iterator[object] = getattr(self, f"_{name}")()

        def replace(random: Random) -> None:
            self.gone = frozenset()  # what is replaced may bring back what had left
            next(steps)
            self.found.counts["replacements"] += 1
            if random.random() < 0.3:
                self.compare()

        return replace

    def _rollback(self) -> Iterator[object]:
        self.writer.points.save(1)
        while True:
            self._grow()
            aside = self._random.random() < 0.3
            self.writer.points.rollback(1, aside=aside)
            name = self._aside() if aside else ""
            if name:  # what was added may all have been evicted before
                self.writer.points.remove(name)
            yield

    def _go_to(self) -> Iterator[object]:
        while True:
            self.writer.points.save(1)
            self._grow()
            self.writer.points.rollback(1)
            name = self._aside()
            if name:
                self.writer.points.go_to(name)
                self.writer.points.remove("step-1")
            yield
            self._shrink()

    def _aside(self) -> str:
        """Return the name of the head that was left last; empty if none was."""
        return next((head.name for head in reversed(Catalog.open(open_directory(self.path)).asides())), "")

    def _load(self) -> Iterator[object]:
        paths = [self.folder / "first", self.folder / "second"]
        for number, path in enumerate(paths, 1):
            with self._opened(path) as other:
                self.add(other, number, _FIRST)
        while True:
            self.path = self._random.choice(paths)
            self.writer.load_checkpoint(self.path)
            yield

    def _refresh(self) -> Iterator[object]:
        self.writer.points.save(1)
        self.shown = TrajectoryReplayBuffer.open(self.path)
        while True:
            self._grow()
            if self._random.random() < 0.5:
                self.writer.points.rollback(1, aside=False)
            self.writer.flush()
            self.shown.refresh()
            yield

    def _close(self) -> Iterator[object]:
        while True:
            self._grow()
            self.writer.close()
            self.writer = self.shown = self._opened(self.path)
            yield
            self._shrink()

    def _grow(self) -> None:
        self.add(self.writer, 0, self._random.randrange(1, 5))
        if self._random.random() < 0.5:
            self.writer.flush()

    def _shrink(self) -> None:
        with self.still:
            ids = self.writer.trajectory_ids.tolist()
            self.writer.evict(ids[: max(len(ids) - 2 * _FIRST, 0)])

    def compare(self) -> None:
        """Compare the ids that are shown with those of the store, and read every one of them."""
        with self.still:
            self.writer.flush()
            self.shown.refresh()
            there = set(Catalog.open(open_directory(self.path)).index["trajectory_id"].tolist())
            ids = self.shown.trajectory_ids.tolist()
            if sorted(ids) != sorted(there):
                raise AssertionError(
                    f"shown and not there: {sorted(set(ids) - there)}; there and not shown: {sorted(there - set(ids))}"
                )
            keys = {check(self.kind, self.shown.get(number)) for number in ids}
            self.gone = frozenset(self.given - keys)
            self.found.counts["comparisons with the store"] += 1


def session(folder: Path, replacer: str, form: str, seconds: float, seed: int) -> Result:
    """Replace contents for some seconds, and until every reader has read; return what was found."""
    found = Result()
    end, stages = 0.0, list[Stage]()

    def ended() -> bool:
        has_begun = found.counts["replacements"] and all(one.has_read == READERS[one.kind].keys() for one in stages)
        return bool(found.problems) or time.monotonic() > (end if has_begun else end + _HANGS / 2)

    stages += [Stage(folder / kind, kind, form, seed, found, ended) for kind in READERS]
    end = time.monotonic() + seconds
    threads = []
    for stage in stages:
        works = [stage.replacer(replacer), *map(stage.reader, READERS[stage.kind])]
        if replacer != "load":  # whose own store is not shown
            works.append(stage.change)
        threads += [threading.Thread(target=stage.guard(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    absent = [f"{one.kind}: {name}" for one in stages for name in READERS[one.kind].keys() - one.has_read]
    if absent and not found.problems:
        found.problems.append(f"some readers never read: {absent}")
    return found


def run(folder: Path, replacer: str, form: str, seconds: float, seed: int) -> None:
    """Run one session in a process of its own; what it found is in a file of its folder, as is what it wrote."""
    told = os.open(folder / TOLD, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    logging.disable(logging.WARNING)  # of rollbacks and rows that are drawn again, thousands
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(seconds + _HANGS, exit=True, file=2)
    with released_is_unreadable():
        found = session(folder, replacer, form, seconds, seed)
    (folder / FOUND).write_text(json.dumps({"problems": found.problems, "counts": found.counts}))
