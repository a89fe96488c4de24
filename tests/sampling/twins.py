"""Common base of the samplers' plain twins: trajectories are added, and any may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from trajstore.samplers import Additions


class SamplerTwin(RuleBasedStateMachine):
    """Keeps ``rows``: the twin's data by trajectory. The initial rule sets ``make`` and ``sampler``."""

    make: Callable[[], Any]
    sampler: Any

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Any] = {}
        self.added = 0

    def note(self, additions: Additions, rows: Mapping[int, Any]) -> None:
        """Add trajectories to the sampler and the twin."""
        self.sampler.added(additions)
        self.rows |= rows
        self.added += len(rows)

    def next_numbers(self, count: int) -> range:
        """Return the ids of the next trajectories."""
        return range(self.added, self.added + count)

    def additions_of(self, numbers: list[int]) -> Additions:
        """Return the additions for live trajectories."""
        raise NotImplementedError

    @precondition(lambda self: self.rows)
    @rule()
    def reload(self) -> None:
        """As in a resumed run: a new sampler receives the live trajectories, then the state."""
        state = self.sampler.state_dict()
        self.sampler = self.make()
        self.sampler.added(self.additions_of(sorted(self.rows)))
        self.sampler.load_state_dict(state)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        evicted = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.sampler.evicted(evicted)
        for number in evicted:
            del self.rows[number]
