"""Random draws: the window of the newest trajectories, and which of its samples a generator gives. No I/O.

A buffer draws with ``Contents.lock`` held.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.arguments import whole_or_none
from trajstore.core.sampling.states import check_state
from trajstore.core.store.index import TrajectoryIndex
from trajstore.errors import ConfigurationError, EmptyBufferError

logger = logging.getLogger(__name__)

_SEED_BITS = (1 << 64) - 1
"""Seeds of torch are 64 bits, with a sign or without."""


@dataclass(frozen=True, slots=True)
class Window:
    """The newest trajectories of an index that can be read, oldest first.

    A buffer in memory only evicts in the order of addition, and what it has loaded stays readable. So those that cannot
    be read are one run of positions, the gap, and a window may lie on both sides of it::

        first            gap.start            gap.stop            end
          |---- before ----|----- skipped -----|--- the rest ------|      samples: before + the rest

    Attributes:
        first: position of the oldest.
        gap: positions after it that do not belong to the window; often none.
        end: position after the newest.
        before: samples (T·B) of the trajectories before the gap.
        skipped: samples in the gap.
        samples: samples of the window.
    """

    first: int
    gap: range
    end: int
    before: int
    skipped: int
    samples: int

    @staticmethod
    def newest(index: TrajectoryIndex, size: int, gap: range, start: int = 0) -> Window:
        """Return the ``size`` newest trajectories, or as many as there are; 0 = all.

        Args:
            index: what the buffer shows.
            size: how many.
            gap: positions of unavailable trajectories.
            start: position of the oldest that can be read; none before it is of the window.
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
        start, low, high, stop = (index.samples_before(at) for at in (first, gap.start, gap.stop, index.end))
        return Window(first, gap, index.end, low - start, high - low, low - start + stop - high)

    def __len__(self) -> int:
        """Number of trajectories."""
        return self.end - self.first - len(self.gap)


class Draws:
    """The generator of a buffer; the same seed and the same windows give the same draws as RLinf's buffer.

    Args:
        seed: of the generator; None takes one from the system.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._generator = _seeded(seed)
        self._clamp_told = False

    def samples(self, window: Window, count: int) -> npt.NDArray[np.int64]:
        """Draw samples uniformly, with replacement; each is told by its place after the window's first sample.

        Samples of the gap are counted on the way, but never drawn. More than the window has is cut to what it
        has, which is told once.

        Raises:
            EmptyBufferError: the window is empty.
        """
        total = window.samples
        if total == 0:
            raise _empty(window)
        if count > total and not self._clamp_told:
            self._clamp_told = True
            logger.warning("%d samples asked for: the window has %d only, so that many are drawn", count, total)
        drawn: npt.NDArray[np.int64] = torch.randint(0, total, (min(count, total),), generator=self._generator).numpy()
        if window.skipped:
            drawn[drawn >= window.before] += window.skipped
        return drawn

    def trajectories(self, window: Window, count: int) -> list[int]:
        """Draw trajectories uniformly, none twice, and return their positions; all if ``count`` is larger.

        Raises:
            EmptyBufferError: the window is empty.
        """
        if len(window) == 0:
            raise _empty(window)
        drawn = torch.randperm(len(window), generator=self._generator)[:count]
        older = window.gap.start - window.first
        return [window.first + at + (len(window.gap) if at >= older else 0) for at in drawn.tolist()]

    def take_up(self, seed: int | None, rng_state: torch.Tensor | None) -> None:
        """Go on as a checkpoint says. What is None stays as it is; a seed without a state makes a new generator."""
        if seed is not None:
            self.seed = seed
        if rng_state is not None:
            self._generator.set_state(rng_state)
        elif seed is not None:
            self._generator = _seeded(seed)

    def begin_for_rank(self, seed: int | None, rank: int, ranks: int) -> None:
        """Begin anew as one of several ranks, no two of which draw alike, be their seeds equal or not.

        Args:
            seed: taken where this buffer was given none.
            rank: 0-based.
            ranks: how many there are.
        """
        if self.seed is None:
            self.seed = seed
        if self.seed is not None:
            mixed = np.random.SeedSequence([self.seed & _SEED_BITS, rank, ranks])
            self._generator = _seeded(int(mixed.generate_state(1, np.uint64)[0]))

    @property
    def generator(self) -> torch.Generator:
        """Where samplers take their chance from too."""
        return self._generator

    @property
    def rng_state(self) -> torch.Tensor:
        """State of the generator, as torch gives it: uint8, ``[bytes]``."""
        return self._generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened."""
        return {"seed": self.seed, "rng_state": self.rng_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the draws where :meth:`state_dict` left them.

        Raises:
            ConfigurationError: it is no such state; nothing was changed.
        """
        check_state(state, ("seed", "rng_state"))
        seed = whole_or_none("state: seed", state["seed"], -(1 << 63), (1 << 64) - 1)
        try:
            self._generator.set_state(state["rng_state"])
        except (TypeError, RuntimeError) as error:
            raise ConfigurationError(f"state: rng_state is not that of a generator ({error})") from error
        self.seed = seed


def _empty(window: Window) -> EmptyBufferError:
    if not window.gap:
        return EmptyBufferError("cannot sample from an empty buffer")
    return EmptyBufferError(
        f"cannot sample: all {len(window.gap)} trajectories were kept in memory only and have left it; "
        "allow more cache_bytes, or use auto_save=True"
    )


def _seeded(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
