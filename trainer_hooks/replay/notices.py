"""Warnings of a pool, each given once, and the reason why it has nothing to replay.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from trainer_hooks.replay.buckets import bucket_probabilities
from trainer_hooks.replay.entry import PoolEntry, Refusal, problem_of
from trainer_hooks.replay.message_rows import NEEDS_TOKENIZER
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import Refused, has_known_age, is_too_long
from trainer_hooks.replay.state import PoolState
from trajstore.errors import counted, trajectories

logger = logging.getLogger(__name__)


REASONS = {
    Refusal.NO_LLM_TOKEN: "none of its tokens is the model's",
    Refusal.NO_RESPONSE_MASK: "neither loss_mask with response_start nor response_mask marks the model's tokens",
    Refusal.LOG_PROBS_MISMATCH: "old_log_probs are absent, not finite, or not one for each token of the response;"
    " set them before the rollouts are saved",
    Refusal.NO_TOKENS: f"it has no token ids; {NEEDS_TOKENIZER}",
    Refusal.LOG_PROBS_ABOVE_ZERO: "a recorded log-prob is above 0",
    Refusal.NO_OUTCOME: "its reward has no outcome",
    Refusal.OUTCOME_NOT_FINITE: "its outcome is NaN or infinite",
    Refusal.NO_ENTROPY: "it has neither log-probs nor a finite entropy",
    Refusal.MALFORMED: "a field is malformed; the log names it",
    Refusal.NOT_WORTH_KEEPING: "it is no success",
    Refusal.DUPLICATE: "the pool has a trajectory with its tokens",
    Refusal.NOT_BETTER: "its task has its full number of trajectories, and it is no better",
}
"""What each refusal means, as a clause on one rollout."""

_NOT_WARNED_OF = (Refusal.MALFORMED, Refusal.NOT_WORTH_KEEPING, Refusal.DUPLICATE, Refusal.NOT_BETTER)
"""``malformed`` has its own warning, which names the field; the others are no fault of the rollout."""


class PoolNotices:
    """Gives each warning once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def ages(self, entries: Iterable[PoolEntry], rules: PoolRules, global_steps: int) -> None:
        """Warn of trajectories of unknown age, if the rules depend on age.

        The policy version is newer than the current step, or absent (as for an earlier run's trajectories, which some
        rules never replay).
        """
        held = list(entries)
        unknown = [entry.policy_version for entry in held if not has_known_age(entry, global_steps)]
        newer = [version for version in unknown if version is not None]
        if newer and self._first("newer"):
            logger.warning(
                "experience pool: %s policy versions up to %d, this is step %d: the step count"
                " restarted (no checkpoint?). Their age is unknown and counts as %s. Resume from the checkpoint that"
                " belongs to the pool, or begin with an empty one; to use what an earlier run made, fill a"
                " pool by `trajstore pool seed`",
                trajectories(len(newer), "has", "have"),
                max(newer),
                global_steps,
                "any age" if rules.max_policy_age is None else "too old for max_policy_age",
            )
        without = sum(entry.policy_version is None and not entry.is_demonstration for entry in held)
        if without and rules.max_policy_age is not None and self._first("without a version"):
            logger.warning(
                "experience pool: %s without a policy version of this run (made by an earlier run?), which"
                " are never replayed with max_policy_age: %d (set null to replay them). If this run continues from "
                "the checkpoint of theirs, seed the pool with same_run (--same-run), which keeps their versions",
                trajectories(without),
                rules.max_policy_age,
            )

    def refused(self, refused: Refused) -> None:
        """Warn of refused rollouts, each reason once, and the first rollout of each malformed field."""
        for rollout in refused.get(Refusal.MALFORMED, ()):
            problem = problem_of(rollout)
            if self._first(problem.partition(":")[0]):
                logger.warning(
                    "experience pool: rollout %r of task %r is refused as malformed (refused/malformed counts"
                    " this and later ones): %s",
                    rollout.rollout_id,
                    rollout.task_id,
                    problem,
                )

        for reason, rollouts in refused.items():
            if reason not in _NOT_WARNED_OF and self._first(reason.value):
                logger.warning(
                    "experience pool: %s refused as %s (refused/%s counts these and later ones): %s (rollout %r of task"
                    " %r)",
                    counted(len(rollouts), "rollout", "is", "are"),
                    *(reason.value, reason.value, REASONS[reason], rollouts[0].rollout_id, rollouts[0].task_id),
                )

    def _first(self, what: str) -> bool:
        """Return whether this warning is new, and mark it as given."""
        first = what not in self._told
        self._told.add(what)
        return first


def warn_of_refusals(source: object, refused: Counter[str], offered: int) -> None:
    """Warn if some of a saved pool's trajectories were refused, with the numbers by reason."""
    if refused:
        reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
        remedy = f"; of what has no tokens: {NEEDS_TOKENIZER}" if refused[Refusal.NO_TOKENS.value] else ""
        logger.warning("%s: %d of %s refused: %s%s", source, refused.total(), trajectories(offered), reasons, remedy)


def why_nothing(state: PoolState, rules: PoolRules, global_steps: int, refused: Mapping[str, int]) -> str:
    """Return why no task of the pool can be drawn now; empty if one can.

    Args:
        state: of the pool.
        rules: of the pool.
        global_steps: the current step.
        refused: number of refused trajectories so far, by reason.
    """
    valid = state.valid_buckets(rules, global_steps)
    if valid and rules.replay_difficulty is None and rules.task_sampling != "similar":
        sizes = {difficulty: len(tasks) for difficulty, tasks in valid.items()}
        if not bucket_probabilities(sizes, rules.task_sampling, rules.n_rollout).any():
            levels = ", ".join(map(str, sorted(valid)))
            return f"task_sampling: {rules.task_sampling} gives no weight to difficulty {levels}, and no other is there"
    if valid and (rules.replay_difficulty is None or rules.replay_difficulty in valid):
        return ""
    if valid:
        levels = ", ".join(map(str, sorted(valid)))
        return f"replay_difficulty is {rules.replay_difficulty}, and the tasks that could be replayed have {levels}"
    if not state.entries:
        reasons = [f"{count} were refused as {reason}" for reason, count in refused.items() if count]
        if state.skip:
            reasons.append(counted(len(state.skip), "task", "is solved and needs none", "are solved and need none"))
        else:
            reasons.append(
                f"no success entered yet: an outcome must reach success_threshold = {rules.success_threshold:g}, of a"
                f" task with {rules.bounds}"
            )
        return "the pool has no trajectory; " + "; ".join(reasons)
    held = list(state.entries)
    skipped = sum(task in state.skip for task in held)
    unplaced = sum(task not in state.buckets and task not in state.skip for task in held)
    barred = len(held) - skipped - unplaced
    limits = f"max_policy_age = {rules.max_policy_age}, min_reward = {rules.min_reward}"
    too_long = sum(is_too_long(entry, rules) for entry in state.all_entries())
    limits += f", {counted(too_long, 'trajectory')} too long" if too_long else ""
    corrected = sum(entry.is_corrected for entry in state.all_entries())
    limits += f", {counted(corrected, 'outcome')} given late" if corrected else ""
    return (
        f"{counted(len(held), 'task')} with trajectories: {barred} without one that may be replayed ({limits}), "
        f"{skipped} skipped as solved, {unplaced} without a bucket"
    )
