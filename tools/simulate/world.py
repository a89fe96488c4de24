"""One run: tasks, disk, clients and crashes of one seed, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import hashlib
import itertools
import logging
import math
import os
import random
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

import numpy as np
import orjson
import zarr.core.sync

from tests.support.witness import check_batch, extent_of
from tools.powerloss.filesystem import Op
from tools.simulate import work
from tools.simulate.agents import Acknowledged, Recorder
from tools.simulate.disk import MAY_FAIL, Disk, waiting_flock
from tools.simulate.judge import BrokenPromiseError, Model
from tools.simulate.released import released_is_unreadable
from tools.simulate.schedule import Choice, Given, strategy
from tools.simulate.tasks import Task, Tasks, entered
from tools.simulate.training import Trained, Trainer, check_training
from tools.simulate.work import Annotator, Plan, Writer, check, heads_in, opened, plan, points_in
from trajstore import Reader, TrajectoryReplayBuffer, annotate
from trajstore._core.files.descriptors import Descriptor
from trajstore._core.files.opening import open_directory
from trajstore._core.formats import zarr as zarr_format
from trajstore._core.sampling.base import Drawn
from trajstore._core.store.catalog import Catalog
from trajstore._core.writing.inbox import waiting
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreWriteError
from trajstore.mirror import restore
from trajstore.operations.verify import verify

C = TypeVar("C", bound=work.Client)
MOST_STEPS = 60_000
_LAST = 400
"""Steps that a failure shows."""


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        seed: of the run.
        problem: the broken promise or error; empty if none.
        steps: how many there were.
        digest: of every step: number, task, what.
        changes: where another task went on than without a choice.
        plan: the choices of the seed.
        trace: the newest steps, or all if asked for.
        seconds: of simulated time.
        operations: of the disk.
    """

    seed: int
    problem: str = ""
    steps: int = 0
    digest: str = ""
    changes: dict[int, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    trace: list[tuple[int, str, str]] = field(default_factory=list)
    seconds: float = 0.0
    operations: int = 0


class World:
    """Runs one seed. Its threads wait forever afterwards, and what they hold stays.

    Args:
        seed: decides everything.
        folder: for its files; made, and removed at the end.
        changes: those of an earlier run, to repeat; None to choose.
        whole: keep the whole trace.
    """

    def __init__(
        self, seed: int, folder: Path, changes: Mapping[int, str] | None = None, *, whole: bool = False
    ) -> None:
        self.seed, self.folder = seed, folder
        self.chance = random.Random(f"work/{seed}")
        self.plan: Plan = plan(self.chance, random.Random(f"training/{seed}"))
        self.model, self._acknowledged, self._trained = Model(limit=self.plan.limit), Acknowledged(), Trained()
        self._whole = whole
        choosing: Choice = strategy(random.Random(f"schedule/{seed}")) if changes is None else Given(changes)
        self.tasks = Tasks(choosing, self._at_step, self.end)
        folder.mkdir()
        self.store = self.folder / "run" / "rank_0" if self.plan.ranks else self.folder / "store"
        self.sibling = Model(limit=self.plan.limit, begun=self.model.begun)
        """Of rank 1, in a run."""
        self.ops: list[Op] = []
        self._faults = random.Random(f"faults/{seed}")
        self.disk = Disk(self.folder, self.ops, self.tasks, self._fails)
        self.keys = itertools.count(1)
        self.tasks.alarm, self._fault_from, self._fault_steps = MOST_STEPS, 0, 0
        self._changes_left, self._change = 0, ""
        self._living: set[int] = set()
        self._failed: set[int] = set()
        self._driver: Task | None = None
        self._crashed = ""
        self._processes = itertools.count(1)
        self._writer_process = 0

    # -- ends -------------------------------------------------------------------------------------

    def end(self, problem: str) -> NoReturn:
        """End the run, without another step of any task."""
        self.disk.is_unseen = True
        self._outcome = Outcome(
            self.seed,
            problem,
            self.tasks.step,
            hashlib.blake2b(orjson.dumps(self.tasks.trace), digest_size=16).hexdigest(),
            self.tasks.changes,
            asdict(self.plan),
            self.tasks.trace if self._whole else self.tasks.trace[-_LAST:] if problem else [],
            self.tasks.now - 1_800_000_000.0,
            len(self.ops),
        )
        self.tasks.finish()

    # -- faults -----------------------------------------------------------------------------------

    @property
    def is_faulty(self) -> bool:
        """Whether the disk may fail now, could have a moment ago, or has failed in this process."""
        task = self.tasks.mine
        may = self._fault_from <= self.tasks.step or (task is not None and task.process in self._failed)
        return bool(self.plan.faults) and may

    def _fails(self, name: str) -> float | None:
        counts = not self.plan.within or (self.tasks.mine and self.tasks.mine.call in self.plan.within)
        self._changes_left -= bool(counts) and self._change in ("any", name, f"before {name}")
        if not self._changes_left:
            self._changes_left = -1
            self.tasks.alarm = self.tasks.step  # crash at the next step, which is after this change
            if self._change.startswith("before"):
                self.tasks.point("crash")
        task = self.tasks.mine
        within = self._fault_from <= self.tasks.step < self._fault_from + self._fault_steps
        if not (within and name in MAY_FAIL and task and task.process and self._faults.random() < self.plan.faults):
            return None
        self._failed.add(task.process)
        return self._faults.choice((0.0, 0.0, 0.5, 1.0))

    def _at_step(self, step: int) -> None:
        if step > MOST_STEPS:
            self.end(f"no end after {MOST_STEPS} steps")
        waits = self._driver is not None and self._driver.waits_for == _CLIENTS
        if step < MOST_STEPS and self._living and waits:
            self.tasks.alarm = MOST_STEPS
            self.tasks.note(f"CRASH: {self._coming}")
            self._crashed = self._coming
            for process in list(self._living):
                if self._coming != "kill" or process == self._writer_process:
                    self._kill(process)

    def _kill(self, process: int) -> None:
        self.tasks.kill(process)
        self.disk.kill(process)
        self._ended(process)

    def _ended(self, process: int) -> None:
        self._living.discard(process)
        if (
            self._driver is not None
            and self._driver.waits_for
            and (not self._living or process == self._writer_process)
        ):
            self.tasks.wake(self._driver)

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run."""
        gc.disable()
        gc.freeze()  # what the collections of ended processes need not look at
        logging.disable(logging.CRITICAL)
        numbers = random.Random(f"numbers/{self.seed}")

        def new_uuid() -> uuid.UUID:
            return uuid.UUID(int=numbers.getrandbits(128), version=4)

        try:
            with (
                released_is_unreadable() if self.plan.unreadable else contextlib.nullcontext(),
                entered(self.tasks),
                mock.patch.object(os, "urandom", numbers.randbytes),
                mock.patch.object(random, "_urandom", numbers.randbytes),  # of the module secrets
                mock.patch.object(uuid, "uuid4", new_uuid),
                mock.patch.object(os, "getpid", self._pid),
                mock.patch.object(os, "kill", self._signal),
                # Its default is the real call, which would leave a number as open.
                mock.patch.object(Descriptor.close, "__defaults__", (lambda number: os.close(number),)),
                mock.patch.object(fcntl, "flock", waiting_flock(self.tasks)),
                self.disk.recording(),
                zarr_in_thread(),
            ):
                # Only threads of ``threading`` have an identity that is theirs alone, so this one starts them and ends.
                self.tasks.start(lambda: self._thread(self._drive, "driver", 0), name="start", process=0)
                self.tasks.run()
        except RuntimeError as error:  # files were changed by other calls than recorded ones
            self._outcome.problem = self._outcome.problem or str(error)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._outcome

    def _thread(self, call: Callable[[], object], name: str, process: int) -> None:
        thread = threading.Thread(target=self._guarded(call), name=name)
        thread.process = process  # type: ignore[attr-defined]  # read where it becomes a task
        thread.start()

    def _pid(self) -> int:
        task = self.tasks.mine
        return _FIRST_PID + (task.process if task else 0)

    def _signal(self, pid: int, number: int) -> None:
        if pid - _FIRST_PID not in {task.process for task in self.tasks.alive}:
            raise ProcessLookupError(pid)

    def _guarded(self, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                call()
            except BaseException:
                self.end(traceback.format_exc(limit=-14))

        return run

    def _drive(self) -> None:
        self._driver = self.tasks.mine
        for life in range(self.plan.lives):
            last = life == self.plan.lives - 1
            self._crashed = ""
            self._coming = self.plan.crashes[life]
            self._change = "" if self._coming == "none" else self.plan.moments[life]
            self.tasks.alarm = MOST_STEPS
            most = self.chance.choice(
                (10, 40, 160) if self._change == "any" else (1, 3) if self.plan.within else (1, 3, 10)
            )
            self._changes_left = self.chance.randint(1, most)
            if self._coming != "none" and self._change in ("", "soon"):
                self.tasks.alarm = self.tasks.step + self.chance.randrange(20, 2000)
            self._fault_from = self.tasks.step + self.chance.choice(
                (self.chance.randrange(20, 600), self.chance.randrange(3000))
            )
            self._fault_steps = self.chance.choice((100, 300, 1000))
            if life and not self._living:  # the writer finds a store that others use
                self._start_others()
                self.tasks.wait("sleep", self.chance.choice((0.0, 0.0005, 0.002)))
            self._start_writer()
            if life == 0:
                self._start_others()
            while self._writer_process in self._living or (last and self._living):
                self.tasks.wait(_CLIENTS)
            if self._crashed in ("kill all", "power", "node"):
                while self._living:
                    self.tasks.wait(_CLIENTS)
            if self._crashed == "power":
                if self._unsettled is not None:
                    self.model.restore(self._unsettled)
                self._unsettled = None
                self.disk.lose_power(random.Random(f"power/{self.seed}/{life}"))
            elif self._crashed == "node":
                self._lose_node()
            elif self._crashed.startswith("kill") and self._unsettled is None:
                self._unsettled = self.model.copy()
            self._look(last=last)
        self.end("")

    _coming = ""
    _unsettled: dict[str, object] | None = None
    """What was known before a killed process's last changes were seen, which the next writer makes durable."""

    def _lose_node(self) -> None:
        """Remove the store, and restore it from its mirror, where there is one yet; the first restore may be killed."""
        store, mirror = self.store, self.folder / "mirror"
        for folder, _, files in sorted(
            os.walk(store), reverse=True
        ):  # rmtree makes other calls on each version of Python
            for name in sorted(files):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        self.model.lose_node()
        try:
            TrajectoryReplayBuffer.open(mirror).close()
        except StoreNotFoundError:
            self.model.ever.clear()  # nothing is restored, and ids begin anew
            self.model.is_restored = False
        else:
            self._crashed, self._coming = "", "kill"
            self.tasks.alarm = self.tasks.step + self.chance.randrange(20, 600)
            self._writer_process = self._process(lambda: restore(mirror, store), "restore")
            while self._writer_process in self._living:
                self.tasks.wait(_CLIENTS)
            self.tasks.alarm = MOST_STEPS
            if self._crashed:
                with contextlib.suppress(ConfigurationError):  # it was complete; else it is found to be absent
                    restore(mirror, store)
        self._crashed = "node"

    def _look(self, *, last: bool) -> None:
        """Compare the store with the model, while no writer lives.

        Args:
            last: read everything; else only some of the trajectories that were read before, unless power was lost.
        """
        store = self.store
        if self.plan.ranks and not self._living:
            self._look_at_sibling()
        if not (store / "metadata.json").exists() and not self.model.durable:
            self.model.found({})
            return
        if self.plan.sessions:
            if not self._living:
                self._acknowledged.check(store)
            return
        with TrajectoryReplayBuffer.open(store) as reader:
            self.model.found(self._keys(reader))
        directory, is_alone = open_directory(store), not self._living
        if self.model.keys and waiting(directory):  # takes it in
            annotate(store, [min(self.model.keys)], {"looked": self.model.tick()})
        catalog = Catalog.open(directory)
        if is_alone:  # else an annotator may hold the inbox
            values: dict[int, list[Any]] = {
                number: [None, *(note.value for note in catalog.notes.history(number) if note.name == "v")]
                for number in self.model.keys
            }
            self.model.check_values({number: history[-1] for number, history in values.items()})
        points = points_in(catalog)
        for step in points if last else ():
            with TrajectoryReplayBuffer.open(store, pin=f"step-{step}") as reader:
                points[step] = reader.trajectory_ids.tolist()
        self.model.check_points(points, heads_in(catalog, "aside"))
        self.model.check_pins(heads_in(catalog, "pin"))
        self.model.is_restored = False
        limit = self.plan.limit
        if (
            last
            and limit is not None
            and len(self.model.keys) > limit
            and not (points or self.plan.faults or self._crashed)
        ):
            raise AssertionError(f"retention is applied: {sorted(self.model.keys)} are more than {limit}")
        if last and self.plan.trains:
            check_training(self.folder / "twin", self._trained, self.plan)
        report = verify(store) if last or self._crashed else None
        if report and report.problems:
            raise AssertionError(f"a store is sound: {[(found.file, found.message) for found in report.problems[:3]]}")

    def _keys(self, reader: Reader) -> dict[int, int]:
        """Read every row of every trajectory, and bootstrap rows of some; return their keys."""
        ids = reader.trajectory_ids.tolist()
        keys = {number: self.model.keys[number] for number in ids if number in self.model.keys}
        for number in set(ids) - keys.keys() | set(self.chance.sample(sorted(keys), min(len(keys), 2))):
            keys[number] = check(reader.get(number))
        counts = [math.prod(extent_of(keys[number])[:2]) for number in ids]
        if ids:
            rows = Drawn(np.repeat(ids, counts), np.concatenate([*map(np.arange, counts)]))
            read = check_batch(reader.read(rows))
            keys |= dict(zip(rows.ids.tolist(), read.tolist(), strict=True))
        return keys

    def _process(self, run: Callable[[], object], name: str) -> int:
        process = next(self._processes)
        self._living.add(process)

        def life() -> None:
            run()
            self._check_released(process)
            self._ended(process)

        self._thread(life, name, process)
        return process

    def _check_released(self, process: int) -> None:
        """A process that has closed everything, and whose calls all succeeded, has no other thread and no open file."""
        end = self.tasks.now + _ENDING
        while threads := [
            task.name for task in self.tasks.alive if task.process == process and task is not self.tasks.mine
        ]:
            if self.tasks.now > end:
                raise BrokenPromiseError(f"a closed store leaves no threads: {threads}")
            time.sleep(0.001)
        if self.disk.opened_by(process):
            gc.collect()  # what only a cycle keeps is closed
        if files := self.disk.opened_by(process):
            raise BrokenPromiseError(f"a closed store leaves no open files: {files}")

    def _chance(self) -> random.Random:
        return random.Random(self.chance.getrandbits(64))

    def _client(self, kind: type[C], store: Path | None = None, model: Model | None = None) -> C:
        model, note, calling = model or self.model, self.tasks.note, self.tasks.calling
        return kind(self.folder, store or self.store, model, self._chance(), lambda: self.is_faulty, note, calling)

    def _start_others(self) -> None:
        if self.plan.sessions:
            for _ in range(self.plan.readers + self.plan.annotators):
                self._start_recorder()
            return
        if self.plan.ranks:
            self._start_sibling()
        for _ in range(self.plan.readers):
            reader = self._reader()
            reader.keys, reader.pauses, reader.may_be_unknown = self.keys, self.plan.pauses, bool(self.plan.faults)
            self._process(lambda reader=reader: reader.run(self.plan.calls, self.plan.reads), "reader")  # type: ignore[misc]
        for _ in range(self.plan.annotators):
            annotator = self._client(Annotator)
            annotator.keys, annotator.fresh, annotator.pauses = self.keys, self.plan.fresh, self.plan.pauses
            self._process(lambda one=annotator: one.run(self.plan.calls), "annotator")  # type: ignore[misc]

    def _reader(self) -> work.Reader:
        if not self.plan.ranks:
            return self._client(work.Reader)
        reader = self._client(work.RunReader, self.store.parent)
        reader.sibling, reader.others = self.sibling, self.sibling.durable
        return reader

    def _start_sibling(self) -> None:
        """Start the writer of rank 1."""

        def run() -> None:
            with opened(self.folder, self.store.with_name("rank_1"), self.plan) as sibling.buffer:
                for _ in range(self.plan.calls):
                    sibling.step({"add": 4, "flush": 3, "evict": 2, "listed": 1})

        sibling = self._client(Writer, self.store.with_name("rank_1"), self.sibling)
        sibling.keys, sibling.fresh = self.keys, self.plan.fresh
        self._process(run, "sibling")

    def _look_at_sibling(self) -> None:
        store = self.store.with_name("rank_1")
        if (store / "metadata.json").exists() or self.sibling.durable:
            with TrajectoryReplayBuffer.open(store) as reader:
                self.sibling.found({number: check(reader.get(number)) for number in reader.trajectory_ids.tolist()})

    def _start_recorder(self) -> None:
        chance = self._chance()

        def run() -> None:
            recorder = self._recorder(self.store, chance)
            for _ in range(self.plan.calls):
                time.sleep(chance.choice((0.0, 0.0002, 0.001)))  # a step takes 1 µs
                recorder.step()
            recorder.close()

        self._process(run, "recorder")

    def _recorder(self, opener: TrajectoryReplayBuffer | Path, chance: random.Random) -> Recorder:
        process = self.tasks.mine.process if self.tasks.mine else 0
        return Recorder(self._acknowledged, chance, lambda: self.is_faulty, process, self._living, opener)

    def _opened(self) -> TrajectoryReplayBuffer:
        while True:
            try:
                return opened(self.folder, self.store, self.plan)
            except (StoreWriteError, OSError):
                if not self.is_faulty:
                    raise

    def _start_writer(self) -> None:
        def run() -> None:
            buffer = self._opened()
            self._unsettled = None
            if self._change == "soon":
                self.tasks.alarm = self.tasks.step + self.chance.randrange(self.chance.choice((50, 200)))
            gate = Gate()
            clients = []
            kind = Trainer if self.plan.trains else Writer
            for number in range(self.plan.writers):
                client = self._client(kind)
                client.buffer, client.keys, client.alone = buffer, self.keys, gate.alone
                client.number, client.fresh = number, self.plan.fresh
                if isinstance(client, Trainer):
                    client.trained = self._trained
                clients.append(client)

            def record() -> None:
                recorder = self._recorder(buffer, self._chance())
                for _ in range(self.plan.calls):
                    recorder.step()

            def use(client: Writer) -> None:
                if self.plan.sessions:
                    record()
                    return
                for _ in range(self.plan.calls):
                    with gate.shared():
                        client.step(self.plan.weights)
                client.close()

            threads = [
                threading.Thread(target=self._guarded(functools.partial(use, client)), name="client")
                for client in clients
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._fault_steps = 0
            added = set(self.model.keys)
            try:
                buffer.flush()
            except StoreWriteError:
                if not self.plan.faults:
                    raise
                buffer.flush()  # a failure is reported once
            self.model.durable |= added
            buffer.close()

        self._writer_process = self._process(run, "writer")


@contextlib.contextmanager
def zarr_in_thread() -> Iterator[None]:
    """Run zarr's coroutines in the thread that waits for them: its own loop would wait in the system.

    What the format remembers of zarr's metadata is forgotten, because an earlier run of the process may have seen it.
    """

    def run(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        future = Future[Any]()
        with contextlib.closing(asyncio.new_event_loop()) as own:
            own.time = lambda: 0.0  # type: ignore[method-assign]  # each version of Python reads the clock at other moments
            future.set_result(own.run_until_complete(coroutine))
        return future

    async def in_thread(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    template = zarr_format._metadata_template.__wrapped__
    with (
        contextlib.closing(asyncio.new_event_loop()) as loop,
        mock.patch.object(zarr.core.sync, "_get_loop", return_value=loop),
        mock.patch.object(asyncio, "run_coroutine_threadsafe", run),
        mock.patch.object(asyncio, "to_thread", in_thread),
        mock.patch.object(zarr_format, "_metadata_template", functools.cache(template)),
    ):
        yield


class Gate:
    """Calls beside each other, and some alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Beside others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Alone; called within :meth:`shared`."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._inside += 1
                self._changed.notify_all()


_CLIENTS = "the clients"
_ENDING = 1.0
"""Simulated seconds in which threads of a closed store end."""
_FIRST_PID = 4_200_000
"""Above those of the system."""
