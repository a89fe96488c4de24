"""Sources of batches: a replay buffer, optionally with a buffer of demonstrations."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.columns.fields import nest, unnest
from trajstore.core.feeding.belonging import (
    belonging_of,
    check_batches,
    check_belonging,
    check_rows,
    rows_of,
    rows_state,
)
from trajstore.core.feeding.options import (
    BatchOptions,
    Replay,
    check_options,
    check_recorded,
    check_replay,
    check_sampler,
    selection_of,
    share_of_batch,
    told_selection,
)
from trajstore.core.sampling.base import NO_TRAJECTORY, Drawn, Sampler
from trajstore.core.sampling.states import check_state
from trajstore.errors import ConfigurationError, EmptyBufferError, SchemaMismatchError

if TYPE_CHECKING:
    from trajstore.core.buffer.reader import Reader

logger = logging.getLogger(__name__)

D = TypeVar("D")


class Source(ABC, Generic[D]):
    """Draws batches and reads them later. ``D`` describes the rows of a batch."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True if a buffer was closed."""

    @property
    @abstractmethod
    def grows(self) -> bool:
        """True if a buffer may still receive trajectories."""

    @abstractmethod
    def continue_draws(self) -> None:
        """Continue the generators' draws in this process, see :class:`~trajstore.core.sampling.draws.Draws`."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether every buffer has its minimum number of trajectories."""

    @abstractmethod
    def draw(self) -> D:
        """Choose the rows of the next global batch.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """

    @abstractmethod
    def mend(self, drawn: D) -> D | None:
        """Replace a batch's rows of evicted trajectories; None if no rows are left."""

    @abstractmethod
    def read(self, drawn: D, out: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return this rank's part of a batch.

        Args:
            drawn: rows of the global batch.
            out: tensors to fill, by dotted name; None = fresh ones.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
        """

    @abstractmethod
    def columns(self, drawn: D) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of this rank's part of a batch for a ledger, by column of ``trajstore.ledger.ROW``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
        """

    @abstractmethod
    def rows(self, drawn: D) -> int:
        """Return the number of rows in this rank's part of a batch."""

    @abstractmethod
    def size(self, drawn: D) -> int:
        """Return the number of rows of the buffer in a global batch, without demonstrations."""

    @abstractmethod
    def state_of(self, drawn: D) -> Any:
        """Return the rows of a batch as plain containers and tensors."""

    @abstractmethod
    def drawn_of(self, state: Any) -> D:
        """Return the rows of a :meth:`state_of`."""

    @abstractmethod
    def check_rows(self, state: Any) -> None:
        """Reject a :meth:`state_of` whose ids refer to other trajectories here.

        Raises:
            ConfigurationError: an id does; names it.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return generators and samplers as of the last draw, and the source's identity."""

    @abstractmethod
    def check(self, state: Any) -> list[str]:
        """Reject the state of another source; return a sentence for each difference.

        Raises:
            ConfigurationError: it is invalid, or of a source with other parts, batches or trajectories.
        """

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Values besides the draws that determine the sequence of batches."""

    def changed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state relabelled as one of this source's batches."""
        return {**state, "batches": self.settings}

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` that was checked.

        Raises:
            ConfigurationError: as in :meth:`check`, or the samplers differ.
        """

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics."""
        return {}


_ABSENT: Mapping[str, np.generic] = {
    **dict.fromkeys(("ids", "samples", "names", "uses"), np.int64(0)),
    "weights": np.float32(1),
    "probabilities": np.float64(np.nan),
}
"""Value of each attribute of drawn rows in batches with rows of another buffer that has it."""


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """Rows of a batch: of the replay buffer, then of the demonstrations."""

    replay: Drawn
    demos: Drawn | None = None

    def __len__(self) -> int:
        return len(self.replay) + (0 if self.demos is None else len(self.demos))

    @property
    def together(self) -> Drawn:
        """All rows, in the order of the batch; demonstrations have no id. :data:`_ABSENT` replaces absent values."""
        if self.demos is None:
            return self.replay
        unnamed = replace(
            self.demos, ids=np.full(len(self.demos), NO_TRAJECTORY), names=np.zeros(len(self.demos), np.int64)
        )
        parts = [(part, part.arrays) for part in (self.replay, unnamed)]
        filled: dict[str, Any] = {
            name: np.concatenate([here.get(name, np.full(len(part), absent)) for part, here in parts])
            for name, absent in _ABSENT.items()
            if any(name in here for _, here in parts)
        }
        return replace(self.replay, **filled)


class BatchSource(Source[DrawnBatch]):
    """Draws transitions.

    Args:
        replay: buffer of rollouts.
        batch_size: transitions per global batch.
        options: options of :class:`BatchOptions` that determine a batch.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(self, replay: Replay, batch_size: int, **options: Unpack[BatchOptions]) -> None:
        check_options("ReplayLoader", options, BatchOptions)
        check_replay("replay", replay)
        demos = options.get("demos")
        share = 0.5 if options.get("demo_share") is None else options["demo_share"]
        if demos is not None and not 0 < share < 1:
            raise ConfigurationError(f"demo_share: {share}, must be between 0 and 1")
        for name in ("demo_sampler", "demo_share", "min_demo_size", "common_columns"):
            value = options.get(name)
            if demos is None and value is not None and value is not False:
                raise ConfigurationError(f"{name}: has no effect without demos")
        if options.get("ledger") is not None:
            check_recorded(replay)
            if demos is not None:
                raise ConfigurationError("ledger: has no place for the rows of demos; use a loader without demos")
        if demos is not None:
            share_of_batch(options, batch_size, demos)  # rejects options that ranks would not draw alike from
        self._rank, batch_size = share_of_batch(options, batch_size, replay)
        self.replay, self.demos = replay, demos
        self.batch_size = batch_size
        self._demo_count = 0 if demos is None else int(batch_size * share)
        if demos is not None and not 0 < self._demo_count < batch_size:
            raise ConfigurationError(
                f"demo_share: {share} of {batch_size} transitions leaves one of both buffers without any"
            )
        min_demos = 1 if options.get("min_demo_size") is None else options["min_demo_size"]
        self._needed = options.get("min_size", 1), min_demos
        check_sampler("demo_sampler", options.get("demo_sampler"), "sample")
        self._samplers = selection_of(options, "sample"), options.get("demo_sampler")
        self._columns = options.get("columns")
        self._common = options.get("common_columns", False)
        self._told_differing: list[str] = []
        self._told_few = False
        self._drawn_demos: Drawn | None = None

    @property
    def settings(self) -> dict[str, Any]:
        windows = [None if buffer is None else buffer.sample_window_size for buffer in (self.replay, self.demos)]
        sizes = {"batch_size": self.batch_size, "demonstrations": self._demo_count, "sample_window_size": windows}
        return {**sizes, **told_selection(self._samplers[0])}

    @property
    def closed(self) -> bool:
        return self.replay.closed or (self.demos is not None and self.demos.closed)

    @property
    def grows(self) -> bool:
        return self.replay.grows or (self.demos is not None and self.demos.grows)

    def continue_draws(self) -> None:
        for buffer in (self.replay, self.demos):
            if buffer is not None:
                buffer.sampling.continue_draws()

    def ready(self) -> bool:
        return self.replay.is_ready(self._needed[0]) and (self.demos is None or self.demos.is_ready(self._needed[1]))

    def draw(self) -> DrawnBatch:
        if self.demos is None:
            return DrawnBatch(self.replay.draw(self.batch_size, sampler=self._samplers[0]))
        demos = self._drawn_demos
        if demos is None:
            demos = self.demos.draw(self._demo_count, sampler=self._samplers[1])
        if len(demos) < self._demo_count and not self._told_few:
            self._told_few = True
            logger.warning(
                "demonstrations provided %d of the %d transitions of their share of a batch; the replay buffer "
                "provides the others",
                len(demos),
                self._demo_count,
            )
        self._drawn_demos = demos  # the next draw uses them if the replay draw fails
        batch = DrawnBatch(self.replay.draw(self.batch_size - len(demos), sampler=self._samplers[0]), demos)
        self._drawn_demos = None
        return batch

    def mend(self, drawn: DrawnBatch) -> DrawnBatch | None:
        replay = self._mended(self.replay, drawn.replay, self._samplers[0])
        demos = drawn.demos
        if self.demos is not None and demos is not None:
            demos = self._mended(self.demos, demos, self._samplers[1])
        return DrawnBatch(replay, demos) if len(replay) and (demos is None or len(demos)) else None

    def _mended(self, buffer: Replay, drawn: Drawn, sampler: Sampler | None) -> Drawn:
        left = still_there(buffer, drawn)
        lacking = len(drawn) - len(left)
        try:
            return Drawn.joined(left, buffer.draw(lacking, sampler=sampler)) if lacking else left
        except EmptyBufferError:  # the sampler is exhausted, or the buffer was emptied
            return left

    def columns(self, drawn: DrawnBatch) -> dict[str, npt.NDArray[Any]]:
        part = self.part(drawn).replay
        return columns_of(cast("Reader", self.replay), part) | {"tokens": np.ones(len(part), np.int32)}

    def rows(self, drawn: DrawnBatch) -> int:
        return len(self.part(drawn))

    def size(self, drawn: DrawnBatch) -> int:
        return len(drawn.replay)

    def part(self, drawn: DrawnBatch) -> DrawnBatch:
        """Return this rank's part of a global batch: equally many rows per rank, with its share of both buffers."""
        if self._rank[1] == 1:
            return drawn
        low, high = (len(drawn) * number // self._rank[1] for number in (self._rank[0], self._rank[0] + 1))
        if drawn.demos is None:
            return DrawnBatch(drawn.replay.at(slice(low, high)))
        # One order of both buffers' rows, each evenly spread over it.
        places = [(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in (drawn.replay, drawn.demos)]
        order = np.argsort(np.concatenate(places), kind="stable")
        first, last = (int(np.count_nonzero(order[:end] < len(drawn.replay))) for end in (low, high))
        return DrawnBatch(drawn.replay.at(slice(first, last)), drawn.demos.at(slice(low - first, high - last)))

    def read(self, drawn: DrawnBatch, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return this rank's part of a batch as a nested dict of tensors ``[n, ...]``.

        Args:
            drawn: rows of the global batch.
            out: tensors to fill, by dotted name, ``[>= n, ...]``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
            SchemaMismatchError: the buffers' columns differ.
        """
        part = self.part(drawn)
        if self.demos is None or drawn.demos is None or part.demos is None:
            return nest(self._rows(self.replay, part.replay, drawn.replay, out))
        count = len(part.replay)
        if self._common or not count or not len(part.demos):
            out = None  # columns are known only after reading both
        rest = None if out is None else {name: tensor[count:] for name, tensor in out.items()}
        first = self._rows(self.replay, part.replay, drawn.replay, out)
        second = self._rows(self.demos, part.demos, drawn.demos, rest)
        names = self._agreed(first, second)
        if out is not None:
            return nest({name: out[name][: len(part)] for name in names})
        return nest({name: torch.cat([first[name], second[name]]) for name in names})

    def _rows(
        self, buffer: Replay, mine: Drawn, whole: Drawn, out: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """Return rows of one buffer by dotted name; for a rank without rows, empty tensors of the same columns."""
        if len(mine):
            return unnest(buffer.read(mine, columns=self._columns, out=out))
        row = buffer.read(whole.at(slice(1)), columns=self._columns)
        return {name: tensor[:0] for name, tensor in unnest(row).items()}

    def _agreed(self, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the columns of a batch with rows of both buffers.

        Raises:
            SchemaMismatchError: they differ, and ``common_columns`` was not set.
        """
        both = [name for name in first if name in second and first[name].shape[1:] == second[name].shape[1:]]
        names = both if self._common else [name for name in both if first[name].dtype == second[name].dtype]
        differing = sorted((first.keys() | second.keys()) - set(names))
        if not differing or (self._common and self._told_differing == differing):
            return names
        difference = f"replay and demonstrations differ in {', '.join(differing)} (absent, or another dtype or shape)"
        if not self._common:
            raise SchemaMismatchError(f"{difference}; name the columns to read, or pass common_columns=True")
        self._told_differing = differing
        logger.warning("%s; batches do not have these columns", difference)
        return names

    # -- state ------------------------------------------------------------------------------------

    def state_of(self, drawn: DrawnBatch) -> Any:
        return [rows_state(drawn.replay, self.replay), rows_state(drawn.demos, self.demos)]

    def drawn_of(self, state: Any) -> DrawnBatch:
        return DrawnBatch(rows_of(state[0]), None if state[1] is None else rows_of(state[1]))

    def check_rows(self, state: Any) -> None:
        for rows, buffer in zip(state, (self.replay, self.demos), strict=True):
            if rows is not None and buffer is not None:
                check_rows(rows, buffer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.settings,
            "of": [belonging_of(self.replay), belonging_of(self.demos)],
            "replay": self.replay.state_dict(),
            "demos": None if self.demos is None else self.demos.state_dict(),
            "drawn_demos": rows_state(self._drawn_demos, self.demos),
            "samplers": [None if sampler is None else sampler.state_dict() for sampler in self._samplers],
        }

    def check(self, state: Any) -> list[str]:
        if isinstance(state, Mapping) and "waiting" in state:
            raise ConfigurationError("the state is of a loader of token batches; this one's batches are transitions")
        check_state(state, ("batches", "of", "replay", "demos", "samplers"))
        check_batches(state["batches"], self.settings)
        given = [part is not None for part in (state["demos"], *state["samplers"])]
        here = [part is not None for part in (self.demos, *self._samplers)]
        if given != here:
            raise ConfigurationError(
                f"the state is of a loader with other parts (demos, sampler, demo_sampler: {given}, here {here})"
            )
        if state.get("drawn_demos") is not None and self.demos is not None:
            check_rows(state["drawn_demos"], self.demos)
        differences = check_belonging("replay buffer", self.replay, state["of"][0])
        return (
            differences
            if self.demos is None
            else differences + check_belonging("demonstrations", self.demos, state["of"][1])
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)  # again: it may be loaded later, perhaps in another process
        drawn = state.get("drawn_demos")
        self._drawn_demos = None if drawn is None else rows_of(drawn)
        buffers = (self.replay, self.demos)
        for buffer, sampler, of_buffer, chosen in zip(
            buffers, self._samplers, (state["replay"], state["demos"]), state["samplers"], strict=True
        ):
            if buffer is not None and sampler is not None:
                buffer.follow(sampler)
                sampler.load_state_dict(chosen)
            if buffer is not None:
                buffer.load_state_dict(of_buffer)


def columns_of(buffer: Reader, drawn: Drawn) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of drawn rows for a ledger."""
    row, version = buffer.sampling.origins(drawn)
    given = {"weight": drawn.weights, "probability": drawn.probabilities}
    known = {name: values for name, values in given.items() if values is not None}
    return {"trajectory": drawn.ids, "row": row, "version": version, **known}


def still_there(buffer: Replay, drawn: Drawn) -> Drawn:
    """Return the rows whose trajectories are still readable."""
    readable = buffer.sampling.readable(drawn)
    return drawn if readable.all() else drawn.at(readable)
