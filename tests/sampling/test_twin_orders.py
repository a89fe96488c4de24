"""Epochs and groups against plain twins: additions, evictions, reloads and draws in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.sampling.told import told
from tests.sampling.twins import SamplerTwin
from trajstore.errors import EmptyBufferError
from trajstore.sampling import Additions, Drawn, EpochSampler, FreshestSampler, GroupSampler, LeastUsedSampler


class EpochTwin(SamplerTwin):
    """Every row of an epoch comes once; what is added waits, what is evicted does not come."""

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.make = EpochSampler
        self.sampler = self.make()
        self.left: set[tuple[int, int]] = set()

    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
    def add(self, sizes: list[int]) -> None:
        new = dict(zip(self.next_numbers(len(sizes)), sizes, strict=True))
        self.note(told(new), new)

    def told(self, numbers: list[int]) -> Additions:
        return told({number: self.rows[number] for number in numbers})

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 6))
    def draw(self, count: int) -> None:
        drawn = self.sampler.draw(count, self.generator)
        assert len(drawn) == count
        self.left = {row for row in self.left if row[0] in self.rows}
        for row in zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True):
            if not self.left:  # the epoch ended with the row before
                self.left = {(number, at) for number, size in self.rows.items() for at in range(size)}
            assert row in self.left
            self.left.remove(row)


class GroupTwin(SamplerTwin):
    """Whole groups of different tasks, as many as there are to draw."""

    LEAST, MOST, MAX_AGE = 2, 3, 2

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.make = lambda: GroupSampler(self.LEAST, self.MOST, self.MAX_AGE)
        self.sampler = self.make()
        self.newest = 0

    def told(self, numbers: list[int]) -> Additions:
        rows = [self.rows[number] for number in numbers]
        return told(dict.fromkeys(numbers, 1), [version for _, version in rows], [task for task, _ in rows])

    @rule(tasks=st.text("abcd", min_size=1, max_size=8), step=st.integers(0, 2))
    def add(self, tasks: str, step: int) -> None:
        self.newest += step
        numbers = self.next_numbers(len(tasks))
        rows = {number: (task, self.newest) for number, task in zip(numbers, tasks, strict=True)}
        self.note(told(dict.fromkeys(numbers, 1), [self.newest] * len(tasks), list(tasks)), rows)

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 5), window=st.integers(0, 12))
    def draw(self, count: int, window: int) -> None:
        first = sorted(self.rows)[-window:][0] if window else None
        drawn = self.drawn(count, first)
        expected = {
            task: [
                number
                for number, (its, version) in self.rows.items()
                if its == task and self.is_young(version) and number >= (first or 0)
            ]
            for task, _ in self.rows.values()
        }
        good = {task: numbers[-self.MOST :] for task, numbers in expected.items() if len(numbers) >= self.LEAST}
        found = {self.rows[number][0] for number in drawn}
        assert len(found) == min(count, len(good))
        assert sorted(drawn) == sorted(number for task in found for number in good[task])

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
    sampler.added(told(dict.fromkeys(range(7), 1), [0] * 7, list("aaabbcd")))
    assert len(sampler.draw(2, generator).ids) == 5
    assert not caplog.messages
    for _ in range(2):
        assert len(sampler.draw(16, generator).ids) == 5
    assert caplog.messages == ["groups: 16 tasks asked for, 2 of 4 have 2 rollouts to draw, so that many are drawn"]


@pytest.mark.parametrize("make", [FreshestSampler, LeastUsedSampler])
def test_what_a_ranked_sampler_keeps_sorted_is_as_long_as_its_window(
    make: type[FreshestSampler] | type[LeastUsedSampler],
) -> None:
    """Else a draw from a narrow window passes over all that is older, and what was drawn or evicted stays for ever."""
    sampler, generator = make(), torch.Generator()
    sampler.added(told(dict.fromkeys(range(2000), 1), range(2000)))
    most = 64 + 4 * 50
    for number in range(2000, 2400):
        sampler.added(told({number: 1}, [number]))
        drawn = sampler.draw(4, generator, number - 49)
        assert min(drawn.ids) >= number - 49
        assert len(sampler._heap) <= most
    sampler.evicted(range(2390))
    assert len(sampler.draw(20, generator)) == 10
    assert len(sampler._heap) <= 64 + 4 * 10
