"""The possible disk states after a crash: extremes, single omissions, random ones. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.powerloss.filesystem import Entries, Op, Pending, Tree, Write

_RANDOM = 4
"""Random states, if some operations are not durable."""
_SINGLE = 8
"""Operations that are the only one lost, and the only one kept."""
_TORN = 4
"""Parts of the newest operation."""


@dataclass(frozen=True)
class Case:
    """A crash and the operations that it lost.

    Attributes:
        moment: number of operations before the crash.
        lost: positions of the operations that were lost.
        parts: partial writes: position, and the first byte kept and the one after the last; the rest is zeros.
    """

    moment: int
    lost: frozenset[int]
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Choice:
    """The surviving operations among those not durable, and the partial writes."""

    kept: frozenset[int]
    parts: tuple[tuple[int, int, int], ...] = ()


def cases_after(ops: Sequence[Op], chance: random.Random) -> list[Case]:
    """Return crashes after these operations.

    Args:
        ops: all operations.
        chance: random choices.
    """
    pending = Pending()
    for op in ops:
        pending.add(op)
    return [Case(len(ops), frozenset(pending.open) - one.kept, one.parts) for one in _choices(pending, chance)]


def state_after(ops: Sequence[Op], chance: random.Random) -> dict[str, bytes | None]:
    """Return a possible content of the disk if the power fails after these operations."""
    return build(ops, chance.choice(cases_after(ops, chance)))


def build(ops: Sequence[Op], case: Case) -> dict[str, bytes | None]:
    """Return the disk's content by path; None for a folder."""
    parts = {at: (begin, end) for at, begin, end in case.parts}
    tree = Tree()
    for at, op in enumerate(ops[: case.moment]):
        if at in case.lost:
            continue
        if at in parts and isinstance(op, Write):
            begin, end = parts[at]
            kept = bytes(begin) + op.data[begin:end]
            op = Write(op.node, op.offset, kept.ljust(len(op.data), b"\0"))
        tree.apply(op)
    return tree.listing()


def _choices(pending: Pending, chance: random.Random) -> Iterator[_Choice]:
    open_ = pending.open
    everything = frozenset(open_)
    names = frozenset(at for at, op in open_.items() if isinstance(op, Entries))
    yield _Choice(everything)
    yield _Choice(frozenset())
    if not open_:
        return
    writes = {at: len(op.data) for at, op in open_.items() if isinstance(op, Write)}
    yield _Choice(names)
    yield _Choice(everything - names)
    yield _Choice(everything, tuple((at, 0, 0) for at in writes))  # full length, all zeros
    for _ in range(_TORN if max(open_) in writes else 0):  # the newest write, which a crash interrupts most easily
        yield _Choice(everything, (_part(pending, max(open_), chance),))
    for at in chance.sample(sorted(open_), min(len(open_), _SINGLE)):
        yield _closed(pending, everything - {at})
        yield _Choice(frozenset(_with_earlier(pending, at)))
        if at in writes:
            yield _Choice(everything, (_part(pending, at, chance),))
    for _ in range(_RANDOM):
        likely = chance.random()
        kept = _closed(pending, frozenset(at for at in open_ if chance.random() < likely)).kept
        torn = [at for at in sorted(kept & writes.keys()) if chance.random() < 0.2]
        yield _Choice(kept, tuple(_part(pending, at, chance) for at in torn))


def _part(pending: Pending, position: int, chance: random.Random) -> tuple[int, int, int]:
    """Return the part of a write that survives: position, first byte, and the one after the last."""
    op = pending.open[position]
    nbytes = len(op.data) if isinstance(op, Write) else 0
    first, last = sorted(chance.choices(range(nbytes), k=2))
    parts = [(0, last), (first, nbytes), (first, last)]
    return position, *chance.choice(parts if position in pending.inside else parts[:1])


def _with_earlier(pending: Pending, position: int) -> set[int]:
    """Return an operation and all its predecessors."""
    found: set[int] = set()
    waiting = [position]
    while waiting:
        at = waiting.pop()
        if at in pending.open and at not in found:
            found.add(at)
            waiting += pending.before.get(at, ())
    return found


def _closed(pending: Pending, kept: frozenset[int]) -> _Choice:
    """Leave out operations with a missing predecessor."""
    there: set[int] = set()
    for at in sorted(kept):
        if all(earlier in there or earlier not in pending.open for earlier in pending.before.get(at, ())):
            there.add(at)
    return _Choice(frozenset(there))
