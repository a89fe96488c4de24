"""Admission, replacement and selection of trajectories. Pure; the generator is passed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainer_hooks.replay.entry import EARLIER_RUN, PoolEntry, Refusal, new_entry, own_entropy, refusal_of
from trainer_hooks.replay.outcomes import TaskOutcome, is_replayed, is_success, outcome_of
from trainer_hooks.replay.prompts import RowPrompts
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.wellformed import as_recorded, field_problem
from trajstore.trajectory import AgentTrajectory

Refused = dict[Refusal, list[AgentTrajectory]]
"""Refused trajectories by reason."""

LeftOut = Literal["replayed", "not_worth_keeping", "solved", "out_of_bounds", "not_best"]
"""Why a rollout of a step could never enter the pool, without being refused."""


def in_bounds(outcome: TaskOutcome, rules: PoolRules) -> bool:
    """Return whether ``experience_lbound < difficulty < experience_rbound``; both are exclusive."""
    difficulty = outcome.difficulty(rules.n_rollout)
    if difficulty is None:
        return False
    low, high = rules.experience_lbound, rules.experience_rbound
    return (low is None or low < difficulty) and (high is None or difficulty < high)


def is_worth_keeping(trajectory: AgentTrajectory, rules: PoolRules) -> bool:
    """Return whether a rollout's outcome lets it enter: a success, or any above 0 with ``save_filter: positive``."""
    return _deserves_keeping(outcome_of(trajectory), rules)


def _deserves_keeping(outcome: float | None, rules: PoolRules) -> bool:
    if rules.save_filter == "positive":
        return outcome is not None and 0 < outcome < math.inf
    return is_success(outcome, rules.success_threshold)


def outcome_refusal(trajectory: AgentTrajectory) -> Refusal | None:
    """Return why a rollout's outcome is unusable; ``None`` if it is usable."""
    outcome = outcome_of(trajectory)
    if outcome is None:
        return Refusal.NO_OUTCOME
    return None if math.isfinite(outcome) else Refusal.OUTCOME_NOT_FINITE


def choose_to_save(
    candidates: Sequence[AgentTrajectory], rules: PoolRules, generator: np.random.Generator
) -> list[AgentTrajectory]:
    """Return the rollouts of one task that are kept, by ``save_filter``.

    Args:
        candidates: rollouts of a task that is in bounds; each has its ``entropy``.
        rules: the pool's rules.
        generator: used only by ``save_filter="best"`` with ``exp_select_mode="random"``.
    """
    worthy = [trajectory for trajectory in candidates if is_worth_keeping(trajectory, rules)]
    if rules.save_filter != "best" or not worthy:
        return worthy
    entropies = [math.nan if trajectory.entropy is None else trajectory.entropy for trajectory in worthy]
    if rules.exp_select_mode == "random":
        return [worthy[int(generator.integers(len(worthy)))]]
    best = min if rules.exp_select_mode == "argmin" else max
    return [worthy[entropies.index(best(entropies))]]


def rollouts_to_keep(
    trajectories: Sequence[AgentTrajectory],
    *,
    outcomes: Mapping[str, TaskOutcome],
    rules: PoolRules,
    global_steps: int,
    generator: np.random.Generator,
) -> tuple[list[AgentTrajectory], Refused, Counter[LeftOut]]:
    """Return the kept rollouts of one step, task by task, those refused, and the numbers left out, by reason.

    Args:
        trajectories: the step's rollouts; replayed ones are left out.
        outcomes: of each task that may enter; others are left out.
        rules: the pool's rules.
        global_steps: policy version of rollouts that have none, unless they are of an earlier run.
        generator: see :func:`choose_to_save`.

    Returns:
        Copies with ``entropy`` and ``policy_version`` set, which share tensors with ``trajectories``;
        refusals: of rollouts without a usable outcome, and of those worth keeping that cannot be replayed; all others.
    """
    candidates: dict[str, list[AgentTrajectory]] = {}
    refused: Refused = {}
    left_out: Counter[LeftOut] = Counter()
    for trajectory in trajectories:
        task = trajectory.task_id
        if is_replayed(trajectory):
            left_out["replayed"] += 1
            continue
        refusal = outcome_refusal(trajectory)
        if refusal is not None:
            refused.setdefault(refusal, []).append(trajectory)
            continue
        enters = task in outcomes and in_bounds(outcomes[task], rules)
        held = candidates.setdefault(task, []) if enters else []
        if not is_worth_keeping(trajectory, rules):
            left_out["not_worth_keeping"] += 1
            continue
        if not enters:
            left_out["out_of_bounds" if task in outcomes else "solved"] += 1
            continue
        # Refused ones are removed first: save_filter="best" might choose one, and nothing of its task would enter.
        entropy, refusal = None, Refusal.MALFORMED if field_problem(trajectory) else None
        if refusal is None:
            entropy = own_entropy(trajectory)
            # A demonstration has no entropy: it is no rollout of a step, and enters by `seed`.
            refusal = refusal_of(trajectory, entropy) or (Refusal.NO_ENTROPY if entropy is None else None)
        if refusal is not None:
            refused.setdefault(refusal, []).append(trajectory)
            continue
        version = trajectory.policy_version
        if version is None and EARLIER_RUN not in trajectory.metadata:
            version = global_steps
        held.append(replace(trajectory, entropy=entropy, policy_version=version))
    kept = [rollout for rollouts in candidates.values() for rollout in choose_to_save(rollouts, rules, generator)]
    left_out["not_best"] = sum(map(len, candidates.values())) - len(kept)
    return kept, refused, left_out


def has_known_age(entry: PoolEntry, global_steps: int) -> bool:
    """Return whether the age of the policy that sampled is known.

    A version newer than the current step comes from another count of steps: a new run on the pool of an earlier one.
    """
    return entry.policy_version is not None and entry.policy_version <= global_steps


def is_too_long(entry: PoolEntry, rules: PoolRules) -> bool:
    """Return whether an entry is longer than a row of the trainer may be; then it is never drawn."""
    longest = ((entry.prompt_length, rules.max_prompt_length), (entry.response_length, rules.max_response_length))
    return any(limit is not None and length > limit for length, limit in longest)


def eligible(entry: PoolEntry, rules: PoolRules, global_steps: int) -> bool:
    """Return whether an entry may be drawn at this step: short enough, young enough and rewarded enough.

    An unknown outcome is below any ``min_reward``, an unknown age above any ``max_policy_age``. A corrected outcome
    must also be one with which the entry could enter.
    """
    if is_too_long(entry, rules) or (entry.is_corrected and not _deserves_keeping(entry.outcome, rules)):
        return False
    if rules.min_reward is not None and (entry.outcome is None or entry.outcome < rules.min_reward):
        return False
    if rules.max_policy_age is None:
        return True
    if entry.policy_version is None or not has_known_age(entry, global_steps):
        return False
    return entry.policy_version >= global_steps - rules.max_policy_age


def admit(
    entries: Sequence[PoolEntry], new: PoolEntry, rules: PoolRules, rows: RowPrompts | None = None
) -> tuple[tuple[PoolEntry, ...], PoolEntry | None] | Refusal:
    """Add an entry to those of its task.

    A full task gives up its highest entropy for a lower one (``argmin``), its lowest for a higher one (``argmax``), its
    lowest outcome for one that is as high or higher (``reward``), or its oldest (``random``). By entropy,
    demonstrations, which have none, go first. A rollout replaces a demonstration with the same tokens, since it has
    log-probs. It also replaces a history that is never drawn: one with another prompt, or a longer one than allowed.
    Entries stay in order of arrival.
    Recovery is exact because adding the survivors of some additions again, in the same order, gives the same entries.

    Returns:
        The task's entries afterwards and the replaced one, if any; or why the new one is refused.
    """
    same = next((entry for entry in entries if entry.digest == new.digest), None)
    if same is not None:
        if not same.is_demonstration or new.is_demonstration:
            return Refusal.DUPLICATE
        return (*(entry for entry in entries if entry is not same), new), same  # the same tokens, now with log-probs
    if len(entries) < rules.max_trajectories_per_task:
        return (*entries, new), None
    others: list[PoolEntry] = []
    if not new.is_demonstration:
        prompts = RowPrompts() if rows is None else rows
        others = [
            entry
            for entry in entries
            if is_too_long(entry, rules) or prompts.is_other(new.task_id, entry.prompt, new.prompt)
        ]
    worst = max(others or entries, key=lambda entry: _place(entry, rules))  # the oldest among equals
    by_entropy = rules.exp_select_mode in ("argmin", "argmax")
    better = _place(new, rules) < _place(worst, rules) or (
        not by_entropy and _place(new, rules) == _place(worst, rules)
    )
    if not others and not better:
        return Refusal.NOT_BETTER
    return (*(entry for entry in entries if entry is not worst), new), worst


def _place(entry: PoolEntry, rules: PoolRules) -> tuple[int, float]:
    """Return the sort key for replacement in a full task; the highest is replaced first, unknown values before all."""
    if rules.exp_select_mode == "random":
        return 0, 0.0
    if rules.exp_select_mode == "reward":
        return (1, 0.0) if entry.known_outcome is None else (0, -entry.known_outcome)
    if entry.entropy is None:
        return 1, 0.0
    return 0, entry.entropy if rules.exp_select_mode == "argmin" else -entry.entropy


@dataclass(frozen=True)
class AdmissionPlan:
    """The effect of adding some trajectories to a pool, before anything is stored.

    Trajectories that will stay have placeholder ids below zero in ``entries``; ``accepted`` has them in that order. A
    trajectory that a later one of the same call replaces is not stored at all.
    """

    entries: dict[str, tuple[PoolEntry, ...]]
    """The entries of each changed task."""
    accepted: dict[int, AgentTrajectory]
    replaces: dict[int, int]
    """Placeholder id of an accepted trajectory -> id of the stored trajectory that it replaces."""
    refused: Refused
    displaced: int
    """Number of replaced trajectories: stored ones, and those of the same call that are not stored."""

    def with_ids(self, ids: Sequence[int]) -> dict[str, tuple[PoolEntry, ...]]:
        """Return ``entries`` with the ids that the store gave to the ``accepted``."""
        given = dict(zip(self.accepted, ids, strict=True))
        return {
            task: tuple(
                replace(entry, trajectory_id=given.get(entry.trajectory_id, entry.trajectory_id)) for entry in entries
            )
            for task, entries in self.entries.items()
        }


def plan_admissions(
    held: Mapping[str, tuple[PoolEntry, ...]],
    trajectories: Sequence[AgentTrajectory],
    rules: PoolRules,
    *,
    are_checked: bool = False,
    rows: RowPrompts | None = None,
) -> AdmissionPlan:
    """Return the effect of adding ``trajectories``, in this order, to a pool that holds ``held``.

    Args:
        held: the pool's entries.
        trajectories: the candidates.
        rules: the pool's.
        are_checked: whether :func:`rollouts_to_keep` returned them, without given ``entropies``.
        rows: prompts of the training data's rows; ``None`` = unknown.
    """
    entries: dict[str, tuple[PoolEntry, ...]] = {}
    accepted: dict[int, AgentTrajectory] = {}
    replaces: dict[int, int] = {}
    refused: Refused = {}
    left = 0
    for number, trajectory in enumerate(trajectories):
        task, entry = trajectory.task_id, new_entry(trajectory, -1 - number, is_checked=are_checked)
        if isinstance(entry, Refusal):
            refused.setdefault(entry, []).append(trajectory)
            continue
        outcome = admit(entries.get(task, held.get(task, ())), entry, rules, rows)
        if isinstance(outcome, Refusal):
            refused.setdefault(outcome, []).append(trajectory)
            continue
        entries[task], displaced = outcome
        accepted[entry.trajectory_id] = as_recorded(trajectory, entry.entropy)
        if displaced is None:
            continue
        left += 1
        if accepted.pop(displaced.trajectory_id, None) is None:
            replaces[entry.trajectory_id] = displaced.trajectory_id
        elif displaced.trajectory_id in replaces:  # not stored: this one replaces its target instead
            replaces[entry.trajectory_id] = replaces.pop(displaced.trajectory_id)
    return AdmissionPlan(entries, accepted, replaces, refused, left)


def choose_histories(
    entries: Sequence[PoolEntry],
    n: int,
    rules: PoolRules,
    *,
    uses: Sequence[int],
    entropies: Sequence[float | None],
    generator: np.random.Generator,
    versions_drawn: Counter[int | None] | None = None,
) -> list[int]:
    """Return the indices of up to ``n`` entries of one task, best first, without repetition.

    Their number depends on neither ``entropies`` nor ``generator``.

    Args:
        entries: those that may be drawn, oldest first; of equally good ones the older is chosen.
        n: the maximum.
        rules: define the best.
        uses: number of draws of each; used with ``in_turns``.
        entropies: of each, in nats: the sort key, unless the rules use the outcome. ``None`` = unknown, after all
            others.
        generator: of ``exp_select_mode: random``; otherwise unused.
        versions_drawn: number of histories of each policy version in the batch so far, for ``policy_versions: spread``.
    """
    if n < 1 or not entries:
        return []
    if rules.exp_select_mode == "random":
        order: list[int] = generator.permutation(len(entries)).tolist()
    else:
        sign = 1.0 if rules.exp_select_mode == "argmin" else -1.0
        values = [entry.known_outcome for entry in entries] if rules.exp_select_mode == "reward" else entropies
        ranks = [(1, 0.0) if value is None else (0, sign * value) for value in values]
        order = sorted(range(len(entries)), key=ranks.__getitem__)
    if rules.in_turns:
        order.sort(key=uses.__getitem__)
    if rules.policy_versions == "any":
        return order[:n]
    return _spread(order, n, entries, Counter(versions_drawn))


def _spread(order: Sequence[int], n: int, entries: Sequence[PoolEntry], drawn: Counter[int | None]) -> list[int]:
    """Return the indices of up to ``n`` entries, each of the version drawn least so far; updates ``drawn``."""
    left = list(order)
    chosen: list[int] = []
    while left and len(chosen) < n:
        place = min(left, key=lambda at: drawn[entries[at].policy_version])  # the first among equals
        left.remove(place)
        chosen.append(place)
        drawn[entries[place].policy_version] += 1
    return chosen
