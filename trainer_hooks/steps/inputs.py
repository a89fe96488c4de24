"""The inputs of a recorded training step: from its ledger and the store of its rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.plan import rows_of_rollout
from trainer_hooks.replay.late_values import SCORE, with_training
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.facts import GIVEN, RECORDED, session_of
from trajstore.errors import ConfigurationError, CorruptStoreError, TrajectoryUnavailableError, counted
from trajstore.ledger import LEDGER_FOLDER, TrainedStep, read
from trajstore.trajectory import AgentTrajectory

TOLERANCES: Mapping[str, float] = {"advantages": 1e-6, "log-probs": 1e-4, "ratios": 1e-5, "loss": 1e-6}
"""Largest difference that counts as equal, by check; relative to the value where that is above 1."""

HALF_PRECISION: Mapping[str, float] = {**TOLERANCES, "log-probs": 0.1, "ratios": 0.1, "loss": 0.02}
"""The same for a policy in bfloat16 or float16: other kernels round its logits, with 8 or 11 bits, differently."""

TENSORS = ("input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask", "response_mask", "step_ids")
"""The batch's tensors, as :func:`~trainer_hooks.batch.build_batch` makes them."""

NOTED = {"advantages": "stored_advantages", "rollout_is_weights": "stored_weights"}
"""Late value of a fresh row, reported by the trainer after the step -> name of its tensor."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step trained on. B rows of P prompt and R response positions.

    Attributes:
        step: the ledger's record.
        tensors: those of :data:`TENSORS`; ``rewards`` float64 [B], by which advantages are made; ``rollouts`` int64
            [B], the rollout of each row; ``old_log_probs`` [B, R], to which the loss's ratios are relative, and
            ``old_known`` bool [B, R], where they are recorded; of :data:`NOTED`, those that are late values of a fresh
            row, [B, R] with NaN elsewhere. After :func:`~trainer_hooks.steps.recompute.with_log_probs` also
            ``current_log_probs`` [B, R] of the policy's pass before the step, and ``log_probs`` [n, R] of the rows of
            all updates, in order.
        rows: facts of each row's rollout: ``trajectory`` (its id), ``rollout_id``, ``task``, ``version``, ``replayed``,
            ``uid`` (name of the group that it was sampled in, or None), and ``corrected``: names of rewards that were
            changed since it was recorded, each with both values.
        tolerances: as :data:`TOLERANCES`.
    """

    step: TrainedStep
    tensors: Mapping[str, Tensor]
    rows: Sequence[Mapping[str, Any]]
    tolerances: Mapping[str, float] = field(default_factory=lambda: dict(TOLERANCES))


def step_inputs(
    path: str | Path, step: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> StepInputs:
    """Read the inputs of a step from a store of all rollouts with a ledger in its folder ``ledger``.

    All checksums of the rollouts' files are compared.

    Args:
        path: of the store, or a URL.
        step: number of the step.
        progress: called with the numbers of rollouts read and in all.

    Raises:
        StoreNotFoundError: there is no store, or no ledger.
        ConfigurationError: the ledger lacks the step, or does not have its padding token.
        TrajectoryUnavailableError: a row's rollout is in no store, or evicted; names step and row.
        CorruptStoreError: the store or the ledger is damaged, or a rollout lacks a row.
    """
    record = _record(path, step)
    if "pad_token_id" not in record.options:
        raise ConfigurationError(
            f"{path}: the record of step {step} has no options, so its batch cannot be rebuilt; pass options to "
            "the hook's step_done when recording"
        )
    ids = record.rows["trajectory"]
    if (unstored := ids < 0).any():
        raise TrajectoryUnavailableError(
            f"{path}: {counted(int(unstored.sum()), 'row')} of step {step} are of rollouts in no store, first row "
            f"{int(unstored.argmax())}; record all rollouts, with ReplayHook(rollouts=...) for example"
        )
    stored: dict[int, list[BatchRow]] = {}
    wanted = dict.fromkeys(ids.tolist())
    with Reader.open(path, verify_shards=True) as reader:
        for number, trajectory in enumerate(wanted):
            rollout = reader.get(trajectory)
            if not isinstance(rollout, AgentTrajectory):
                raise CorruptStoreError(f"{path}: trajectory {trajectory} of step {step} is not a rollout of an agent")
            trained = replace(with_training(rollout), metadata=rollout.metadata, notes=rollout.notes)
            stored[trajectory] = rows_of_rollout(trained, 0, number, is_replayed=False)
            progress(number + 1, len(wanted))
    return inputs_of(record, stored, str(path))


def inputs_of(record: TrainedStep, stored: Mapping[int, Sequence[BatchRow]], source: str) -> StepInputs:
    """Return the inputs of a step from the rows of its rollouts, by trajectory id.

    Raises:
        CorruptStoreError: a rollout lacks a row; names the source.
    """
    rows: list[BatchRow] = []
    facts: list[dict[str, Any]] = []
    of_score = record.options.get("advantages", {}).get("reward") == "score"
    times: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int | str, int], int] = {}
    rollouts: list[int] = []
    for place, (trajectory, part, group, replayed) in enumerate(
        record.rows[["trajectory", "row", "group", "replayed"]].tolist()
    ):
        parts = stored[trajectory]
        if not part < len(parts):
            raise CorruptStoreError(
                f"{source}: row {place} of step {record.step} is row {part} of trajectory {trajectory}, which has "
                f"{counted(len(parts), 'row')}"
            )
        row = parts[part]
        times[trajectory, part] = times.get((trajectory, part), -1) + 1  # replayed twice in a step: two rollouts
        session = session_of(row.trajectory.metadata)  # whose rows may be trajectories of their own
        name = trajectory if session is None else session[0]
        rollouts.append(numbers.setdefault((name, times[trajectory, part]), len(numbers)))
        rows.append(replace(row, group_id=group, is_experience_replay=bool(replayed)))
        facts.append(
            {
                "trajectory": trajectory,
                "rollout_id": row.trajectory.rollout_id,
                "task": row.trajectory.task_id,
                "version": row.trajectory.policy_version,
                "replayed": bool(replayed),
                "uid": row.trajectory.metadata.get("uid"),
                "corrected": _corrected(row.trajectory) if of_score else {},
            }
        )
    batch = build_batch(rows, record.options["pad_token_id"])
    old, known = _old_log_probs(rows, batch.tensors["response_mask"], record.options)
    reward_of = _score if of_score else _outcome
    tensors = {name: batch.tensors[name] for name in TENSORS} | {
        "rewards": torch.tensor([reward_of(row.trajectory) for row in rows], dtype=torch.float64),
        "rollouts": torch.tensor(rollouts),
        "old_log_probs": old,
        "old_known": known,
    }
    for name, tensor in NOTED.items():
        columns = [None if row.is_experience_replay else row.trajectory.notes.get(name) for row in rows]
        if any(column is not None for column in columns):
            tensors[tensor] = _padded(rows, columns)
    half = record.options.get("policy", {}).get("dtype", "float32") in ("bfloat16", "float16")
    return StepInputs(record, tensors, facts, dict(HALF_PRECISION if half else TOLERANCES))


def _record(path: str | Path, step: int) -> TrainedStep:
    """Return the ledger's record of a step."""
    folder = f"{path}/{LEDGER_FOLDER}"
    steps = read(folder, step, step).steps
    if step not in steps:
        raise ConfigurationError(f"{folder}: has no step {step}; `trajstore audit {folder}` lists its steps")
    return steps[step]


def _old_log_probs(
    rows: Sequence[BatchRow], response_mask: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the recorded log-probs that the loss uses, and where they are known; both [B, R]."""
    columns = []
    for row in rows:
        recorded = row.trajectory.old_log_probs
        if not row.is_experience_replay:  # where older weights sampled, the trainer's pass counts
            recorded = row.trajectory.notes.get("old_log_probs", recorded)
        columns.append(recorded if not row.is_experience_replay or options.get("recorded_log_probs", True) else None)
    padded = _padded(rows, columns)
    known = padded.isfinite() & (response_mask != 0)
    return torch.where(padded.isfinite(), padded, 0.0), known


def _padded(rows: Sequence[BatchRow], columns: Sequence[Tensor | None]) -> Tensor:
    """Return columns of responses as [B, R] float32, NaN where a response has no value."""
    padded = []
    for row, column in zip(rows, columns, strict=True):
        length = int(row.trajectory.input_ids.numel() - (row.trajectory.response_start or 0))  # type: ignore[union-attr]  # checked by build_batch
        whole = torch.full((length,), math.nan)
        if column is not None:
            whole[: len(column)] = column[:length].float()
        padded.append(whole)
    return pad_sequence(padded, batch_first=True, padding_value=math.nan)


def _score(trajectory: AgentTrajectory) -> float:
    """Return the score that the trainer reported, else that of the reward function; NaN = unknown."""
    score = None if trajectory.reward is None else trajectory.reward.metadata.get("score")
    return float(score) if isinstance(score, int | float) else math.nan


def _corrected(trajectory: AgentTrajectory) -> dict[str, list[float]]:
    """Return the rewards with another value than when the rollout was recorded: that one, then the present one."""
    late = trajectory.metadata.get(GIVEN, {})
    recorded = trajectory.metadata.get(RECORDED, {})
    pairs = {name: [recorded.get(name), late.get(name)] for name in ("outcome", SCORE)}
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def _outcome(trajectory: AgentTrajectory) -> float:
    """Return the outcome as recorded, without later corrections; NaN = unknown."""
    recorded = trajectory.metadata.get(RECORDED)
    if isinstance(recorded, dict) and "outcome" in recorded:
        return math.nan if recorded["outcome"] is None else float(recorded["outcome"])
    outcome = None if trajectory.reward is None else trajectory.reward.outcome
    return math.nan if outcome is None else float(outcome)
