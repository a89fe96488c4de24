"""Loaders that read batches ahead of a learner, and resume exactly."""

from trajstore._core.buffer.sampling import Batch
from trajstore._core.feeding.datasets import PreloadReplayBufferDataset, ReplayBufferDataset, replay_buffer_collate_fn
from trajstore._core.feeding.loader import LoadedBatch, ReplayLoader, TokenLoader
from trajstore._core.feeding.options import BatchOptions, LoaderOptions, TokenOptions
from trajstore._core.feeding.packing import lay_out
from trajstore._core.feeding.shares import Share

__all__ = [
    "Batch",
    "BatchOptions",
    "LoadedBatch",
    "LoaderOptions",
    "PreloadReplayBufferDataset",
    "ReplayBufferDataset",
    "ReplayLoader",
    "Share",
    "TokenLoader",
    "TokenOptions",
    "lay_out",
    "replay_buffer_collate_fn",
]
