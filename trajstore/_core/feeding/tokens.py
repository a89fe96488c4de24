"""Sources of token batches: whole agent trajectories, combined into packs of a given size."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import check_instance, whole
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.feeding.belonging import check_rows, rows_of, rows_state
from trajstore._core.feeding.options import Layout, LongTrajectories, Replay, TokenOptions, check_options
from trajstore._core.feeding.packing import Room, lay_out
from trajstore._core.feeding.shares import shares_of
from trajstore._core.feeding.source import Parts, Source, columns_of, still_there
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


class TokenSource(Source):
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

    kind = "token batches"

    def __init__(self, buffer: Reader, tokens: int, **options: Unpack[TokenOptions]) -> None:
        check_options("TokenLoader", options, TokenOptions)
        check_instance(
            "buffer",
            buffer,
            Reader,
            "a reader or buffer, whose mapped files tokens are copied from; for stores of Ray open the path of the run",
        )
        self._buffer = buffer
        self._tokens = tokens = whole("tokens", tokens, 1)
        self._layout: Layout = options.get("layout", "packed")
        self._long: LongTrajectories = options.get("long", "refuse")
        self._pad_id = options.get("pad_id", 0)
        if self._pad_id and self._layout == "packed":
            raise ConfigurationError(f"pad_id: {self._pad_id}, has no effect on packed batches, which have no padding")
        super().__init__(shares_of(buffer, options), options.get("batch_size", 1), options, "trajectory")
        (self._sampler,) = self._selected
        self._waiting, self._lengths = _NONE, np.zeros(0, np.int64)
        """Drawn trajectories that are in no pack yet, and their numbers of tokens."""
        self._skipped = 0

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"tokens": self._tokens, "layout": self._layout, "long": self._long}

    def buffers_of(self, parts: Sequence[Any]) -> Sequence[Replay]:
        return self._buffers * len(parts)

    # -- drawing ----------------------------------------------------------------------------------

    def draw(self) -> Parts:
        """Return the packs of the next global batch as rows; fewer at the very end.

        Raises:
            EmptyBufferError: there is nothing to draw from.
            ConfigurationError: a trajectory exceeds the budget or has no tokens (``long="refuse"``).
        """
        packs: list[Drawn] = []
        try:
            while len(packs) < self.batch_size:
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

    def mend(self, drawn: Parts) -> Parts | None:
        left = tuple(still_there(self._buffer, pack) for pack in drawn)
        return tuple(pack for pack in left if len(pack)) or None

    # -- reading ----------------------------------------------------------------------------------

    def columns(self, drawn: Parts) -> list[dict[str, npt.NDArray[Any]] | None]:
        rows = reduce(_joined, self.part(drawn), drawn[0].at(slice(0)))
        return [columns_of(self._buffer, rows) | {"tokens": self._buffer._sampling.extents(rows.ids)[0]}]

    def rows(self, drawn: Parts) -> int:
        return len(self.part(drawn))

    def part(self, drawn: Parts) -> Parts:
        low, high = (len(drawn) * number // self._rank[1] for number in (self._rank[0], self._rank[0] + 1))
        return drawn[low:high]

    def read(self, drawn: Parts, out: Mapping[str, torch.Tensor] | None = None) -> list[dict[str, Any]]:
        """Return this rank's packs, see :func:`~trajstore._core.feeding.packing.lay_out`; ignores ``out``."""
        packs = []
        for pack in self.part(drawn):
            rows = self._buffer._sampling.token_rows(pack.ids, self._columns)
            try:
                if not self._buffer._sampling.readable(pack).all():
                    raise TrajectoryUnavailableError("other trajectories have the ids of drawn ones since a load")
                packs.append(lay_out(rows, self._layout, self._pad_id, pack))
            finally:
                rows.end()
        return packs

    # -- state ------------------------------------------------------------------------------------

    def left_over(self) -> dict[str, Any]:
        return {
            "waiting": rows_state(self._waiting, self._buffer),
            "waiting_tokens": tensor_of(self._lengths),
            "skipped": self._skipped,
        }

    def check_left_over(self, state: Mapping[str, Any]) -> None:
        check_state(state, ("waiting", "waiting_tokens", "skipped"), only=True)
        whole_in(state, "skipped")
        check_rows(state["waiting"], self._buffer, "what waits for a pack")

    def load_left_over(self, state: Mapping[str, Any]) -> None:
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
