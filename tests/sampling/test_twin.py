"""Samplers against plain twins: additions, evictions, draws and updates in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.sampling.told import told
from tests.sampling.twins import SamplerTwin
from trajstore.errors import EmptyBufferError
from trajstore.sampling import (
    Additions,
    FreshestSampler,
    LeastUsedSampler,
    Priorities,
    Recency,
    Staleness,
    UseLimit,
    WeightedSampler,
)

MAX_AGE, FLOOR, MAX_USES, COOLDOWN, HALF_LIFE = 2, 1, 3, 1, 0.2


class WeightedTwin(SamplerTwin):
    """The weight of every row, worked out from scratch, is what the sampler's tree has."""

    @initialize(seed=st.integers(0, 9), per=st.sampled_from(["sample", "trajectory", None]))
    def begin(self, seed: int, per: str | None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        priorities = None if per is None else Priorities(alpha=0.5, eps=0.1, per=per)  # type: ignore[arg-type]
        self.per = per
        self.make = lambda: WeightedSampler(
            [Recency(HALF_LIFE), Staleness(MAX_AGE, FLOOR), UseLimit(MAX_USES, COOLDOWN)], priorities
        )
        self.sampler = self.make()
        self.batches = 0
        self.largest = 1.0

    @rule(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
        version=st.integers(-1, 2),
        task=st.sampled_from("ab"),
    )
    def add(self, sizes: list[int], version: int, task: str) -> None:
        newest = max([row["version"] for row in self.rows.values()], default=5) + version  # type: ignore[type-var,operator]
        numbered = dict(zip(self.next_numbers(len(sizes)), sizes, strict=True))
        self.newest = max(getattr(self, "newest", newest), newest)
        known = {"version": newest, "task": task, "uses": 0, "ready": 0}
        self.note(
            told(numbered, [newest] * len(sizes), [task] * len(sizes)),
            {number: {**known, "size": size, "priority": [self.largest] * size} for number, size in numbered.items()},
        )

    def told(self, numbers: list[int]) -> Additions:
        rows = [self.rows[number] for number in numbers]
        sizes = {number: self.rows[number]["size"] for number in numbers}
        return told(sizes, [row["version"] for row in rows], [row["task"] for row in rows])

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 5), priority=st.floats(0, 50))
    def draw_and_update(self, count: int, priority: float) -> None:
        try:
            drawn = self.sampler.draw(count, self.generator)
        except EmptyBufferError:
            assert sum(map(sum, self.expected().values())) == 0
            return
        self.batches += 1
        for number in set(drawn.ids.tolist()):
            row = self.rows[number]
            row["uses"] += 1  # type: ignore[operator]
            row["ready"] = self.batches + COOLDOWN
        if self.per is not None:
            self.sampler.update(drawn.ids, drawn.samples, [priority] * len(drawn))
            self.largest = max(self.largest, priority)
            for number, sample in zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True):
                values: list[float] = self.rows[number]["priority"]  # type: ignore[assignment]
                if self.per == "sample":
                    values[sample] = priority
                else:
                    values[:] = [priority] * len(values)

    def expected(self) -> dict[int, list[float]]:
        weights = {}
        for number, row in self.rows.items():
            newer = [
                other
                for other, its in self.rows.items()
                if its["task"] == row["task"] and (its["version"], other) > (row["version"], number)
            ]
            young = row["version"] >= self.newest - MAX_AGE  # type: ignore[operator]
            held = young or len(newer) < FLOOR
            usable = row["uses"] < MAX_USES and row["ready"] <= self.batches  # type: ignore[operator]
            age = (self.added - 1 - number) / HALF_LIFE
            trajectory = float(held and usable) * (2.0**-age if age < 1074 else 0.0)
            powers = [(value + 0.1) ** 0.5 if self.per else 1.0 for value in row["priority"]]  # type: ignore[attr-defined]
            weights[number] = [trajectory * power for power in powers]
        return weights

    @invariant()
    def weights_are_as_expected(self) -> None:
        roster, tree = self.sampler._roster, self.sampler._tree
        expected = self.expected()
        entries = roster.find(np.array(sorted(expected), np.int64))
        assert np.all(entries >= 0)
        assert roster.live == len(expected)
        leaves, counts = roster.leaf_runs(entries)
        if self.per == "sample":
            wanted = [weight for number in sorted(expected) for weight in expected[number]]
            assert counts.tolist() == [len(expected[number]) for number in sorted(expected)]
        else:
            wanted = [sum(expected[number]) for number in sorted(expected)]
        # Recency scales weights by a power of two of its own choice: only their ratios say something.
        seen = tree.leaves[leaves]
        total, all_seen = sum(wanted), seen.sum()
        assert (total == 0) == (all_seen == 0)
        if total:
            assert np.allclose(seen / all_seen, np.array(wanted) / total, rtol=1e-6, atol=1e-12)
        assert tree.total == np.float64(tree.leaves.sum()) or np.isclose(tree.total, tree.leaves.sum())
        assert np.isclose(all_seen, tree.leaves.sum())


class FreshestTwin(SamplerTwin):
    @initialize()
    def begin(self) -> None:
        self.make = lambda: FreshestSampler(decay=1.5, max_uses=3)
        self.sampler = self.make()

    def told(self, numbers: list[int]) -> Additions:
        return told(dict.fromkeys(numbers, 1), [self.rows[number][0] for number in numbers])

    @rule(versions=st.lists(st.integers(0, 6), min_size=1, max_size=8))
    def add(self, versions: list[int]) -> None:
        numbers = self.next_numbers(len(versions))
        rows = {number: [version, 0] for number, version in zip(numbers, versions, strict=True)}
        self.note(told(dict.fromkeys(numbers, 1), versions), rows)

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 4), data=st.data())
    def draw(self, count: int, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.rows)))
        good = [number for number, (_, uses) in self.rows.items() if uses < 3 and number >= first]
        wanted = sorted(good, key=lambda number: (-(self.rows[number][0] - 1.5 * self.rows[number][1]), number))[:count]
        try:
            drawn = self.sampler.draw(count, torch.Generator(), first).ids.tolist()
        except EmptyBufferError:
            drawn = []
        assert drawn == wanted
        for number in drawn:
            self.rows[number][1] += 1


class LeastUsedTwin(SamplerTwin):
    @initialize(best=st.sampled_from(["lowest", "highest"]))
    def begin(self, best: Any) -> None:
        self.best = best
        self.make = lambda: LeastUsedSampler(best, max_uses=3)
        self.sampler = self.make()

    def told(self, numbers: list[int]) -> Additions:
        return told(dict.fromkeys(numbers, 1))

    @rule(count=st.integers(1, 6))
    def add(self, count: int) -> None:
        numbers = self.next_numbers(count)
        self.note(told(dict.fromkeys(numbers, 1)), {number: [0, 0.0] for number in numbers})

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), value=st.sampled_from([-1.0, 0.0, 2.0]))
    def value(self, data: st.DataObject, value: float) -> None:
        rated = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1))
        self.sampler.value(np.array(rated), [value] * len(rated))
        for number in rated:
            self.rows[number][1] = value

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), uses=st.integers(0, 3))
    def used(self, data: st.DataObject, uses: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        self.sampler.used(np.array([number]), np.array([uses]))
        self.rows[number][0] = uses

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 4))
    def draw(self, count: int) -> None:
        sign = 1 if self.best == "lowest" else -1
        good = [number for number, (uses, _) in self.rows.items() if uses < 3]
        wanted = sorted(good, key=lambda number: (self.rows[number][0], sign * self.rows[number][1], number))[:count]
        try:
            drawn = self.sampler.draw(count, torch.Generator()).ids.tolist()
        except EmptyBufferError:
            drawn = []
        assert drawn == wanted
        for number in drawn:
            self.rows[number][0] += 1


TestLeastUsedTwin = LeastUsedTwin.TestCase
TestLeastUsedTwin.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
TestWeightedTwin = WeightedTwin.TestCase
TestWeightedTwin.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestFreshestTwin = FreshestTwin.TestCase
TestFreshestTwin.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
