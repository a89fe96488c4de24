"""Samplers and their weights, and batches of consecutive steps."""

from trajstore._core.buffer.sequences import (
    Hindsight,
    NStep,
    Sequences,
    sample_hindsight,
    sample_n_step,
    sample_sequences,
)
from trajstore._core.sampling import (
    Additions,
    Drawn,
    EpochSampler,
    GroupSampler,
    Priorities,
    Recency,
    Sampler,
    Staleness,
    UseLimit,
    WeightedSampler,
    sampler_of,
)

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
