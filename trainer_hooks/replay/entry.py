"""Pool entries: the facts of a trajectory that selection needs, or the reason for refusing it. Pure."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from trainer_hooks.replay.outcomes import outcome_of
from trainer_hooks.replay.prompts import UNKNOWN_PROMPT, Prompt, plain_json, prompt_of
from trainer_hooks.replay.rows import lengths_of_rows
from trainer_hooks.replay.wellformed import as_recorded, field_problem, record_problem
from trajstore._core.columns.facts import RECORDED
from trajstore.trajectory import AgentTrajectory

DEMONSTRATION = "demonstration"
"""Key of ``metadata``, true for a trajectory without log-probabilities that no policy of this run sampled: a
demonstration, or another program's transcript. It is replayed with the current policy's log-probabilities."""

EARLIER_RUN = "earlier_run"
"""Key of ``metadata`` for the original policy version of a trajectory of an earlier run."""

LOG_PROB_ROUNDING = 1e-3
"""Tolerance for log-probabilities above 0: rounding of logit minus logsumexp in half precision."""


class Refusal(StrEnum):
    """Why a trajectory did not enter the pool.

    Attributes:
        NO_LLM_TOKEN: the model wrote none of its tokens.
        NO_RESPONSE_MASK: neither ``loss_mask`` with ``response_start`` nor ``response_mask`` marks the model's tokens,
            so that recorded log-probabilities cannot be aligned (as in a pool saved with filtered ones).
        LOG_PROBS_MISMATCH: recorded log-probabilities are absent (and it is no demonstration), differ in length from
            the response, or are not finite where they count; or ``response_mask``, ``loss_mask`` and ``input_ids``
            disagree on the length of the response.
        MALFORMED: a field has an invalid shape, length, dtype or value, so that no store could keep the rollout:
            ``entropys`` of another length than ``old_log_probs``, token ids that are not integers, metadata that is not
            JSON. The log names the field.
        NO_TOKENS: no token ids, only messages at most, so there is nothing to train on. A tokenizer makes them
            (``ReplayHook(tokenizer=...)``, ``trajstore pool seed --tokenizer``).
        LOG_PROBS_ABOVE_ZERO: a recorded log-probability that counts is above 0 by more than rounding.
        NO_OUTCOME: the rollout has no outcome, so it is neither a success nor a failure.
        OUTCOME_NOT_FINITE: the rollout's outcome is NaN or infinite.
        NO_ENTROPY: it has neither log-probabilities nor a finite entropy, such as a demonstration among the rollouts of
            a step; or the entropies given with it have no finite mean, or differ in number from its mask.
        NOT_WORTH_KEEPING: a demonstration that is no success by ``save_filter``.
        DUPLICATE: the task has a trajectory with the same tokens already.
        NOT_BETTER: the task has its full number of trajectories, and this one's entropy is no improvement.
    """

    NO_LLM_TOKEN = "no_llm_token"
    NO_RESPONSE_MASK = "no_response_mask"
    LOG_PROBS_MISMATCH = "log_probs_mismatch"
    MALFORMED = "malformed"
    NO_TOKENS = "no_tokens"
    LOG_PROBS_ABOVE_ZERO = "log_probs_above_zero"
    NO_OUTCOME = "no_outcome"
    OUTCOME_NOT_FINITE = "outcome_not_finite"
    NO_ENTROPY = "no_entropy"
    NOT_WORTH_KEEPING = "not_worth_keeping"
    DUPLICATE = "duplicate"
    NOT_BETTER = "not_better"


class Departure(StrEnum):
    """Why a trajectory left the pool.

    Attributes:
        TASK_SOLVED: every rollout of a later step succeeded, so the task no longer needs history.
        REPLACED: its task had its full number, and a better one took its place; or it was a demonstration with the same
            tokens.
        UNAVAILABLE: the store evicted it.
        UNREADABLE: its stored record is damaged or missing.
    """

    TASK_SOLVED = "task_solved"
    REPLACED = "replaced"
    UNAVAILABLE = "unavailable"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """The facts of a stored trajectory that selection needs."""

    trajectory_id: int
    task_id: str
    entropy: float | None
    """Mean entropy in nats at entry; ``None`` for a demonstration."""
    outcome: float | None
    policy_version: int | None
    digest: bytes
    """Identifies the tokens."""
    prompt: Prompt = UNKNOWN_PROMPT
    """The prompt that it answers, computed from its tokens and messages on every load."""
    prompt_length: int = 0
    """Tokens of the prompt, of several rows the first one's."""
    response_length: int = 0
    """Tokens of the longest row's response."""
    is_demonstration: bool = False
    """Whether it has no recorded log-probabilities: :data:`DEMONSTRATION`."""
    is_corrected: bool = False
    """Whether a later outcome replaced the recorded one."""

    @property
    def known_outcome(self) -> float | None:
        """The outcome; ``None`` if it is unknown or not finite."""
        return self.outcome if self.outcome is not None and math.isfinite(self.outcome) else None


def mean_entropy(entropys: torch.Tensor, response_mask: torch.Tensor) -> float | None:
    """Return the mean of ``entropys`` where ``response_mask == 1``; ``None`` if not finite or empty.

    Also ``None`` if the two differ in shape.

    Args:
        entropys: ``[R]`` floating point, nats.
        response_mask: ``[R]`` integer or bool.
    """
    if entropys.shape != response_mask.shape:
        return None
    mask = response_mask.detach()
    valid = entropys.detach()[mask if mask.dtype == torch.bool else mask == 1].double()
    if valid.numel() == 0:
        return None
    mean = float(valid.mean())
    return mean if math.isfinite(mean) else None


def own_entropy(trajectory: AgentTrajectory) -> float | None:
    """Return a trajectory's mean entropy in nats, from its own fields; ``None`` if they give none.

    The mean of its ``entropys``; else its ``entropy``; else the mean of -``old_log_probs`` over the model's tokens, an
    estimate from the sampled tokens. The trajectory must have no :func:`field_problem`.
    """
    mask = llm_mask(trajectory)
    known = trajectory.entropy if trajectory.entropy is not None and math.isfinite(trajectory.entropy) else None
    for values, sign in ((trajectory.entropys, 1.0), (trajectory.old_log_probs, -1.0)):
        if sign < 0 and known is not None:
            return known
        if values is not None and mask is not None and values.shape == mask.shape:
            mean = mean_entropy(values, mask)
            if mean is not None:
                return sign * mean
    return known


def token_digest(trajectory: AgentTrajectory) -> bytes:
    """Return 16 bytes that are equal for two trajectories only if their tokens are.

    Without token ids, messages and log-probabilities are compared, since equal texts may have been other tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    if trajectory.input_ids is not None:
        digest.update(b"ids" + trajectory.input_ids.to(torch.int64).cpu().contiguous().numpy().tobytes())
        return digest.digest()
    texts = [(message.get("role"), message.get("content")) for message in trajectory.messages]
    digest.update(b"messages" + plain_json(texts))
    if trajectory.old_log_probs is not None:
        digest.update(trajectory.old_log_probs.to(torch.float32).cpu().contiguous().numpy().tobytes())
    return digest.digest()


def llm_mask(trajectory: AgentTrajectory) -> torch.Tensor | None:
    """Return which response tokens the model wrote, bool ``[R]``; ``None`` if unknown.

    This is ``loss_mask`` from ``response_start`` on, else ``response_mask``.
    """
    if trajectory.loss_mask is not None and trajectory.response_start is not None:
        return trajectory.loss_mask[trajectory.response_start :] == 1
    return None if trajectory.response_mask is None else trajectory.response_mask == 1


def is_demonstration(trajectory: AgentTrajectory) -> bool:
    """Return whether a trajectory is marked as a demonstration and has no log-probabilities."""
    return trajectory.old_log_probs is None and trajectory.metadata.get(DEMONSTRATION) is True


def of_earlier_run(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return an earlier run's rollout with unknown age; tensors and messages are shared.

    Its ``policy_version`` counts that run's steps, so it moves to ``metadata["earlier_run"]``, and a pool does not fill
    it in again. Demonstrations, which have none, and malformed rollouts are returned unchanged.
    """
    if is_demonstration(trajectory) or EARLIER_RUN in trajectory.metadata or field_problem(trajectory):
        return trajectory
    metadata = {**trajectory.metadata, EARLIER_RUN: {"policy_version": trajectory.policy_version}}
    return replace(trajectory, policy_version=None, metadata=metadata)


def token_refusal(trajectory: AgentTrajectory) -> Refusal | None:
    """Return why the trajectory's tokens cannot be replayed; ``None`` if they can."""
    if trajectory.input_ids is None:
        return Refusal.NO_TOKENS
    demonstration = is_demonstration(trajectory)
    mask = llm_mask(trajectory)
    if mask is None:
        return Refusal.NO_RESPONSE_MASK
    if not bool(mask.any()):
        return Refusal.NO_LLM_TOKEN
    log_probs = trajectory.old_log_probs
    if not demonstration and (log_probs is None or log_probs.shape != mask.shape):
        return Refusal.LOG_PROBS_MISMATCH
    if trajectory.response_mask is not None and trajectory.response_mask.shape != mask.shape:
        return Refusal.LOG_PROBS_MISMATCH
    tokens, start = len(trajectory.input_ids), trajectory.response_start
    if tokens < len(mask) if start is None else tokens - start != len(mask):
        return Refusal.LOG_PROBS_MISMATCH
    if log_probs is None:
        return None
    counted = log_probs[mask].double()  # some float dtypes have no comparison
    low, high = map(float, torch.aminmax(counted))  # both are nan if any is
    if not math.isfinite(low) or not math.isfinite(high):
        return Refusal.LOG_PROBS_MISMATCH
    return Refusal.LOG_PROBS_ABOVE_ZERO if high > LOG_PROB_ROUNDING else None


def refusal_of(trajectory: AgentTrajectory, entropy: float | None) -> Refusal | None:
    """Return why a trajectory can enter no pool; ``None`` if it may.

    Checks its tokens first, then its entropy (a mean over these tokens), and last whether a store could keep it.

    Args:
        trajectory: the candidate, without a :func:`field_problem`.
        entropy: its mean entropy in nats; ``None`` = unknown. Ignored for a demonstration.
    """
    refusal = _replay_refusal(trajectory, entropy)
    if refusal is None and record_problem(as_recorded(trajectory, entropy)):
        return Refusal.MALFORMED
    return refusal


def problem_of(trajectory: AgentTrajectory) -> str:
    """Return the problem of a trajectory that is refused as ``malformed``; empty if there is none."""
    return field_problem(trajectory) or record_problem(as_recorded(trajectory, _entropy_of(trajectory)))


def new_entry(trajectory: AgentTrajectory, trajectory_id: int, *, is_checked: bool = False) -> PoolEntry | Refusal:
    """Return the entry of a candidate, or why it can enter no pool.

    Args:
        trajectory: the candidate.
        trajectory_id: of the entry.
        is_checked: whether :func:`field_problem` and :func:`refusal_of` have found nothing.
    """
    if is_checked:
        return _entry(trajectory, trajectory_id, _entropy_of(trajectory))
    if field_problem(trajectory):
        return Refusal.MALFORMED
    outcome, entropy = outcome_of(trajectory), _entropy_of(trajectory)
    if outcome is not None and not math.isfinite(outcome):
        return Refusal.OUTCOME_NOT_FINITE
    return refusal_of(trajectory, entropy) or _entry(trajectory, trajectory_id, entropy)


def entry_of(trajectory: AgentTrajectory, trajectory_id: int) -> PoolEntry | Refusal:
    """Return the entry of a stored trajectory, or why it cannot be replayed.

    Its entropy is its ``entropy`` field if finite, else :func:`own_entropy`.
    """
    entropy = _entropy_of(trajectory)
    return _replay_refusal(trajectory, entropy) or _entry(trajectory, trajectory_id, entropy)


def _replay_refusal(trajectory: AgentTrajectory, entropy: float | None) -> Refusal | None:
    """Return why a well-formed trajectory cannot be replayed; ``None`` if it can."""
    refusal = token_refusal(trajectory)
    if is_demonstration(trajectory) or (entropy is not None and math.isfinite(entropy)):
        return refusal
    neither = refusal is Refusal.LOG_PROBS_MISMATCH and trajectory.old_log_probs is None
    return Refusal.NO_ENTROPY if refusal is None or neither else refusal


def _entropy_of(trajectory: AgentTrajectory) -> float | None:
    """Return the entropy used to compare a trajectory; ``None`` for a demonstration, or if unknown."""
    if is_demonstration(trajectory):
        return None
    if trajectory.entropy is not None and math.isfinite(trajectory.entropy):
        return float(trajectory.entropy)
    return own_entropy(trajectory)


def _entry(trajectory: AgentTrajectory, trajectory_id: int, entropy: float | None) -> PoolEntry:
    recorded, lengths = trajectory.metadata.get(RECORDED), lengths_of_rows(trajectory)
    return PoolEntry(
        trajectory_id=trajectory_id,
        task_id=trajectory.task_id,
        entropy=entropy,
        outcome=outcome_of(trajectory),
        policy_version=trajectory.policy_version,
        digest=token_digest(trajectory),
        prompt=prompt_of(trajectory),
        prompt_length=lengths[0][1],  # prompts of later rows are made by the agent
        response_length=max(length - prompt for length, prompt in lengths),
        is_demonstration=is_demonstration(trajectory),
        is_corrected=isinstance(recorded, dict) and "outcome" in recorded,
    )
