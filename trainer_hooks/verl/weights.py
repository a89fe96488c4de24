"""Weights of the rows of sessions with several outputs, where verl's own code takes each row for a sequence."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from transfer_queue import KVBatchMeta

from trainer_hooks.verl import dataplane
from trainer_hooks.verl.rows import session_of
from trainer_hooks.verl.trained import WEIGHTS

logger = logging.getLogger(__name__)

_COUNTS_SESSIONS = ("grpo", "gae", "remax", "reinforce_plus_plus")
"""Estimators that count sessions, or have no statistics of a group."""


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
    rows = dataplane.read_rows(batch, ("response_mask",), (WEIGHTS,))
    masks = [row.columns["response_mask"] != 0 for row in rows]
    tokens: Counter[str] = Counter()
    for row, mask in zip(rows, masks, strict=True):
        tokens[session_of(row.key)] += int(mask.sum())
    weights = [
        row.columns.get(WEIGHTS, torch.ones(len(mask))) * (mask.sum() / max(tokens[session_of(row.key)], 1))
        for row, mask in zip(rows, masks, strict=True)
    ]
    dataplane.write_column(batch.keys, batch.partition_id, WEIGHTS, weights)
    if batch.fields is not None:  # those that the workers read
        batch.fields = [*dict.fromkeys((*batch.fields, WEIGHTS))]
