"""Histories on their way into a batch: from their choice until their rows stand beside the rollouts of their prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transfer_queue import KVBatchMeta

from trainer_hooks.verl import dataplane
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION, Row, output_of, replayed_row, session_of
from trajstore.errors import ConfigurationError
from trajstore.experience.entry import llm_mask
from trajstore.experience.rows import rows_of
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

TRAINING = "train"
"""Partition of the data plane that holds what is trained on."""

REPLAYED_TAG = "replayed_history"
"""Tag of a replayed row: the number of its history among those of the prompt."""

SCORE_METRIC = "reward"
"""Name by which verl's group filtering means the score itself."""


class Histories:
    """Which histories join which prompt, and which rows of the sampled batch they became.

    Rows join when a batch is sampled; where groups are filtered, before verl judges them (:meth:`join_finished`).

    Args:
        n_rollout: sessions that a prompt may have.
        own_group: each replayed row is a group of its own.
    """

    def __init__(self, n_rollout: int, *, own_group: bool) -> None:
        self.expected: dict[str, Sequence[AgentTrajectory]] = {}
        """By ``uid`` of the prompt, until the prompt is sampled or dropped."""
        self.joined: dict[str, AgentTrajectory] = {}
        """Row of a history by key of the row, of the batch sampled last."""
        self.whole: dict[str, AgentTrajectory] = {}
        """History by session, of the batch sampled last."""
        self.asked: dict[str, int] = {}
        """Rollouts that were to be made, by ``uid``, of the batch sampled last."""
        self._n_rollout = n_rollout
        self._own_group = own_group
        self._told_metric = False

    def expect(self, histories: Mapping[str, Sequence[AgentTrajectory]]) -> None:
        """Remember which histories are to join the rollouts of which prompt, by ``uid``.

        To be called before the prompts are under way. Histories of prompts that were dropped since are forgotten.
        """
        if self.expected:
            alive = dataplane.prompts_under_way(TRAINING)
            self.expected = {uid: held for uid, held in self.expected.items() if uid in alive}
        self.expected.update({uid: held for uid, held in histories.items() if held})

    def join_finished(self, uids: Iterable[str], tags: dict[str, dict[str, Any]], metric: str) -> None:
        """Put the histories of finished prompts into the data plane, before their groups are judged.

        Args:
            uids: prompts all of whose rollouts are there.
            tags: rows of the partition with their tags, as the sampler has them; gets the new rows.
            metric: what groups are judged by; a history whose reward had no such figure stays out, told once.
        """
        waiting = [uid for uid in uids if uid in self.expected]
        if not waiting:
            return
        rows: dict[str, list[str]] = {uid: [] for uid in waiting}
        for key in tags:
            if (uid := key.split("_")[0]) in rows:
                rows[uid].append(key)
        added: list[Row] = []
        for uid, keys in rows.items():
            if not keys or any(REPLAYED_TAG in tags[key] for key in keys):
                continue
            self.expected[uid] = self._with_metric(self.expected[uid], metric)
            added += self._rows(uid, keys[0], tags[keys[0]], TRAINING, len({session_of(key) for key in keys}))
        dataplane.add_rows(added, TRAINING)
        tags.update((row.key, dict(row.tag)) for row in added)

    def sampled(self, batch: KVBatchMeta, exchanged: Container[str] = frozenset()) -> KVBatchMeta:
        """Return a sampled batch with the replayed rows in it, each beside the rollouts of its prompt.

        Every row gets ``exp_mask``. No prompt has more than n sessions. Prompts that came back without any
        rollout get no history either.

        Args:
            batch: as verl samples it.
            exchanged: keys of rows whose experience was taken out of the prompt.

        Raises:
            ConfigurationError: a row's key or columns do not allow it.
        """
        sessions = Counter(session.rpartition("_")[0] for session in {session_of(key) for key in batch.keys})
        self.joined, self.whole = {}, {}
        first: dict[str, int] = {}
        there: set[str] = set()
        for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            uid, session = key.split("_")[:2]
            if int(session) < FIRST_REPLAYED_SESSION:
                first.setdefault(uid, place)
                continue
            number = tag.get(REPLAYED_TAG)
            if number is None or uid not in self.expected:
                raise ConfigurationError(
                    f"row {key!r}: sessions from {FIRST_REPLAYED_SESSION} on are those of replayed rows;"
                    " the sampler or the agent loop must use lower ones"
                )
            self._note_joined(key, self.expected[uid][number])
            there.add(uid)
        added: list[Row] = []
        for uid, place in first.items():
            if uid not in there:
                added += self._rows(uid, batch.keys[place], batch.tags[place], batch.partition_id, sessions[uid])
        dataplane.add_rows(added, batch.partition_id)
        for row in added:
            self._note_joined(row.key, self.expected[row.key.split("_")[0]][row.tag[REPLAYED_TAG]])
        self.asked = {uid: self._n_rollout - len(self.expected.pop(uid, ())) for uid in {*first, *there}}
        joined = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[*batch.keys, *(row.key for row in added)],
            tags=[*batch.tags, *(dict(row.tag) for row in added)],
            extra_info=batch.extra_info,
        )
        masks = [
            self._exp_mask(key, tag["response_len"], guided=key in exchanged)
            for key, tag in zip(joined.keys, joined.tags, strict=True)
        ]
        dataplane.write_column(joined.keys, joined.partition_id, EXP_MASK, masks)
        return joined

    def take(self, uid: str) -> int:
        """Forget the histories of a prompt that is dropped; return how many rollouts it was to make."""
        return self._n_rollout - len(self.expected.pop(uid, ()))

    def _rows(self, uid: str, key: str, tag: dict[str, Any], partition_id: str, sessions: int) -> list[Row]:
        """Return rows for the histories of a prompt, as many as there is room for beside its sessions."""
        held = tuple(self.expected.get(uid, ()))[: max(0, self._n_rollout - sessions)]
        if not held:
            return []
        template = dataplane.read_whole_row(key, tag, partition_id)
        rows = []
        for number, history in enumerate(held):
            for output, part in enumerate(rows_of(history)):
                row = replayed_row(template, part, number, own_group=self._own_group, output=output)
                rows.append(Row(row.key, {**row.tag, REPLAYED_TAG: number}, row.columns))
        return rows

    def _note_joined(self, key: str, history: AgentTrajectory) -> None:
        self.joined[key] = rows_of(history)[output_of(key)]
        self.whole[session_of(key)] = history

    def _exp_mask(self, key: str, length: int, *, guided: bool) -> Tensor:
        history = self.joined.get(key)
        mask = None if history is None else llm_mask(history)
        return torch.full((length,), int(guided), dtype=torch.int64) if mask is None else mask.long()

    def _with_metric(self, held: Sequence[AgentTrajectory], metric: str) -> Sequence[AgentTrajectory]:
        if metric == SCORE_METRIC:
            return held
        has = [one.reward is not None and metric in one.reward.metadata.get("extra", {}) for one in held]
        if not all(has) and not self._told_metric:
            self._told_metric = True
            logger.warning(
                "experience replay: algorithm.filter_groups.metric: the reward of recorded rollouts had no %r; such"
                " histories are not replayed (rollout %s is the first)",
                metric,
                held[has.index(False)].rollout_id,
            )
        return tuple(one for one, known in zip(held, has, strict=True) if known)
