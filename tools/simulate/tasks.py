"""Threads that run one at a time, on simulated time: at every lock, wait and disk call a choice says who goes on.

Threads stay threads of the system, so that identities and thread-local values are real; each waits for its turn. While
a world is :func:`entered <entered>`, the primitives of ``threading`` that are made, the threads that are started and
the clocks that are read belong to it; the standard library builds conditions, events, queues and thread pools of them.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from typing import Any, NoReturn
from unittest import mock

from tools.simulate.schedule import Choice, unforced

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
        waits_for: what it waits for; empty if it can run.
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


class Tasks:
    """Lets one task run at a time.

    Args:
        choice: decides who.
        most: steps after which a run counts as endless.
        at_step: called in the running task before every step, with its number; may end or kill.
        end: called once, in any task, with why the run cannot go on; does not return.
    """

    def __init__(
        self, choice: Choice, most: int, at_step: Callable[[int], None], end: Callable[[str], NoReturn]
    ) -> None:
        self._choice, self._most, self._at_step, self._end = choice, most, at_step, end
        self._tasks: list[Task] = []
        self._mine = threading.local()
        self._begun: dict[str, int] = {}
        self.now = BEGIN
        self.step = 0
        self.changes: dict[int, str] = {}
        """Where another task went on than without a choice, and which."""
        self.trace: deque[tuple[int, str, str]] = deque(maxlen=400)
        """The newest steps: number, task, what it was about to do."""
        self.record: Callable[[int, str, str], None] = lambda *_: None
        """Called with every step."""

    # -- tasks ------------------------------------------------------------------------------------

    @property
    def mine(self) -> Task | None:
        """The running task; None in other threads."""
        return getattr(self._mine, "task", None)

    @property
    def alive(self) -> list[Task]:
        """Tasks that have not ended."""
        return [task for task in self._tasks if not task.over]

    def start(self, call: Callable[..., object], arguments: tuple[Any, ...] = (), *, name: str, process: int) -> Task:
        """Add a task; it begins when it is chosen."""
        count = self._begun[name] = self._begun.get(name, 0) + 1
        task = Task(f"{process}/{name}" if count == 1 else f"{process}/{name}#{count}", process)
        self._tasks.append(task)

        def run() -> None:
            task.turn.acquire()
            self._mine.task = task
            task.ident = _thread.get_ident()
            try:
                call(*arguments)
            finally:
                task.over = True
                self._pass_on(None, ends=True)

        _new_thread(run, ())
        return task

    def run(self) -> NoReturn:
        """Let the first task run. Called outside of them; the world ends by ``end``, which never comes back here."""
        self._pass_on(None)
        nobody = _new_lock()
        nobody.acquire()
        while True:
            nobody.acquire()

    def kill(self, process: int) -> None:
        """Let a process's tasks never run again; only a task of another process, or one that ends itself, goes on."""
        for task in self._tasks:
            if task.process == process:
                task.over = True

    # -- steps ------------------------------------------------------------------------------------

    def point(self, what: str) -> None:
        """Let another task run here, perhaps."""
        task = self.mine
        if task is not None:
            self._count(what, task)
            self._pass_on(task)

    def wait(self, what: str, seconds: float | None = None) -> bool:
        """Wait until the task is woken; return False after ``seconds``."""
        task = self.mine
        if task is None:
            raise RuntimeError(f"{what}: a thread outside of the world would wait for it")
        self._count(what, task)
        task.waits_for, task.timed_out = what, False
        task.until = None if seconds is None else self.now + max(seconds, 0.0)
        self._pass_on(None)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        task.waits_for, task.until = "", None

    def note(self, text: str) -> None:
        """Put a line into the trace."""
        task = self.mine
        line = self.step, task.name if task else "", text
        self.trace.append(line)
        self.record(*line)

    def _count(self, what: str, task: Task) -> None:
        self.step += 1
        self.now += _TICK
        self.trace.append((self.step, task.name, what))
        self.record(self.step, task.name, what)
        if self.step > self._most:
            self._end(f"no end after {self._most} steps")
        self._at_step(self.step)

    def _pass_on(self, current: Task | None, *, ends: bool = False) -> None:
        """Let the chosen task run; ``current`` is the running one if it can go on."""
        running = self.mine
        chosen = self._next(current)
        if chosen is running:
            return
        chosen.turn.release()
        if running is not None and not ends:
            running.turn.acquire()  # forever if it was killed

    def _next(self, current: Task | None) -> Task:
        ready = [task for task in self._tasks if not task.over and not task.waits_for]
        if not ready:
            waiting = [task for task in self._tasks if not task.over and task.until is not None]
            if not waiting:
                self._end(self._stuck())
            first = min(waiting, key=lambda task: task.until or 0.0)
            self.now = max(self.now, first.until or 0.0)
            first.timed_out = True
            self.wake(first)
            ready = [first]
        if current is not None and current.over:
            current = None
        if len(ready) == 1:
            return ready[0]
        by_name = {task.name: task for task in ready}
        names = list(by_name)
        unchosen = unforced(names, current.name if current else None)
        name = self._choice.choose(self.step, names, current.name if current else None)
        if name != unchosen:
            self.changes[self.step] = name
        return by_name[name]

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
        return "".join(traceback.format_list([one for one in frames if "/simulate/" not in one.filename][-8:]))


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

    # What a condition needs.

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
    """While entered, what is made of ``threading`` and read from ``time`` belongs to the world."""
    ends: dict[Task | None, Lock] = {}

    def start_new(call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        mine, thread = tasks.mine, getattr(call, "__self__", None)

        def run() -> None:
            try:
                call(*arguments)
            finally:
                ends[tasks.mine].release()

        name = thread.name if isinstance(thread, threading.Thread) else "call"
        process = getattr(thread, "process", mine.process if mine else 0)
        tasks.start(run, name=_plain(name), process=process)

    def sentinel() -> Lock:
        """Return the lock that is held until the calling thread ends, for ``Thread.join``."""
        return ends.setdefault(tasks.mine, Lock(tasks))

    def lock() -> Lock:
        return Lock(tasks)

    def rlock() -> RLock:
        return RLock(tasks)

    def sleep(seconds: float) -> None:
        tasks.wait("sleep", seconds)

    def clock() -> float:
        tasks.point("clock")
        return tasks.now

    with contextlib.ExitStack() as stack:
        replaced: list[tuple[Any, str, Any]] = [
            (threading, "Lock", lock),
            (threading, "_allocate_lock", lock),
            (threading, "RLock", rlock),
            (threading, "_start_new_thread", start_new),
            (threading, "_set_sentinel", sentinel),
            (threading, "_time", lambda: tasks.now),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (queue, "time", lambda: tasks.now),
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
