"""Sources of token batches: whole agent trajectories, combined into packs of a given size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import check_instance, whole
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.feeding.belonging import (
    belonging_of,
    check_batches,
    check_belonging,
    check_rows,
    rows_of,
    rows_state,
)
from trajstore._core.feeding.options import (
    Layout,
    LongTrajectories,
    TokenOptions,
    check_options,
    check_recorded,
    selection_of,
    selection_settings,
    share_of_batch,
)
from trajstore._core.feeding.packing import Room, lay_out
from trajstore._core.feeding.source import Source, are_there, columns_of, revision_of, still_there, unfilled
from trajstore._core.sampling.base import Drawn
from trajstore._core.sampling.states import array_in, check_state, tensor_of, whole_in
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, EmptyBufferError, TrajectoryUnavailableError, counted

logger = logging.getLogger(__name__)

_MOST_WAITING = 32
"""Number of drawn trajectories among which a pack is filled."""

_IN_VAIN = 10_000
"""Maximum consecutive skipped trajectories; more are an error."""


_NONE = Drawn(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TokenSource(Source[tuple[Drawn, ...]]):
    """Draws whole trajectories one by one; a global batch is a number of packs.

    Drawn trajectories wait until they fit. A pack takes the oldest waiting one, then every other that still fits, and
    is closed when 32 trajectories wait and none fits. So each drawn trajectory is used once, in almost the
    order of the draws.

    Args:
        buffer: buffer of agent trajectories.
        tokens: maximum tokens of a pack.
        options: options of :class:`TokenOptions` that determine a batch.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(self, buffer: Reader, tokens: int, **options: Unpack[TokenOptions]) -> None:
        check_options("TokenLoader", options, TokenOptions)
        check_instance(
            "buffer",
            buffer,
            Reader,
            "a reader or buffer, whose mapped files tokens are copied from; for stores of Ray open the path of the run",
        )
        self.ledgers = [options.get("ledger")]
        self.samplers = [options.get("sampler")]
        if options.get("ledger") is not None:
            check_recorded(buffer)
        self._buffer = buffer
        self._tokens = tokens = whole("tokens", tokens, 1)
        self._batch_size = options.get("batch_size", 1)
        self._layout: Layout = options.get("layout", "packed")
        self._long: LongTrajectories = options.get("long", "refuse")
        self._pad_id = options.get("pad_id", 0)
        if self._pad_id and self._layout == "packed":
            raise ConfigurationError(f"pad_id: {self._pad_id}, has no effect on packed batches, which have no padding")
        self._rank, self._batch_size = share_of_batch(options, self._batch_size, buffer)
        self._min_size = options.get("min_size", 1)
        self._sampler = selection_of(options, "trajectory")
        self._columns = options.get("columns")
        self._waiting, self._lengths = _NONE, np.zeros(0, np.int64)
        """Drawn trajectories that are in no pack yet, and their numbers of tokens."""
        self._skipped = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "layout": self._layout,
            "batch_size": self._batch_size,
            "long": self._long,
            "sample_window_size": [self._buffer.sample_window_size],
            **selection_settings(self._sampler),
        }

    @property
    def closed(self) -> bool:
        return self._buffer._closed

    @property
    def grows(self) -> bool:
        return self._buffer._grows

    def continue_draws(self) -> None:
        self._buffer._sampling.continue_draws()

    def unfilled(self) -> str:
        return unfilled([("the buffer", self._buffer, self._min_size, self._sampler)])

    # -- drawing ----------------------------------------------------------------------------------

    def draw(self) -> tuple[Drawn, ...]:
        """Return the packs of the next global batch as rows; fewer at the very end.

        Raises:
            EmptyBufferError: there is nothing to draw from.
            ConfigurationError: a trajectory exceeds the budget or has no tokens (``long="refuse"``).
        """
        packs: list[Drawn] = []
        try:
            while len(packs) < self._batch_size:
                packs.append(self._pack())
        except EmptyBufferError:
            if not packs:
                raise
        return tuple(packs)

    def _pack(self) -> Drawn:
        room = Room(self._tokens, self._layout)
        pack = _NONE
        exhausted = False
        while True:
            fits = np.array([room.take(length) for length in self._lengths.tolist()], np.bool_)
            # The buffer of the first rows: later rows have names, and those without names are drawn again.
            first = pack if len(pack) else self._waiting
            pack = replace(_joined(pack, self._waiting.at(fits)), buffer=first.buffer)
            self._waiting, self._lengths = self._waiting.at(~fits), self._lengths[~fits]
            if room.full or len(self._waiting) >= _MOST_WAITING or exhausted:
                return pack
            try:
                self._draw_ahead()
            except EmptyBufferError:  # for example the end of the last epoch
                if not len(pack) and not len(self._waiting):
                    raise
                exhausted = True

    def _draw_ahead(self) -> None:
        """Draw until ``_MOST_WAITING`` trajectories wait."""
        in_vain = 0
        while (still_wanted := _MOST_WAITING - len(self._waiting)) > 0:
            drawn = self._buffer.draw(min(still_wanted, max(1, len(self._buffer))), sampler=self._sampler)
            drawn = still_there(self._buffer, drawn)
            try:
                lengths = self._buffer._sampling.extents(drawn.ids)[0]
            except TrajectoryUnavailableError:  # just evicted: draw others
                continue
            fits = self._wait(drawn, lengths)
            in_vain = 0 if fits else in_vain + len(drawn)
            if in_vain >= _IN_VAIN:
                raise ConfigurationError(
                    f"tokens: {self._tokens}, but all of {in_vain} drawn trajectories are longer or have no tokens"
                )

    def _wait(self, drawn: Drawn, lengths: IntArray) -> bool:
        """Let the trajectories that may go into a pack wait for one; return whether any may."""
        rows = zip(drawn.ids.tolist(), lengths.tolist(), strict=True)
        good = np.array([self._is_fit(number, length) for number, length in rows], np.bool_)
        if self._waiting.buffer != drawn.buffer:  # another store was loaded
            here = self._buffer._sampling.readable(self._waiting)
            self._waiting, self._lengths = self._waiting.at(here), self._lengths[here]
        self._waiting = _joined(self._waiting, drawn.at(good))
        self._lengths = np.concatenate([self._lengths, lengths[good]])
        return bool(good.any())

    def _is_fit(self, number: int, length: int) -> bool:
        """Return whether a trajectory may go into a pack.

        Raises:
            ConfigurationError: it may not, and ``long`` is not ``"skip"``.
        """
        if 0 < length <= self._tokens or (length and self._long == "alone"):
            return True
        problem = f"has {counted(length, 'token')}, the budget is {self._tokens}" if length else "has no tokens"
        if self._long != "skip":
            more, alone = ("allow more tokens, ", " or long='alone'") if length else ("", "")
            raise ConfigurationError(
                f"trajectory {shown_id(number)}: {problem}; {more}evict it, or pass long='skip'{alone}"
            )
        if not self._skipped:
            logger.warning("trajectory %s: %s; it is skipped, as are others like it", shown_id(number), problem)
        self._skipped += 1
        return False

    def revision(self) -> Any:
        return revision_of(self._buffer)

    def is_current(self, drawn: tuple[Drawn, ...]) -> bool:
        return all(are_there(self._buffer, pack) for pack in drawn)

    def mend(self, drawn: tuple[Drawn, ...]) -> tuple[Drawn, ...] | None:
        left = tuple(still_there(self._buffer, pack) for pack in drawn)
        return tuple(pack for pack in left if len(pack)) or None

    # -- reading ----------------------------------------------------------------------------------

    def columns(self, drawn: tuple[Drawn, ...]) -> list[dict[str, npt.NDArray[Any]] | None]:
        rows = reduce(_joined, self._part(drawn), drawn[0].at(slice(0)))
        return [columns_of(self._buffer, rows) | {"tokens": self._buffer._sampling.extents(rows.ids)[0]}]

    def rows(self, drawn: tuple[Drawn, ...]) -> int:
        return len(self._part(drawn))

    def size(self, drawn: tuple[Drawn, ...]) -> int:
        return sum(map(len, drawn))

    def _part(self, drawn: tuple[Drawn, ...]) -> tuple[Drawn, ...]:
        low, high = (len(drawn) * number // self._rank[1] for number in (self._rank[0], self._rank[0] + 1))
        return drawn[low:high]

    def read(self, drawn: tuple[Drawn, ...], out: Mapping[str, torch.Tensor] | None = None) -> list[dict[str, Any]]:
        """Return this rank's packs, see :func:`~trajstore._core.feeding.packing.lay_out`; ignores ``out``."""
        packs = []
        for pack in self._part(drawn):
            rows = self._buffer._sampling.token_rows(pack.ids, self._columns)
            try:
                if not self._buffer._sampling.readable(pack).all():
                    raise TrajectoryUnavailableError("other trajectories have the ids of drawn ones since a load")
                packs.append(lay_out(rows, self._layout, self._pad_id, pack))
            finally:
                rows.end()
        return packs

    # -- state ------------------------------------------------------------------------------------

    def state_of(self, drawn: tuple[Drawn, ...]) -> Any:
        return [rows_state(pack, self._buffer) for pack in drawn]

    def drawn_of(self, state: Any) -> tuple[Drawn, ...]:
        return tuple(map(rows_of, state))

    def check_rows(self, state: Any) -> None:
        for pack in state:
            check_rows(pack, self._buffer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "of": belonging_of(self._buffer),
            "buffer": self._buffer.state_dict(),
            "sampler": None if self._sampler is None else self._sampler.state_dict(),
            "waiting": rows_state(self._waiting, self._buffer),
            "waiting_tokens": tensor_of(self._lengths),
            "skipped": self._skipped,
            "batches": self.settings,
        }

    def check(self, state: Any) -> list[str]:
        if isinstance(state, Mapping) and "samplers" in state:
            raise ConfigurationError("the state is of a loader of transitions; this one's batches are of tokens")
        check_state(state, ("buffer", "sampler", "waiting", "waiting_tokens", "skipped", "batches", "of"), only=True)
        whole_in(state, "skipped")
        if (state["sampler"] is None) != (self._sampler is None):
            raise ConfigurationError(
                f"the state is of a loader with {'no' if state['sampler'] is None else 'a'} sampler, where= or ids=; "
                f"here is {'none' if self._sampler is None else 'one'}"
            )
        check_batches(state["batches"], self.settings)
        check_rows(state["waiting"], self._buffer, "what waits for a pack")
        return check_belonging("buffer", self._buffer, state["of"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)  # again: it may be loaded later, perhaps in another process
        if self._sampler is not None:
            self._sampler.follow(self._buffer)
            self._sampler.load_state_dict(state["sampler"])
        self._buffer.load_state_dict(state["buffer"])
        self._skipped = int(state["skipped"])
        waiting = rows_of(state["waiting"])
        self._waiting, self._lengths = _NONE, np.zeros(0, np.int64)
        self._wait(waiting, array_in(state, "waiting_tokens", np.int64, len(waiting)))

    def figures(self) -> dict[str, float]:
        """Return ``skipped_trajectories`` (``long="skip"``) and ``waiting_trajectories`` (drawn, in no pack yet)."""
        return {"skipped_trajectories": float(self._skipped), "waiting_trajectories": float(len(self._waiting))}


def _joined(first: Drawn, second: Drawn) -> Drawn:
    """Concatenate rows; an empty part has no say in which attributes there are."""
    return Drawn.joined(first, second) if len(first) and len(second) else (first if len(first) else second)
