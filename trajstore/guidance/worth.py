"""What an experience was worth: rewards of rollouts with it and without it, kept in a trajectory store."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.arguments import finite, whole
from trajstore.checked import checked
from trajstore.errors import ConfigurationError, StoreError
from trajstore.experience import MemoryStore, PoolStore
from trajstore.experience.outcomes import known_outcome
from trajstore.guidance.context import Guidance
from trajstore.guidance.experience import EXPERIENCE
from trajstore.guidance.summary import by_task
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

COMPACT_AFTER = 64
"""Records of changes after which one record of everything takes their place."""


@checked
@dataclass(frozen=True, slots=True)
class Worth:
    """Rollouts that were shown an experience, and rollouts of the same task and step that were not.

    Attributes:
        shown: rollouts that were shown it.
        shown_reward: sum of their outcomes.
        other: rollouts that were not.
        other_reward: sum of their outcomes.
    """

    shown: int = 0
    shown_reward: float = 0.0
    other: int = 0
    other_reward: float = 0.0

    def __post_init__(self) -> None:
        whole("shown", self.shown, 0)
        whole("other", self.other, 0)
        finite("shown_reward", self.shown_reward)
        finite("other_reward", self.other_reward)

    def __add__(self, more: Worth) -> Worth:
        return Worth(
            self.shown + more.shown,
            self.shown_reward + more.shown_reward,
            self.other + more.other,
            self.other_reward + more.other_reward,
        )

    @property
    def gain(self) -> float | None:
        """Mean outcome with it less the mean without it; ``None`` if there is no rollout on one of the sides."""
        if not self.shown or not self.other:
            return None
        return self.shown_reward / self.shown - self.other_reward / self.other


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class RetirementRule:
    """When an experience is no longer shown.

    Attributes:
        below: an experience whose gain is below this is retired.
        least_count: so many rollouts on each side must say so.

    Raises:
        ConfigurationError: a value is out of range.
    """

    below: float
    least_count: int = 16

    def __post_init__(self) -> None:
        finite("retire_below", self.below)
        whole("retire_least_count", self.least_count, 1)

    def retires(self, worth: Worth) -> bool:
        """Return whether an experience of this worth is retired."""
        enough = min(worth.shown, worth.other) >= self.least_count
        return enough and worth.gain is not None and worth.gain < self.below


@checked
def count_worth(rollouts: Iterable[AgentTrajectory]) -> dict[str, Worth]:
    """Return what the rollouts of one step say of each experience that was shown in them.

    A rollout without an outcome says nothing. Those without an experience are the task's rollouts that were shown
    others, or none.

    Raises:
        InvalidTrajectoryError: what a rollout says of its guidance cannot be understood.
    """
    result: dict[str, Worth] = {}
    for held in by_task(list(rollouts)):
        rated = [(outcome, _shown(one)) for one in held if (outcome := known_outcome(one)) is not None]
        for name in dict.fromkeys(name for _, names in rated for name in names):
            shown = [outcome for outcome, names in rated if name in names]
            other = [outcome for outcome, names in rated if name not in names]
            worth = Worth(len(shown), math.fsum(shown), len(other), math.fsum(other))
            result[name] = result.get(name, Worth()) + worth
    return result


class GuidanceRecords:
    """What a store's records say of experiences, gathered record by record in order of their ids."""

    def __init__(self) -> None:
        self.count = 0
        """Records that are experiences."""
        self.worth: dict[str, Worth] = {}
        self.retired: dict[str, None] = {}

    def add(self, record: AgentTrajectory) -> bool:
        """Take a record; return whether it is one of guidance. What cannot be understood is one, and says nothing."""
        said = record.metadata.get(EXPERIENCE)
        if not isinstance(said, Mapping) or said.get("kind") not in ("experience", "worth"):
            return False
        if said["kind"] == "experience":
            self.count += 1
            return True
        try:
            self.worth |= {str(name): Worth(*values) for name, values in said["worth"].items()}
            self.retired |= dict.fromkeys(str(name) for name in said["retired"])
        except (KeyError, AttributeError, TypeError, ConfigurationError) as error:
            logger.warning("a record of what experiences were worth cannot be understood: %r", error)
        return True

    def report(self) -> dict[str, Any] | None:
        """Return the number of experiences, what each that was shown was worth, the retired; ``None`` without any."""
        if not self.count and not self.worth:
            return None
        return {
            "count": self.count,
            "shown": {
                name: {
                    "rollouts_with": one.shown,
                    "outcome_with": one.shown_reward / one.shown if one.shown else None,
                    "rollouts_without": one.other,
                    "outcome_without": one.other_reward / one.other if one.other else None,
                    "gain": one.gain,
                }
                for name, one in self.worth.items()
            },
            "retired": list(self.retired),
        }


@checked
class WorthLedger:
    """The worth of all experiences, in a store. Not thread-safe: the training loop's.

    Args:
        store: one that may hold experiences too; in memory if ``None``. This goes on with what it holds.
        rule: when an experience is retired; ``None`` = never.
    """

    def __init__(self, store: PoolStore | None = None, rule: RetirementRule | None = None) -> None:
        self._store: PoolStore = MemoryStore() if store is None else store
        self._rule = rule
        self._records: list[int] = []
        self.lost = 0
        """Steps whose worth could not be written; it counts on in memory, and is in the next record of everything."""
        held = GuidanceRecords()
        for number in self._store.ids():
            try:
                record = self._store.get(number)
            except StoreError as error:
                logger.warning("record %d cannot be read, what it says of experiences is left out: %s", number, error)
                continue
            if held.add(record) and record.metadata[EXPERIENCE]["kind"] == "worth":
                self._records.append(number)
        self._worth, self._retired = held.worth, held.retired

    @property
    def worth(self) -> dict[str, Worth]:
        """Of each experience that was ever shown, by its name; a copy."""
        return dict(self._worth)

    @property
    def retired(self) -> tuple[str, ...]:
        """Names of experiences that are shown no longer."""
        return tuple(self._retired)

    def note(self, rollouts: Iterable[AgentTrajectory]) -> None:
        """Count one step's rollouts. They are written in the background, with the store's other records."""
        step = count_worth(rollouts)
        if not step:
            return
        self._worth |= {name: self._worth.get(name, Worth()) + more for name, more in step.items()}
        retired = []
        if self._rule is not None:
            retired = [name for name in step if name not in self._retired and self._rule.retires(self._worth[name])]
        for name in retired:
            logger.info("guidance: experience %s is retired: its gain is %.3g", name, self._worth[name].gain)
        self._retired |= dict.fromkeys(retired)
        try:
            if len(self._records) >= COMPACT_AFTER:
                self._compact()
            else:
                self._records += self._store.add_trajectories(
                    [_record({name: self._worth[name] for name in step}, retired)]
                )
        except StoreError as error:
            self.lost += 1
            if self.lost == 1:
                logger.warning("guidance: what experiences were worth is not recorded: %s", error)

    def metrics(self) -> dict[str, float]:
        """Return experiences shown and retired, and the mean outcome with and without experience, as flat floats."""
        total = sum(self._worth.values(), Worth())
        figures = {
            "guidance/worth/experiences_shown": float(len(self._worth)),
            "guidance/worth/experiences_retired": float(len(self._retired)),
        }
        if total.shown:
            figures["guidance/worth/outcome_with"] = total.shown_reward / total.shown
        if total.other:
            figures["guidance/worth/outcome_without"] = total.other_reward / total.other
        if self.lost:
            figures["guidance/worth/not_recorded"] = float(self.lost)
        return figures

    def _compact(self) -> None:
        """Write everything as one record, and give up the others once it is durable."""
        ids = self._store.add_trajectories([_record(self._worth, self._retired)])
        self._store.flush()
        self._store.evict(self._records)
        self._records = ids


def _record(worth: Mapping[str, Worth], retired: Iterable[str]) -> AgentTrajectory:
    counts = {name: [one.shown, one.shown_reward, one.other, one.other_reward] for name, one in worth.items()}
    return AgentTrajectory(metadata={EXPERIENCE: {"kind": "worth", "worth": counts, "retired": list(retired)}})


def _shown(rollout: AgentTrajectory) -> Sequence[str]:
    guidance = Guidance.of(rollout)
    return () if guidance is None else guidance.experiences
