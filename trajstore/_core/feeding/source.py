"""Sources of batches: one buffer, or shares of several."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import check_instance, rank_of_ranks, whole
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.buffer.sequences import draw_rows, read_rows
from trajstore._core.columns.fields import nest, unnest
from trajstore._core.feeding.belonging import (
    belonging_of,
    check_batches,
    check_belonging,
    check_rows,
    rows_of,
    rows_state,
)
from trajstore._core.feeding.options import (
    BatchOptions,
    LoaderOptions,
    Replay,
    check_options,
    check_recorded,
    check_sampler,
    share_of_batch,
)
from trajstore._core.feeding.shares import Share, counts_of, parts_of, shares_of
from trajstore._core.sampling.base import NO_TRAJECTORY, Drawn, Unit
from trajstore._core.sampling.selection import Selection, selected
from trajstore._core.sampling.states import check_state
from trajstore.errors import ConfigurationError, EmptyBufferError, SchemaMismatchError, listed, trajectories

logger = logging.getLogger(__name__)

Parts = tuple[Drawn, ...]
"""Rows of a batch, each part drawn from one buffer."""


class Source(ABC):
    """Draws batches of one or several buffers, and reads them later.

    Args:
        shares: the buffers by name, with their samplers.
        batch_size: size of the global batch.
        options: options of a loader that determine a batch.
        unit: unit that its samplers must draw.

    Attributes:
        names: names of the buffers.
        samplers: samplers of the buffers.
        ledgers: ledgers for the rows of the buffers.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    kind: ClassVar[str]
    """What batches are made of, for messages."""

    def __init__(self, shares: Mapping[str, Share], batch_size: int, options: LoaderOptions, unit: Unit) -> None:
        self.names, self._buffers = list(shares), [share.buffer for share in shares.values()]
        self.samplers = [share.sampler for share in shares.values()]
        self.ledgers = [share.ledger for share in shares.values()]
        self._min_sizes = [share.min_size for share in shares.values()]
        for share in shares.values():
            share_of_batch(options, batch_size, share.buffer)  # rejects buffers that ranks would not draw alike from
            check_sampler("sampler", share.sampler, unit)
            if share.ledger is not None:
                check_recorded(share.buffer)
        self._rank, self.batch_size = share_of_batch(options, batch_size, self._buffers[0])
        self._selected = [selected(share.sampler, share.where, share.ids, "sample") for share in shares.values()]
        self._columns = options.get("columns")

    @property
    def closed(self) -> bool:
        """True if a buffer was closed."""
        return any(buffer._closed for buffer in self._buffers)

    @property
    def grows(self) -> bool:
        """True if a buffer may still receive trajectories."""
        return any(buffer._grows for buffer in self._buffers)

    def continue_draws(self) -> None:
        """Continue the generators' draws in this process, see :class:`~trajstore._core.sampling.draws.Draws`."""
        for buffer in self._buffers:
            buffer._sampling.continue_draws()

    def unfilled(self) -> str:
        """Return which buffers have too few trajectories, and columns that an empty one lacks; empty if none.

        Raises:
            EmptyBufferError: one shows a saved point, which gets no more.
            ConfigurationError: the condition for an empty one is invalid, whatever columns there will be.
        """
        few = []
        for name, buffer, least, sampler in zip(
            self.names, self._buffers, self._min_sizes, self._selected, strict=True
        ):
            if not buffer.is_ready(least):
                few.append(f"{name} has {len(buffer)} of {trajectories(least)}")
                if not buffer._grows:
                    raise EmptyBufferError(
                        f"{few[-1]}, and a saved point gets no more; open the store, or lower min_size"
                    )
                if isinstance(buffer, Reader) and not isinstance(buffer, TrajectoryReplayBuffer):
                    few[-1] += " (a reader: it shows later commits only after refresh())"
                if not len(buffer) and isinstance(sampler, Selection) and isinstance(buffer, Reader):
                    few[-1] += buffer._sampling.unknown_column(sampler)
        return ", ".join(few)

    def ready(self) -> bool:
        """Return whether every buffer has its minimum number of trajectories."""
        return not self.unfilled()

    # -- batches ----------------------------------------------------------------------------------

    @abstractmethod
    def draw(self) -> Parts:
        """Choose the rows of the next global batch.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """

    def buffers_of(self, parts: Sequence[Any]) -> Sequence[Replay]:
        """Return the buffer of each part of a batch."""
        return self._buffers

    def revision(self) -> Any:
        """Return a value that changes whenever a trajectory leaves a buffer; of a handle, always 0."""
        return [buffer._sampling.revision() if isinstance(buffer, Reader) else 0 for buffer in self._buffers]

    def is_current(self, drawn: Parts) -> bool:
        """Return whether all rows of a batch can still be drawn; a handle's rows count as they were read."""
        return all(
            not isinstance(buffer, Reader) or buffer._sampling.readable(part).all()
            for buffer, part in zip(self.buffers_of(drawn), drawn, strict=True)
        )

    @abstractmethod
    def mend(self, drawn: Parts) -> Parts | None:
        """Replace a batch's rows of evicted trajectories; None if no rows are left."""

    @abstractmethod
    def part(self, drawn: Parts) -> Parts:
        """Return this rank's part of a global batch."""

    @abstractmethod
    def read(self, drawn: Parts, out: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return this rank's part of a batch.

        Args:
            drawn: rows of the global batch.
            out: tensors to fill, by dotted name; None = fresh ones.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
        """

    @abstractmethod
    def columns(self, drawn: Parts) -> list[dict[str, npt.NDArray[Any]] | None]:
        """Return the rows of this rank's part of a batch for each ledger, by column of ``trajstore.ledger.ROW``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
        """

    @abstractmethod
    def rows(self, drawn: Parts) -> int:
        """Return the number of rows in this rank's part of a batch."""

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics."""
        return {}

    # -- state ------------------------------------------------------------------------------------

    def state_of(self, drawn: Parts) -> Any:
        """Return the rows of a batch as plain containers and tensors."""
        return list(map(rows_state, drawn, self.buffers_of(drawn)))

    def drawn_of(self, state: Any) -> Parts:
        """Return the rows of a :meth:`state_of`."""
        return tuple(map(rows_of, state))

    def check_rows(self, state: Any) -> None:
        """Reject a :meth:`state_of` whose ids refer to other trajectories here.

        Raises:
            ConfigurationError: an id does; names it.
        """
        buffers = self.buffers_of(state)
        if len(state) != len(buffers):
            raise ConfigurationError(f"state: a batch under way is of {len(state)} buffers, here {len(buffers)}")
        for rows, buffer in zip(state, buffers, strict=True):
            check_rows(rows, buffer)

    @property
    def settings(self) -> dict[str, Any]:
        """Values besides the draws that determine the sequence of batches."""
        return {
            "batch_size": self.batch_size,
            "sample_window_size": [buffer.sample_window_size for buffer in self._buffers],
            "selection": [
                sampler.settings if isinstance(sampler, Selection) else {"where": None, "ids": None}
                for sampler in self._selected
            ],
        }

    @abstractmethod
    def left_over(self) -> dict[str, Any]:
        """Return the state of what was drawn and is in no batch yet."""

    @abstractmethod
    def check_left_over(self, state: Mapping[str, Any]) -> None:
        """Reject a :meth:`left_over` of other trajectories.

        Raises:
            ConfigurationError: it is; names one.
        """

    @abstractmethod
    def load_left_over(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`left_over` that was checked."""

    def state_dict(self) -> dict[str, Any]:
        """Return generators and samplers as of the last draw, and the source's identity."""
        return {
            "kind": self.kind,
            "batches": self.settings,
            "of": [belonging_of(buffer) for buffer in self._buffers],
            "buffers": [buffer.state_dict() for buffer in self._buffers],
            "samplers": [None if sampler is None else sampler.state_dict() for sampler in self._selected],
            "left_over": self.left_over(),
        }

    def changed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state relabelled as one of this source's batches."""
        return {**state, "batches": self.settings}

    def check(self, state: Any) -> list[str]:
        """Reject the state of another source; return a sentence for each difference.

        Raises:
            ConfigurationError: it is invalid, or of a source with other parts, batches or trajectories.
        """
        check_state(state, ("kind", "batches", "of", "buffers", "samplers", "left_over"), only=True)
        if state["kind"] != self.kind:
            raise ConfigurationError(f"the state is of a loader of {state['kind']}, this one is of {self.kind}")
        given, here = ([part is not None for part in parts] for parts in (state["samplers"], self._selected))
        if given != here:
            raise ConfigurationError(
                f"the state is of a loader with other samplers or selections (sampler=, where= or ids= given: {given}, "
                f"here {here}); construct the loader with as many"
            )
        check_batches(state["batches"], self.settings)
        if any(len(state[name]) != len(self.names) for name in ("of", "buffers")):
            raise ConfigurationError(f"the state is of another number of buffers than {len(self.names)}")
        self.check_left_over(state["left_over"])
        roles = ["replay buffer"] if len(self.names) == 1 else self.names
        return list(itertools.chain(*map(check_belonging, roles, self._buffers, state["of"])))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` that was checked.

        Raises:
            ConfigurationError: as in :meth:`check`, or the samplers differ.
        """
        self.check(state)  # again: it may be loaded later, perhaps in another process
        parts = zip(self._buffers, self._selected, state["buffers"], state["samplers"], strict=True)
        for buffer, sampler, of_buffer, of_sampler in parts:
            if sampler is not None:
                sampler.follow(buffer)
                sampler.load_state_dict(of_sampler)
            buffer.load_state_dict(of_buffer)
        self.load_left_over(state["left_over"])


_ABSENT: Mapping[str, np.generic] = {
    **dict.fromkeys(("ids", "samples", "names", "uses"), np.int64(0)),
    "weights": np.float32(1),
    "probabilities": np.float64(np.nan),
}
"""Value of each attribute of drawn rows in batches with rows of another buffer that has it."""


def together(parts: Parts) -> Drawn:
    """Return all rows of a batch in its order; only those of the first buffer have ids. See :data:`_ABSENT`."""
    if len(parts) == 1:
        return parts[0]
    others = (
        replace(part, ids=np.full(len(part), NO_TRAJECTORY), names=np.zeros(len(part), np.int64)) for part in parts[1:]
    )
    with_arrays = [(part, part.arrays) for part in (parts[0], *others)]
    filled: dict[str, Any] = {
        name: np.concatenate([here.get(name, np.full(len(part), absent)) for part, here in with_arrays])
        for name, absent in _ABSENT.items()
        if any(name in here for _, here in with_arrays)
    }
    return replace(parts[0], chances=None, **filled)


class BatchSource(Source):
    """Draws transitions of one or several buffers.

    Args:
        replay: buffer, or shares of several by name.
        batch_size: transitions per global batch.
        options: options of :class:`BatchOptions` that determine a batch.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    kind = "transitions"

    def __init__(self, replay: Replay | Mapping[str, Share], batch_size: int, **options: Unpack[BatchOptions]) -> None:
        check_options("ReplayLoader", options, BatchOptions)
        shares = shares_of(replay, options)
        super().__init__(shares, batch_size, options, "sample")
        self._counts = counts_of(whole("batch_size", batch_size, 1), shares)
        if options.get("stores") == "per_rank":
            parts = parts_of(self._counts, rank_of_ranks("rank", options.get("rank", (0, 1))))
            self._counts = [part.stop - part.start for part in parts]
            if not all(self._counts):
                lacking = self.names[self._counts.index(0)]
                raise ConfigurationError(f"batch_size: {batch_size}, too small: a rank's part has no rows of {lacking}")
        self._form = options.get("rows")
        for name, buffer in zip(self.names, self._buffers, strict=True):
            if self._form is not None:
                check_instance(name, buffer, Reader, f"a reader or buffer, since rows={type(self._form).__name__}")
        self._common = options.get("common_columns", False)
        if self._common and len(shares) == 1:
            raise ConfigurationError("common_columns: has no effect on a single buffer")
        self._warned_differing: list[str] = []
        self._warned_few: set[str] = set()
        self._drawn: list[Drawn | None] = [None] * len(shares)
        """Rows drawn for the next batch, after the draw of another buffer failed."""

    @property
    def settings(self) -> dict[str, Any]:
        own = {
            "shares": dict(zip(self.names, self._counts, strict=True)),
            "rows": None if self._form is None else self._form.settings,
        }
        return super().settings | own

    def draw(self) -> Parts:
        """Choose the rows of the next global batch; the first buffer provides the rows that others lack."""
        for place in range(len(self.names) - 1, -1, -1):
            if self._drawn[place] is None:
                others = sum(len(part) for part in self._drawn[1:] if part is not None)
                self._drawn[place] = self._draw(place, self._counts[place] if place else sum(self._counts) - others)
        drawn = tuple(part for part in self._drawn if part is not None)
        self._drawn = [None] * len(drawn)
        return drawn

    def _draw(self, place: int, count: int) -> Drawn:
        name = self.names[place]
        try:
            buffer, sampler = self._buffers[place], self._selected[place]
            if self._form is None:
                drawn = buffer.draw(count, sampler=sampler)
            else:
                drawn = draw_rows(cast(Reader, buffer), self._form, count, sampler)
        except EmptyBufferError as error:
            if len(self.names) == 1:
                raise
            raise type(error)(f"{name}: {error}") from error
        if place and len(drawn) < count and name not in self._warned_few:
            self._warned_few.add(name)
            logger.warning(
                "%s provided %d of the %d transitions of its share of a batch; %s provides the others",
                name,
                len(drawn),
                count,
                self.names[0],
            )
        return drawn

    def mend(self, drawn: Parts) -> Parts | None:
        mended = tuple(self._mended(place, part) for place, part in enumerate(drawn))
        return mended if all(map(len, mended)) else None

    def _mended(self, place: int, drawn: Drawn) -> Drawn:
        left = still_there(self._buffers[place], drawn)
        lacking = len(drawn) - len(left)
        try:
            return Drawn.joined(left, self._draw(place, lacking)) if lacking else left
        except EmptyBufferError:  # the sampler is exhausted, or the buffer was emptied
            return left

    def columns(self, drawn: Parts) -> list[dict[str, npt.NDArray[Any]] | None]:
        steps = 1 if self._form is None else self._form.steps
        return [
            None if ledger is None else columns_of(buffer, part) | {"tokens": np.full(len(part), steps)}
            for buffer, ledger, part in zip(self._buffers, self.ledgers, self.part(drawn), strict=True)
        ]

    def rows(self, drawn: Parts) -> int:
        return sum(map(len, self.part(drawn)))

    def part(self, drawn: Parts) -> Parts:
        """Return this rank's part of a global batch: equally many rows per rank, with its share of each buffer."""
        if self._rank[1] == 1:
            return drawn
        parts = parts_of([len(part) for part in drawn], self._rank)
        return tuple(rows.at(part) for rows, part in zip(drawn, parts, strict=True))

    def read(self, drawn: Parts, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return this rank's part of a batch as a nested dict of tensors ``[n, ...]``.

        Args:
            drawn: rows of the global batch.
            out: tensors to fill, by dotted name, ``[>= n, ...]``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted after it was drawn.
            SchemaMismatchError: the buffers' columns differ.
        """
        part = self.part(drawn)
        if self._common or not all(map(len, part)):
            out = None  # columns are known only after all buffers were read
        read: list[dict[str, torch.Tensor]] = []
        begin = 0
        for buffer, mine, rows in zip(self._buffers, part, drawn, strict=True):
            rest = None if out is None else {name: tensor[begin:] for name, tensor in out.items()}
            read.append(self._rows(buffer, mine, rows, rest))
            begin += len(mine)
        if len(read) == 1:
            return nest(read[0])
        names = self._agreed(read)
        if out is not None:
            return nest({name: out[name][:begin] for name in names})
        return nest({name: torch.cat([values[name] for values in read]) for name in names})

    def _rows(
        self, buffer: Replay, mine: Drawn, whole: Drawn, out: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """Return rows of one buffer by dotted name; for a rank without rows, empty tensors of the same columns."""
        if not len(mine):
            return {name: tensor[:0] for name, tensor in self._rows(buffer, whole.at(slice(1)), whole, None).items()}
        if self._form is None:
            return unnest(buffer.read(mine, columns=self._columns, out=out))
        values = read_rows(cast(Reader, buffer), self._form, mine, self._columns)
        return values if out is None else _copied(values, out)

    def _agreed(self, read: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
        """Return the columns of a batch with rows of several buffers.

        Raises:
            SchemaMismatchError: they differ, and ``common_columns`` was not set.
        """
        kinds: dict[str, list[str]] = {}
        for values, name in itertools.product(read, dict.fromkeys(itertools.chain(*read))):
            kinds.setdefault(name, []).append(_kind(values.get(name), with_dtype=not self._common))
        names = [name for name, of_name in kinds.items() if len({*of_name}) == 1]
        differing = sorted(kinds.keys() - set(names))
        if not differing or (self._common and self._warned_differing == differing):
            return names
        detail = (f"{kind} in {name}" for name, kind in zip(self.names, kinds[differing[0]], strict=True))
        difference = f"{listed(self.names)} differ in {', '.join(differing)} ({differing[0]}: {', '.join(detail)})"
        if not self._common:
            raise SchemaMismatchError(f"{difference}; name the columns to read, or pass common_columns=True")
        self._warned_differing = differing
        logger.warning("%s; batches do not have these columns", difference)
        return names

    # -- state ------------------------------------------------------------------------------------

    def left_over(self) -> dict[str, Any]:
        return {"drawn": list(map(rows_state, self._drawn, self._buffers))}

    def check_left_over(self, state: Mapping[str, Any]) -> None:
        check_state(state, ("drawn",), only=True)
        if len(state["drawn"]) != len(self.names):
            raise ConfigurationError(f"the state is of another number of buffers than {len(self.names)}")
        for rows, buffer in zip(state["drawn"], self._buffers, strict=True):
            if rows is not None:
                check_rows(rows, buffer)

    def load_left_over(self, state: Mapping[str, Any]) -> None:
        self._drawn = [None if rows is None else rows_of(rows) for rows in state["drawn"]]


def _kind(column: torch.Tensor | None, *, with_dtype: bool) -> str:
    """Return the dtype and shape of a column's rows as a text."""
    if column is None:
        return "absent"
    return f"{str(column.dtype).removeprefix('torch.') if with_dtype else ''}{list(column.shape[1:])}"


def _copied(values: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy columns into tensors of as many or more rows.

    Raises:
        ConfigurationError: these are of other columns.
    """
    for name in values.keys() | out.keys():
        here, there = values.get(name), out.get(name)
        if here is None or there is None or here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
            raise ConfigurationError(f"out: column {name} is absent, or of another dtype or shape")
    return {name: out[name][: len(tensor)].copy_(tensor) for name, tensor in values.items()}


def columns_of(buffer: Any, drawn: Drawn) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of drawn rows for a ledger."""
    row, version = buffer._sampling.origins(drawn)
    given = {"weight": drawn.weights, "probability": drawn.probabilities}
    known = {name: values for name, values in given.items() if values is not None}
    return {"trajectory": drawn.ids, "row": row, "version": version, **known}


def still_there(buffer: Replay, drawn: Drawn) -> Drawn:
    """Return the rows whose trajectories are still readable."""
    readable = buffer._sampling.readable(drawn)
    return drawn if readable.all() else drawn.at(readable)
