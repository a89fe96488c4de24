"""Weighted draws: by priority, age, staleness and use, alone or multiplied.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import check_kind, finite, numbers, one_of, whole, whole_numbers
from trajstore._core.base.types import FloatArray, IntArray
from trajstore._core.columns.limits import shown
from trajstore._core.sampling.base import NO_TRAJECTORY, Additions, Drawn, Fits, Sampler, Unit, uniform
from trajstore._core.sampling.factors import Factor, UseLimit
from trajstore._core.sampling.roster import Growing, Roster
from trajstore._core.sampling.states import (
    OF_WHOM,
    array_in,
    check_names,
    check_sampler_state,
    check_state,
    described,
    ids_in,
    mapping_in,
    tell_gone,
)
from trajstore._core.sampling.tree import SumTree
from trajstore.errors import ConfigurationError, EmptyBufferError, trajectories

_LEAST_CAPACITY = 1024
_MOST_POWER = 1e100
"""Keeps sums finite with the largest factor, 2 ** 500 of recency, and the maximum number of rows."""


@dataclass(frozen=True)
class Priorities:
    """Converts priorities to probabilities and importance weights.

    A row of priority p is drawn with a probability proportional to ``(p + eps) ** alpha``. Its importance weight is
    ``(least / chance) ** beta``, where ``least`` is the smallest probability in the batch, so that the largest weight
    is 1. New rows get the largest priority seen so far.
    Source: Schaul et al., "Prioritized Experience Replay", 2016, equations 1 and 2.

    Attributes:
        alpha: 0 = uniform, 1 = proportional.
        beta: 0 = no correction, 1 = full correction of the bias.
        eps: added to every priority, so that rows of priority 0 can be drawn again.
        per: ``"sample"``: one priority per transition; ``"trajectory"``: one per trajectory.
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    per: Unit = "sample"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "eps"):
            object.__setattr__(self, name, finite(f"priorities: {name}", getattr(self, name), 0))
        one_of("priorities: per", self.per, get_args(Unit))
        self.powers(np.ones(1))  # power of new rows

    def powers(self, priorities: FloatArray) -> FloatArray:
        """Return ``(p + eps) ** alpha`` of priorities, which are at least 0.

        Raises:
            ConfigurationError: a power exceeds :data:`_MOST_POWER`, so sums of weights might not be finite.
        """
        with np.errstate(over="ignore"):
            powers: FloatArray = (priorities + self.eps) ** self.alpha
        if np.any(powers > _MOST_POWER):
            worst = float(priorities[np.argmax(powers)])
            raise ConfigurationError(
                f"priorities: ({worst:g} + eps {self.eps:g}) ** alpha {self.alpha:g} must be at most {_MOST_POWER:g}; "
                "scale priorities down, or take a smaller alpha"
            )
        return powers


class WeightedSampler(Sampler):
    """Draws rows in proportion to their weight: the product of all factors and the priority.

    For transitions, each one has its trajectory's weight, and rows can repeat. For trajectories, a batch has no
    duplicates, and is shorter if fewer have a weight above 0. Draws and changes cost O(log n) for n leaves; only
    growing visits all leaves, which is amortised.

    Args:
        factors: weights of trajectories.
        priorities: weights of rows, changed with :meth:`update`.
        unit: unit of the draws.
    """

    def __init__(
        self, factors: Sequence[Factor] = (), priorities: Priorities | None = None, *, unit: Unit = "sample"
    ) -> None:
        one_of("unit", unit, get_args(Unit))
        check_kind("priorities", priorities, Priorities, "Priorities(...)")
        if not isinstance(factors, Sequence) or not all(isinstance(factor, Factor) for factor in factors):
            raise ConfigurationError(
                f"factors: {shown(factors)} is a {type(factors).__name__}, must be a list of factors, as [Recency(100)]"
            )
        if len({factor.name for factor in factors}) < len(factors):
            raise ConfigurationError("a sampler can have each factor once")
        if unit == "trajectory" and priorities is not None and priorities.per == "sample":
            raise ConfigurationError(
                "priorities: per 'sample' needs unit 'sample'; whole trajectories have per='trajectory'"
            )
        self.unit = unit
        self.priorities = priorities
        self.factors = tuple(factors)
        self.needs_tasks = any(factor.needs_tasks for factor in factors)
        self.remembers = priorities is not None or any(isinstance(factor, UseLimit) for factor in factors)
        self._by_sample = priorities is not None and priorities.per == "sample"
        self._roster = Roster()
        self._samples = Growing(np.int64)
        self._given = Growing(np.float64)
        """Priority of each leaf; empty without priorities."""
        self._initial = self._applied = priorities or Priorities()
        """The argument, and the priorities by which leaves are weighed."""
        self._largest = 1.0
        self._tree = SumTree(_LEAST_CAPACITY)

    @property
    def alpha(self) -> float:
        """Exponent of the priorities in later draws; may be set between draws, to anneal it.

        The next draw recomputes the weights of all rows.

        Raises:
            ConfigurationError: the sampler has no priorities, or the value is negative, not finite, or too large for
                the largest priority so far.
        """
        return self._of_priorities("alpha").alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        priorities = replace(self._of_priorities("alpha"), alpha=value)
        priorities.powers(np.array([self._largest]))
        self.priorities = priorities

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of later draws; may be set between draws, to anneal it.

        Raises:
            ConfigurationError: the sampler has no priorities, or the value is negative or not finite.
        """
        return self._of_priorities("beta").beta

    @beta.setter
    def beta(self, value: float) -> None:
        self.priorities = replace(self._of_priorities("beta"), beta=value)

    def _of_priorities(self, what: str) -> Priorities:
        if self.priorities is None:
            raise ConfigurationError(f"{what}: this sampler has no priorities; give it priorities=Priorities(...)")
        return self.priorities

    def _apply_alpha(self) -> None:
        """Recompute all weights if ``alpha`` was set; here, because setters are called without the lock."""
        priorities = self.priorities
        if priorities is not None and priorities.alpha != self._applied.alpha:
            self._weigh([np.arange(len(self._roster))], priorities)
            self._applied = priorities

    # -- trajectories -----------------------------------------------------------------------------

    @property
    def ids(self) -> IntArray:
        return self._roster.live_ids

    def added(self, additions: Additions) -> None:
        leaves = additions.samples if self._by_sample else np.ones(len(additions), np.int64)
        entries = self._roster.add(additions.ids, leaves, additions.names)
        self._samples.append(additions.samples, len(additions))
        if self.priorities is not None:
            self._given.append(self._largest, int(leaves.sum()))
        changed = [entries, *(factor.added(entries, additions) for factor in self.factors)]
        if self._roster.leaves > self._tree.capacity:
            self._tree.replace(self._tree.leaves, 2 * self._roster.leaves)
        self._weigh(changed)

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        entries = self._roster.discard(ids)
        if not len(entries):
            return
        changed = [entries, *(factor.evicted(entries) for factor in self.factors)]
        self._weigh(changed)
        if self._roster.is_sparse():
            kept, leaves = self._roster.compact()
            self._samples.keep(kept)
            if self.priorities is not None:
                self._given.keep(leaves)
            for factor in self.factors:
                factor.compacted(kept)
            self._tree.replace(self._tree.leaves[leaves], max(_LEAST_CAPACITY, 2 * len(leaves)))

    def used(self, ids: IntArray, uses: IntArray) -> None:
        entries = self._roster.find(ids)
        alive = entries >= 0
        self._weigh([entries[:0], *(factor.used(entries[alive], uses[alive]) for factor in self.factors)])

    def reached(self, version: int) -> None:
        self._weigh([np.zeros(0, np.int64), *(factor.reached(version) for factor in self.factors)])

    def _weigh(self, changed: Sequence[IntArray], priorities: Priorities | None = None) -> None:
        entries = np.unique(np.concatenate(changed))
        leaves, counts = self._roster.leaf_runs(entries)
        weights = np.repeat(self._shares(entries), counts)
        if self.priorities is not None:
            weights *= (priorities or self._applied).powers(self._given.values[leaves])
        self._tree.set(leaves, weights)

    def _shares(self, entries: IntArray) -> FloatArray:
        """Return the weight of each leaf of some entries, without its priority."""
        weights: FloatArray = self._roster.alive[entries].astype(np.float64)
        for factor in self.factors:
            weights *= factor.weights(entries)
        if self.unit == "sample" and not self._by_sample:
            weights *= self._samples.values[entries]
        return weights

    # -- drawing ----------------------------------------------------------------------------------

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        still_wanted, low = whole("count", count, 1), 0
        if first is not None:
            entry = self._roster.find(np.array([first]))
            low = int(self._roster.first_leaf(entry)[0]) if entry[0] >= 0 else 0
        self._apply_alpha()
        self._awaken(low)
        kept: list[tuple[IntArray, IntArray]] = []
        while still_wanted > 0:
            leaves, samples = self._rows(still_wanted, generator, low)
            if fits is not None:
                good = fits(self._roster.ids[self._roster.entry_of(leaves)], samples)
                leaves, samples = leaves[good], samples[good]
            kept.append((leaves, samples))
            still_wanted = 0 if fits is None else still_wanted - len(leaves)
        leaves, samples = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        entries = self._roster.entry_of(leaves)
        chances, total = self._chances(leaves), self._tree.total_from(low)
        if self.factors:
            different = np.unique(entries)
            changed = [factor.drawn(different) for factor in self.factors]
            if any(len(some) for some in changed):
                self._weigh(changed)
        uses = [factor.uses(entries) for factor in self.factors if isinstance(factor, UseLimit)]
        return Drawn(
            self._roster.ids[entries],
            samples,
            self._importance(chances),
            probabilities=chances / total if fits is None else None,
            uses=uses[0] if uses else None,
        )

    def _awaken(self, low: int) -> None:
        """Ensure that something can be drawn, if necessary by ending pauses."""
        while not self._tree.total_from(low) > 0:
            changed = [factor.awakened() for factor in self.factors]
            if not any(len(some) for some in changed):
                raise self._empty(low)
            self._weigh(changed)

    def _rows(self, count: int, generator: torch.Generator, low: int) -> tuple[IntArray, IntArray]:
        """Draw leaves, and a place within the trajectory for each."""
        if self.unit == "trajectory":
            leaves = self._without_repeats(count, generator, low)
            return leaves, np.zeros(len(leaves), np.int64)
        leaves = self._leaves(count, generator, low)
        entries = self._roster.entry_of(leaves)
        if self._by_sample:
            return leaves, leaves - self._roster.first_leaf(entries)
        sizes = self._samples.values[entries]
        return leaves, np.minimum((uniform(len(entries), generator) * sizes).astype(np.int64), sizes - 1)

    def _leaves(self, count: int, generator: torch.Generator, low: int) -> IntArray:
        return self._tree.find(uniform(count, generator) * self._tree.total_from(low), low)

    def _without_repeats(self, count: int, generator: torch.Generator, low: int) -> IntArray:
        """Draw repeatedly, excluding earlier draws: equivalent to one by one without replacement."""
        parts: list[IntArray] = []
        weights: list[FloatArray] = []
        still_wanted = count
        try:
            while still_wanted > 0 and self._tree.total_from(low) > 0:
                leaves = self._leaves(still_wanted, generator, low)
                leaves = leaves[np.sort(np.unique(leaves, return_index=True)[1])]
                parts.append(leaves)
                weights.append(self._tree.leaves[leaves].copy())
                self._tree.set(leaves, np.zeros(len(leaves)))
                still_wanted -= len(leaves)
        finally:
            for leaves, weight in zip(parts, weights, strict=False):
                self._tree.set(leaves, weight)
        return np.concatenate(parts)

    def _chances(self, leaves: IntArray) -> FloatArray:
        """Return the weight of one row of each leaf."""
        chances = self._tree.leaves[leaves]
        if self.unit == "sample" and not self._by_sample:  # one leaf for all rows of a trajectory
            chances = chances / self._samples.values[self._roster.entry_of(leaves)]
        return chances

    def _importance(self, chances: FloatArray) -> npt.NDArray[np.float32] | None:
        if self.priorities is None:
            return None
        weights: npt.NDArray[np.float32] = ((chances.min() / chances) ** self.priorities.beta).astype(np.float32)
        return weights

    def _empty(self, low: int) -> EmptyBufferError:
        if not self._roster.live:
            return EmptyBufferError("cannot sample from an empty buffer")
        names = ", ".join(factor.name for factor in self.factors) or "the window"
        inside = self._roster.alive if not low else self._roster.alive[self._roster.entry_of(np.array([low]))[0] :]
        count, older = np.count_nonzero(inside), self._roster.live - np.count_nonzero(inside)
        outside = f"; {older} older ones are not in the window (sample_window_size)" if older else ""
        return EmptyBufferError(
            f"cannot sample: none of {trajectories(int(count))} is left to draw from after {names}{outside}"
        )

    # -- priorities -------------------------------------------------------------------------------

    def update(self, ids: IntArray, samples: IntArray, priorities: npt.ArrayLike) -> int:
        """Set the priorities of drawn rows; return the number of rows no longer present.

        Args:
            ids: trajectory ids, ``[n]``; rows of :data:`~trajstore._core.sampling.base.NO_TRAJECTORY` are ignored.
            samples: places within their trajectories, ``[n]``; ignored with priorities per trajectory, where the
                largest counts.
            priorities: ``[n]``, at least 0, usually the absolute TD error.

        Raises:
            ConfigurationError: the sampler has no priorities, or one is negative or not finite; nothing changed.
        """
        self._of_priorities("update_priorities")
        given = numbers("priorities", priorities)
        ids, samples = whole_numbers("ids", ids), whole_numbers("samples", samples)
        if given.shape != ids.shape or samples.shape != ids.shape:
            raise ConfigurationError(f"priorities {list(given.shape)}: must be one for each of {len(ids)} rows")
        if not np.all((given >= 0) & (given < np.inf)):
            raise ConfigurationError("priorities must be finite numbers, at least 0")
        self._apply_alpha()
        powers = self._applied.powers(given)
        entries = self._roster.find(ids)
        alive = entries >= 0
        entries, given, samples, powers = entries[alive], given[alive], samples[alive], powers[alive]
        leaves = self._roster.first_leaf(entries)
        if self._by_sample:
            if np.any((samples < 0) | (samples >= self._roster.leaf_counts(entries))):
                raise ConfigurationError("samples: a place lies outside its trajectory")
            leaves = leaves + samples
        else:
            order = np.argsort(given, kind="stable")  # the last of a trajectory counts: the largest
            leaves, entries, given, powers = leaves[order], entries[order], given[order], powers[order]
        self._largest = float(given.max(initial=self._largest))
        self._given.values[leaves] = given
        different, of_each = np.unique(entries, return_inverse=True)
        # The same product as elsewhere, so that a weight does not depend on the order of changes.
        self._tree.set(leaves, self._shares(different)[of_each] * powers)
        return int(np.count_nonzero(~alive & (ids != NO_TRAJECTORY)))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        entries = np.flatnonzero(self._roster.alive).astype(np.int64)
        state: dict[str, Any] = {
            OF_WHOM: self._described(),
            "ids": torch.from_numpy(self._roster.ids[entries].copy()),
            "names": torch.from_numpy(self._roster.names[entries].copy()),
            "factors": {factor.name: factor.state(entries) for factor in self.factors},
        }
        if self.priorities is not None:
            leaves, counts = self._roster.leaf_runs(entries)
            state |= {
                "priorities": torch.from_numpy(self._given.values[leaves].copy()),
                "leaves": torch.from_numpy(counts),
                "largest": self._largest,
                "alpha": self.priorities.alpha,
                "beta": self.priorities.beta,
            }
        return state

    def _described(self) -> dict[str, Any]:
        fixed: dict[str, Any] = {"unit": self.unit, "factors": [factor.name for factor in self.factors]}
        free: dict[str, Any] = {}
        for factor in self.factors:
            fixed |= {f"{factor.name}.{name}": value for name, value in factor.fixed.items()}
            free |= {f"{factor.name}.{name}": value for name, value in factor.free.items()}
        if self.priorities is not None:
            fixed |= {f"priorities.{name}": value for name, value in asdict(self._initial).items()}
        return described("weighted", fixed, free)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_sampler_state(state, self._described(), ("ids", "factors"))
        factors = mapping_in(state, "factors")
        if set(factors) != {factor.name for factor in self.factors} or ("priorities" in state) != (
            self.priorities is not None
        ):
            raise ConfigurationError(
                f"the state is of a sampler with {sorted(map(str, factors))}"
                f"{' and priorities' if 'priorities' in state else ''}; this one is configured otherwise"
            )
        ids, names = ids_in(state)
        ids = self._roster.ids_here(ids, names)
        check_names("what a sampler says", ids, names, self._roster.names_at(ids))
        rows = [factor.read(mapping_in(factors, factor.name), len(ids)) for factor in self.factors]
        entries = self._roster.find(ids)
        kept = np.flatnonzero(entries >= 0)
        kept = kept[np.argsort(entries[kept])]  # in this roster's order
        entries = entries[kept]
        others = np.setdiff1d(np.flatnonzero(self._roster.alive), entries)
        if self.priorities is not None:
            given = self._read_priorities(state, kept, entries)
            check_state(state, ("largest", "alpha", "beta"))
            largest = finite("state: largest", state["largest"], float(given.max(initial=0.0)))
            priorities = replace(self.priorities, alpha=state["alpha"], beta=state["beta"])
            priorities.powers(np.array([largest]))
            self.priorities, self._applied, self._largest = priorities, priorities, largest
            self._given.values[:] = largest
            self._given.values[self._roster.leaf_runs(entries)[0]] = given
        if not len(kept):
            tell_gone("a sampler", ids, self._roster.live)
        for factor, factor_rows in zip(self.factors, rows, strict=True):
            here = {
                name: value[kept] if isinstance(value, np.ndarray) else value for name, value in factor_rows.items()
            }
            factor.take_up(entries, others, here)
        self._weigh([np.arange(len(self._roster))])

    def _read_priorities(self, state: Mapping[str, Any], kept: IntArray, entries: IntArray) -> FloatArray:
        """Return a state's priorities of the leaves of the kept entries."""
        given = array_in(state, "priorities", np.float64, least=0.0, most=float(np.finfo(np.float64).max))
        counts = array_in(state, "leaves", np.int64, len(state["ids"]), least=0, most=len(given))
        if counts.sum() != len(given):
            raise ConfigurationError(f"state: leaves: add up to {counts.sum()}, priorities has {len(given)} numbers")
        if np.any(counts[kept] != self._roster.leaf_counts(entries)):
            raise ConfigurationError("the state has another number of rows for a trajectory than the buffer")
        place = np.full(len(counts), len(counts), np.int64)
        place[kept] = np.arange(len(kept))
        of_each = np.repeat(place, counts)
        order = np.argsort(of_each, kind="stable")
        kept_given: FloatArray = given[order[: np.count_nonzero(of_each < len(counts))]]
        return kept_given

    def figures(self) -> dict[str, float]:
        alive = np.flatnonzero(self._roster.alive).astype(np.int64)
        return {name: value for factor in self.factors for name, value in factor.figures(alive).items()}
