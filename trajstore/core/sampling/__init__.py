"""Samplers and their weights. Pure: they choose rows from trajectory metadata and a generator."""

from __future__ import annotations

from trajstore.core.sampling.base import Additions, Drawn, Sampler
from trajstore.core.sampling.config import sampler_of
from trajstore.core.sampling.epochs import EpochSampler
from trajstore.core.sampling.factors import Recency, UseLimit
from trajstore.core.sampling.groups import GroupSampler
from trajstore.core.sampling.staleness import Staleness
from trajstore.core.sampling.weighted import Priorities, WeightedSampler

__all__ = [
    "Additions",
    "Drawn",
    "EpochSampler",
    "GroupSampler",
    "Priorities",
    "Recency",
    "Sampler",
    "Staleness",
    "UseLimit",
    "WeightedSampler",
    "sampler_of",
]
