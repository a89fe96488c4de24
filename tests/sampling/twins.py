"""What the plain twins of all samplers have in common: trajectories come, and any of them are evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from trajstore.core.sampling import Additions


class SamplerTwin(RuleBasedStateMachine):
    """Keeps ``rows``: by trajectory, what the twin knows of it. The rule that begins sets ``make`` and ``sampler``."""

    make: Callable[[], Any]
    sampler: Any

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Any] = {}
        self.added = 0

    def note(self, told: Additions, rows: Mapping[int, Any]) -> None:
        """Tell the sampler of trajectories, and keep what is known of them."""
        self.sampler.added(told)
        self.rows |= rows
        self.added += len(rows)

    def next_numbers(self, count: int) -> range:
        """Return the ids of the next trajectories."""
        return range(self.added, self.added + count)

    def told(self, numbers: list[int]) -> Additions:
        """Return what a sampler is told of trajectories that are there."""
        raise NotImplementedError

    @precondition(lambda self: self.rows)
    @rule()
    def reload(self) -> None:
        """As a run does that goes on: another sampler is told of what is there, then of the state."""
        state = self.sampler.state_dict()
        self.sampler = self.make()
        self.sampler.added(self.told(sorted(self.rows)))
        self.sampler.load_state_dict(state)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        evicted = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.sampler.evicted(evicted)
        for number in evicted:
            del self.rows[number]
