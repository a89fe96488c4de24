"""The newest trajectories over several stores: an index against one buffer with the same additions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_server import ids_of, request_of
from tests.support.witness import witness
from trajstore import TrajectoryReplayBuffer
from trajstore._core.sampling.base import Additions
from trajstore._core.sampling.draws import Draws
from trajstore.distributed.change_log import Changes
from trajstore.distributed.routes import Routes
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import MOST_STORES, StoreServer
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.samplers import WeightedSampler


class Stores:
    """A run's stores, some unreachable, with a dict as reference."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there: dict[int, StoreServer] = {}
        self.away: set[int] = set()
        self.starts = 0
        self.held: dict[int, int] = {}
        """Trajectory keys by id."""
        self.next_key = 0
        self.index = RunIndex()

    def start(self, rank: int) -> None:
        self.starts += 1
        if rank in self.there:
            self.there[rank].close()
        self.there[rank] = StoreServer(str(self.path), rank, {}, ("host", "node", f"start {self.starts}"))
        self.away.discard(rank)

    def add(self, rank: int, count: int) -> list[int]:
        keys = range(self.next_key, self.next_key + count)
        self.next_key += count
        ids = ids_of(self.there[rank].add(request_of([witness(key) for key in keys]), count))
        self.held |= dict(zip(ids, keys, strict=True))
        return ids

    def evict(self, number: int) -> None:
        self.there[number % MOST_STORES].evict([number])
        del self.held[number]

    def look(self) -> None:
        """Query all stores, like a handle."""
        again = set(self.there)
        for _ in range(2):
            clock = self.index.clock
            for rank in sorted(again):
                if rank in self.away:
                    self.index.leave_out(rank)
                elif self.index.take(rank, self.there[rank].changes(*self.index.received(rank), clock)):
                    again.remove(rank)
            again |= set(self.index.behind)
        self.index.show(self.names_of)

    def described(self, ids: np.ndarray[Any, Any], tasks: bool) -> Additions:
        parts = [store.described(ids[ids % MOST_STORES == rank], tasks) for rank, store in self.there.items()]
        rows = Additions.joined(parts)
        return rows.at(np.argsort(rows.ids))

    def names_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        known = self.described(ids, False)
        assert known.names is not None
        return known.names[np.searchsorted(known.ids, ids)]

    def expected(self) -> dict[int, int]:
        """Return the keys of drawable trajectories by id, oldest first."""
        return {number: key for number, key in sorted(self.held.items()) if number % MOST_STORES not in self.away}

    def close(self) -> None:
        for store in self.there.values():
            store.close()


def twin_of(stores: Stores, window: int) -> tuple[TrajectoryReplayBuffer, list[int]]:
    """Return one buffer with the drawable trajectories in order, and their ids in the run."""
    expected = stores.expected()
    twin = TrajectoryReplayBuffer(seed=3, sample_window_size=0)
    if expected:
        twin.add_trajectories([witness(key) for key in expected.values()])
    twin.sample_window_size = window
    return twin, list(expected)


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.campaign)])
def test_windows_are_those_of_one_buffer(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stores = Stores(tmp_path)
    stores.start(0)
    stores.start(1)
    sampler = WeightedSampler()
    seen: set[int] = set()
    for step in range(20):
        fresh: list[int] = []
        for _ in range(chance.randrange(4)):
            rank = chance.choice(sorted(stores.there.keys() - stores.away))
            fresh += stores.add(rank, 1 + chance.randrange(3))
        # Additions after a look are newer than everything that it showed, in any store.
        assert not fresh or min(fresh) > max(seen, default=-1)
        if stores.expected() and chance.random() < 0.3:
            stores.evict(chance.choice(list(stores.expected())))
        if chance.random() < 0.2 and len(stores.there.keys() - stores.away) > 1:
            stores.away.add(chance.choice(sorted(stores.there.keys() - stores.away)))
        if chance.random() < 0.3 and stores.away:
            stores.start(min(stores.away))  # the node returns
        if step == 10:
            stores.start(2)  # a new store joins
        stores.look()
        index = stores.index
        seen = set(index.ids.tolist())
        assert index.ids.tolist() == list(stores.expected())
        for window in (0, 1, 4, 1000):
            twin, ids = twin_of(stores, window)
            if not ids:
                with pytest.raises(EmptyBufferError):
                    index.samples(8, window, Draws(3))
                continue
            draws = Draws(3)
            mine, theirs = index.samples(8, window, draws), twin.draw(8)
            assert mine.ids.tolist() == [ids[number] for number in theirs.ids.tolist()]
            assert mine.samples.tolist() == theirs.samples.tolist()
            assert mine.probabilities is not None
            assert theirs.probabilities is not None
            assert mine.probabilities.tolist() == theirs.probabilities.tolist()
            assert len(twin.sample_trajectories(3)) == len(index.trajectories(3, window, draws))
            index.inform(sampler, stores.described)
            assert sampler.ids.tolist() == ids
            mine, theirs = (
                sampler.draw(8, draws.generator, index.first_of(window)),
                twin.draw(8, sampler=WeightedSampler()),
            )
            assert mine.ids.tolist() == [ids[number] for number in theirs.ids.tolist()]
            assert mine.samples.tolist() == theirs.samples.tolist()
    stores.close()


def test_what_lies_in_two_stores_is_drawn_once(tmp_path: Path) -> None:
    """A silent store had accepted a request that was then resent to another store."""
    stores = Stores(tmp_path)
    for rank in range(2):
        stores.start(rank)
    request = request_of([witness(key) for key in range(5)])
    first = ids_of(stores.there[0].add(request, 5))
    stores.away.add(0)
    stores.look()
    stores.add(1, 1)
    second = ids_of(stores.there[1].add(request, 5, stores.index.clock))
    sampler = WeightedSampler()
    for away, shown in ((True, second), (False, second)):
        if not away:
            stores.start(0)
        stores.look()
        stores.index.inform(sampler, stores.described)
        assert sampler.ids.tolist()[-5:] == stores.index.ids.tolist()[-5:] == shown
        assert len(stores.index) == 6
    assert stores.index.hidden.ids.tolist() == first
    for given, others in ((second, first), (first, second)):  # an id of either copy names both
        copies, places = stores.index.copies_of(np.array([*given[3:], 10**9]))
        assert (copies.tolist(), places.tolist()) == (others[3:], [0, 1])
    assert not len(stores.index.copies_of(np.array([*first, *second]))[0])
    stores.away.add(1)
    stores.look()
    stores.index.inform(sampler, stores.described)
    assert sampler.ids.tolist() == stores.index.ids.tolist() == first
    assert not len(stores.index.copies_of(stores.index.ids)[0])
    stores.close()


def test_ids_that_are_no_clock_are_refused(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    stores.start(1)
    store = stores.there[1]
    assert (store.tick(0), store.tick(5000), store.tick(0)) == (1, 5121, 5121)
    assert stores.add(1, 2) == [5121, 5121 + MOST_STORES]
    for clock in (-1, 1 << 62):
        with pytest.raises(ConfigurationError, match="clock"):
            store.tick(clock)
    assert store.add(request_of([witness(9)]), 1, 10_000) == [1 + 10 * MOST_STORES]
    stores.close()


def synthetic(chance: np.random.Generator, rank: int, first: int, count: int) -> Additions:
    """Additions of one store, with gaps of a clock and of a restore between the ids."""
    gaps = chance.choice([1, 1, 1, 40, 1 << 26], count)
    ids = (first + np.cumsum(gaps)) * MOST_STORES + rank
    names = chance.integers(-(1 << 63), (1 << 63) - 1, count)
    return Additions(ids, chance.choice([0, 1, 7, 400, 70_000], count), np.zeros(count, np.int64), names=names)


@pytest.mark.parametrize("few", [100, 1 << 20])
def test_many_trajectories_are_those_of_a_plain_list(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Ids, lengths and copies among thousands of trajectories, whose marks are often equal by chance."""
    monkeypatch.setattr("trajstore.distributed.compact_table._FEW", few)
    for module in ("compact_table", "run_index"):
        marks = f"trajstore.distributed.{module}.marks_of"
        monkeypatch.setattr(marks, lambda names: (1 + (names & 15)).astype(np.uint32))
    chance, index = np.random.default_rng(7), RunIndex()
    known: dict[int, tuple[int, int]] = {}
    """Length and name by id."""
    clock = 0
    for step in range(6):
        for rank in range(3):
            added = synthetic(chance, rank, clock, 500)
            assert added.names is not None
            if step and rank == 1:  # some are copies of earlier ones
                added.names[:20] = [known[number][1] for number in sorted(known)[:20]]
            triples = added.ids.tolist(), added.samples.tolist(), added.names.tolist()
            known |= {number: (length, name) for number, length, name in zip(*triples, strict=True)}
            gone = chance.choice([number for number in known if number % MOST_STORES == rank], 30, replace=False)
            known = {number: value for number, value in known.items() if number not in set(gone.tolist())}
            after = max(known) + MOST_STORES
            index.take(rank, Changes("a", step, step == 0, [added, gone], after))
            clock = max(clock, after // MOST_STORES)
        for rank in range(3):
            index.take(rank, Changes("a", step, False, [], clock * MOST_STORES + rank))
        index.show(lambda ids, known=known: np.array([known[number][1] for number in ids.tolist()], np.int64))  # type: ignore[misc]
        newest = {name: number for number, (_, name) in sorted(known.items())}
        shown = sorted(newest.values())
        assert index.ids.tolist() == shown
        assert sorted(index.hidden.ids.tolist()) == sorted(set(known) - set(shown))
        lengths = np.array([known[number][0] for number in shown])
        assert index.table.total_samples == lengths.sum()
        places = chance.integers(0, lengths.sum(), 300)
        drawn, ends = index.table.drawn(places), np.cumsum(lengths)
        at = np.searchsorted(ends, places, side="right")
        assert drawn.ids.tolist() == np.array(shown)[at].tolist()
        assert drawn.samples.tolist() == (places - ends[at] + lengths[at]).tolist()
        assert index.first_of(77) == shown[-77]
        wanted = np.array([*shown[::50], *(number + MOST_STORES for number in shown[::50]), 5])
        assert index.has(wanted).tolist() == [number in set(shown) for number in wanted.tolist()]


@pytest.mark.parametrize("silent", [False, True])
def test_what_leaves_while_stores_are_asked_about_copies(silent: bool) -> None:
    def added(rank: int, first: int, names: list[int]) -> Changes:
        count = len(names)
        ids = (first + np.arange(count)) * MOST_STORES + rank
        rows = Additions(ids, np.ones(count, np.int64), np.zeros(count, np.int64), names=np.array(names))
        return Changes("start", 1, True, [rows], 100 * MOST_STORES)

    def names_of(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if silent:
            index.leave_out(1)
        else:
            index.remove(np.array([0]))  # evicted meanwhile
        return np.where(ids == 0, 0, (ids // MOST_STORES + 1) << 32)

    index = RunIndex()
    index.take(0, added(0, 0, [1 << 32, 2 << 32, 3 << 32, 4 << 32]))
    index.show(names_of)
    assert index.ids.tolist() == [0, 1024, 2048, 3072]
    index.take(1, added(1, 10, [(1 << 32) + 5, 3 << 32]))  # like the first one in 32 bits, and a copy of the third
    index.show(names_of)
    assert index.ids.tolist() == ([0, 1024, 2048, 3072] if silent else [1024, 3072, 10241, 11265])


def test_an_answering_store_is_preferred_to_a_silent_one_nearby() -> None:
    routes = Routes([1], [0, 1], 1.0)
    assert routes.instead_of(1) == 0
    assert routes.next() == 0
