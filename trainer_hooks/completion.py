"""Copies results of a policy's pass over a batch back to its rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized

from torch import Tensor

from trainer_hooks.batch import Batch
from trainer_hooks.replay import mean_entropy
from trainer_hooks.replay.rows import pack_rows, row_count, rows_of
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory


def completed_rollouts(
    batch: Batch, fresh: Sequence[AgentTrajectory], old_log_probs: Tensor, entropys: Tensor, policy_version: int
) -> list[AgentTrajectory]:
    """Return copies of rollouts with log-probs, entropies, response mask and policy version, on the CPU.

    Rollouts are located in the batch by task and rollout id.

    Args:
        batch: the padded batch.
        fresh: the rollouts made; not changed.
        old_log_probs: [B, R], natural logarithm, under the policy that sampled.
        entropys: [B, R], nats, under the same policy.
        policy_version: of that policy.

    Raises:
        ConfigurationError: ``old_log_probs`` or ``entropys`` has another shape than the batch's responses.
        InvalidTrajectoryError: a rollout is not in the batch, or two have the same ids.
    """
    shape = batch.tensors["response_mask"].shape
    for name, given in (("old_log_probs", old_log_probs), ("entropys", entropys)):
        if given.shape != shape:
            raise ConfigurationError(f"{name}: shape {list(given.shape)}, must be {list(shape)} as response_mask")
    places = _fresh_rows(batch, fresh)
    log_probs, entropy = old_log_probs.detach().float().cpu(), entropys.detach().float().cpu()
    mask = batch.tensors["response_mask"].cpu()
    result = []
    for trajectory, rows in zip(fresh, places, strict=True):
        parts = rows_of(trajectory)
        completed = [
            _completed(part, log_probs[row], entropy[row], mask[row], policy_version)
            for part, row in zip(parts, rows, strict=True)
        ]
        result.append(_whole(trajectory, completed))
    return result


class HandedOver:
    """The rollouts of the newest finished step, to refuse duplicates."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._ids: set[tuple[str, str]] = set()

    def check(self, step: int, rollouts: Sequence[AgentTrajectory]) -> None:
        """Refuse rollouts that this step has had already; those without a ``rollout_id`` are not checked.

        Raises:
            InvalidTrajectoryError: one was handed over already; names it.
        """
        if step != self._step:
            return
        for new in rollouts:
            if new.rollout_id and (new.task_id, new.rollout_id) in self._ids:
                raise InvalidTrajectoryError(
                    f"rollout {(new.task_id, new.rollout_id)}: was passed already in step {step}, and would"
                    " count twice; pass each batch once, with the number of its step"
                )

    def note(self, step: int, rollouts: Sequence[AgentTrajectory]) -> None:
        """Remember the rollouts of a step."""
        if step != self._step:
            self._step, self._ids = step, set()
        self._ids.update((rollout.task_id, rollout.rollout_id) for rollout in rollouts)

    def forget(self) -> None:
        """Clear them: the loop went back to an earlier step."""
        self._step, self._ids = None, set()


def check_lengths(**by_row: Sized) -> None:
    """Refuse lists of different lengths, which must have one entry for every row of a batch.

    Raises:
        ConfigurationError: lengths differ; names the lists.
    """
    lengths = [len(entries) for entries in by_row.values()]
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            f"{', '.join(by_row)}: {', '.join(map(str, lengths))} entries; each must have one for every row"
        )


def _fresh_rows(batch: Batch, fresh: Sequence[AgentTrajectory]) -> list[list[int]]:
    """Return the batch's rows of each rollout, by task and rollout id."""
    rows: dict[tuple[str, str], dict[int, int]] = {}
    names = zip(
        batch.non_tensors["task_ids"], batch.non_tensors["rollout_ids"], batch.non_tensors["extras"], strict=True
    )
    for row, (task, rollout, extras) in enumerate(names):
        if extras["is_experience_replay"]:
            continue
        number = extras["rollout"][1] if "rollout" in extras else 0
        if number in rows.setdefault((task, rollout), {}):
            raise InvalidTrajectoryError(
                f"field rollout_id: {rollout!r} twice among the fresh rows of task {task!r}; give each rollout its own"
            )
        rows[task, rollout][number] = row
    result = []
    for each in fresh:
        held = rows.get((each.task_id, each.rollout_id), {})
        if sorted(held) != list(range(row_count(each))):
            raise InvalidTrajectoryError(
                f"rollout {(each.task_id, each.rollout_id)} is not among the fresh rows of the batch with all its rows"
            )
        result.append([held[number] for number in sorted(held)])
    return result


def _whole(trajectory: AgentTrajectory, made: Sequence[AgentTrajectory]) -> AgentTrajectory:
    """Return a rollout joined from its completed rows."""
    if len(made) == 1:
        return made[0]
    packed = pack_rows(made)
    mask, entropys = packed.response_mask, packed.entropys
    entropy = None if mask is None or entropys is None else mean_entropy(entropys, mask)
    return dataclasses.replace(packed, entropy=entropy, metadata=trajectory.metadata)


def _completed(
    trajectory: AgentTrajectory, log_probs: Tensor, entropys: Tensor, response_mask: Tensor, version: int
) -> AgentTrajectory:
    """Return a row with its part of the policy's results, cut to its own length."""
    length = trajectory.input_ids.numel() if trajectory.input_ids is not None else 0
    response = length - (trajectory.response_start or 0)
    return dataclasses.replace(
        trajectory,
        old_log_probs=log_probs[:response].clone(),
        entropys=entropys[:response].clone(),
        response_mask=response_mask[:response].clone(),
        entropy=mean_entropy(entropys[:response], response_mask[:response]),
        policy_version=version,
    )
