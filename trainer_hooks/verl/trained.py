"""A trained batch of verl as a step of the training ledger (:mod:`trajstore.ledger`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer_hooks.trained import trained_step
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.rows import session_of
from trajstore.ledger import TrainedStep

TRAINED = ("uid", "response_mask", "old_log_probs", "advantages")
"""Required columns of trained rows."""

TOKENS = ("prompts", "responses")
"""Further ones, of which the ledger has a digest."""

WEIGHTS = "rollout_is_weights"
"""Optional column: the weights of verl's rollout correction."""

CORRECTION = ("rollout_is", "rollout_rs")
"""Options of verl's rollout correction that change a row's mask or weight."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row whose advantages are not computed yet."""

    task: str
    rollout: str
    """``rollout_id``; of a replayed row, its history's."""
    version: int | None
    """Policy version that sampled it."""
    actor: Tensor | None = None
    """The actor's log-probs of a replayed row, which has the recorded ones; ``None`` of other rows."""


def step_of_rows(
    rows: Sequence[Row],
    scored: Mapping[str, ScoredRow],
    numbers: Mapping[str, int | None],
    step: int,
    *,
    drops_negative: bool,
    bypass: bool,
    loss: Mapping[str, float],
    **header: Mapping[str, Any],
) -> TrainedStep:
    """Return the record of a step, with rows by task and session, whose order does not depend on the time of arrival.

    ``ratio`` is that before the step's first update, 1 for fresh rows; unknown in verl's bypass mode, in which the
    actor computes no log-probs then.

    Args:
        rows: with the columns of :data:`TRAINED` and :data:`TOKENS`, without padding.
        scored: the same rows by key.
        numbers: ids in the store by ``rollout_id``; ``None`` = not in the store.
        step: number of the step.
        drops_negative: replayed rows with a negative advantage have no loss.
        bypass: ``old_log_probs`` are the engine's.
        loss: loss terms by name.
        header: ``data``, ``seeds``, ``options`` and ``config`` of :class:`~trajstore.ledger.TrainedStep`.
    """
    ordered = sorted(rows, key=lambda row: (scored[row.key].task, *_parts(row.key)))
    facts = [scored[row.key] for row in ordered]
    mask, old, advantages = (
        pad_sequence([row.columns[name].float() for row in ordered], batch_first=True) for name in TRAINED[1:]
    )
    own = [
        row.columns["old_log_probs"] if fact.actor is None else fact.actor
        for row, fact in zip(ordered, facts, strict=True)
    ]
    actor = pad_sequence([log_probs.float() for log_probs in own], batch_first=True)
    weights = torch.tensor([_weight(row, scored[row.key], drops_negative=drops_negative) for row in ordered])
    return trained_step(
        step,
        uids=[str(row.columns["uid"]) for row in ordered],
        task_ids=[fact.task for fact in facts],
        mask=mask,
        advantages=advantages,
        ratios=None if bypass else (actor - old).exp(),
        versions=[fact.version for fact in facts],
        replayed=[fact.actor is not None for fact in facts],
        trajectories=[numbers.get(fact.rollout) for fact in facts],
        rollouts=[session_of(row.key) for row in ordered],
        weights=weights,
        policy_before=step,
        policy_after=step + 1,
        loss=loss,
        tokens=[torch.cat([row.columns[name] for name in TOKENS]) for row in ordered],
        log_probs=old,
        **header,
    )


def options_of(config: Any, pad_token_id: int, *, drops_negative: bool, recorded_log_probs: bool) -> dict[str, Any]:
    """Return the options by which ``trajstore replay-step`` rebuilds a step, as JSON values.

    Args:
        config: verl's configuration.
        pad_token_id: padding of the batch.
        drops_negative: replayed rows with a negative advantage have no loss.
        recorded_log_probs: whether ratios of replayed rows are relative to their recorded log-probs.
    """
    algorithm = config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    estimator = algorithm.adv_estimator
    return {
        "pad_token_id": pad_token_id,
        "advantages": {
            "estimator": str(getattr(estimator, "value", estimator)),
            "norm_adv_by_std_in_grpo": bool(algorithm.get("norm_adv_by_std_in_grpo", True)),
            "kl_in_reward": bool(algorithm.use_kl_in_reward),
            "reward": "score",
            "precision": "float32",
        },
        "loss": {
            "loss_agg_mode": str(config.actor_rollout_ref.actor.loss_agg_mode),
            "drop_negative_off_policy": drops_negative,
        },
        "recorded_log_probs": recorded_log_probs,
        "rollout_correction": {name: str(correction[name]) for name in CORRECTION if correction.get(name)},
        "policy": {"trainer": "verl"},
    }


def _parts(key: str) -> tuple[str, int, int]:
    uid, session, output = key.split("_")
    return uid, int(session), int(output)


def _weight(row: Row, scored: ScoredRow, *, drops_negative: bool) -> float:
    trained = row.columns["response_mask"] != 0
    if not trained.any():
        return 1.0
    if drops_negative and scored.actor is not None and row.columns["advantages"][trained].float().mean() < 0:
        return 0.0
    return float(row.columns[WEIGHTS][trained].float().mean()) if WEIGHTS in row.columns else 1.0


def loss_terms(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among verl's metrics of an actor update, NaN too, without those of speed and memory."""
    return {
        name.removeprefix("actor/"): float(value)
        for name, value in metrics.items()
        if name.startswith("actor/") and "perf/" not in name
        if isinstance(value, int | float)
    }
