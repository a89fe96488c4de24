"""Where batches come from: a replay buffer, or one beside a buffer of demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.columns.fields import join_name, nest, walk
from trajstore.errors import ConfigurationError, SchemaMismatchError
from trajstore.sampling.base import Drawn, Sampler


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """The rows of one batch: those of the replay buffer, then those of the demonstrations."""

    replay: Drawn
    demos: Drawn | None = None

    def __len__(self) -> int:
        return len(self.replay) + (0 if self.demos is None else len(self.demos))


class BatchSource:
    """Draws batches and reads them, two steps that may lie far apart.

    Args:
        replay: buffer of rollouts.
        batch_size: transitions of a global batch.
        demos: buffer of demonstrations, mixed in.
        demo_share: which part of a batch comes from ``demos``, rounded down to whole transitions.
        min_size, min_demo_size: trajectories that each buffer must hold before anything is drawn.
        sampler, demo_sampler: choose instead of the buffers' uniform draws.
        columns: dotted names of the columns to read; None = all.
        rank: (r, W): of every global batch, this reads the r-th of W parts, as equal as can be; all ranks draw
            the same batches, and their parts together are that batch, whatever W is.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        replay: TrajectoryReplayBuffer,
        batch_size: int,
        *,
        demos: TrajectoryReplayBuffer | None = None,
        demo_share: float = 0.5,
        min_size: int = 1,
        min_demo_size: int = 1,
        sampler: Sampler | None = None,
        demo_sampler: Sampler | None = None,
        columns: Sequence[str] | None = None,
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size: {batch_size}, must be at least 1")
        if demos is not None and not 0 < demo_share < 1:
            raise ConfigurationError(f"demo_share: {demo_share}, must be between 0 and 1")
        if demos is None and demo_sampler is not None:
            raise ConfigurationError("demo_sampler: has no effect without demos")
        if not 0 <= rank[0] < rank[1]:
            raise ConfigurationError(f"rank: {rank}, must be (r, W) with 0 <= r < W")
        if batch_size < rank[1]:
            raise ConfigurationError(f"batch_size: {batch_size}, must be at least the number of ranks, {rank[1]}")
        self.replay, self.demos = replay, demos
        self.batch_size = batch_size
        self._demo_count = 0 if demos is None else int(batch_size * demo_share)
        if demos is not None and not 0 < self._demo_count < batch_size:
            raise ConfigurationError(
                f"demo_share: {demo_share} of {batch_size} transitions leaves one of both buffers without any"
            )
        self._needed = min_size, min_demo_size
        self._samplers = sampler, demo_sampler
        self._columns = columns
        self._rank = rank

    def ready(self) -> bool:
        """Return whether every buffer holds as many trajectories as it must."""
        return self.replay.is_ready(self._needed[0]) and (self.demos is None or self.demos.is_ready(self._needed[1]))

    def draw(self) -> DrawnBatch:
        """Choose the rows of the next global batch."""
        replay = self.replay.draw(self.batch_size - self._demo_count, sampler=self._samplers[0])
        if self.demos is None:
            return DrawnBatch(replay)
        return DrawnBatch(replay, self.demos.draw(self._demo_count, sampler=self._samplers[1]))

    def part(self, drawn: DrawnBatch) -> DrawnBatch:
        """Return this rank's part of a global batch, the same share of both buffers' rows."""
        if self._rank[1] == 1:
            return drawn
        return DrawnBatch(
            _part(drawn.replay, *self._rank), None if drawn.demos is None else _part(drawn.demos, *self._rank)
        )

    def read(self, drawn: DrawnBatch, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return a batch as a nested dict of tensors ``[n, ...]``.

        Args:
            drawn: its rows.
            out: tensors to fill, by dotted name, ``[>= n, ...]``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
            SchemaMismatchError: both buffers differ in their columns.
        """
        if self.demos is None or drawn.demos is None:
            return self.replay.read(drawn.replay, columns=self._columns, out=out)
        count = len(drawn.replay)
        first = _flat(self.replay.read(drawn.replay, columns=self._columns, out=out))
        if out is not None:
            rest = {name: tensor[count:] for name, tensor in out.items()}
            self.demos.read(drawn.demos, columns=self._columns, out=rest)
            return nest({name: out[name][: len(drawn)] for name in first})
        second = _flat(self.demos.read(drawn.demos, columns=self._columns))
        differing = sorted(
            name
            for name in first.keys() | second.keys()
            if name not in first
            or name not in second
            or (first[name].dtype, first[name].shape[1:]) != (second[name].dtype, second[name].shape[1:])
        )
        if differing:
            raise SchemaMismatchError(
                f"replay and demonstrations differ in {', '.join(differing)} (absent, or another dtype or shape); "
                "name the columns to read"
            )
        return nest({name: torch.cat([first[name], second[name]]) for name in first})

    def state_dict(self) -> dict[str, Any]:
        """Return generators and samplers."""
        return {
            "replay": self.replay.state_dict(),
            "demos": None if self.demos is None else self.demos.state_dict(),
            "samplers": [None if sampler is None else sampler.state_dict() for sampler in self._samplers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` said.

        Raises:
            ConfigurationError: it is the state of a source with other parts.
        """
        given = [part is not None for part in (state["demos"], *state["samplers"])]
        here = [part is not None for part in (self.demos, *self._samplers)]
        if given != here:
            raise ConfigurationError(
                f"the state is of a loader with other parts (demos, sampler, demo_sampler: {given}, here {here})"
            )
        buffers = (self.replay, self.demos)
        for buffer, sampler, own, chosen in zip(
            buffers, self._samplers, (state["replay"], state["demos"]), state["samplers"], strict=True
        ):
            if buffer is not None:
                buffer.load_state_dict(own)
            if buffer is not None and sampler is not None:
                buffer.follow(sampler)
                sampler.load_state_dict(chosen)


def _flat(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {join_name(path): value for path, value in walk(values)}


def _part(drawn: Drawn, rank: int, world: int) -> Drawn:
    low, high = (len(drawn) * number // world for number in (rank, rank + 1))
    weights = None if drawn.weights is None else drawn.weights[low:high]
    return Drawn(drawn.ids[low:high], drawn.samples[low:high], weights)
