"""Samplers and their weights. Pure: they choose rows from trajectory metadata and a generator."""

from __future__ import annotations

from trajstore._core.sampling.base import Additions, Drawn, Sampler
from trajstore._core.sampling.config import sampler_of
from trajstore._core.sampling.epochs import EpochSampler
from trajstore._core.sampling.factors import Recency, UseLimit
from trajstore._core.sampling.groups import GroupSampler
from trajstore._core.sampling.staleness import Staleness
from trajstore._core.sampling.weighted import Priorities, WeightedSampler

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
