"""A plain model of the promises to clients, for any order of threads, crashes and faults. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field


class BrokenPromiseError(Exception):
    """Something was seen that no order of the calls allows; the message begins with the promise."""


@dataclass
class Given:
    """A late value of one call: whom it was given to, and between which moments."""

    ids: frozenset[int]
    value: int
    begun: int
    ended: int | None = None


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
        points: ids that each saved point holds, by step.
        saving: the step of a point that is being saved, and its contents, for each attempt since one succeeded.
        pins: ids that each pin holds, by name.
        pinning: names of pins that are being set or removed.
        limit: of retention; older trajectories may be evicted at any moment.
        mirrored: ids that were evicted, and those that were not, of which it is known that the mirror knows.
        ever: keys of all trajectories so far, by id.
        begun: keys of all additions so far.
        going: the step that a rollback under way goes back to, and its ids.
        is_restored: from a mirror; what saved points and pins it has is not known until they are listed.
        values_are_known: until a rollback, which brings back earlier late values.
    """

    keys: dict[int, int] = field(default_factory=dict)
    adding: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    evicting: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    given: list[Given] = field(default_factory=list)
    points: dict[int, frozenset[int]] = field(default_factory=dict)
    saving: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    pins: dict[str, frozenset[int]] = field(default_factory=dict)
    pinning: set[str] = field(default_factory=set)
    limit: int | None = None
    mirrored: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    used: set[int] = field(default_factory=set)
    ever: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    going: tuple[int, frozenset[int]] | None = None
    values_are_known: bool = True
    is_restored: bool = False
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
            self.evicting |= set(sorted({*self.keys, *seen})[: -self.limit])

    def may_be_gone(self, ids: Collection[int]) -> bool:
        """Return whether one of these may be evicted, also by retention, for additions that have not returned yet."""
        gone = set(self.evicting)
        if self.limit is not None:
            gone |= set(sorted(self.keys)[: max(len(self.keys) + len(self.adding) - self.limit, 0)])
        return not gone.isdisjoint(ids)

    def go_back(self, step: int) -> None:
        """A rollback begins; until it is done, readers see the old contents or the point's."""
        self.going = step, self.points[step]
        self._before = self.durable, self.evicting, self.evicted
        self.durable, self.evicting, self.evicted = set(), self.evicting | self.keys.keys(), set()

    def arrived(self, seen: Collection[int], *, crashed: bool = False) -> None:
        """A rollback is over: later trajectories are gone, and those evicted since are back; or nothing has changed.

        After a crash, what came later may never have been committed; then its ids may be given out again.
        """
        if self.going is None:
            return
        (step, ids), self.going = self.going, None
        self.durable, self.evicting, self.evicted = self._before
        if set(seen) == ids:
            later = (self.keys.keys() & self.durable if crashed else self.keys.keys()) - ids
            self.keys = {number: self.ever[number] for number in ids}
            self.durable = set(ids)
            self.evicted = (self.evicted | later) - ids
            self.evicting = (self.evicting | later) - ids
            self.points = {one: held for one, held in self.points.items() if one <= step}
            self.values_are_known = False

    @property
    def head(self) -> frozenset[int]:
        """Ids of all trajectories that no eviction has touched."""
        return frozenset(self.keys.keys() - self.evicting)

    def lose_node(self) -> None:
        """The store is gone with its machine; the mirror's contents are restored."""
        self.evicted, self.durable = set(self.mirrored[0]), set(self.mirrored[1]) & self.keys.keys()
        self.points, self.saving, self.going, self.pins, self.pinning = {}, [], None, {}, set()
        self.values_are_known, self.is_restored = False, True

    def check_read(self, number: int, key: int) -> None:
        """A trajectory was read."""
        expected = self.ever.get(number)  # a reader may show trajectories that a rollback removed
        if expected is None and key not in self.begun:
            raise BrokenPromiseError(f"nothing is there that was not added: {number} has the key {key}")
        if expected not in (None, key):
            raise BrokenPromiseError(f"a trajectory does not change: {number} has the key {key}, not {expected}")

    def check_seen(self, seen: Collection[int], must: Collection[int], gone: Collection[int]) -> None:
        """Ids were listed; ``must`` and ``gone`` are those that were durable, and evicted, before the listing began."""
        self._retain(seen)  # also of additions that have not returned yet
        lost = sorted(set(must) - set(seen) - self.evicting)
        if lost:
            raise BrokenPromiseError(f"acknowledged trajectories are there: {lost} are not among {sorted(seen)}")
        back = sorted(set(gone) & set(seen))
        if back:
            raise BrokenPromiseError(f"evicted trajectories stay away: {back}")

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
        self.check_seen(present, self.durable, self.evicted)
        self.used = self.used & (self.durable | self.evicted) | present.keys()
        self.keys = dict(present)
        self.ever = {number: key for number, key in self.ever.items() if number in self.used} | present
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
        for name, ids in self.pins.items():
            if name not in found:
                raise BrokenPromiseError(f"a pin is there: {name} is not among {sorted(found)}")
            if set(found[name]) != ids:
                raise BrokenPromiseError(f"a pin does not change: {name} has {sorted(found[name])}, not {sorted(ids)}")
        if found.keys() - self.pins.keys():
            raise BrokenPromiseError(f"a removed pin stays away: {sorted(found.keys() - self.pins.keys())}")

    def check_points(self, found: Mapping[int, Iterable[int]]) -> None:
        """Saved points were listed when no call was under way but one that a crash has ended."""
        if self.is_restored:
            self.points = {step: frozenset(ids) for step, ids in found.items()}
        self._check_saving(found)
        for step, ids in self.points.items():
            if step not in found:
                raise BrokenPromiseError(f"a saved point is there: {step} is not among {sorted(found)}")
            if set(found[step]) != ids:
                raise BrokenPromiseError(
                    f"a saved point does not change: {step} has {sorted(found[step])}, not {sorted(ids)}"
                )

    def _check_saving(self, found: Mapping[int, Iterable[int]]) -> None:
        """Decide whether the point that was being saved is there, and the older ones that it replaces."""
        for step, ids in self.saving:
            if step in found and (step not in self.points or set(found[step]) == ids):
                self.points[step] = ids
                self.points = {one: held for one, held in self.points.items() if one in found or one > step - 2}
        self.saving.clear()

    def copy(self) -> dict[str, object]:
        """Return what is known of the store's contents, for :meth:`restore`."""
        return {name: deepcopy(value) for name, value in vars(self).items() if name not in _OF_THE_WORLD}

    def restore(self, known: Mapping[str, object]) -> None:
        """What was seen since :meth:`copy` was never durable."""
        vars(self).update(known)


_OF_THE_WORLD = {"given", "begun", "moment", "used", "ever"}
