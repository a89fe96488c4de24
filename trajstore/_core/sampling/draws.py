"""Random draws from the window of the newest trajectories.

A buffer draws with ``Contents.lock`` held. Seeds come from the system, in copies from process id and host name.
"""

from __future__ import annotations

import base64
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from trajstore._core.base.arguments import whole_or_none
from trajstore._core.sampling.base import Sampler
from trajstore._core.sampling.states import check_state
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import ConfigurationError, EmptyBufferError, trajectories

logger = logging.getLogger(__name__)

_SEED_BITS = (1 << 64) - 1
"""Range of torch seeds: 64 bits, signed or unsigned."""


@dataclass(frozen=True, slots=True)
class Window:
    """The newest readable trajectories of an index, oldest first.

    A buffer in memory evicts only in order of addition, and its loaded trajectories stay readable. So the unreadable
    ones form one range of positions, the gap, which a window may enclose::

        first            gap.start            gap.stop            end
          |---- before ----|----- skipped -----|--- the rest ------|      samples: before + the rest

    Attributes:
        first: position of the oldest.
        gap: positions after it that are outside the window; usually empty.
        end: position after the newest.
        before: samples (T·B) of the trajectories before the gap.
        skipped: samples in the gap.
        samples: valid samples of the window.
    """

    first: int
    gap: range
    end: int
    before: int
    skipped: int
    samples: int

    @staticmethod
    def newest(index: TrajectoryIndex, size: int, gap: range, start: int = 0) -> Window:
        """Return the ``size`` newest trajectories, or all if fewer; 0 = all.

        Args:
            index: visible index of the buffer.
            size: number of trajectories.
            gap: positions of unavailable trajectories.
            start: position of the oldest readable trajectory; the window starts there or later.
        """
        start = max(start, index.first)
        gap = gap or range(start, start)
        after = index.end - gap.stop
        wanted = size if size > 0 else len(index)
        if wanted <= after:
            first = index.end - wanted
            gap = range(first, first)
        else:
            first = max(start, gap.start - (wanted - after))
        start, low, high, stop = index.before[[first, gap.start, gap.stop, index.end]].tolist()
        return Window(first, gap, index.end, low - start, high - low, low - start + stop - high)

    def __len__(self) -> int:
        """Number of trajectories."""
        return self.end - self.first - len(self.gap)


class Draws:
    """A buffer's generator; equal seeds and windows give the same draws as RLinf's buffer.

    A copy in another process (forked, or unpickled) and one made in a DataLoader worker are reseeded at the first draw:
    from their state and the worker's seed, which differs per worker and epoch, or else the host's name and the
    process id. So copies never repeat each other's draws, unless :meth:`continue_here` or :meth:`load_state_dict` asks
    for it.

    Args:
        seed: seed of the generator; None takes one from the system.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._generator = _seeded(seed)
        self._pid = os.getpid() if get_worker_info() is None else None
        """The process that continues the generator's draws; None if every process reseeds it."""
        self._workers = 1
        """Number of DataLoader workers with a copy that draws independently."""
        self._clamp_told = False

    def samples(self, window: Window, count: int) -> npt.NDArray[np.int64]:
        """Draw samples uniformly with replacement, as offsets from the window's first sample.

        Samples in the gap are counted in the offsets, but never drawn. A larger count than the window is reduced to its
        size, with one warning.

        Raises:
            EmptyBufferError: the window is empty.
        """
        total = window.samples
        if total == 0:
            raise _empty(window)
        if count > total and not self._clamp_told:
            self._clamp_told = True
            logger.warning("samples: %d requested, but the window has only %d, which are drawn", count, total)
        drawn: npt.NDArray[np.int64] = torch.randint(0, total, (min(count, total),), generator=self.generator).numpy()
        if window.skipped:
            drawn[drawn >= window.before] += window.skipped
        return drawn

    def trajectories(self, window: Window, count: int) -> list[int]:
        """Draw distinct trajectories uniformly and return their positions; all if ``count`` is larger.

        Raises:
            EmptyBufferError: the window is empty.
        """
        if len(window) == 0:
            raise _empty(window)
        drawn = torch.randperm(len(window), generator=self.generator)[:count]
        older = window.gap.start - window.first
        return [window.first + at + (len(window.gap) if at >= older else 0) for at in drawn.tolist()]

    def take_up(self, seed: int | None, rng_state: torch.Tensor | None) -> None:
        """Restore a checkpoint; None keeps the present value, a seed without a state makes a new generator."""
        if seed is not None:
            self.seed = seed
        if rng_state is not None:
            self._generator.set_state(rng_state)
        elif seed is not None:
            self._generator = _seeded(seed)

    def begin_for_rank(self, seed: int | None, rank: int, ranks: int) -> None:
        """Restart as one of several ranks; all ranks draw differently, even with equal seeds.

        Args:
            seed: used if this buffer was given none.
            rank: 0-based.
            ranks: number of ranks.
        """
        if self.seed is None:
            self.seed = seed
        if self.seed is not None:
            mixed = np.random.SeedSequence([self.seed & _SEED_BITS, rank, ranks])
            self._generator = _seeded(int(mixed.generate_state(1, np.uint64)[0]))

    @property
    def generator(self) -> torch.Generator:
        """The generator, shared with samplers; reseeded if it was inherited."""
        if self._pid != os.getpid():
            worker = get_worker_info()
            here = [*socket.gethostname().encode(), os.getpid()] if worker is None else [worker.seed]
            inherited = int(torch.randint(0, 1 << 62, (), generator=self._generator))
            self._generator.manual_seed(int(np.random.SeedSequence([inherited, *here]).generate_state(1, np.uint64)[0]))
            self._workers = 1 if worker is None else worker.num_workers
            self._pid = os.getpid()
        return self._generator

    def generator_for(self, sampler: Sampler) -> torch.Generator:
        """Return the generator for a draw of a sampler.

        Raises:
            ConfigurationError: several DataLoader workers have copies of the sampler, and its draws depend on earlier
                ones, of which each copy knows only its own.
        """
        generator = self.generator
        if self._workers > 1 and sampler.remembers:
            raise ConfigurationError(
                f"sampler: {type(sampler).__name__} depends on earlier draws, and each of the {self._workers} "
                "DataLoader workers has a copy that knows only its own; iterate a ReplayLoader or TokenLoader, whose "
                "workers share one sequence of draws, or use one worker"
            )
        return generator

    def continue_here(self) -> None:
        """Continue the inherited draws in this process, as another process may do too."""
        self._pid = os.getpid()
        self._workers = 1

    def copied(self) -> None:
        """Mark the generator as a copy of another process's, to be reseeded at the next draw."""
        self._pid = None

    @property
    def rng_state(self) -> torch.Tensor:
        """State of torch's generator: uint8, ``[bytes]``."""
        return self._generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""
        return {"seed": self.seed, "rng_state": self.rng_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws from a state of :meth:`state_dict`.

        Raises:
            ConfigurationError: the state is invalid; nothing changed.
        """
        check_state(state, ("seed", "rng_state"))
        seed = whole_or_none("state: seed", state["seed"], -(1 << 63), (1 << 64) - 1)
        try:
            self._generator.set_state(state["rng_state"])
        except (TypeError, RuntimeError) as error:
            raise ConfigurationError(f"state: rng_state is not that of a generator ({error})") from error
        self.seed = seed
        self.continue_here()


def rng_json(seed: int | None, rng_state: torch.Tensor) -> dict[str, Any]:
    """Return seed and state of a generator as JSON values."""
    return {"seed": seed, "rng_state": base64.b64encode(rng_state.numpy().tobytes()).decode()}


def _empty(window: Window) -> EmptyBufferError:
    if len(window):
        return EmptyBufferError("cannot sample: no step of the window is valid")
    if not window.gap:
        return EmptyBufferError("cannot sample from an empty buffer")
    return EmptyBufferError(
        f"cannot sample: {trajectories(len(window.gap), 'was', 'were')} kept in memory only, and evicted from it; "
        "allow more cache_bytes, or use auto_save=True"
    )


def _seeded(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))  # generator.seed() opens a file
    else:
        generator.manual_seed(seed)
    return generator
