"""Log-probs in the data plane of replayed rows, and of rows with an exchanged prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta

from trainer_hooks.hook import ReplayHook
from trainer_hooks.replay.entry import is_demonstration
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import is_exchanged
from trainer_hooks.verl.rows import recorded_log_probs
from trajstore.trajectory import AgentTrajectory


def replace_log_probs(
    hook: ReplayHook[str], rows: Sequence[Row], histories: Mapping[str, AgentTrajectory], partition_id: str
) -> None:
    """Replace the actor's log-probs of replayed rows with the recorded ones.

    Args:
        hook: chooses the tokens to replace.
        rows: replayed rows, with ``old_log_probs``, ``exp_mask`` and ``response_mask``.
        histories: history of each row, by key.
        partition_id: partition of the rows.
    """
    if not rows:
        return
    lengths = [row.columns["old_log_probs"].numel() for row in rows]
    recorded = [recorded_log_probs(histories[row.key], length) for row, length in zip(rows, lengths, strict=True)]
    current, exp_mask, response_mask = (
        pad_sequence([row.columns[name] for row in rows], batch_first=True)
        for name in ("old_log_probs", EXP_MASK, "response_mask")
    )
    values, known = (pad_sequence([row[part] for row in recorded], batch_first=True) for part in (0, 1))
    replaced = hook.replace_log_probs(current, values, known, exp_mask, response_mask)
    rows_of = [row[:length] for row, length in zip(replaced.to(current.dtype), lengths, strict=True)]
    dataplane.write_column([row.key for row in rows], partition_id, "old_log_probs", rows_of)
    demonstrations = [row for row in rows if is_demonstration(histories[row.key])]
    if demonstrations and "rollout_log_probs" in demonstrations[0].columns:
        # Not sampled by the engine: with the actor's log-probs, verl's rollout correction weighs them 1.
        actors = [row.columns["old_log_probs"] for row in demonstrations]
        dataplane.write_column([row.key for row in demonstrations], partition_id, "rollout_log_probs", actors)


def forget_log_probs(rows: Sequence[Row], partition_id: str) -> None:
    """Replace the engine's log-probs with the actor's in rows with an exchanged prompt, so that the ratio is 1."""
    keys = [row.key for row in rows if is_exchanged(row.columns.get("extra_fields"))]
    exchanged = KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys])
    read = dataplane.read_rows(exchanged, ("old_log_probs",), ("rollout_log_probs",))
    changed = [row for row in read if "rollout_log_probs" in row.columns]
    values = [row.columns["old_log_probs"].float() for row in changed]
    dataplane.write_column([row.key for row in changed], partition_id, "rollout_log_probs", values)
