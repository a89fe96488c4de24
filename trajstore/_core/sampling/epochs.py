"""Uniform draws without replacement: each epoch has every row once, in a new random order.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from trajstore._core.base.arguments import one_of, whole, whole_or_none
from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler, Unit
from trajstore._core.sampling.permutation import permuted
from trajstore._core.sampling.roster import Growing, Roster, searched
from trajstore._core.sampling.states import (
    OF_WHOM,
    array_in,
    check_names,
    check_sampler_state,
    described,
    ids_in,
    tell_gone,
    whole_in,
)
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, EmptyBufferError, EpochsEndedError

_KEY_BITS = 62


class EpochSampler(Sampler):
    """Draws every row once per epoch, in an order given by one random key.

    An epoch covers the window's rows at its beginning. Rows added during an epoch belong to the next one; evicted rows
    are skipped and counted. A batch may span two epochs.

    Args:
        unit: unit of the draws.
        epochs: number of epochs; the batch that ends the last one may be shorter, and later draws raise
            :class:`EpochsEndedError`. None = no end.
    """

    remembers = True

    def __init__(self, *, unit: Unit = "sample", epochs: int | None = None) -> None:
        one_of("unit", unit, get_args(Unit))
        self.unit = unit
        self._epochs = whole_or_none("epochs", epochs, 1)
        self._roster = Roster()
        self._sizes = Growing(np.int64)
        self._ids: IntArray = np.zeros(0, np.int64)
        self._ends: IntArray = np.zeros(0, np.int64)
        self._names: IntArray = np.zeros(0, np.int64)
        self._key = 0
        self._place = 0
        self._begun = 0
        self._passed_over = 0

    @property
    def ids(self) -> IntArray:
        return self._roster.live_ids

    def added(self, additions: Additions) -> None:
        self._roster.add(additions.ids, np.ones(len(additions), np.int64), additions.names)
        self._sizes.append(additions.samples if self.unit == "sample" else 1, len(additions))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        self._roster.discard(ids)
        if self._roster.is_sparse():
            self._sizes.keep(self._roster.compact()[0])

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        ids: list[IntArray] = []
        samples: list[IntArray] = []
        still_wanted = count = whole("count", count, 1)
        while still_wanted > 0:
            total = int(self._ends[-1]) if len(self._ends) else 0
            if self._place == total:
                if self._epochs is not None and self._begun == self._epochs:
                    if still_wanted < count:
                        break
                    raise EpochsEndedError(f"all {self._epochs} epochs have been drawn")
                self._begin(generator, first)
                continue
            places = np.arange(self._place, min(total, self._place + still_wanted))
            self._place += len(places)
            rows = permuted(places, total, self._key)
            entries = searched(self._ends, rows, "right")
            of, here, then = self._ids[entries], self._roster.find(self._ids[entries]), self._names[entries]
            alive = here >= 0
            now = self._roster.names[here[alive]]  # a changed name means another store with the same id was loaded
            alive[alive] = (now == then[alive]) | (now == 0) | (then[alive] == 0)
            self._passed_over += int(np.count_nonzero(~alive))
            of, entries, rows = of[alive], entries[alive], rows[alive]
            within = rows - np.where(entries > 0, self._ends[entries - 1], 0)
            good = slice(None) if fits is None else fits(of, within)
            ids.append(of[good])
            samples.append(within[good])
            still_wanted -= len(ids[-1])
        return Drawn(np.concatenate(ids), np.concatenate(samples))

    def _begin(self, generator: torch.Generator, first: int | None) -> None:
        entries = np.flatnonzero(self._roster.alive)
        if first is not None:
            oldest = self._roster.find(np.array([first]))[0]
            entries = entries[entries >= oldest]
        sizes = self._sizes.values[entries]
        if not sizes.sum():
            raise EmptyBufferError("cannot sample from an empty buffer")
        self._ids, self._ends = self._roster.ids[entries].copy(), np.cumsum(sizes)
        self._names = self._roster.names[entries].copy()
        self._key = int(torch.randint(0, 1 << _KEY_BITS, (), generator=generator))
        self._place = 0
        self._begun += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            OF_WHOM: self._described(),
            "ids": torch.from_numpy(self._ids.copy()),
            "names": torch.from_numpy(self._names.copy()),
            "ends": torch.from_numpy(self._ends.copy()),
            "key": self._key,
            "place": self._place,
            "epoch": self._begun,
            "passed_over": self._passed_over,
        }

    def _described(self) -> dict[str, Any]:
        return described("epochs", {"unit": self.unit}, {"epochs": self._epochs})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_sampler_state(state, self._described(), ("ids", "ends", "key", "place", "epoch", "passed_over"))
        ids, names = ids_in(state)
        ids = self._roster.ids_here(ids, names)
        ends = array_in(state, "ends", np.int64, len(ids), least=0)
        if np.any(np.diff(ends, prepend=0) < 0):
            raise ConfigurationError("state: ends: they must not descend")
        entries = self._roster.find(ids)
        check_names("an epoch", ids, names, self._roster.names_at(ids))
        alive = entries >= 0
        other = alive & (np.diff(ends, prepend=0) != self._sizes.values[entries] if len(self._sizes) else alive)
        if other.any():
            raise ConfigurationError(
                f"state: ends: of trajectory {shown_id(int(ids[other][0]))} it has another number of rows than in "
                "the buffer"
            )
        place = whole_in(state, "place", most=int(ends[-1]) if len(ends) else 0)
        key, epoch = whole_in(state, "key", most=(1 << _KEY_BITS) - 1), whole_in(state, "epoch")
        passed_over = whole_in(state, "passed_over")
        if not alive.any():
            tell_gone("an epoch", ids, self._roster.live)
        self._ids, self._ends, self._names = ids, ends, names
        self._key, self._place, self._begun, self._passed_over = key, place, epoch, passed_over

    def figures(self) -> dict[str, float]:
        total = int(self._ends[-1]) if len(self._ends) else 0
        return {
            "epoch": float(self._begun),
            "epoch_done": self._place / total if total else 0.0,
            "passed_over_rows": float(self._passed_over),
        }
