"""Samplers against plain twins: additions, evictions, draws and updates in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.sampling.additions import additions
from tests.sampling.twins import SamplerTwin
from trajstore.errors import EmptyBufferError
from trajstore.samplers import (
    Additions,
    Drawn,
    EpochSampler,
    GroupSampler,
    Priorities,
    Recency,
    Staleness,
    UseLimit,
    WeightedSampler,
)

MAX_AGE, FLOOR, MAX_USES, COOLDOWN, HALF_LIFE = 2, 1, 3, 1, 0.2


class WeightedTwin(SamplerTwin):
    """The weight of every row, recomputed from scratch, equals the one in the sampler's tree."""

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
        self.alpha = 0.5

    @rule(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
        version=st.integers(-1, 2),
        task=st.sampled_from(["a", "b", ""]),
    )
    def add(self, sizes: list[int], version: int, task: str) -> None:
        newest = max([row["version"] for row in self.rows.values()], default=5) + version  # type: ignore[type-var,operator]
        numbered = dict(zip(self.next_numbers(len(sizes)), sizes, strict=True))
        self.newest = max(getattr(self, "newest", newest), newest)
        known = {"version": newest, "task": task, "uses": 0, "ready": 0}
        self.note(
            additions(numbered, [newest] * len(sizes), [task] * len(sizes)),
            {number: {**known, "size": size, "priority": [self.largest] * size} for number, size in numbered.items()},
        )

    def additions_of(self, numbers: list[int]) -> Additions:
        rows = [self.rows[number] for number in numbers]
        sizes = {number: self.rows[number]["size"] for number in numbers}
        return additions(sizes, [row["version"] for row in rows], [row["task"] for row in rows])

    @precondition(lambda self: self.per)
    @rule(alpha=st.sampled_from([0.0, 0.25, 0.5, 1.5]))
    def anneal(self, alpha: float) -> None:
        self.sampler.alpha = self.alpha = alpha

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 5), priority=st.floats(0, 50))
    def draw_and_update(self, count: int, priority: float) -> None:
        before = self.expected()
        total = sum(map(sum, before.values()))
        try:
            drawn = self.sampler.draw(count, self.generator)
        except EmptyBufferError:
            assert total == 0
            return
        rows = list(zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True))
        assert drawn.probabilities is not None
        assert drawn.uses is not None
        if total:  # else rests ended
            assert np.allclose(drawn.probabilities, [before[number][at] / total for number, at in rows], rtol=1e-6)
        self.batches += 1
        for number in set(drawn.ids.tolist()):
            row = self.rows[number]
            row["uses"] += 1  # type: ignore[operator]
            row["ready"] = self.batches + COOLDOWN
        assert drawn.uses.tolist() == [self.rows[number]["uses"] for number, _ in rows]
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
            held = young or (len(newer) < FLOOR and row["task"] != "")
            usable = row["uses"] < MAX_USES and row["ready"] <= self.batches  # type: ignore[operator]
            age = (self.added - 1 - number) / HALF_LIFE
            trajectory = float(held and usable) * (2.0**-age if age < 1074 else 0.0)
            powers = [(value + 0.1) ** self.alpha if self.per else 1.0 for value in row["priority"]]  # type: ignore[attr-defined]
            weights[number] = [trajectory * power for power in powers]
        return weights

    @invariant()
    def weights_are_as_expected(self) -> None:
        self.sampler._apply_alpha()  # as the next draw does
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
        # Recency scales weights by an arbitrary power of two: only their ratios matter.
        seen = tree.leaves[leaves]
        total, all_seen = sum(wanted), seen.sum()
        assert (total == 0) == (all_seen == 0)
        if total:
            assert np.allclose(seen / all_seen, np.array(wanted) / total, rtol=1e-6, atol=1e-12)
        assert tree.total == np.float64(tree.leaves.sum()) or np.isclose(tree.total, tree.leaves.sum())
        assert np.isclose(all_seen, tree.leaves.sum())


TestWeightedTwin = WeightedTwin.TestCase
TestWeightedTwin.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


# -- Epochs and groups against plain twins: additions, evictions, reloads and draws in any order --


class EpochTwin(SamplerTwin):
    """Every row of an epoch is drawn once; added rows wait, evicted ones are skipped."""

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.make = EpochSampler
        self.sampler = self.make()
        self.left: set[tuple[int, int]] = set()

    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
    def add(self, sizes: list[int]) -> None:
        new = dict(zip(self.next_numbers(len(sizes)), sizes, strict=True))
        self.note(additions(new), new)

    def additions_of(self, numbers: list[int]) -> Additions:
        return additions({number: self.rows[number] for number in numbers})

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 6))
    def draw(self, count: int) -> None:
        drawn = self.sampler.draw(count, self.generator)
        assert len(drawn) == count
        self.left = {row for row in self.left if row[0] in self.rows}
        for row in zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True):
            if not self.left:  # the epoch ended with the previous row
                self.left = {(number, at) for number, size in self.rows.items() for at in range(size)}
            assert row in self.left
            self.left.remove(row)


class GroupTwin(SamplerTwin):
    """Whole groups of distinct tasks, as many as available; the rows of a session are one rollout."""

    LEAST, MOST, MAX_AGE = 2, 3, 2

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.make = lambda: GroupSampler(self.LEAST, self.MOST, self.MAX_AGE)
        self.sampler = self.make()
        self.newest = 0

    def additions_of(self, numbers: list[int]) -> Additions:
        tasks, versions, *sessions = zip(*(self.rows[number] for number in numbers), strict=True)
        pairs = list(zip(*sessions, strict=True))
        return additions(dict.fromkeys(numbers, 1), versions, tasks, pairs if any(name for name, _ in pairs) else None)

    @rule(rollouts=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1), step=st.integers(0, 2))
    def add(self, rollouts: list[tuple[str, int]], step: int) -> None:
        self.newest += step
        rows = {}
        for task, paths in rollouts:  # 0: no session
            numbers = self.next_numbers(len(rows) + max(paths, 1))[len(rows) :]
            name = f"{numbers[0]}" if paths else ""
            rows |= dict.fromkeys(numbers, (task, self.newest, name, paths))
        self.rows |= rows
        new = self.additions_of(list(rows))
        for number in rows:
            del self.rows[number]
        self.note(new, rows)

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 5), window=st.integers(0, 12))
    def draw(self, count: int, window: int) -> None:
        first = sorted(self.rows)[-window:][0] if window else None
        drawn = self.drawn(count, first)
        expected: dict[str, dict[object, list[int]]] = {}
        for number, (task, version, name, _) in self.rows.items():
            if self.is_young(version) and number >= (first or 0):
                expected.setdefault(task, {}).setdefault(name or number, []).append(number)
        good = {}
        for task, rollouts in expected.items():
            whole = [rows for rows in rollouts.values() if len(rows) >= self.rows[rows[0]][3]]
            if len(whole) >= self.LEAST:
                good[task] = [number for rows in whole[-self.MOST :] for number in rows]
        tasks = {self.rows[number][0] for number in drawn}
        assert len(tasks) == min(count, len(good))
        assert sorted(drawn) == sorted(number for task in tasks for number in good[task])

    def is_young(self, version: int) -> bool:
        return version >= self.newest - self.MAX_AGE

    def drawn(self, count: int, first: int | None) -> list[int]:
        try:
            drawn: Drawn = self.sampler.draw(count, self.generator, first)
        except EmptyBufferError:
            return []
        return drawn.ids.tolist()  # type: ignore[no-any-return]


TestEpochTwin = EpochTwin.TestCase
TestEpochTwin.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestGroupTwin = GroupTwin.TestCase
TestGroupTwin.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_fewer_groups_than_asked_for_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler, generator = GroupSampler(least=2), torch.Generator()
    sampler.added(additions(dict.fromkeys(range(7), 1), [0] * 7, list("aaabbcd")))
    assert len(sampler.draw(2, generator).ids) == 5
    assert not caplog.messages
    for _ in range(2):
        assert len(sampler.draw(16, generator).ids) == 5
    assert caplog.messages == ["groups: 16 tasks requested, but only 2 of 4 have 2 rollouts to draw"]
