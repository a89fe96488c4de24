"""Feeds a learner: batches drawn and read ahead, exact and elastic resume."""

from __future__ import annotations

from trajstore._core.feeding.datasets import PreloadReplayBufferDataset, ReplayBufferDataset, replay_buffer_collate_fn
from trajstore._core.feeding.limiter import RateLimiter
from trajstore._core.feeding.loader import LoadedBatch, ReplayLoader, TokenLoader
from trajstore._core.feeding.options import BatchOptions, LoaderOptions, TokenOptions
from trajstore._core.feeding.shares import Share

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
    "replay_buffer_collate_fn",
]
