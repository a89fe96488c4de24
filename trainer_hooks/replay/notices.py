"""What a pool warns of, each once: entries that do not belong to the run that uses them; and why it gives nothing.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from trainer_hooks.replay.buckets import bucket_probabilities
from trainer_hooks.replay.entry import PoolEntry, Refusal, problem_of
from trainer_hooks.replay.journal import PoolState
from trainer_hooks.replay.message_rows import NEEDS_TOKENIZER
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import has_known_age
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


class PoolNotices:
    """Remembers what was told already."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def ages(self, entries: Iterable[PoolEntry], rules: PoolRules, global_steps: int) -> None:
        """Warn of trajectories whose age is not known where that matters.

        Those that a policy newer than the step that is going on made; and those without a version, such as an earlier
        run's, which some rules never let out.
        """
        held = list(entries)
        self._newer_versions(held, rules, global_steps)
        without = sum(entry.policy_version is None and not entry.is_demonstration for entry in held)
        if without and rules.max_policy_age is not None and self._first("without a version"):
            logger.warning(
                "experience pool: %d trajectories have no policy version on this run's count of steps (an earlier run"
                " made them?) and never come out with max_policy_age: %d (set null to replay them). If the run goes on"
                " from the checkpoint of theirs, import them with same_run (--same-run), which keeps their versions",
                without,
                rules.max_policy_age,
            )

    def malformed(self, among: Iterable[AgentTrajectory]) -> None:
        """Tell what is wrong with rollouts that were refused as malformed: of each field the first, once.

        Args:
            among: the rollouts, and others.
        """
        for one in among:
            problem = problem_of(one)
            field = problem.partition(":")[0]
            if problem and self._first(field):
                logger.warning(
                    "experience pool: rollout %r of task %r is refused as malformed, and so are others like it,"
                    " which refused/malformed counts: %s",
                    one.rollout_id,
                    one.task_id,
                    problem,
                )

    def _first(self, what: str) -> bool:
        """Return whether this was not told yet; it is now."""
        first = what not in self._told
        self._told.add(what)
        return first

    def _newer_versions(self, entries: Sequence[PoolEntry], rules: PoolRules, global_steps: int) -> None:
        """Warn of trajectories that a policy newer than the step that is going on made."""
        versions = [entry.policy_version for entry in entries if not has_known_age(entry, global_steps)]
        newer = [version for version in versions if version is not None]
        if not newer or not self._first("newer"):
            return
        logger.warning(
            "experience pool: %d trajectories have policy versions up to %d, this is step %d: the count of steps"
            " began anew (no checkpoint?). Their age is unknown and counts as %s. Resume from the checkpoint that"
            " belongs to the pool, or begin with an empty one; to use what an earlier run made, import it"
            " (`trajstore pool import`)",
            len(newer),
            max(newer),
            global_steps,
            "any age" if rules.max_policy_age is None else "too old for max_policy_age",
        )


def warn_of_other_rewards(entries: Iterable[PoolEntry], ours: str) -> None:
    """Warn of trajectories whose outcome another reward function gave, unless a later one was given in its place.

    An empty fingerprint is unknown and passes.
    """
    others = Counter(entry.reward_fingerprint for entry in entries if not entry.is_corrected)
    others.pop("", None)
    others.pop(ours, None)
    if ours and others:
        named = ", ".join(f"{name!r} ({count})" for name, count in others.most_common())
        logger.warning(
            "experience pool: %d trajectories have outcomes of another reward function: %s; this run's is %r. Old and"
            " new rewards are compared within a group: give them new outcomes with `trajstore annotate`, or begin with"
            " an empty pool",
            others.total(),
            named,
            ours,
        )


def warn_of_refusals(source: object, refused: Counter[str], offered: int) -> None:
    """Warn if some of a saved pool's trajectories were not taken, and why."""
    if refused:
        reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
        remedy = f"; of what has no tokens: {NEEDS_TOKENIZER}" if refused[Refusal.NO_TOKENS.value] else ""
        logger.warning(
            "%s: %d of %d trajectories were not taken: %s%s", source, refused.total(), offered, reasons, remedy
        )


def why_nothing(state: PoolState, rules: PoolRules, global_steps: int, refused: Mapping[str, int]) -> str:
    """Return why no task of the pool can be drawn now; empty if one can.

    Args:
        state: of the pool.
        rules: of the pool.
        global_steps: the step that is going on.
        refused: how many trajectories were refused so far, by reason.
    """
    valid = state.valid_buckets(rules, global_steps)
    if valid and rules.replay_difficulty is None and rules.task_sampling != "similar":
        sizes = {difficulty: len(tasks) for difficulty, tasks in valid.items()}
        if not bucket_probabilities(sizes, rules.task_sampling, rules.n_rollout).any():
            found = ", ".join(map(str, sorted(valid)))
            return f"task_sampling: {rules.task_sampling} gives no weight to difficulty {found}, and no other is there"
    if valid and (rules.replay_difficulty is None or rules.replay_difficulty in valid):
        return ""
    if valid:
        found = ", ".join(map(str, sorted(valid)))
        return f"replay_difficulty is {rules.replay_difficulty}, and the tasks that could be replayed have {found}"
    if not state.entries:
        reasons = [f"{count} were refused as {reason}" for reason, count in refused.items() if count]
        low, high = rules.experience_lbound, rules.experience_rbound
        if state.skip:
            reasons.append(f"{len(state.skip)} tasks are solved and need none")
        else:
            reasons.append(
                f"no success entered yet: an outcome must reach success_threshold = {rules.success_threshold:g}, of a"
                f" task with more than {low} and fewer than {high} successes out of {rules.n_rollout}"
            )
        return "the pool has no trajectory; " + "; ".join(reasons)
    held = list(state.entries)
    skipped = sum(task in state.skip for task in held)
    unplaced = sum(task not in state.buckets and task not in state.skip for task in held)
    barred = len(held) - skipped - unplaced
    limits = f"max_policy_age = {rules.max_policy_age}, min_reward = {rules.min_reward}"
    limits += "" if rules.max_uses is None else f", max_uses = {rules.max_uses}"
    corrected = sum(entry.is_corrected for entry in state.all_entries())
    limits += f", {corrected} outcomes given late" if corrected else ""
    return (
        f"of {len(held)} tasks with trajectories {barred} have none that may come out ({limits}), {skipped} are skipped"
        f" as solved, {unplaced} have no bucket yet"
    )
