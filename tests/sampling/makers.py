"""One sampler of each kind for tests of states; their draws differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trajstore.samplers import (
    EpochSampler,
    GroupSampler,
    Priorities,
    Recency,
    Sampler,
    Staleness,
    UseLimit,
    WeightedSampler,
)

SAMPLERS: Mapping[str, Callable[[], Sampler]] = {
    "recency": lambda: WeightedSampler([Recency(half_life=2)]),
    "recency of trajectories": lambda: WeightedSampler([Recency(half_life=1.5)], unit="trajectory"),
    "recency by versions": lambda: WeightedSampler([Recency(half_life=2, by="versions")]),
    "staleness": lambda: WeightedSampler([Staleness(max_age=2)]),
    "priorities": lambda: WeightedSampler(priorities=Priorities()),
    "recency and priorities": lambda: WeightedSampler([Recency(half_life=3)], priorities=Priorities()),
    "uses": lambda: WeightedSampler([UseLimit(max_uses=9, cooldown=1)], unit="trajectory"),
    "epochs": EpochSampler,
}

WITH_ALL: Mapping[str, Callable[[], Sampler]] = {
    "epochs": EpochSampler,
    "all that rows can have": lambda: WeightedSampler([Recency(3.0), UseLimit(9, cooldown=1)], Priorities()),
    "all that trajectories can have": lambda: WeightedSampler(
        [Recency(2.0, by="versions"), Staleness(5)], Priorities(per="trajectory"), unit="trajectory"
    ),
    "groups": GroupSampler,
}
"""One of each class, the weighted ones with all optional state; the group sampler needs tasks."""
