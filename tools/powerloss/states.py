"""Which states a disk may be in after a crash: extremes at every moment, single omissions, random ones. Pure."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.powerloss.filesystem import Entries, Op, Pending, Promise, Tree, Write, before

_RANDOM = 4
"""Random states at every moment at which something is not durable."""


@dataclass(frozen=True)
class Case:
    """A crash, and what it took.

    Attributes:
        moment: how many operations had been done.
        promises: how many promises were among them.
        lost: positions of the operations that were lost.
        parts: of writes of which only so many bytes are there, and zeros in place of the rest.
    """

    moment: int
    promises: int
    lost: frozenset[int]
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Choice:
    """Of what is not durable: what is there, and which writes are there in part only: so many bytes, the rest zeros."""

    kept: frozenset[int]
    parts: tuple[tuple[int, int], ...] = ()


def plan(ops: Sequence[Op], begin: int, seed: int) -> list[Case]:
    """Return crashes at every moment from ``begin`` on, in an order in which any first ones are a fair sample.

    Every second one is right after a promise, when what is not durable and should be tells most.

    Args:
        ops: all that was done, promises among it.
        begin: the first moment.
        seed: of what is chosen at random.
    """
    pending, promises = Pending(), 0
    told: list[Case] = []
    between: list[Case] = []
    for position, op in enumerate(ops):
        pending.add(op)
        promises += isinstance(op, Promise)
        moment = position + 1
        if moment >= begin:
            chance = random.Random(f"{seed}/{moment}")
            choices = dict.fromkeys(_choices(pending.open, chance))
            target = told if isinstance(op, Promise) else between
            target += [Case(moment, promises, frozenset(pending.open) - c.kept, c.parts) for c in choices]
    random.Random(seed).shuffle(told)
    random.Random(seed).shuffle(between)
    mixed = [case for pair in zip(told, between, strict=False) for case in pair]
    return mixed + told[len(between) :] + between[len(told) :]


def build(ops: Sequence[Op], case: Case) -> dict[str, bytes | None]:
    """Return what the disk holds: content by path, None for a folder."""
    parts = dict(case.parts)
    tree = Tree()
    for at, op in enumerate(ops[: case.moment]):
        if at in case.lost:
            continue
        if at in parts and isinstance(op, Write):
            op = Write(op.node, op.offset, op.data[: parts[at]].ljust(len(op.data), b"\0"))
        tree.apply(op)
    return tree.listing()


def digest(files: dict[str, bytes | None]) -> bytes:
    """Return what tells two states apart."""
    summary = hashlib.blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        summary.update(name.encode() + b"\0" + (b"-" if content is None else b"%d:" % len(content) + content))
    return summary.digest()


def _choices(open_: dict[int, Op], chance: random.Random) -> Iterator[_Choice]:
    everything = frozenset(open_)
    names = frozenset(at for at, op in open_.items() if isinstance(op, Entries))
    yield _Choice(everything)
    yield _Choice(frozenset())
    if not open_:
        return
    writes = {at: len(op.data) for at, op in open_.items() if isinstance(op, Write)}
    yield _Choice(names)
    yield _Choice(everything - names)
    yield _Choice(everything, tuple((at, 0) for at in writes))  # as long as they were, and zero
    for at in open_:
        yield _closed(open_, everything - {at})
        yield _closed(open_, {at} | _before_all(open_, at))
        if at in writes:
            yield _Choice(everything, ((at, chance.randrange(writes[at])),))
    for _ in range(_RANDOM):
        likely = chance.random()
        kept = {at for at in open_ if chance.random() < likely}
        parts = tuple(
            (at, chance.randrange(size)) for at, size in writes.items() if at in kept and chance.random() < 0.2
        )
        choice = _closed(open_, kept)
        yield _Choice(choice.kept, tuple(part for part in parts if part[0] in choice.kept))


def _before_all(open_: dict[int, Op], position: int) -> set[int]:
    """Return which operations must have happened if this one has."""
    found: set[int] = set()
    waiting = [position]
    while waiting:
        at = waiting.pop()
        op = open_[at]
        if isinstance(op, Entries):
            new = set(before(open_, at, op)) - found
            found |= new
            waiting += new
    return found


def _closed(open_: dict[int, Op], kept: set[int] | frozenset[int]) -> _Choice:
    """Leave out what cannot have happened because something before it did not."""
    there: set[int] = set()
    for at in sorted(kept):
        op = open_[at]
        if not isinstance(op, Entries) or there.issuperset(before(open_, at, op)):
            there.add(at)
    return _Choice(frozenset(there))
