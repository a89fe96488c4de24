"""Reads and writes rows of verl's data plane (TransferQueue). The only module here that calls it.

The data plane has one value per row and column. It silently drops a requested column if one row lacks it;
:func:`read_rows` raises.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from trainer_hooks.hook import ReplayHook
from trainer_hooks.replay.entry import is_demonstration
from trainer_hooks.transfer_queue.rows import Row, column_values
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import is_exchanged
from trainer_hooks.verl.rows import recorded_log_probs, session_of
from trainer_hooks.verl.trained import WEIGHTS
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_COUNTS_SESSIONS = ("grpo", "gae", "remax", "reinforce_plus_plus")
"""Estimators that count sessions, or have no statistics of a group."""


def read_rows(batch: KVBatchMeta, needed: Sequence[str], welcome: Sequence[str] = ()) -> list[Row]:
    """Return rows with these columns, in the order of the batch; token columns share one buffer.

    Args:
        batch: keys of the rows.
        needed: required columns.
        welcome: optional columns, read if every row has them.

    Raises:
        ConfigurationError: a row lacks a required column; the message names it.
    """
    if not batch.keys:
        return []
    names = [*needed, *welcome]
    data = tq.kv_batch_get(keys=list(batch.keys), partition_id=batch.partition_id, select_fields=names)
    present = set(data.keys())
    lacking = [name for name in needed if name not in present]
    if lacking:
        raise ConfigurationError(
            f"the data plane has no column {', '.join(lacking)} for these {len(batch.keys)} rows: one of them was"
            " written without, and the plane then drops it for all. Every writer of rows must write it"
        )
    columns = {name: column_values(data, name) for name in names if name in present}
    return [
        Row(key, tag, {name: values[number] for name, values in columns.items()})
        for number, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
    ]


def prompts_under_way(partition_id: str) -> set[str]:
    """Return the ``uid`` of every prompt whose rollouts are neither sampled nor dropped."""
    rows = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    return {key for key, tag in rows.items() if tag.get("is_prompt", False)}


def read_whole_row(key: str, tag: dict[str, Any], partition_id: str) -> Row:
    """Return one row with all its columns."""
    data = tq.kv_batch_get(keys=[key], partition_id=partition_id)[0]
    return Row(key, tag, {name: data[name] for name in data.keys()})  # noqa: SIM118 - no dict


def add_rows(rows: Sequence[Row], partition_id: str) -> None:
    """Add rows with their tags to the data plane. All rows must have the same columns."""
    if rows:
        tq.kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=partition_id,
            fields=list_of_dict_to_tensordict([dict(row.columns) for row in rows]),
            tags=[dict(row.tag) for row in rows],
        )


def write_column(keys: Sequence[str], partition_id: str, name: str, values: Sequence[Tensor]) -> None:
    """Write a token column of rows, one tensor per row."""
    if keys:
        jagged = torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        tq.kv_batch_put(
            keys=list(keys), partition_id=partition_id, fields=TensorDict({name: jagged}, batch_size=len(keys))
        )


def part_of(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """Return the rows of a batch at ``places``."""
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[place] for place in places],
        tags=[batch.tags[place] for place in places],
        extra_info=batch.extra_info,
    )


def without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch without verl's padding rows."""
    real = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return batch if len(real) == len(batch.keys) else part_of(batch, real)


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
    write_column([row.key for row in rows], partition_id, "old_log_probs", rows_of)
    demonstrations = [row for row in rows if is_demonstration(histories[row.key])]
    if demonstrations and "rollout_log_probs" in demonstrations[0].columns:
        # Not sampled by the engine: with the actor's log-probs, verl's rollout correction weighs them 1.
        actors = [row.columns["old_log_probs"] for row in demonstrations]
        write_column([row.key for row in demonstrations], partition_id, "rollout_log_probs", actors)


def forget_log_probs(rows: Sequence[Row], partition_id: str) -> None:
    """Replace the engine's log-probs with the actor's in rows with an exchanged prompt, so that the ratio is 1."""
    keys = [row.key for row in rows if is_exchanged(row.columns.get("extra_fields"))]
    exchanged = KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys])
    read = read_rows(exchanged, ("old_log_probs",), ("rollout_log_probs",))
    changed = [row for row in read if "rollout_log_probs" in row.columns]
    values = [row.columns["old_log_probs"].float() for row in changed]
    write_column([row.key for row in changed], partition_id, "rollout_log_probs", values)


def weigh_sessions(batch: KVBatchMeta, config: Any, warned: set[str]) -> None:
    """Make a session with several rows one sequence of verl's policy loss.

    ``loss_agg_mode=seq-mean-token-mean`` is the mean over sequences of the mean over their tokens. verl takes the mean
    of each row, with its T_r tokens. The column ``rollout_is_weights``, by which verl multiplies the losses of tokens,
    gets the factor T_r / T_s, with the T_s tokens of all rows of the session: the rows of a session sum up to the mean
    over its tokens. In verl's other modes a token weighs the same in any row. Without sessions of several rows nothing
    is written. (Mean of a sequence: GRPO, arXiv 2402.03300.)

    Args:
        batch: rows with ``response_mask`` and advantages; padding too. Gets the column among its fields.
        config: verl's configuration.
        warned: estimators that a warning has named; changed.
    """
    if max(Counter(map(session_of, batch.keys)).values(), default=1) == 1:
        return
    estimator = config.algorithm.adv_estimator
    name = str(getattr(estimator, "value", estimator))
    if name not in _COUNTS_SESSIONS and name not in warned:
        warned.add(name)
        logger.warning("adv_estimator=%s counts each row of a session as a rollout of its group; grpo does not", name)
    if config.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-mean":
        return
    rows = read_rows(batch, ("response_mask",), (WEIGHTS,))
    masks = [row.columns["response_mask"] != 0 for row in rows]
    tokens: Counter[str] = Counter()
    for row, mask in zip(rows, masks, strict=True):
        tokens[session_of(row.key)] += int(mask.sum())
    weights = [
        row.columns.get(WEIGHTS, torch.ones(len(mask))) * (mask.sum() / max(tokens[session_of(row.key)], 1))
        for row, mask in zip(rows, masks, strict=True)
    ]
    write_column(batch.keys, batch.partition_id, WEIGHTS, weights)
    if batch.fields is not None:  # those that the workers read
        batch.fields = [*dict.fromkeys((*batch.fields, WEIGHTS))]
