"""A sampler of the trajectories that match a condition or are in a list of ids.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from trajstore._core.base.arguments import check_kind
from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler, Unit
from trajstore._core.sampling.weighted import WeightedSampler
from trajstore._core.store.run_ids import id_from, shown_id
from trajstore.errors import ConfigurationError, EmptyBufferError, counted, listed, trajectories

logger = logging.getLogger(__name__)

_KEPT = 8
"""Selections of uniform draws that a buffer keeps."""


class Selection(Sampler):
    """Lets a sampler draw only selected trajectories. The buffer updates the selection before each draw.

    Args:
        inner: the sampler; only the selected trajectories are added to it.
        where: condition on facts, as for ``query().where``; None = all.
        ids: sorted ids; None = all.
    """

    def __init__(self, inner: Sampler, where: str | None, ids: IntArray | None) -> None:
        self.inner, self.where, self.only = inner, where, ids
        self.unit, self.needs_tasks, self.remembers = inner.unit, inner.needs_tasks, inner.remembers
        self.in_groups = inner.in_groups
        self.seen: object = None
        """The facts for which the condition was evaluated last."""
        none = np.zeros(0, np.int64)
        self._all = Additions(none, none, none, [] if self.needs_tasks else None, none)
        self._matching = np.zeros(0, np.int64) if ids is None else ids
        self._applied: IntArray | None = None
        self._absent_told = False

    @property
    def settings(self) -> dict[str, Any]:
        """The condition and a digest of the ids, for the state of a loader."""
        return {"where": self.where, "ids": None if self.only is None else sha256(self.only.tobytes()).hexdigest()[:16]}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None}

    def match(self, ids: IntArray, seen: object) -> None:
        """Replace the ids that match the condition; applied at the next draw.

        Args:
            ids: of matching trajectories.
            seen: the facts for which the condition was evaluated.
        """
        self._matching = np.sort(ids) if self.only is None else np.intersect1d(ids, self.only)
        self.seen = seen

    @property
    def ids(self) -> IntArray:
        return self._all.ids

    def added(self, additions: Additions) -> None:
        self._all = Additions.joined([self._all, additions])
        self._applied = None

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        self._all = self._all.at(np.flatnonzero(~np.isin(self._all.ids, ids)))
        self._applied = None

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        self.apply()
        ids = self._all.ids
        window = ids if first is None else ids[int(np.flatnonzero(ids == first)[0]) :]
        inside = window[np.isin(window, self._matching)]
        if not len(inside):
            raise self._empty()
        first = None if first is None else int(inside[0])
        return self.inner.draw(count, generator, first, **({} if fits is None else {"fits": fits}))

    def apply(self) -> None:
        """Add trajectories that match now to the inner sampler, in the order of all; evict those that do not."""
        matching = self._matching
        if self._applied is matching:
            return
        if self.only is not None and not self._absent_told and len(absent := np.setdiff1d(self.only, self._all.ids)):
            self._absent_told = True
            logger.warning("ids: %d of %d are not here: %s", len(absent), len(self.only), listed(map(shown_id, absent)))
        chosen = np.flatnonzero(np.isin(self._all.ids, matching))

        def add(same: int) -> None:
            if same < len(chosen):
                self.inner.added(self._all.at(chosen[same:]))

        rearrange(self.inner, self._all.ids[chosen], add)
        self._applied = matching

    def _empty(self) -> EmptyBufferError:
        parts = [] if self.where is None else [f"match where={self.where!r}"]
        parts += [] if self.only is None else [f"are among {counted(len(self.only), 'id')}"]
        return EmptyBufferError(f"cannot sample: of {trajectories(len(self._all))}, none {' and '.join(parts)}")

    def used(self, ids: IntArray, uses: IntArray) -> None:
        self.apply()
        mine = np.isin(ids, self.inner.ids)
        self.inner.used(ids[mine], uses[mine])

    def reached(self, version: int) -> None:
        self.inner.reached(version)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.apply()
        self.inner.load_state_dict(state)

    def figures(self) -> dict[str, float]:
        return self.inner.figures()


def first_difference(known: IntArray, wanted: IntArray) -> int:
    """Return the first place of ``wanted`` that differs from the ids of a sampler without those that are not wanted."""
    stay = known[np.isin(known, wanted)]
    moved = np.flatnonzero(stay != wanted[: len(stay)])
    return int(moved[0]) if len(moved) else len(stay)


def rearrange(sampler: Sampler, wanted: IntArray, add: Callable[[int], None]) -> None:
    """Add and evict trajectories so that a sampler has the wanted ids in their order; its state is kept.

    Args:
        sampler: the sampler.
        wanted: the ids.
        add: adds the wanted trajectories from a place on.
    """
    known = sampler.ids
    sampler.evicted(np.setdiff1d(known, wanted))
    stay = known[np.isin(known, wanted)]
    same = first_difference(known, wanted)
    state = sampler.state_dict() if same < len(stay) else None
    sampler.evicted(stay[same:])
    add(same)
    if state is not None:
        sampler.load_state_dict(state)


def selected(
    sampler: Sampler | None, where: str | None, ids: Any, unit: Unit, uniform: dict[Any, Selection] | None = None
) -> Sampler | None:
    """Return the sampler for draws with these arguments: a selection, or the sampler itself if both are None.

    Args:
        sampler: the caller's; with a selection, it has the same one for its life. None draws uniformly.
        where: condition on facts.
        ids: ids of the trajectories to draw from.
        unit: unit of uniform draws.
        uniform: keeps the selections of uniform draws for later calls.

    Raises:
        ConfigurationError: the sampler has drawn with another selection, or an argument is invalid.
    """
    check_kind("sampler", sampler, Sampler, "a sampler of trajstore._core.sampling (sampler_of makes one of a dict)")
    if where is None and ids is None:
        if sampler is not None and sampler.selection is not None:
            raise ConfigurationError(
                "sampler: it draws with where= or ids=; pass the same ones, or make a sampler for each selection"
            )
        return sampler
    only = None if ids is None else np.unique(np.array([id_from("ids", number) for number in _listed(ids)], np.int64))
    if where is not None and not isinstance(where, str):
        raise ConfigurationError(f'where: {where!r}, must be an SQL expression, such as "outcome > 0"')
    if sampler is None:
        key = where, None if only is None else only.tobytes(), unit
        uniform = {} if uniform is None else uniform
        uniform[key] = made = uniform.pop(key, None) or Selection(WeightedSampler(unit=unit), where, only)
        if len(uniform) > _KEPT:
            del uniform[next(iter(uniform))]
        return made
    inner, selection = sampler, sampler.selection
    if selection is None and len(inner.ids):
        raise ConfigurationError(
            "sampler: it follows or has drawn all trajectories, without where= and ids=; make a sampler for each "
            "selection, and give follow() what its draws get"
        )
    if isinstance(selection, Selection):
        if selection.settings == Selection(inner, where, only).settings:
            return selection
        raise ConfigurationError(
            f"sampler: it draws with where={selection.where!r} and "
            f"{'all ids' if selection.only is None else counted(len(selection.only), 'id')}; make a sampler for each "
            "selection"
        )
    inner.selection = made = Selection(inner, where, only)
    return made


def _listed(ids: Any) -> Any:
    if isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
        raise ConfigurationError(f"ids: {ids!r}, must be a list of ids")
    return ids.tolist() if isinstance(ids, np.ndarray | torch.Tensor) else ids
