"""The disk of a world: real files, whose every change is recorded and may fail, and their state after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.powerloss.filesystem import ROOT, Entries, Node, Op, Sync, Write
from tools.powerloss.recorder import Recorder, write_tree
from tools.powerloss.states import state_after
from tools.simulate.tasks import Tasks

MAY_FAIL = {
    **dict.fromkeys(("write", "writev", "pwrite"), errno.ENOSPC),
    **dict.fromkeys(("fsync", "fdatasync"), errno.EIO),
    **dict.fromkeys(("rename", "mkdir", "link"), errno.ENOSPC),
}
"""Calls that may fail, and with what."""
_CHANGES = {*MAY_FAIL, "unlink", "rmdir", "ftruncate"}


class Disk(Recorder):
    """Records, fails, and knows which process has opened what.

    Args:
        root: an existing folder.
        ops: what its files were made by.
        tasks: of the world.
        fails: called before a change; returns the part of the call that is done before it fails, or None.
    """

    is_unseen: bool
    """Whether calls are done without a step and not recorded."""

    def __init__(self, root: Path, ops: list[Op], tasks: Tasks, fails: Callable[[str], float | None]) -> None:
        super().__init__(root, ops)
        self._tasks, self._fails = tasks, fails
        self._owners: dict[int, int] = {}
        self.is_unseen = False
        self._nothing = os.open(os.devnull, os.O_RDONLY)

    def _recorded(self, real: Callable[..., Any], record: Callable[..., None], name: str) -> Callable[..., Any]:
        call = super()._recorded(real, record, name)

        def stepped(*arguments: Any, **keywords: Any) -> Any:
            task = self._tasks.mine
            if self.is_unseen:
                return real(*arguments, **keywords)
            if task is not None:
                if name != "close":  # at what moment objects are deleted depends on the version of Python
                    self._tasks.point(name)
                if name in _CHANGES and self._concerns(arguments) and (part := self._fails(name)) is not None:
                    self._tasks.note(f"FAILS {name} after {part}")
                    if name == "writev":
                        first = memoryview(arguments[1][0]).cast("B")
                        call(arguments[0], [first[: int(part * len(first))]])
                    raise OSError(MAY_FAIL[name], os.strerror(MAY_FAIL[name]))
            result = call(*arguments, **keywords)
            if name == "open" and task is not None:
                self._owners[result] = task.process
            elif name == "close":
                self._owners.pop(arguments[0], None)
            return result

        return stepped

    def _concerns(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether a call by descriptor is of a file in the world."""
        return not isinstance(arguments[0], int) or arguments[0] in self._open

    def kill(self, process: int) -> None:
        """Close a process's descriptors, so that its locks are free; the numbers are not given out again."""
        for descriptor in [number for number, owner in self._owners.items() if owner == process]:
            os.dup2(self._nothing, descriptor)
            self._open.pop(descriptor, None)
            del self._owners[descriptor]

    def opened_by(self, process: int) -> list[str]:
        """Return the files, without folders, that a process has open."""
        owned = [f"/proc/self/fd/{number}" for number, owner in self._owners.items() if owner == process]
        return [os.readlink(link) for link in owned if os.path.isfile(link)]

    def lose_power(self, chance: random.Random) -> None:
        """Leave a state on the disk that a power loss may leave. No process may live."""
        files = state_after(self.ops, chance)
        self.is_unseen = True
        for name in os.listdir(self._root):
            shutil.rmtree(os.path.join(self._root, name))
        write_tree(Path(self._root), files)
        self.is_unseen = False
        self.ops[:] = made_of(files)
        self._restart()


def made_of(files: dict[str, bytes | None]) -> list[Op]:
    """Return operations that make these files, and make them durable."""
    nodes: dict[str, Node] = {"": ROOT}
    ops: list[Op] = []
    for name, content in sorted(files.items()):
        above, _, own = name.rpartition("/")
        node = nodes[name] = Node(len(nodes), content is None)
        ops.append(Entries(((nodes[above], own, node),)))
        if content:
            ops.append(Write(node, 0, content))
    return ops + [Sync(node) for node in nodes.values()]


def waiting_flock(tasks: Tasks) -> Callable[[Any, int], None]:
    """Return ``fcntl.flock`` that lets others go on while it waits."""
    real = fcntl.flock

    def flock(descriptor: Any, operation: int) -> None:
        if tasks.mine is None:
            real(descriptor, operation)
            return
        tasks.point("flock")
        while True:
            try:
                real(descriptor, operation | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                tasks.wait("flock", 0.01)

    return flock
