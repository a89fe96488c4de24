"""A model of a file system under power loss: operations, their durability, and the states that may remain. Pure.

The rules are those of ALICE (Pillai et al., OSDI 2014) in their strictest form:

- a file's data are durable after ``fsync`` or ``fdatasync`` of the file, a name after ``fsync`` of its folder; neither
  makes the other durable;
- any subset of the other operations may survive. A write may survive in part, the rest as zeros: its beginning, and
  if it does not extend the file, also its end or middle (file systems publish a size after the data before it);
- changes of one name in one folder happen in order. A rename is atomic for both names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A file or folder, independent of its names."""

    number: int
    folder: bool


ROOT = Node(0, True)

Change = tuple[Node, str, Node | None]
"""A name in a folder and its new node; None removes the name."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Names that change atomically."""

    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes were written at an offset."""

    node: Node
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Size:
    """A file was truncated or extended."""

    node: Node
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A file's content, or a folder's names, became durable."""

    node: Node


Op = Entries | Write | Size | Sync


@dataclass
class Tree:
    """The visible state: names in folders, bytes in files."""

    folders: dict[Node, dict[str, Node]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[Node, bytearray] = field(default_factory=dict)

    def apply(self, op: Op) -> None:
        """Apply an operation."""
        if isinstance(op, Entries):
            for folder, name, node in op.changes:
                names = self.folders.setdefault(folder, {})
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        elif isinstance(op, Write):
            content = self.files.setdefault(op.node, bytearray())
            content.extend(bytes(max(op.offset + len(op.data) - len(content), 0)))
            content[op.offset : op.offset + len(op.data)] = op.data
        elif isinstance(op, Size):
            content = self.files.setdefault(op.node, bytearray())
            del content[op.size :]
            content.extend(bytes(op.size - len(content)))

    def find(self, folder: Node, parts: Sequence[str]) -> Node | None:
        """Return the node of a path."""
        for part in parts:
            found = self.folders.get(folder, {}).get(part)
            if found is None:
                return None
            folder = found
        return folder

    def listing(self, folder: Node = ROOT, above: str = "") -> dict[str, bytes | None]:
        """Return the content of every file by its path; None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, node in self.folders.get(folder, {}).items():
            found[above + name] = None if node.folder else bytes(self.files.get(node, b""))
            if node.folder:
                found |= self.listing(node, f"{above}{name}/")
        return found


def tree_of(ops: Iterable[Op]) -> Tree:
    """Return the visible state after all of these operations."""
    tree = Tree()
    for op in ops:
        tree.apply(op)
    return tree


@dataclass
class Pending:
    """Positions of the operations that are not durable yet; operations are added in order."""

    open: dict[int, Op] = field(default_factory=dict)
    before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each change of names, the last earlier changes of the same names."""
    inside: set[int] = field(default_factory=set)
    """Writes that do not extend their files."""
    _sizes: dict[Node, int] = field(default_factory=dict)
    _last: dict[tuple[Node, str], int] = field(default_factory=dict)
    _synced: dict[int, set[Node]] = field(default_factory=dict)
    _position: int = 0

    def add(self, op: Op) -> None:
        """Add the next operation."""
        if isinstance(op, Sync):
            self._sync(op.node)
        else:
            self.open[self._position] = op
            if isinstance(op, Entries):
                names = [(folder, name) for folder, name, _ in op.changes]
                self.before[self._position] = tuple({self._last[name] for name in names if name in self._last})
                self._last |= dict.fromkeys(names, self._position)
            elif isinstance(op, Size):
                self._sizes[op.node] = op.size
            else:
                end, size = op.offset + len(op.data), self._sizes.get(op.node, 0)
                self._sizes[op.node] = max(size, end)
                if end <= size:
                    self.inside.add(self._position)
        self._position += 1

    def _sync(self, node: Node) -> None:
        for position, op in list(self.open.items()):
            if isinstance(op, Entries):
                folders = {change[0] for change in op.changes}
                if node in folders:
                    done = self._synced.setdefault(position, set())
                    done.add(node)
                    if done == folders:
                        self._settle(position)
            elif isinstance(op, Write | Size) and op.node == node:
                del self.open[position]

    def _settle(self, position: int) -> None:
        """Mark an operation and the earlier ones of the same names as durable."""
        waiting = [position]
        while waiting:
            at = waiting.pop()
            if self.open.pop(at, None) is not None:
                waiting += self.before[at]
