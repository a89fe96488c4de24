"""Threads that run one at a time, on simulated time: at every lock, wait and disk call a choice says who goes on.

Threads stay threads of the system, so that identities and thread-local values are real; each waits for its turn. While
a world is :func:`entered <entered>`, the primitives of ``threading`` that are made, the threads that are started and
the clocks that are read belong to it; the standard library builds conditions, events, queues and thread pools of them.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from typing import Any, NoReturn
from unittest import mock

from tools.simulate.schedule import Choice

_new_lock = _thread.allocate_lock
_new_thread = _thread.start_new_thread

BEGIN = 1_800_000_000.0
"""Simulated time of the first step, in seconds since 1970."""
_TICK = 1e-6
"""Seconds that a step takes."""


class Task:
    """A thread of the world.

    Attributes:
        name: unique.
        process: of the world's processes.
        until: time at which its wait ends; None without limit, or while it can run.
        waits_for: in words; empty if it can run.
        doing: its last operation.
        call: of a client, under way.
    """

    def __init__(self, name: str, process: int) -> None:
        self.name, self.process = name, process
        self.turn = _new_lock()
        self.turn.acquire()
        self.until: float | None = None
        self.waits_for = ""
        self.timed_out = False
        self.over = False
        self.ident = 0
        self.doing = self.call = ""


class Tasks:
    """Lets one task run at a time.

    Args:
        choice: decides which.
        at_step: called in the running task from step ``alarm`` on; may end the world, or kill.
        end: called once, in any task, with why the run cannot go on; does not return.

    Attributes:
        mine: the running task; None before the first.
        alive: tasks that have not ended.
        alarm: a step number.
        changes: where another task went on than without a choice, and which.
        trace: every step: number, task, its next operation.
    """

    def __init__(self, choice: Choice, at_step: Callable[[int], None], end: Callable[[str], NoReturn]) -> None:
        self._choice, self._at_step, self._end = choice, at_step, end
        self._begun: dict[str, int] = {}
        self._ready: list[Task] = []
        self.mine: Task | None = None
        self.alive: list[Task] = []
        self.now = BEGIN
        self._due = math.inf  # of the first wait that ends by itself
        self.step = self.alarm = 0
        self.changes: dict[int, str] = {}
        self.trace: list[tuple[int, str, str]] = []
        self._over = _new_lock()

    # -- tasks ------------------------------------------------------------------------------------

    def start(self, call: Callable[[], object], *, name: str, process: int) -> None:
        """Add a task; it begins when it is chosen."""
        count = self._begun[name] = self._begun.get(name, 0) + 1
        task = Task(f"{process}/{name}" if count == 1 else f"{process}/{name}#{count}", process)
        self.alive.append(task)
        self._ready.append(task)

        def run() -> None:
            task.turn.acquire()
            task.ident = _thread.get_ident()
            try:
                call()
            finally:
                self._remove(task)
                self._next(None).turn.release()

        _new_thread(run, ())

    def run(self) -> None:
        """Let the first task run; return after :meth:`finish`. Called outside of the tasks."""
        self._over.acquire()
        self._next(None).turn.release()
        self._over.acquire()

    def finish(self) -> NoReturn:
        """Let :meth:`run` return, and no task run again. Called in the running one."""
        self.mine = None
        self._over.release()
        never = _new_lock()
        while True:
            never.acquire()

    def kill(self, process: int) -> None:
        """Let a process's tasks never run again; only a task of another process, or one that ends itself, goes on."""
        for task in [task for task in self.alive if task.process == process]:
            self._remove(task)

    def _remove(self, task: Task) -> None:
        task.over = True
        self.alive.remove(task)
        if task in self._ready:
            self._ready.remove(task)

    # -- steps ------------------------------------------------------------------------------------

    def point(self, what: str) -> None:
        """Let another task run here, perhaps."""
        task = self.mine
        if task is not None:
            self._count(what, task)
            if self._ready != [task] or self.now >= self._due:
                self._pass_on(task, can_run=not task.over)

    def wait(self, what: str, seconds: float | None = None) -> bool:
        """Wait until the task is woken; return False after ``seconds``."""
        task = self.mine
        if task is None:
            raise RuntimeError(f"{what}: a thread outside of the world would wait for it")
        self._count(what, task)
        task.waits_for, task.timed_out = what, False
        task.until = None if seconds is None else self.now + max(seconds, 0.0)
        self._due = min(self._due, task.until or math.inf)
        if not task.over:
            self._ready.remove(task)
        self._pass_on(task, can_run=False)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        if task.waits_for and not task.over:
            self._ready.append(task)
        task.waits_for, task.until = "", None

    def note(self, text: str) -> None:
        """Put a line into the trace."""
        self.trace.append((self.step, self.mine.name if self.mine else "", text))

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Name the running task's call until the block ends."""
        task = self.mine
        self.note(f"CALL {name}")
        if task is not None:
            task.call = name
        yield
        if task is not None:
            task.call = ""
        self.note(f"RETURN {name}")

    def _count(self, what: str, task: Task) -> None:
        self.step += 1
        self.now += _TICK
        self.trace.append((self.step, task.name, what))
        task.doing = what
        if self.step >= self.alarm:
            self._at_step(self.step)

    def _pass_on(self, running: Task, *, can_run: bool) -> None:
        """Let the chosen task run; wait until ``running`` is chosen again, forever if it was killed."""
        chosen = self._next(running if can_run else None)
        if chosen is not running:
            chosen.turn.release()
            running.turn.acquire()

    def _next(self, current: Task | None) -> Task:
        """Choose the task that runs now; ``current`` is the running one if it can go on."""
        ready = self._ready
        if not ready:
            until = [task.until for task in self.alive if task.until is not None]
            if not until:
                self._end(self._stuck())
            self.now = max(self.now, min(until))
        if not ready or self.now >= self._due:
            self._end_waits()
        if len(ready) == 1:
            self.mine = ready[0]
            return self.mine
        unchosen = current or ready[0]
        self.mine = self._choice.choose(self.step, ready, current)
        if self.mine is not unchosen:
            self.changes[self.step] = self.mine.name
        return self.mine

    def _end_waits(self) -> None:
        """Let tasks go on whose waits have ended; others may run at the same time."""
        for task in [task for task in self.alive if task.until is not None and task.until <= self.now]:
            task.timed_out = True
            self.wake(task)
        self._due = min((task.until for task in self.alive if task.until is not None), default=math.inf)

    def _stuck(self) -> str:
        if not self.alive:
            return ""
        return "every task waits forever:\n" + "\n".join(
            f"{t.name} waits for {t.waits_for}\n{self.stack(t)}" for t in self.alive
        )

    def stack(self, task: Task) -> str:
        """Return where a task is, without the frames of the simulator."""
        frame = sys._current_frames().get(task.ident)
        frames = traceback.extract_stack(frame) if frame else []
        return "".join(traceback.format_list([frame for frame in frames if "/simulate/" not in frame.filename][-8:]))


class Lock:
    """Stands for ``threading.Lock``."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        tasks = self._tasks
        tasks.point("acquire")
        until = None if timeout is None or timeout < 0 else tasks.now + timeout
        while self._held:
            if not blocking or (until is not None and tasks.now >= until):
                return False
            task = tasks.mine
            if task is None:
                raise RuntimeError("a thread outside of the world would wait for a lock in it")
            self._waiting.append(task)
            tasks.wait("a lock", None if until is None else until - tasks.now)
            if task in self._waiting:
                self._waiting.remove(task)
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._tasks.wake(task)
        self._tasks.point("release")

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock:
    """Stands for ``threading.RLock``."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks, self._lock = tasks, Lock(tasks)
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._count and self._owner is self._tasks.mine:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = self._tasks.mine, 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    # Called by conditions.

    def _is_owned(self) -> bool:
        return bool(self._count) and self._owner is self._tasks.mine

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = self._tasks.mine, count


@contextlib.contextmanager
def entered(tasks: Tasks) -> Iterator[None]:
    """While entered, primitives made of ``threading`` and times read from ``time`` belong to the world."""
    ends: dict[threading.Thread, Lock] = {}
    numbers = itertools.count()
    # A new thread may have the identity of an ended one, for which ``threading`` made an object in an earlier world.
    active = threading._active  # type: ignore[attr-defined]
    for identity in [one for one, thread in active.items() if isinstance(thread, threading._DummyThread)]:
        del active[identity]

    # Thread's own, of which each version of Python has others.

    def start(thread: threading.Thread) -> None:
        if thread._started.is_set():  # type: ignore[attr-defined]
            raise RuntimeError("threads can only be started once")
        ends[thread] = end = Lock(tasks)
        end.acquire()

        def run() -> None:
            try:
                thread._bootstrap()  # type: ignore[attr-defined]
            finally:
                end.release()

        threading._limbo[thread] = thread  # type: ignore[attr-defined]
        process = getattr(thread, "process", tasks.mine.process if tasks.mine else 0)
        tasks.start(run, name=_plain(thread.name), process=process)
        thread._started.wait()  # type: ignore[attr-defined]

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread is threading.current_thread():
            raise RuntimeError("cannot join current thread")
        if ends[thread].acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            ends[thread].release()

    def is_alive(thread: threading.Thread) -> bool:
        return thread in ends and ends[thread].locked()

    def number(thread: threading.Thread) -> int:
        """Return a hash that is no address, for the order of sets of threads."""
        number: int = thread.__dict__.setdefault("number", next(numbers))
        return number

    def lock() -> Lock:
        return Lock(tasks)

    def rlock() -> RLock:
        return RLock(tasks)

    def sleep(seconds: float) -> None:
        tasks.wait("sleep", seconds)

    def clock() -> float:
        tasks.point("clock")
        return tasks.now

    def worker(pool: Callable[[], Any], work: queue.SimpleQueue[Any], *_: object) -> None:
        """Take the work of a thread pool; each version of Python does so by other calls."""
        while (item := work.get()) is not None:
            item.run()
            del item
            if (idle := pool()) is not None:
                idle._idle_semaphore.release()
            del idle
        idle = pool()  # held until this thread ends, as by Python's own: whoever frees a pool last makes steps
        work.put(None)

    with contextlib.ExitStack() as stack:
        replaced: list[tuple[Any, str, Any]] = [
            (threading, "Lock", lock),
            (threading, "_allocate_lock", lock),
            (threading, "RLock", rlock),
            (threading.Thread, "start", start),
            (threading.Thread, "join", join),
            (threading.Thread, "is_alive", is_alive),
            (threading.Thread, "__hash__", number),
            (threading, "_time", lambda: tasks.now),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (queue, "time", lambda: tasks.now),
            (pools, "_worker", worker),
            (pools, "_global_shutdown_lock", contextlib.nullcontext()),  # else a killed process may hold it
            (time, "monotonic", clock),
            (time, "perf_counter", clock),
            (time, "time", clock),
            (time, "time_ns", lambda: int(clock() * 1e9)),
            (time, "monotonic_ns", lambda: int(clock() * 1e9)),
            (time, "sleep", sleep),
        ]
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _plain(name: str) -> str:
    """Return a thread's name without the numbers that depend on what ran before."""
    return name.split("_")[0].split(" ")[0].rstrip("0123456789-") or "thread"
