"""Samplers and their weights, and batches of consecutive steps."""

from trajstore._core.buffer.sequences import (
    Hindsight,
    NStep,
    Sequences,
    sample_hindsight,
    sample_n_step,
    sample_sequences,
)
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
    "Hindsight",
    "NStep",
    "Priorities",
    "Recency",
    "Sampler",
    "Sequences",
    "Staleness",
    "UseLimit",
    "WeightedSampler",
    "sample_hindsight",
    "sample_n_step",
    "sample_sequences",
    "sampler_of",
]
