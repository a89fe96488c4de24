"""Log-probs written anew: recorded ones of replayed rows, the actor's own of rows sampled with another prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn.utils.rnn import pad_sequence

from trainer_hooks.hook import ReplayHook
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import is_exchanged
from trainer_hooks.verl.rows import Row, recorded_log_probs
from trajstore.experience.entry import is_demonstration
from trajstore.trajectory import AgentTrajectory


def replace_log_probs(
    hook: ReplayHook[str], rows: Sequence[Row], histories: Mapping[str, AgentTrajectory], partition_id: str
) -> None:
    """Put the recorded log-probs of replayed rows in the place of the actor's.

    Args:
        hook: says where they are to be replaced.
        rows: the replayed ones, with ``old_log_probs``, ``exp_mask`` and ``response_mask``.
        histories: the history of each row, by its key.
        partition_id: of the rows.
    """
    if not rows:
        return
    lengths = [row.columns["old_log_probs"].numel() for row in rows]
    recorded = [recorded_log_probs(histories[row.key], length) for row, length in zip(rows, lengths, strict=True)]
    current, exp_mask, response_mask = (
        pad_sequence([row.columns[name] for row in rows], batch_first=True)
        for name in ("old_log_probs", EXP_MASK, "response_mask")
    )
    values, known = (pad_sequence([one[part] for one in recorded], batch_first=True) for part in (0, 1))
    replaced = hook.replace_log_probs(current, values, known, exp_mask, response_mask)
    rows_of = [row[:length] for row, length in zip(replaced.to(current.dtype), lengths, strict=True)]
    dataplane.write_column([row.key for row in rows], partition_id, "old_log_probs", rows_of)
    demonstrations = [row for row in rows if is_demonstration(histories[row.key])]
    if demonstrations and "rollout_log_probs" in demonstrations[0].columns:
        # No engine sampled them: with the actor's own, verl's rollout correction weighs them 1.
        actors = [row.columns["old_log_probs"] for row in demonstrations]
        dataplane.write_column([row.key for row in demonstrations], partition_id, "rollout_log_probs", actors)


def forget_log_probs(rows: Sequence[Row], partition_id: str) -> None:
    """Put the actor's log-probs in the place of the engine's where these are of another prompt: the ratio is 1."""
    changed = [
        row for row in rows if "rollout_log_probs" in row.columns and is_exchanged(row.columns.get("extra_fields"))
    ]
    values = [row.columns["old_log_probs"].float() for row in changed]
    dataplane.write_column([row.key for row in changed], partition_id, "rollout_log_probs", values)
