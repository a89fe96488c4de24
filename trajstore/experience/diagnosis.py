"""Why a pool has nothing to replay, in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trajstore.experience.buckets import bucket_probabilities
from trajstore.experience.journal import PoolState
from trajstore.experience.rules import PoolRules


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
