"""What a pool warns of, each once: entries that do not belong to the run that uses them.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from trajstore.experience.entry import PoolEntry
from trajstore.experience.rules import PoolRules
from trajstore.experience.selection import has_known_age

logger = logging.getLogger(__name__)


class PoolNotices:
    """Remembers what was told already."""

    def __init__(self) -> None:
        self._newer = False

    def newer_versions(self, entries: Iterable[PoolEntry], rules: PoolRules, global_steps: int) -> None:
        """Warn of trajectories that a policy newer than the step that is going on made."""
        versions = [entry.policy_version for entry in entries if not has_known_age(entry, global_steps)]
        newer = [version for version in versions if version is not None]
        if not newer or self._newer:
            return
        self._newer = True
        logger.warning(
            "experience pool: %d trajectories have policy versions up to %d, this is step %d: the count of steps"
            " began anew (no checkpoint?). Their age is unknown and counts as %s; begin with an empty pool, or"
            " resume from the checkpoint that belongs to it",
            len(newer),
            max(newer),
            global_steps,
            "any age" if rules.max_policy_age is None else "too old for max_policy_age",
        )


def warn_of_other_rewards(entries: Iterable[PoolEntry], ours: str) -> None:
    """Warn of trajectories whose outcome another reward function gave. An empty fingerprint is unknown and passes."""
    others = Counter(entry.reward_fingerprint for entry in entries)
    others.pop("", None)
    others.pop(ours, None)
    if ours and others:
        named = ", ".join(f"{name!r} ({count})" for name, count in others.most_common())
        logger.warning(
            "experience pool: %d trajectories have outcomes of another reward function: %s; this run's is %r. Old and"
            " new rewards are compared within a group: give them new outcomes with ExperienceManager.rerate, or begin"
            " with an empty pool",
            others.total(),
            named,
            ours,
        )


def warn_of_refusals(source: object, refused: Counter[str], offered: int) -> None:
    """Warn if some of a saved pool's trajectories were not taken, and why."""
    if refused:
        reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
        logger.warning("%s: %d of %d trajectories were not taken: %s", source, refused.total(), offered, reasons)
