"""A plain model of the promises to clients, for any order of threads, crashes and faults. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BrokenPromiseError(Exception):
    """Something was seen that no order of the calls allows; the message begins with the promise."""


@dataclass
class Given:
    """A late value of one call: whom it was given to, and between which moments."""

    ids: frozenset[int]
    value: int
    begun: int
    ended: int | None = None


Line = dict[int, tuple[frozenset[int], int]]
"""The saved points of a line, by step: ids that each holds, and the moment at which it was saved."""


@dataclass
class Going:
    """A change to a snapshot that is under way.

    Attributes:
        ids: of the snapshot.
        line: the saved points that led to it, with its own.
        aside: whether the contents before it are kept.
        before: contents and line before it.
    """

    ids: frozenset[int]
    line: Line
    aside: bool
    before: tuple[frozenset[int], Line]


class Known(NamedTuple):
    """What is known before a listing begins.

    Attributes:
        must: ids that it shows.
        gone: ids that it does not show.
        visits: number of times that the store had begun to go to a snapshot; after another one, both are open.
    """

    must: set[int]
    gone: set[int]
    visits: int


@dataclass
class Model:
    """Calls that were begun and acknowledged, in the order of the world.

    Attributes:
        keys: of trajectories whose addition returned, by id.
        adding: keys of additions that have begun and whose ids are unknown.
        durable: ids that a ``flush`` acknowledged.
        evicting: ids whose eviction has begun.
        evicted: ids whose eviction returned.
        given: late values.
        used: ids that were given out, and are not to be given out again.
        points: saved points of the current line.
        saving: a point that is being saved, by step, for each attempt since one succeeded.
        pins: ids that each pin holds, by name.
        pinning: names of pins that are being set or removed.
        asides: ids that each head that was left holds, by name.
        unfinished: names of heads of changes that a crash ended before they happened; the next writer removes them.
        lines: saved points that led to a pin or a head that was left, by name, where they are known.
        limit: of retention; older trajectories may be evicted at any moment.
        mirrored: ids that were evicted, and those that were not, of which it is known that the mirror knows.
        ever: keys of all trajectories so far, by id.
        begun: keys of all additions so far.
        going: the change to a snapshot that is under way.
        gone: the newest one that is over, until the saved points are listed; whether it has happened, if known; and
            whether a crash has ended it.
        visits: number of times that the store has begun to go to a snapshot.
        is_restored: from a mirror; what saved points and pins it has is not known until they are listed.
        values_are_known: until a rollback, which brings back earlier late values.
    """

    keys: dict[int, int] = field(default_factory=dict)
    adding: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    evicting: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    given: list[Given] = field(default_factory=list)
    points: Line = field(default_factory=dict)
    saving: list[Line] = field(default_factory=list)
    pins: dict[str, frozenset[int]] = field(default_factory=dict)
    pinning: set[str] = field(default_factory=set)
    asides: dict[str, frozenset[int]] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    lines: dict[str, Line] = field(default_factory=dict)
    limit: int | None = None
    mirrored: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    used: set[int] = field(default_factory=set)
    ever: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    going: Going | None = None
    gone: tuple[Going, bool | None, bool] | None = None
    values_are_known: bool = True
    is_restored: bool = False
    visits: int = 0
    _before: tuple[set[int], set[int], set[int]] = field(default_factory=lambda: (set(), set(), set()))
    moment: int = 0

    def added(self, new: Mapping[int, int]) -> None:
        """An addition returned."""
        again = sorted(new.keys() & self.used)
        if again:
            raise BrokenPromiseError(f"ids are never reused: {again}")
        self.used |= new.keys()
        self.keys |= new
        self.ever |= new
        self.adding -= set(new.values())
        self._retain()

    def _retain(self, seen: Collection[int] = ()) -> None:
        if self.limit is not None:
            unreturned = self.evicting - self.ever.keys()  # evicted before their addition returned
            self.evicting |= set(sorted({*self.keys, *seen, *unreturned})[: -self.limit])

    def may_be_gone(self, ids: Collection[int]) -> bool:
        """Return whether one of these may be evicted, also by retention, for additions that have not returned yet."""
        gone = set(self.evicting)
        if self.limit is not None:
            gone |= set(sorted({*self.keys, *ids})[: max(len(self.keys) + len(self.adding) - self.limit, 0)])
        return not gone.isdisjoint(ids)

    def go_to(self, target: int | str, *, aside: bool) -> None:
        """The store begins to go to a snapshot; until it is done, readers see the old contents or the snapshot's."""
        if isinstance(target, int):
            (ids, _), line = self.points[target], {one: held for one, held in self.points.items() if one <= target}
        else:
            ids, line = {**self.pins, **self.asides}[target], self.lines[target]
        self.visits += 1
        self.going = Going(ids, line, aside, (self.head, dict(self.points)))
        self._before = self.durable, self.evicting, self.evicted
        self.durable, self.evicting, self.evicted = set(), self.evicting | self.keys.keys(), set()

    def arrived(self, seen: Collection[int], *, crashed: bool = False) -> None:
        """The change is over: the contents are the snapshot's, or nothing has changed.

        After a crash, what came later may never have been committed; then its ids may be given out again.
        """
        if self.going is None:
            return
        going, self.going = self.going, None
        self.durable, self.evicting, self.evicted = self._before
        has_happened = set(seen) == going.ids
        contents = going.before[0]  # what was not durable of it is gone after a crash
        is_alike = going.ids == contents or (crashed and contents & self.durable <= going.ids <= contents)
        self.gone = going, None if has_happened and is_alike else has_happened, crashed
        if has_happened:
            later = (self.keys.keys() & self.durable if crashed else self.keys.keys()) - going.ids
            self.keys = {number: self.ever[number] for number in going.ids}
            self.durable = set(going.ids)
            self.evicted = (self.evicted | later) - going.ids
            self.evicting = (self.evicting | later) - going.ids
            self.values_are_known = False

    @property
    def head(self) -> frozenset[int]:
        """Ids of all trajectories that no eviction has touched."""
        return frozenset(self.keys.keys() - self.evicting)

    def lose_node(self) -> None:
        """The store is gone with its machine; the mirror's contents are restored."""
        self.evicted, self.durable = set(self.mirrored[0]), set(self.mirrored[1]) & self.keys.keys()
        self.points, self.saving, self.going, self.pins, self.pinning = {}, [], None, {}, set()
        self.asides, self.lines, self.gone = {}, {}, None
        self.values_are_known, self.is_restored = False, True

    def check_read(self, number: int, key: int) -> None:
        """A trajectory was read."""
        expected = self.ever.get(number)  # a reader may show trajectories that a rollback removed
        if expected is None and key not in self.begun:
            raise BrokenPromiseError(f"nothing is there that was not added: {number} has the key {key}")
        if expected not in (None, key):
            raise BrokenPromiseError(f"a trajectory does not change: {number} has the key {key}, not {expected}")

    def known(self) -> Known:
        """Return what a listing that begins now shows, of any process."""
        return Known(set(self.durable), set(self.evicted), self.visits)

    def check_seen(self, seen: Collection[int], known: Known) -> None:
        """Ids were listed."""
        self._retain(seen)  # also of additions that have not returned yet
        if known.visits != self.visits:
            return
        lost = sorted(known.must - set(seen) - self.evicting)
        if lost:
            raise BrokenPromiseError(f"acknowledged trajectories are there: {lost} are not among {sorted(seen)}")
        back = sorted(known.gone & set(seen))
        if back:
            raise BrokenPromiseError(f"evicted trajectories stay away: {back}")

    def check_merged(self, keys: Collection[int], known: Known) -> None:
        """Stores were merged."""
        if len(set(keys)) < len(keys):
            raise BrokenPromiseError(f"nothing is there twice: {sorted(keys)}")
        lost = {self.keys[number] for number in known.must - self.evicting} - set(keys)
        if lost and known.visits == self.visits:
            raise BrokenPromiseError(
                f"acknowledged trajectories are there: {sorted(lost)} are not among {sorted(keys)}"
            )
        if set(keys) - self.begun:
            raise BrokenPromiseError(f"nothing is there that was not added: {sorted(set(keys) - self.begun)}")

    def check_values(self, values: Mapping[int, int | None]) -> None:
        """Late values were read when no call was under way but those that a crash has ended."""
        for number, value in values.items() if self.values_are_known else ():
            calls = [given for given in self.given if number in given.ids]
            last = max((call.begun for call in calls if call.ended is not None), default=-1)
            legal: set[int | None] = {call.value for call in calls if call.ended is None or call.ended >= last}
            if last < 0:
                legal.add(None)
            if value not in legal:
                raise BrokenPromiseError(f"the newest late value is there: {number} has {value}, not one of {legal}")

    def found(self, present: Mapping[int, int]) -> None:
        """A crash has ended every call; ``present`` was found."""
        self.arrived(present, crashed=True)
        for number, key in present.items():
            self.check_read(number, key)
        if len(set(present.values())) < len(present):
            raise BrokenPromiseError(f"nothing is there twice: {sorted(present.values())}")
        self.check_seen(present, self.known())
        for given in self.given:
            given.ids &= present.keys()  # others were evicted, or their ids may be given out again
        self.used = self.used & (self.durable | self.evicted) | present.keys()
        self.keys = dict(present)
        kept = self.used.union(*self.pins.values(), *self.asides.values(), self.gone[0].before[0] if self.gone else ())
        if self.is_restored:  # its snapshots are not known yet; new ids begin far above all earlier ones
            kept = {*self.ever}
        self.ever = {number: key for number, key in self.ever.items() if number in kept} | self.keys
        committed, self.durable = self.durable, set(present)
        self.adding.clear()
        self.evicted |= self.evicting & committed - present.keys()
        self.evicting = set(self.evicted)  # an id that was never committed may be given out again
        self._retain()

    def tick(self) -> int:
        """Return a new moment."""
        self.moment += 1
        return self.moment

    def check_pins(self, found: Mapping[str, Iterable[int]]) -> None:
        """Pins were listed when no call was under way but those that a crash has ended."""
        unknown = found.keys() if self.is_restored else self.pinning & found.keys()
        self.pins |= {name: frozenset(found[name]) for name in unknown}
        self.pinning.clear()
        _compare("a pin", self.pins, found)
        if found.keys() - self.pins.keys():
            raise BrokenPromiseError(f"a removed pin stays away: {sorted(found.keys() - self.pins.keys())}")

    def check_points(self, found: Mapping[int, Iterable[int]], asides: Mapping[str, Iterable[int]]) -> None:
        """Saved points and heads that were left were listed when no call was under way but one that a crash has ended.

        Args:
            found: ids of each saved point of the current line, by step.
            asides: ids of each head that was left, by name.
        """
        if self.is_restored:
            self.points = {step: (frozenset(ids), self.tick()) for step, ids in found.items()}
            self.asides = {name: frozenset(ids) for name, ids in asides.items()}
        self._check_gone(found, asides)
        self._check_saving(found)
        _compare("a saved point", {step: ids for step, (ids, _) in self.points.items()}, found)
        _compare("a head that was left", self.asides, asides)
        if unknown := asides.keys() - self.asides.keys() - self.unfinished:
            raise BrokenPromiseError(f"no head is there that was not left: {sorted(unknown)}")

    def _check_gone(self, found: Mapping[int, Iterable[int]], asides: Mapping[str, Iterable[int]]) -> None:
        """Decide whether the store has gone to a snapshot, and take over the snapshot's line without removed points."""
        if self.gone is None:
            return
        (going, has_happened, crashed), self.gone = self.gone, None
        contents, line = going.before
        if has_happened is None:
            was = {step: set(ids) for step, (ids, _) in line.items()}
            is_as_before = {step: set(found[step]) for step in found} == was
            # Of two equal lines, a crash may have left either.
            is_as_before &= crashed or line.keys() != going.line.keys()
            has_happened = found.keys() <= going.line.keys() and not is_as_before
        fresh = asides.keys() - self.asides.keys() - self.unfinished
        if not has_happened:
            self.unfinished |= fresh
            return
        self.asides |= dict.fromkeys(fresh, contents)
        self.lines |= dict.fromkeys(fresh, line)
        shared = {step for step, point in going.line.items() if line.get(step) == point}
        if not shared <= found.keys() <= going.line.keys():
            raise BrokenPromiseError(
                f"a snapshot has the saved points that led to it: {sorted(found)}, not {sorted(going.line)}"
            )
        self.points = {step: going.line[step] for step in found}
        if not going.aside:  # the contents before may have had a name
            self.asides = {name: ids for name, ids in self.asides.items() if name in asides or ids != contents}

    def _check_saving(self, found: Mapping[int, Iterable[int]]) -> None:
        """Decide whether the point that was being saved is there, and the older ones that it replaces."""
        for step, (ids, moment) in (item for saved in self.saving for item in saved.items()):
            if step in found and (step not in self.points or set(found[step]) == ids):
                self.points[step] = ids, moment
                self.points = {one: held for one, held in self.points.items() if one in found or one > step - 2}
        self.saving.clear()

    def targets(self) -> list[int | str]:
        """Return the snapshots to which the store can go, with contents that are known."""
        return [*sorted(self.points), *sorted(self.lines.keys() & (self.pins.keys() | self.asides.keys()))]

    def copy(self) -> dict[str, object]:
        """Return what is known of the store's contents, for :meth:`restore`."""
        return {name: deepcopy(value) for name, value in vars(self).items() if name not in _OF_THE_WORLD}

    def restore(self, known: Mapping[str, object]) -> None:
        """What was seen since :meth:`copy` was never durable."""
        vars(self).update(known)


def _compare(what: str, known: Mapping[Any, Iterable[int]], found: Mapping[Any, Iterable[int]]) -> None:
    for name, ids in known.items():
        if name not in found:
            raise BrokenPromiseError(f"{what} is there: {name} is not among {sorted(found)}")
        if set(found[name]) != set(ids):
            raise BrokenPromiseError(f"{what} does not change: {name} has {sorted(found[name])}, not {sorted(ids)}")


_OF_THE_WORLD = {"given", "begun", "moment", "used", "ever", "visits"}
