"""Adds the chosen histories as rows to the batches that verl samples.

verl pads a batch to a multiple of ``ppo_mini_batch_size * n`` rows, and splits it into mini-batches in row order.
Adjacent histories or padding rows would form a mini-batch of their own (:func:`spread`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from trainer_hooks.replay.entry import llm_mask
from trainer_hooks.replay.rows import rows_of
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION, output_of, replayed_row, session_of
from trainer_hooks.wrapper import Wrapper
from trajstore.errors import ConfigurationError, counted
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

TRAINING = "train"
"""Partition of the data plane with the training rows."""

VALIDATION = "val"
"""Partition of the data plane that is never changed."""

JoinFinished = Callable[[set[str], dict[str, dict[str, Any]], str], None]
"""Called with finished prompts, the rows of the training partition with tags, and the metric of group filtering."""

REPLAYED_TAG = "replayed_history"
"""Tag of a replayed row: number of its history within the prompt."""

SCORE_METRIC = "reward"
"""verl's name for the score in group filtering."""


class Histories:
    """The histories of each prompt, and their rows in the sampled batch.

    Rows are added when a batch is sampled, or with group filtering before verl evaluates groups
    (:meth:`join_finished`).

    Args:
        n_rollout: sessions of a prompt that has no number of its own.
        own_group: each replayed row is its own group.
        max_policy_age: steps; older histories are refused; ``None`` = any.
    """

    def __init__(self, n_rollout: int, *, own_group: bool, max_policy_age: int | None = None) -> None:
        self.expected: dict[str, Sequence[AgentTrajectory]] = {}
        """Histories by ``uid`` of the prompt, until the prompt is sampled or dropped."""
        self.joined: dict[str, AgentTrajectory] = {}
        """Rows of histories in the last sampled batch, by key."""
        self.whole: dict[str, AgentTrajectory] = {}
        """Histories in the last sampled batch, by session."""
        self.asked: dict[str, int] = {}
        """Requested rollouts of the last sampled batch, by ``uid``."""
        self.wanted: dict[str, int] = {}
        """Sessions, including histories, of prompts with their own number, by ``uid``; until sampled or dropped."""
        self.step = 0
        """The current training step."""
        self._n_rollout = n_rollout
        self._own_group = own_group
        self._max_policy_age = max_policy_age
        reasons = ("too_old", "without_metric", "without_room")
        self._refused = {reason: FirstTold(logger) for reason in reasons}

    def _young(self, histories: Sequence[AgentTrajectory]) -> tuple[AgentTrajectory, ...]:
        """Return the histories that are not too old in the current step, because their prompt waited."""
        bound, step = self._max_policy_age, self.step
        ages = [0 if history.policy_version is None else step - history.policy_version for history in histories]
        old = [bound is not None and age > bound for age in ages]
        if any(old):
            first = histories[old.index(True)]
            self._refused["too_old"].add(
                old.count(True),
                "experience replay: rollout %r of task %r is not replayed: its age in step %d is %d, above"
                " max_policy_age: its prompt waited. histories_refused/too_old counts such histories of a step",
                *(first.rollout_id, first.task_id, step, ages[old.index(True)]),
            )
        return tuple(history for history, flag in zip(histories, old, strict=True) if not flag)

    def take_refused(self) -> dict[str, float]:
        """Return the number of histories refused since the last call by reason, as metrics."""
        return {
            f"experience_replay/histories_refused/{reason}": float(count.take())
            for reason, count in self._refused.items()
        }

    def expect(
        self, histories: Mapping[str, Sequence[AgentTrajectory]], wanted: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Register the histories of new prompts, by ``uid``, before their rollouts start.

        Also forgets the histories of dropped prompts.

        Args:
            histories: histories by prompt; surplus ones are cut, so that each prompt has a fresh rollout.
            wanted: sessions of each prompt, including its histories; ``n_rollout`` where absent.

        Returns:
            The number of histories of each prompt that has any.
        """
        if self.expected or self.wanted:
            alive = dataplane.prompts_under_way(TRAINING)
            self.expected = {uid: held for uid, held in self.expected.items() if uid in alive}
            self.wanted = {uid: count for uid, count in self.wanted.items() if uid in alive}
        self.wanted.update({uid: count for uid, count in (wanted or {}).items() if count != self._n_rollout})
        joining = {}
        for uid, held in histories.items():
            room = max(self._wanted(uid) - 1, 0)
            kept = held[:room]
            if kept:
                self.expected[uid] = kept
                joining[uid] = len(kept)
        return joining

    def join_finished(self, uids: Iterable[str], tags: dict[str, dict[str, Any]], metric: str) -> None:
        """Add the histories of finished prompts to the data plane, before verl filters groups.

        Args:
            uids: prompts with all rollouts finished.
            tags: the sampler's rows of the partition, with tags; the new rows are added.
            metric: metric of the filter; histories whose reward lacks it are left out, with one warning.
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
        """Add the replayed rows to a sampled batch, and ``exp_mask`` to every row; return the batch.

        No prompt exceeds its number of sessions. Prompts without any rollout get no histories.

        Args:
            batch: batch sampled by verl.
            exchanged: keys of rows whose experience was removed from the prompt.

        Raises:
            ConfigurationError: a row's key or columns do not support replay.
        """
        sessions = Counter(session.rpartition("_")[0] for session in {session_of(key) for key in batch.keys})
        self.joined, self.whole = {}, {}
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        first: dict[str, str] = {}
        held: dict[tuple[str, int], list[str]] = {}
        """Row keys of each history, by ``uid`` and number of the history within the prompt."""
        for key, tag in tags.items():
            uid, session = key.split("_")[:2]
            if int(session) < FIRST_REPLAYED_SESSION:
                first.setdefault(uid, key)
                continue
            number = tag.get(REPLAYED_TAG)
            if number is None or uid not in self.expected:
                raise ConfigurationError(
                    f"row {key!r}: sessions from {FIRST_REPLAYED_SESSION} on are those of replayed rows;"
                    " the sampler or the agent loop must use lower ones"
                )
            held.setdefault((uid, number), []).append(key)
        there = {uid for uid, _ in held}
        added: dict[str, Row] = {}
        for uid, key in first.items():
            if uid not in there:
                added |= {row.key: row for row in self._rows(uid, key, tags[key], batch.partition_id, sessions[uid])}
        for row in added.values():
            held.setdefault((row.key.split("_")[0], row.tag[REPLAYED_TAG]), []).append(row.key)
        prompts = {*first, *there}
        expected = sum(len(self.expected.get(uid, ())) for uid in prompts)
        self._refused["without_room"].add(
            expected - len(held),
            "experience replay: %s no room beside the fresh rollouts of their prompts, which are more"
            " than requested. histories_refused/without_room counts such histories of a step",
            counted(expected - len(held), "history", "has", "have"),
        )
        dataplane.add_rows(list(added.values()), batch.partition_id)
        tags |= {key: dict(row.tag) for key, row in added.items()}
        for (uid, number), keys in held.items():
            for key in keys:
                self._note_joined(key, self.expected[uid][number])
        self.asked = {uid: self.take(uid) for uid in prompts}
        joined = KVBatchMeta(
            partition_id=batch.partition_id, keys=list(tags), tags=list(tags.values()), extra_info=batch.extra_info
        )
        masks = [self._exp_mask(key, tag["response_len"], guided=key in exchanged) for key, tag in tags.items()]
        dataplane.write_column(joined.keys, joined.partition_id, EXP_MASK, masks)
        return joined

    def take(self, uid: str) -> int:
        """Forget the histories of a prompt; return its number of requested rollouts."""
        count = self._wanted(uid) - len(self.expected.pop(uid, ()))
        self.wanted.pop(uid, None)
        return count

    def _wanted(self, uid: str) -> int:
        """Return the number of sessions of a prompt, including its histories."""
        return self.wanted.get(uid, self._n_rollout)

    def _rows(self, uid: str, key: str, tag: dict[str, Any], partition_id: str, sessions: int) -> list[Row]:
        """Return rows for the histories of a prompt, as far as its number of sessions allows."""
        room = max(0, self._wanted(uid) - sessions)
        if not room or not self.expected.get(uid):
            return []
        template = dataplane.read_whole_row(key, tag, partition_id)
        held = self._young(tuple(self.expected[uid])[:room])
        self.expected[uid] = (*held, *self.expected[uid][room:])
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
        has = [history.reward is not None and metric in history.reward.metadata.get("extra", {}) for history in held]
        if not all(has):
            self._refused["without_metric"].add(
                has.count(False),
                "experience replay: algorithm.filter_groups.metric: the reward of recorded rollouts had no %r; such"
                " histories are not replayed (rollout %s is the first)",
                metric,
                held[has.index(False)].rollout_id,
            )
        return tuple(history for history, known in zip(held, has, strict=True) if known)


def spread(kinds: Sequence[int], ranks: int, mini_batches: int) -> list[int]:
    """Return a row order that distributes each kind of row evenly over the mini-batches.

    Rows stay on their rank. Mini-batches differ by at most one row of kind 0 in total, and by at most one row per rank
    of any other kind.

    Args:
        kinds: kind of each row, 0 for the one to balance best; consecutive blocks of ``len(kinds) / ranks`` rows belong
            to the ranks in order.
        ranks: number of ranks; divides the number of rows.
        mini_batches: number of mini-batches; divides the number of rows of a rank. verl splits them in order.

    Returns:
        Positions in ``kinds``; within a rank's part of a mini-batch, rows keep their order.
    """
    each = len(kinds) // ranks
    order: list[int] = []
    turn = 0
    for first in range(0, len(kinds), each):
        places = sorted(range(first, first + each), key=kinds.__getitem__)
        parts = [sorted(places[(number - turn) % mini_batches :: mini_batches]) for number in range(mini_batches)]
        order += [place for part in parts for place in part]
        turn += sum(kinds[place] == 0 for place in places)
    return order


class FirstTold:
    """Counts events and logs only the first.

    Args:
        logger: logger of the calling module.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._count = 0
        self._told = False

    def add(self, count: int, message: str, *values: object) -> None:
        """Add to the count; the first time, log a warning with ``logging``'s message and values."""
        self._count += count
        if count and not self._told:
            self._told = True
            self._logger.warning(message, *values)

    def take(self) -> int:
        """Return the count since the last call."""
        count, self._count = self._count, 0
        return count


class ReplaySampler(Wrapper, wraps="_sampler"):
    """Wraps a sampler and passes its training batches through ``join``.

    A wrapper rather than a subclass, so that any sampler of ``trainer.v1.sampler.custom_sampler`` works with replay.
    All other attributes are the sampler's. Two methods of a ``ReplayBuffer`` of verl are patched on the instance, for
    its lifetime: ``finished`` is called after it reads the data plane and before it filters groups, ``dropped`` before
    it drops groups. Both run in the trainer's thread.

    Args:
        sampler: has ``sample(global_steps, partition_id, batch_size)``.
        join: adds rows to a training batch.
        finished: adds histories to the rollouts of finished prompts.
        dropped: called with the rows of prompts that are dropped from training.
        validated: called with the batches of a validation.
    """

    def __init__(
        self,
        sampler: Any,
        join: Callable[[KVBatchMeta], KVBatchMeta],
        finished: JoinFinished | None = None,
        dropped: Callable[[KVBatchMeta], None] | None = None,
        validated: Callable[[KVBatchMeta], None] | None = None,
    ) -> None:
        object.__setattr__(self, "_sampler", sampler)
        object.__setattr__(self, "_join", join)
        object.__setattr__(self, "_validated", validated)
        if not isinstance(sampler, ReplayBuffer):
            return  # how a custom sampler filters and drops is unknown
        if finished is not None and sampler.filter_groups_metric is not None:
            _join_before_judging(sampler, finished)
        if dropped is not None:
            _tell_of_dropped(sampler, dropped)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the rows of ``batch_size`` prompts, and metrics; see verl's ``ReplayBuffer``."""
        batch, metrics = self._sampler.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id != VALIDATION:
            return self._join(batch), metrics
        if self._validated is not None:
            self._validated(batch)
        return batch, metrics

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)


def _join_before_judging(sampler: Any, finished: JoinFinished) -> None:
    look = sampler._sync_metadata_from_transfer_queue

    def look_and_join() -> None:
        look()
        finished(set(sampler.finished_keys[TRAINING]), sampler.partitions[TRAINING], sampler.filter_groups_metric)

    sampler._sync_metadata_from_transfer_queue = look_and_join


def _tell_of_dropped(sampler: Any, dropped: Callable[[KVBatchMeta], None]) -> None:
    clear = sampler._clear_groups

    def tell_and_clear(partition_id: str, uids: set[str]) -> None:
        if partition_id == TRAINING and uids:
            rows = {key: tag for key, tag in sampler.partitions[TRAINING].items() if key.split("_")[0] in uids}
            dropped(KVBatchMeta(partition_id=TRAINING, keys=list(rows), tags=list(rows.values())))
        clear(partition_id, uids)

    sampler._clear_groups = tell_and_clear
