"""Record a process's operations on files below a folder, at the calls of the module ``os``.

Calls may name a file by its path or relative to a folder's descriptor. C code that bypasses ``os`` is not recorded, but
detected: :meth:`Recorder.recording` compares the files at the end with the recorded operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tools.powerloss.filesystem import ROOT, Change, Entries, Node, Op, Size, Sync, Tree, Write, tree_of

Place = tuple[Node, str]
"""A folder and a name in it."""

_CALLS = (
    *("open", "close", "write", "writev", "pwrite", "ftruncate", "truncate", "fsync", "fdatasync"),
    *("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link"),
)
_SKIPPED: tuple[str, ...] = ("fsync", "fdatasync")
"""Recorded, not executed: this power loss is simulated."""


class Recorder:
    """Appends to a list of operations.

    Args:
        root: an existing folder in the state that ``ops`` produce.
        ops: earlier operations.
    """

    def __init__(self, root: Path, ops: list[Op]) -> None:
        self.ops = ops
        self._root = os.path.realpath(root)
        self._lock = threading.RLock()
        self._restart()

    def _restart(self) -> None:
        """Continue from the files that ``ops`` produce; no descriptor is open."""
        self._tree: Tree = tree_of(self.ops)
        self._nodes = 1 + max(
            (node.number for op in self.ops if isinstance(op, Entries) for _, _, node in op.changes if node), default=0
        )
        self._open: dict[int, Node] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record until the block ends.

        Raises:
            RuntimeError: files below the root differ from the result of the recorded calls.
        """
        with contextlib.ExitStack() as stack:
            for name in _CALLS:
                replaced = self._recorded(getattr(os, name), getattr(self, f"_on_{name}"), name)
                stack.enter_context(mock.patch.object(os, name, replaced))
            stack.enter_context(mock.patch.object(ctypes, "CDLL", self._library(ctypes.CDLL)))
            yield self
        self._compare()

    def _compare(self) -> None:
        seen: dict[str, bytes | None] = {}
        for folder, folders, files in os.walk(self._root):
            below = folder[len(self._root) + 1 :]
            seen |= {os.path.join(below, name): None for name in folders}
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    seen[os.path.join(below, name)] = file.read()
        known = self._tree.listing()
        differing = sorted(name for name in seen.keys() | known.keys() if seen.get(name, 0) != known.get(name, 0))
        if differing:
            raise RuntimeError(f"operations on these files were not recorded: {', '.join(differing[:5])}")

    def _add(self, op: Op) -> None:
        self.ops.append(op)
        self._tree.apply(op)

    def _recorded(self, real: Callable[..., Any], record: Callable[..., None], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                result = None if name in _SKIPPED else real(*arguments, **keywords)
                record(result, *arguments, **keywords)
                return result

        return call

    def _library(self, real: Any) -> Any:
        """Return the class of C libraries with a recorded ``renameat2``."""
        recorder = self

        class Library(real):  # type: ignore[misc]
            def __getattr__(self, name: str) -> Any:
                found = super().__getattr__(name)
                if name == "renameat2":
                    found = recorder._recorded(found, recorder._on_renameat2, name)
                    setattr(self, name, found)
                return found

        return Library

    # -- places ----------------------------------------------------------------------------------

    def _place(self, path: Any, dir_fd: int | None = None) -> Place | None:
        """Return the place of a path; None outside the root."""
        text = path if type(path) is str else os.fsdecode(path)
        if dir_fd is not None and text[:1] != "/":
            base = self._open.get(dir_fd)
            if base is None:
                return None
            parts = [part for part in text.split("/") if part not in ("", ".")]
        else:
            text = os.path.abspath(text)
            if text == self._root or not text.startswith(self._root + "/"):
                return None
            base, parts = ROOT, text[len(self._root) + 1 :].split("/")
        folder = self._tree.find(base, parts[:-1])
        return None if folder is None or not parts else (folder, parts[-1])

    def _node(self, path: Any, dir_fd: int | None = None) -> Node | None:
        if dir_fd is not None and path in (".", b"."):
            return self._open.get(dir_fd)
        if dir_fd is None and os.path.abspath(os.fsdecode(path)) == self._root:
            return ROOT
        place = self._place(path, dir_fd)
        return None if place is None else self._tree.find(place[0], [place[1]])

    def _new(self, place: Place, folder: bool) -> Node:
        node = Node(self._nodes, folder)
        self._nodes += 1
        self._add(Entries(((*place, node),)))
        return node

    # -- calls: the result, then the arguments -----------------------------------------------------

    def _on_open(self, result: int, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._open.pop(result, None)
        node = self._node(path, dir_fd)
        if node is None and flags & os.O_CREAT:
            place = self._place(path, dir_fd)
            node = None if place is None else self._new(place, folder=False)
        if node is not None:
            self._open[result] = node
            if flags & os.O_TRUNC and self._tree.files.get(node):
                self._add(Size(node, 0))

    def _on_close(self, result: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _written(self, descriptor: int, data: bytes, offset: int | None) -> None:
        node = self._open.get(descriptor)
        if node is not None and data:
            if offset is None:  # the position after the call, minus the bytes written
                offset = os.lseek(descriptor, 0, os.SEEK_CUR) - len(data)
            self._add(Write(node, offset, data))

    def _on_write(self, result: int, descriptor: int, data: Any) -> None:
        self._written(descriptor, bytes(memoryview(data).cast("B")[:result]), None)

    def _on_writev(self, result: int, descriptor: int, pieces: Any) -> None:
        self._written(descriptor, b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)[:result], None)

    def _on_pwrite(self, result: int, descriptor: int, data: Any, offset: int) -> None:
        self._written(descriptor, bytes(memoryview(data).cast("B")[:result]), offset)

    def _on_ftruncate(self, result: None, descriptor: int, length: int) -> None:
        node = self._open.get(descriptor)
        if node is not None:
            self._add(Size(node, length))

    def _on_truncate(self, result: None, path: Any, length: int) -> None:
        node = self._open.get(path) if isinstance(path, int) else self._node(path)
        if node is not None:
            self._add(Size(node, length))

    def _on_fsync(self, result: None, descriptor: int) -> None:
        node = self._open.get(descriptor)
        if node is not None:
            self._add(Sync(node))

    _on_fdatasync = _on_fsync

    def _on_rename(
        self, result: None, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self._move(self._place(old, src_dir_fd), self._place(new, dst_dir_fd), exchange=False)

    _on_replace = _on_rename

    def _on_renameat2(self, result: int, old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
        if result == 0:
            here, there = (None if number < 0 else number for number in (old_fd, new_fd))  # AT_FDCWD
            self._move(self._place(old, here), self._place(new, there), exchange=bool(flags & 2))

    def _move(self, old: Place | None, new: Place | None, *, exchange: bool) -> None:
        if old is None or new is None:
            if old is not None or new is not None:
                raise RuntimeError(f"renamed into or out of the recorded folder: {old}, {new}")
            return
        node = self._tree.find(old[0], [old[1]])
        left = self._tree.find(new[0], [new[1]]) if exchange else None
        changes: tuple[Change, ...] = ((*old, left), (*new, node))
        self._add(Entries(changes))

    def _on_unlink(self, result: None, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._add(Entries(((*place, None),)))

    _on_remove = _on_rmdir = _on_unlink

    def _on_mkdir(self, result: None, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None:
            self._new(place, folder=True)

    def _on_link(
        self,
        result: None,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        place = self._place(new, dst_dir_fd)
        if place is not None:
            self._add(Entries(((*place, self._node(old, src_dir_fd)),)))


def write_tree(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Create the files and folders of a listing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
