"""What a pass of the policy over a batch says of the rollouts in it, brought back to the rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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

    Rollouts are found in the batch by task and rollout id, wherever their rows stand.

    Args:
        batch: the padded batch.
        fresh: the rollouts made; not changed.
        old_log_probs: [B, R], natural logarithm, as the policy that sampled gives them.
        entropys: [B, R], nats, under the same policy.
        policy_version: of that policy.

    Raises:
        ConfigurationError: ``old_log_probs`` or ``entropys`` is of another shape than the batch's responses.
        InvalidTrajectoryError: a rollout is not in the batch, or two have the same ids.
    """
    shape = batch.tensors["response_mask"].shape
    for name, given in (("old_log_probs", old_log_probs), ("entropys", entropys)):
        if given.shape != shape:
            raise ConfigurationError(f"{name}: shape {list(given.shape)}, must be {list(shape)} as response_mask")
    places = _fresh_rows(batch, fresh)
    log_probs, entropy = old_log_probs.detach().float().cpu(), entropys.detach().float().cpu()
    mask = batch.tensors["response_mask"].cpu()
    done = []
    for trajectory, rows in zip(fresh, places, strict=True):
        parts = rows_of(trajectory)
        made = [
            _completed(part, log_probs[row], entropy[row], mask[row], policy_version)
            for part, row in zip(parts, rows, strict=True)
        ]
        done.append(_whole(trajectory, made))
    return done


class HandedOver:
    """The rollouts of the newest step that was done: none of them may come a second time."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._ids: set[tuple[str, str]] = set()

    def check(self, step: int, rollouts: Sequence[AgentTrajectory]) -> None:
        """Refuse rollouts that this step has had; those without a ``rollout_id`` cannot be told apart.

        Raises:
            InvalidTrajectoryError: one was handed over already; names it.
        """
        if step != self._step:
            return
        for one in rollouts:
            if one.rollout_id and (one.task_id, one.rollout_id) in self._ids:
                raise InvalidTrajectoryError(
                    f"rollout {(one.task_id, one.rollout_id)}: was handed over already in step {step}, and would count"
                    " twice; hand a batch over once, and give each step its number"
                )

    def note(self, step: int, rollouts: Sequence[AgentTrajectory]) -> None:
        """Remember the rollouts of a step."""
        if step != self._step:
            self._step, self._ids = step, set()
        self._ids.update((one.task_id, one.rollout_id) for one in rollouts)

    def forget(self) -> None:
        """Forget them: the loop went back to an earlier step."""
        self._step, self._ids = None, set()


def check_lengths(**by_row: Sequence[object]) -> None:
    """Refuse lists that are to have an entry for every row of a batch, and differ in length.

    Raises:
        ConfigurationError: they do; names them.
    """
    lengths = [len(one) for one in by_row.values()]
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
    found = []
    for one in fresh:
        held = rows.get((one.task_id, one.rollout_id), {})
        if sorted(held) != list(range(row_count(one))):
            raise InvalidTrajectoryError(
                f"rollout {(one.task_id, one.rollout_id)} is not among the fresh rows of the batch with all its rows"
            )
        found.append([held[number] for number in sorted(held)])
    return found


def _whole(trajectory: AgentTrajectory, made: Sequence[AgentTrajectory]) -> AgentTrajectory:
    """Return a rollout whose rows were completed."""
    if len(made) == 1:
        return made[0]
    packed = pack_rows(made)
    mask, entropys = packed.response_mask, packed.entropys
    entropy = None if mask is None or entropys is None else mean_entropy(entropys, mask)
    return dataclasses.replace(packed, entropy=entropy, metadata=trajectory.metadata)


def _completed(
    trajectory: AgentTrajectory, log_probs: Tensor, entropys: Tensor, response_mask: Tensor, version: int
) -> AgentTrajectory:
    """Return a row with what the policy's pass over the batch says of it, cut to its own length."""
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
