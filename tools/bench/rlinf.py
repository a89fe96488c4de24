"""RLinf's buffer beside ours, where RLinf is ahead: adding in memory, and saving from memory.

Needs ``TRAJSTORE_RLINF``, the path of a checkout of RLinf, and what RLinf imports. Ratios are of times, ours ÷ RLinf's.
RLinf does not wait for the disk when it saves; ours does, so the bytes that it has to write are the limit.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.timing import in_turn, ratio
from trajstore import Trajectory, TrajectoryReplayBuffer

CHECKOUT = "TRAJSTORE_RLINF"


def figures(options: Options) -> Iterator[Figure]:
    """Yield the four figures.

    Raises:
        SkippedError: there is no checkout.
    """
    if not os.environ.get(CHECKOUT):
        raise SkippedError(f"needs {CHECKOUT}, the path of a checkout of RLinf")
    sys.path.insert(0, os.environ[CHECKOUT])
    theirs = importlib.import_module("rlinf.data.storage.replay").TrajectoryReplayBuffer
    logging.getLogger("RLinf").setLevel(logging.ERROR)
    states = [_trajectory(32, 8, {"states": (32,)}) for _ in range(options.count(50, 2))]
    steps = [_trajectory(1, 1, {"states": (32,)}) for _ in range(options.count(2000, 2))]
    images = [_trajectory(16, 4, {"main_images": (64, 64, 3)}) for _ in range(options.count(60, 2))]
    yield _compared(options, theirs, "add in memory, one by one, state", lambda cls: _add(cls, [[t] for t in states]))
    yield _compared(options, theirs, "add in memory, steps in one list", lambda cls: _add(cls, [steps]))
    for layout in ("trajstore", "rlinf"):
        name = f"save from memory, images, layout {layout}"
        yield _compared(options, theirs, name, partial(_save, items=images, folder=options.folder, layout=layout))


def _trajectory(steps: int, batch: int, observed: dict[str, tuple[int, ...]]) -> Trajectory:
    def observation() -> dict[str, torch.Tensor]:
        dtypes = {1: torch.float32, 3: torch.uint8}
        return {name: torch.ones(steps, batch, *row, dtype=dtypes[len(row)]) for name, row in observed.items()}

    return Trajectory(
        model_weights_id="w",
        actions=torch.rand(steps, batch, 8),
        rewards=torch.rand(steps, batch, 1),
        dones=torch.zeros(steps + 1, batch, 1, dtype=torch.bool),
        forward_inputs={"action": torch.rand(steps, batch, 8)},
        curr_obs=observation(),
        next_obs=observation(),
    )


def _compared(options: Options, theirs: Any, name: str, prepare: Callable[[Any], Callable[[], object]]) -> Figure:
    ours, peer = in_turn([prepare(TrajectoryReplayBuffer), prepare(theirs)], options.repeats)
    return Figure("RLINF", name, ratio(ours, peer), None)


def _add(cls: Any, lists: list[list[Trajectory]]) -> Callable[[], object]:
    buffer = cls(sample_window_size=sum(map(len, lists)))  # full after the first time: then each add lets one go

    def work() -> None:
        for items in lists:
            buffer.add_trajectories(items)

    return work


def _save(cls: Any, items: list[Trajectory], folder: Path, layout: str) -> Callable[[], object]:
    buffer = cls(sample_window_size=len(items))
    buffer.add_trajectories(items)
    options = {"layout": layout} if cls is TrajectoryReplayBuffer else {}
    return lambda: buffer.save_checkpoint(str(folder / f"{cls.__module__}_{layout}"), **options)
