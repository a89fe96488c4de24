"""Loaders that read batches ahead of a learner, and resume exactly."""

from trajstore._core.feeding import (
    BatchOptions,
    LoadedBatch,
    LoaderOptions,
    PreloadReplayBufferDataset,
    RateLimiter,
    ReplayBufferDataset,
    ReplayLoader,
    Share,
    TokenLoader,
    TokenOptions,
    replay_buffer_collate_fn,
)
from trajstore._core.feeding.packing import lay_out

__all__ = [
    "BatchOptions",
    "LoadedBatch",
    "LoaderOptions",
    "PreloadReplayBufferDataset",
    "RateLimiter",
    "ReplayBufferDataset",
    "ReplayLoader",
    "Share",
    "TokenLoader",
    "TokenOptions",
    "lay_out",
    "replay_buffer_collate_fn",
]
