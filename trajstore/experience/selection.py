"""What enters the pool, what it replaces there, and what comes out. Pure; the generator is passed in."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, get_args

import numpy as np
import orjson
import torch

from trajstore.errors import ConfigurationError
from trajstore.experience.buckets import TASK_SAMPLING, TASK_SAMPLING_HELP, TaskSampling
from trajstore.experience.outcomes import TaskOutcome, is_known, is_replayed, is_success, outcome_of
from trajstore.trajectory import AgentTrajectory

SelectMode = Literal["argmin", "argmax", "random"]
SELECT_MODES: tuple[SelectMode, ...] = get_args(SelectMode)

SaveFilter = Literal["success", "best", "positive"]
SAVE_FILTERS: tuple[SaveFilter, ...] = get_args(SaveFilter)


class Refusal(StrEnum):
    """Why a trajectory did not enter the pool."""

    NO_LLM_TOKEN = "no_llm_token"
    """Not one token was written by the model."""
    NO_RESPONSE_MASK = "no_response_mask"
    """Neither ``loss_mask`` with ``response_start`` nor ``response_mask`` says which tokens the model wrote, so
    recorded log-probabilities have no place: a pool saved with filtered ones, say."""
    LOG_PROBS_MISMATCH = "log_probs_mismatch"
    """Recorded log-probabilities are absent, of another length than the response, or not finite where they count."""
    LOG_PROBS_ABOVE_ZERO = "log_probs_above_zero"
    """A recorded log-probability that counts is above 0 by more than rounding: it is none."""
    NO_OUTCOME = "no_outcome"
    """The rollout has no outcome, so it is neither a success nor a failure."""
    OUTCOME_NOT_FINITE = "outcome_not_finite"
    """The rollout's outcome is NaN or infinite."""
    NO_ENTROPY = "no_entropy"
    """No position has a (finite) entropy, so that there is no mean."""
    DUPLICATE = "duplicate"
    """The task has a trajectory with the same tokens already."""
    NOT_BETTER = "not_better"
    """The task has its full number of trajectories, and this one's entropy is no improvement."""


REWARD_FINGERPRINT = "reward_fingerprint"
"""Key of ``metadata`` under which a trajectory says which reward function gave its outcome."""

LOG_PROB_ROUNDING = 1e-3
"""How far above 0 a log-probability may be: the difference of a logit and a logsumexp in half precision."""


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """The rules of a pool. ``None`` switches a bound off.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    n_rollout: int
    """Rows that each task has in a batch."""
    success_threshold: float = 1.0
    """Outcome from which on a rollout is a success; see :func:`~trajstore.experience.outcomes.is_success`."""
    experience_lbound: int | None = 0
    """A task's trajectories enter if its difficulty (successes out of ``n_rollout``) is above this,"""
    experience_rbound: int | None = 8
    """and below this. (ExGRPO's upper bound is inclusive: its 7 is 8 here.)"""
    save_filter: SaveFilter = "success"
    """``success``: every success enters; ``best``: only the best of these by entropy; ``positive``: every rollout with
    an outcome above 0, as in AgentEvolver: with partial rewards these are failures too, and they are replayed."""
    exp_select_mode: SelectMode = "argmin"
    """Which entropy is best, both when entering a full task and among equally often used ones when coming out."""
    max_trajectories_per_task: int = 10
    max_policy_age: int | None = None
    """Training steps after which a trajectory no longer comes out. One whose version is unknown, or newer than the
    step that is going on, has no known age and does not come out either."""
    min_reward: float | None = None
    """Outcome that a trajectory must have at the least to come out."""
    use_current_policy_entropy: bool = True
    replay_difficulty: int | None = None
    """The one bucket from which tasks are drawn."""
    task_sampling: TaskSampling = "by_task"
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = rule_problems(vars(self))
        if problems:
            raise ConfigurationError("experience pool: " + "; ".join(problems))


def rule_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with these values of :class:`PoolRules` fields, one sentence each. Absent keys are fine."""
    problems = []

    def whole(key: str, least: int, optional: bool = False) -> None:
        value = values.get(key)
        if key not in values or (optional and value is None):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            null = " or null" if optional else ""
            problems.append(f"{key}: {value!r}, must be a whole number of at least {least}{null}")

    def choice(key: str, allowed: Sequence[str]) -> None:
        if key in values and values[key] not in allowed:
            problems.append(f"{key}: {values[key]!r}, must be one of {', '.join(allowed)}")

    whole("n_rollout", 1)
    whole("max_trajectories_per_task", 1)
    whole("seed", 0)
    whole("max_policy_age", 0, optional=True)
    whole("replay_difficulty", 0, optional=True)
    choice("save_filter", SAVE_FILTERS)
    choice("exp_select_mode", SELECT_MODES)
    if "task_sampling" in values and values["task_sampling"] not in TASK_SAMPLING:
        problems.append(f"task_sampling: {values['task_sampling']!r}, {TASK_SAMPLING_HELP}")
    threshold = values.get("success_threshold", 1.0)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
        problems.append(f"success_threshold: {threshold!r}, must be a finite number")
    for key in ("experience_lbound", "experience_rbound", "min_reward"):
        value = values.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if value is not None and not number:
            problems.append(f"{key}: {value!r}, must be a number or null")
    low, high = values.get("experience_lbound"), values.get("experience_rbound")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        problems.append(f"experience_lbound: {low!r}, must be below experience_rbound = {high!r} (both are exclusive)")
    return problems


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """All that choosing needs to know of a stored trajectory."""

    trajectory_id: int
    task_id: str
    entropy: float
    """Mean entropy in nats when it entered."""
    outcome: float | None
    policy_version: int | None
    digest: bytes
    """Identifies the tokens."""
    reward_fingerprint: str = ""
    """Reward function that gave the outcome; empty = unknown."""


def mean_entropy(entropys: torch.Tensor, response_mask: torch.Tensor) -> float | None:
    """Return the mean of ``entropys`` over positions with ``response_mask == 1``; ``None`` if that is no number.

    Args:
        entropys: ``[R]`` floating point, nats.
        response_mask: ``[R]`` integer or bool.
    """
    valid = entropys.detach()[response_mask.detach() == 1].double()
    if valid.numel() == 0:
        return None
    mean = float(valid.mean())
    return mean if math.isfinite(mean) else None


def own_entropy(trajectory: AgentTrajectory) -> float | None:
    """Return the mean entropy that a trajectory tells of itself, in nats; ``None`` if it tells none.

    The mean of its ``entropys``; else its ``entropy``; else the mean of -``old_log_probs`` where the model wrote, which
    estimates it from the tokens that were sampled.
    """
    mask = llm_mask(trajectory)
    for values, sign in ((trajectory.entropys, 1.0), (trajectory.old_log_probs, -1.0)):
        if sign < 0 and trajectory.entropy is not None:
            return trajectory.entropy
        if values is not None and mask is not None and values.shape == mask.shape:
            mean = mean_entropy(values, mask)
            if mean is not None:
                return sign * mean
    return trajectory.entropy


def token_digest(trajectory: AgentTrajectory) -> bytes:
    """Return 16 bytes that two trajectories share only if their tokens are equal.

    Without token ids equal texts may have been other tokens: then messages and log-probabilities are compared.
    """
    digest = hashlib.blake2b(digest_size=16)
    if trajectory.input_ids is not None:
        digest.update(b"ids" + trajectory.input_ids.to(torch.int64).cpu().contiguous().numpy().tobytes())
        return digest.digest()
    said = [(message.get("role"), message.get("content")) for message in trajectory.messages]
    digest.update(b"messages" + orjson.dumps(said))
    if trajectory.old_log_probs is not None:
        digest.update(trajectory.old_log_probs.to(torch.float32).cpu().contiguous().numpy().tobytes())
    return digest.digest()


def llm_mask(trajectory: AgentTrajectory) -> torch.Tensor | None:
    """Return which response tokens the model wrote, bool ``[R]``; ``None`` if the trajectory does not say.

    ``loss_mask`` from ``response_start`` on; without these, ``response_mask``.
    """
    if trajectory.loss_mask is not None and trajectory.response_start is not None:
        return trajectory.loss_mask[trajectory.response_start :] == 1
    return None if trajectory.response_mask is None else trajectory.response_mask == 1


def token_refusal(trajectory: AgentTrajectory) -> Refusal | None:
    """Return why the trajectory's tokens cannot be replayed; ``None`` if they can."""
    mask = llm_mask(trajectory)
    if mask is None:
        return Refusal.NO_RESPONSE_MASK
    if not bool(mask.any()):
        return Refusal.NO_LLM_TOKEN
    log_probs = trajectory.old_log_probs
    if log_probs is None or log_probs.shape != mask.shape:
        return Refusal.LOG_PROBS_MISMATCH
    if trajectory.response_mask is not None and trajectory.response_mask.shape != mask.shape:
        return Refusal.LOG_PROBS_MISMATCH
    if trajectory.input_ids is not None and len(trajectory.input_ids) < len(mask):
        return Refusal.LOG_PROBS_MISMATCH
    counted = log_probs[mask]
    if not bool(torch.isfinite(counted).all()):
        return Refusal.LOG_PROBS_MISMATCH
    return Refusal.LOG_PROBS_ABOVE_ZERO if bool((counted > LOG_PROB_ROUNDING).any()) else None


def entry_of(trajectory: AgentTrajectory, trajectory_id: int) -> PoolEntry | Refusal:
    """Return the entry of a trajectory, or why it is refused whatever the pool holds."""
    refusal = token_refusal(trajectory)
    if refusal is not None:
        return refusal
    entropy = trajectory.entropy
    if entropy is None or not math.isfinite(entropy):
        return Refusal.NO_ENTROPY
    return PoolEntry(
        trajectory_id=trajectory_id,
        task_id=trajectory.task_id,
        entropy=float(entropy),
        outcome=outcome_of(trajectory),
        policy_version=trajectory.policy_version,
        digest=token_digest(trajectory),
        reward_fingerprint=str(trajectory.metadata.get(REWARD_FINGERPRINT, "")),
    )


def with_reward_fingerprint(trajectory: AgentTrajectory, fingerprint: str) -> AgentTrajectory:
    """Return a trajectory that says which reward function gave its outcome, unless it says so already."""
    if not fingerprint or REWARD_FINGERPRINT in trajectory.metadata:
        return trajectory
    return replace(trajectory, metadata={**trajectory.metadata, REWARD_FINGERPRINT: fingerprint})


def in_bounds(outcome: TaskOutcome, rules: PoolRules) -> bool:
    """Return whether ``experience_lbound < difficulty < experience_rbound``; both are exclusive."""
    difficulty = outcome.difficulty(rules.n_rollout)
    if difficulty is None:
        return False
    low, high = rules.experience_lbound, rules.experience_rbound
    return (low is None or low < difficulty) and (high is None or difficulty < high)


def is_worth_keeping(trajectory: AgentTrajectory, rules: PoolRules) -> bool:
    """Return whether a rollout's outcome lets it enter: a success or, by ``save_filter: positive``, any above 0."""
    outcome = outcome_of(trajectory)
    if rules.save_filter == "positive":
        return is_known(outcome) and outcome is not None and outcome > 0
    return is_success(outcome, rules.success_threshold)


def outcome_refusal(trajectory: AgentTrajectory) -> Refusal | None:
    """Return why a rollout's outcome says nothing; ``None`` if it does."""
    outcome = outcome_of(trajectory)
    if outcome is None:
        return Refusal.NO_OUTCOME
    return None if math.isfinite(outcome) else Refusal.OUTCOME_NOT_FINITE


def choose_to_save(
    candidates: Sequence[AgentTrajectory], rules: PoolRules, generator: np.random.Generator
) -> list[AgentTrajectory]:
    """Return which rollouts of one task are kept, by ``save_filter``.

    Args:
        candidates: rollouts of a task that is in bounds; each has its ``entropy``.
        rules: the pool's rules.
        generator: used by ``save_filter="best"`` with ``exp_select_mode="random"`` only.
    """
    worthy = [trajectory for trajectory in candidates if is_worth_keeping(trajectory, rules)]
    if rules.save_filter != "best" or not worthy:
        return worthy
    entropies = [math.nan if trajectory.entropy is None else trajectory.entropy for trajectory in worthy]
    return [worthy[rank(entropies, rules.exp_select_mode, generator)[0]]]


def rollouts_to_keep(
    trajectories: Sequence[AgentTrajectory],
    entropies: Sequence[float | None],
    *,
    outcomes: Mapping[str, TaskOutcome],
    rules: PoolRules,
    global_steps: int,
    generator: np.random.Generator,
) -> tuple[list[AgentTrajectory], Counter[str]]:
    """Return which rollouts of one step are kept, task by task, and how many were refused, by reason.

    Args:
        trajectories: the step's rollouts; replayed ones are left out.
        entropies: mean entropy in nats of each of them; ``None`` = unknown.
        outcomes: of each task that may enter; others are left out.
        rules: the pool's rules.
        global_steps: policy version of rollouts that tell none.
        generator: see :func:`choose_to_save`.

    Returns:
        Copies with ``entropy`` and ``policy_version`` set, which share tensors with ``trajectories``; refusals.
    """
    candidates: dict[str, list[AgentTrajectory]] = {}
    refused: Counter[str] = Counter()
    for trajectory, entropy in zip(trajectories, entropies, strict=True):
        task = trajectory.task_id
        if is_replayed(trajectory):
            continue
        refusal = outcome_refusal(trajectory)
        if refusal is not None:
            refused[refusal.value] += 1
            continue
        if task not in outcomes or not in_bounds(outcomes[task], rules):
            continue
        version = global_steps if trajectory.policy_version is None else trajectory.policy_version
        candidates.setdefault(task, []).append(replace(trajectory, entropy=entropy, policy_version=version))
    kept: list[AgentTrajectory] = []
    for rollouts in candidates.values():
        known = [trajectory for trajectory in rollouts if trajectory.entropy is not None]
        unknown = [trajectory for trajectory in rollouts if trajectory.entropy is None]
        lost = sum(is_worth_keeping(trajectory, rules) for trajectory in unknown)
        if lost:
            refused[Refusal.NO_ENTROPY.value] += lost
        kept.extend(choose_to_save(known, rules, generator))
    return kept, refused


def rank(
    entropies: Sequence[float], mode: SelectMode, generator: np.random.Generator, uses: Sequence[int] | None = None
) -> list[int]:
    """Return the indices of ``entropies``, best first, each once. Equal ones keep their order.

    Args:
        entropies: in nats.
        mode: ``argmin``: low entropy is good; ``argmax``: high; ``random``: any order.
        generator: used by ``random``.
        uses: how often each was used; fewer is better, before entropy. Otherwise the best would come for ever, and
            the others never. Not used by ``random``, which comes to all of them.
    """
    if mode == "random":
        return [int(index) for index in generator.permutation(len(entropies))]
    sign = 1 if mode == "argmin" else -1
    used = [0] * len(entropies) if uses is None else uses
    return sorted(range(len(entropies)), key=lambda index: (used[index], sign * entropies[index]))


def has_known_age(entry: PoolEntry, global_steps: int) -> bool:
    """Return whether the age of the policy that sampled is known.

    A version newer than the step that is going on comes from another count of steps: a run that began anew on the
    pool of an earlier one.
    """
    return entry.policy_version is not None and entry.policy_version <= global_steps


def eligible(entry: PoolEntry, rules: PoolRules, global_steps: int) -> bool:
    """Return whether an entry may come out at this step: young enough and rewarded enough.

    An unknown outcome is below any ``min_reward``, an unknown age above any ``max_policy_age``.
    """
    if rules.min_reward is not None and (entry.outcome is None or entry.outcome < rules.min_reward):
        return False
    if rules.max_policy_age is None:
        return True
    if entry.policy_version is None or not has_known_age(entry, global_steps):
        return False
    return entry.policy_version >= global_steps - rules.max_policy_age


def admit(
    entries: Sequence[PoolEntry], new: PoolEntry, rules: PoolRules
) -> tuple[tuple[PoolEntry, ...], PoolEntry | None] | Refusal:
    """Put an entry among those of its task.

    A full task gives up its highest entropy for a lower one (``argmin``), its lowest for a higher one
    (``argmax``), or its oldest (``random``). Entries stay in order of arrival. Adding the survivors of some
    additions again, in the same order, gives the same entries: this is what makes recovery exact.

    Returns:
        The task's entries afterwards and the one that was replaced, if any; or why the new one is refused.
    """
    if any(entry.digest == new.digest for entry in entries):
        return Refusal.DUPLICATE
    if len(entries) < rules.max_trajectories_per_task:
        return (*entries, new), None
    sign = {"argmin": 1, "argmax": -1, "random": 0}[rules.exp_select_mode]
    worst = max(entries, key=lambda entry: sign * entry.entropy)  # the oldest among equals
    if sign and sign * new.entropy >= sign * worst.entropy:
        return Refusal.NOT_BETTER
    return (*(entry for entry in entries if entry is not worst), new), worst


@dataclass(frozen=True)
class AdmissionPlan:
    """What taking some trajectories into a pool will do, before anything is stored.

    Trajectories that will stay have placeholder ids below zero in ``entries``; ``accepted`` has them in that
    order. One that a later one of the same call replaces is not stored at all.
    """

    entries: dict[str, tuple[PoolEntry, ...]]
    """The entries of each task that changes."""
    accepted: dict[int, AgentTrajectory]
    replaced: tuple[int, ...]
    """Ids of stored trajectories that leave the pool."""
    refused: Counter[str]

    def with_ids(self, ids: Sequence[int]) -> dict[str, tuple[PoolEntry, ...]]:
        """Return ``entries`` under the ids that the store gave the ``accepted``."""
        given = dict(zip(self.accepted, ids, strict=True))
        return {
            task: tuple(replace(one, trajectory_id=given.get(one.trajectory_id, one.trajectory_id)) for one in entries)
            for task, entries in self.entries.items()
        }


def plan_admissions(
    held: Mapping[str, tuple[PoolEntry, ...]], trajectories: Sequence[AgentTrajectory], rules: PoolRules
) -> AdmissionPlan:
    """Return what taking ``trajectories``, in this order, into a pool that holds ``held`` will do."""
    entries: dict[str, tuple[PoolEntry, ...]] = {}
    accepted: dict[int, AgentTrajectory] = {}
    replaced: list[int] = []
    refused: Counter[str] = Counter()
    for number, trajectory in enumerate(trajectories):
        entry = entry_of(trajectory, -1 - number)
        if isinstance(entry, Refusal):
            refused[entry.value] += 1
            continue
        task = trajectory.task_id
        outcome = admit(entries.get(task, held.get(task, ())), entry, rules)
        if isinstance(outcome, Refusal):
            refused[outcome.value] += 1
            continue
        entries[task], gone = outcome
        accepted[entry.trajectory_id] = trajectory
        if gone is not None and accepted.pop(gone.trajectory_id, None) is None:
            replaced.append(gone.trajectory_id)
    return AdmissionPlan(entries, accepted, tuple(replaced), refused)
