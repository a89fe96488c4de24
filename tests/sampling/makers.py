"""A sampler of each kind, as tests of states want them: their draws differ, and none needs tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trajstore.sampling import (
    EpochSampler,
    FreshestSampler,
    LeastUsedSampler,
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
    "freshest": lambda: FreshestSampler(decay=2.0),
    "least used": LeastUsedSampler,
}
