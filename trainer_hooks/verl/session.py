"""``ReplaySession``: what a replay trainer holds beside verl's own parts, and does at the fixed points of its step.

The way of a step: :meth:`plan` chooses tasks and draws histories before prompts go to the rollout engine;
:meth:`join` puts the histories as rows beside the rollouts that came back; :meth:`scored` records the rollouts,
gives the replayed rows their recorded log-probs, and lets good rollouts enter the pool.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta

from trainer_hooks.hook import ReplayHook
from trainer_hooks.plan import PlannedTask
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.config import ReplayBlock
from trainer_hooks.verl.cuts import Cut, find_cut, restorable_cuts, write_cut
from trainer_hooks.verl.loss import EXP_MASK, HetOptions
from trainer_hooks.verl.recorder import RolloutRecorder
from trainer_hooks.verl.rows import (
    FIRST_REPLAYED_SESSION,
    NEEDED,
    WELCOME,
    Row,
    lost_beside,
    recorded_log_probs,
    replayable,
    replayed_row,
    session_of,
    trajectories_of,
)
from trainer_hooks.verl.tasks import TaskTable
from trajstore.errors import ConfigurationError
from trajstore.experience.persistence import from_plain, to_plain
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

TRAINING = "train"
"""Partition of the data plane that holds what is trained on."""


class ReplaySession:
    """Recording and replay of one training run. Not thread-safe; the trainer's process owns it.

    Args:
        block: the configuration.
        tasks: finds tasks in the training data; None if nothing is replayed.
        fingerprint: tokenizer and chat template.
        run: identifies this process; goes into every recorded rollout.
        checkpoints: ``trainer.default_local_dir``.

    Raises:
        ConfigurationError: the pool is of another tokenizer.
        StoreLockedError: another process writes to a store.
        CorruptStoreError: a store or a checkpoint's cut cannot be continued.
    """

    def __init__(
        self, block: ReplayBlock, tasks: TaskTable | None, *, fingerprint: str, run: str, checkpoints: str | Path
    ) -> None:
        self._block = block
        self._tasks = tasks
        self._fingerprint = fingerprint
        self._run = run
        self._checkpoints = Path(checkpoints).absolute()
        self._histories: dict[str, tuple[AgentTrajectory, ...]] = {}
        self._joined: dict[str, AgentTrajectory] = {}
        self._recorder: RolloutRecorder | None = None
        recording = block.recording
        if recording.enable:
            self._recorder = RolloutRecorder(
                block.recording_path, recording.format, recording.capacity, recording.on_error
            )
        try:
            self._hook: ReplayHook[str] = ReplayHook(
                block.experience_replay,
                n_rollout=block.n_rollout,
                get_task=lambda task: task if tasks is not None and task in tasks else None,
                tokenizer_fingerprint=fingerprint,
            )
            self.hold_checkpoints()
        except BaseException:
            self.close()
            raise

    @property
    def replays(self) -> bool:
        """Whether rows are replayed, or only recorded."""
        return self._hook.manager is not None

    @property
    def loss_options(self) -> HetOptions:
        """What the configuration says about the loss."""
        return HetOptions(**self._hook.loss_options)

    # ---- before the rollouts ----

    def plan(self, task_ids: Sequence[str], progress: float, step: int) -> list[PlannedTask[str]]:
        """Return the tasks of a step with their histories, as many as given; tasks with histories come first.

        Args:
            task_ids: what the data loader gave.
            progress: of the training, in [0, 1].
            step: number of the step.
        """
        return self._hook.before_rollout(self._hook.tasks_chosen(task_ids, progress, step))

    def task_row(self, task_id: str) -> Mapping[str, Any]:
        """Return the row of the training data that is a task."""
        if self._tasks is None:
            raise ConfigurationError(f"task {task_id!r}: there is no table of tasks; nothing is replayed")
        return self._tasks.row(task_id)

    def expect(self, histories: Mapping[str, Sequence[AgentTrajectory]]) -> None:
        """Remember which histories are to join the rollouts of which prompt, by ``uid``.

        To be called before the prompts are under way. Histories of prompts that were dropped since are forgotten.
        """
        if self._histories:
            alive = dataplane.prompts_under_way(TRAINING)
            self._histories = {uid: held for uid, held in self._histories.items() if uid in alive}
        self._histories.update({uid: tuple(held) for uid, held in histories.items() if held})

    # ---- when the rollouts are there ----

    def join(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return a sampled batch with the replayed rows in it, each beside the rollouts of its prompt.

        Every row gets ``exp_mask``. No prompt has more than n sessions. Prompts that came back without any
        rollout get no history either. If nothing is replayed, the batch is returned as it is.

        Raises:
            ConfigurationError: a row's key or columns do not allow it.
        """
        sessions = Counter(session.rpartition("_")[0] for session in {session_of(key) for key in batch.keys})
        self._joined = {}
        if not self.replays:
            return batch
        added: list[Row] = []
        taken = [key for key in batch.keys if int(key.split("_")[1]) >= FIRST_REPLAYED_SESSION]
        if taken:
            raise ConfigurationError(
                f"row {taken[0]!r}: sessions from {FIRST_REPLAYED_SESSION} on are those of replayed rows;"
                " the sampler or the agent loop must use lower ones"
            )
        first: dict[str, int] = {}
        for place, key in enumerate(batch.keys):
            first.setdefault(key.split("_")[0], place)
        for uid, place in first.items():
            histories = self._histories.pop(uid, ())[: max(0, self._block.n_rollout - sessions[uid])]
            if not histories:
                continue
            template = dataplane.read_whole_row(batch.keys[place], batch.tags[place], batch.partition_id)
            own_group = self._block.experience_replay.group_offpolicy == "separate"
            for number, history in enumerate(histories):
                row = replayed_row(template, history, number, own_group=own_group)
                added.append(row)
                self._joined[row.key] = history
        dataplane.add_rows(added, batch.partition_id)
        joined = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[*batch.keys, *(row.key for row in added)],
            tags=[*batch.tags, *(dict(row.tag) for row in added)],
            extra_info=batch.extra_info,
        )
        masks = [torch.zeros(tag["response_len"], dtype=torch.int64) for tag in batch.tags]
        masks += [row.columns["response_mask"] for row in added]
        dataplane.write_column(joined.keys, joined.partition_id, EXP_MASK, masks)
        return joined

    # ---- when the policy has rated them ----

    def scored(self, batch: KVBatchMeta, step: int) -> dict[str, float]:
        """Record the rollouts, replace log-probs of replayed rows, fill the pool; return the figures of all that.

        Args:
            batch: the step's rows, with rewards and with ``old_log_probs`` and ``entropy`` of the current policy.
            step: number of the step.

        Raises:
            ConfigurationError: rows lack a column.
            StoreWriteError: a store could not write.
        """
        real = _without_padding(batch)
        rows = dataplane.read_rows(real, (*NEEDED, EXP_MASK) if self.replays else NEEDED, WELCOME)
        fresh = [row for row in rows if row.key not in self._joined]
        made = trajectories_of(fresh, self._block.outcome, step=step, run=self._run, fingerprint=self._fingerprint)
        figures = self._recorder.record(made) if self._recorder is not None else {}
        if not self.replays:
            return figures
        replayed = [row for row in rows if row.key in self._joined]
        self._replace_log_probs(replayed, batch.partition_id)
        histories = [self._joined[row.key] for row in replayed]
        everything = [*made, *histories]
        figures |= self._hook.rollouts_done(
            replayable(made),
            [trajectory.task_id for trajectory in everything],
            [False] * len(made) + [True] * len(histories),
            [trajectory.policy_version for trajectory in everything],
        )
        return figures

    def _replace_log_probs(self, rows: Sequence[Row], partition_id: str) -> None:
        if not rows:
            return
        lengths = [row.columns["old_log_probs"].numel() for row in rows]
        recorded = [
            recorded_log_probs(self._joined[row.key], length) for row, length in zip(rows, lengths, strict=True)
        ]
        current, exp_mask, response_mask = (
            pad_sequence([row.columns[name] for row in rows], batch_first=True)
            for name in ("old_log_probs", EXP_MASK, "response_mask")
        )
        values, known = (pad_sequence([one[part] for one in recorded], batch_first=True) for part in (0, 1))
        replaced = self._hook.replace_log_probs(current, values, known, exp_mask, response_mask)
        rows_of = [row[:length] for row, length in zip(replaced.to(current.dtype), lengths, strict=True)]
        dataplane.write_column([row.key for row in rows], partition_id, "old_log_probs", rows_of)

    def updated(self, figures: Mapping[str, float]) -> None:
        """Take the loss's figures of this step, to warn if the batch was far off-policy."""
        self._hook.watch(figures)

    # ---- checkpoint and resume ----

    def save(self, folder: Path, step: int) -> None:
        """Write where recording and replay stand, for the checkpoint that is about to be written.

        Raises:
            StoreWriteError: it, or what it names, did not reach the disk.
        """
        rollouts, rollouts_store = -1, ""
        if self._recorder is not None:
            self._recorder.flush()
            rollouts, rollouts_store = self._recorder.buffer.committed, str(self._recorder.buffer.store_id)
        manager = self._hook.manager
        pool = None if manager is None else manager.state_dict()
        expected = {uid: [to_plain(one) for one in held] for uid, held in self._histories.items()}
        write_cut(folder, Cut(step, self._run, rollouts, rollouts_store, pool, expected))

    def hold_checkpoints(self) -> None:
        """Keep in the pool's store what the checkpoints that verl can load now go back to, and nothing else."""
        manager = self._hook.manager
        if manager is not None:
            manager.hold([cut.pool for cut in restorable_cuts(self._checkpoints) if cut.pool is not None])

    def resume(self, folder: Path | None, step: int) -> None:
        """Go back to where the pool stood at a checkpoint. Rollouts recorded since then stay recorded.

        Where no checkpoint says so, the pool is used as it lies in its store. With ``on_resume: keep``, rollouts
        recorded since enter the pool again; without a checkpoint, all that are recorded.

        Args:
            folder: the checkpoint; ``None`` = there is none yet.
            step: of the checkpoint.

        Raises:
            CorruptStoreError: the checkpoint's cut is damaged.
            ConfigurationError: it is of another tokenizer.
        """
        manager = self._hook.manager
        if manager is None:
            return
        cut = None if folder is None else find_cut(folder, step)
        if cut is not None and cut.pool is not None:
            if cut.step != step:
                logger.warning("%s says nothing of the experience pool; it goes back to step %d", folder, cut.step)
            self._hook.load_state_dict(cut.pool)
            if cut.step == step:
                self._histories = {uid: tuple(map(from_plain, held)) for uid, held in cut.expected.items()}
            logger.info("experience pool: back at step %d with %d trajectories", cut.step, len(manager))
        elif folder is not None:
            logger.warning(
                "%s says nothing of the experience pool; it is used as it is: %d trajectories", folder, len(manager)
            )
        if self._block.on_resume == "keep":
            self._take_in_since(cut)

    def _take_in_since(self, cut: Cut | None) -> None:
        """Let rollouts that were recorded after a checkpoint, or at all, enter the pool, step by step."""
        if self._recorder is None or (cut is not None and self._recorder.buffer.store_id != cut.rollouts_store):
            logger.warning("the rollouts recorded since the checkpoint are not in this run's store; none were taken in")
            return
        steps = 0
        # One process after another wrote there, each its steps in their order.
        recorded = self._recorder.recorded_after(-1 if cut is None else cut.rollouts)
        for _, made in itertools.groupby(recorded, lambda one: (one.metadata.get("run"), one.policy_version)):
            found = replayable(made)
            self._hook.admit([*found, *lost_beside(found)])
            steps += 1
        if steps:
            logger.info("experience pool: took in %d steps recorded since", steps)

    def close(self) -> None:
        """Write what is left, and close the stores. Closing again does nothing.

        Raises:
            StoreWriteError: something did not reach the disk.
        """
        hook = getattr(self, "_hook", None)
        try:
            if hook is not None:
                hook.close()
        finally:
            if self._recorder is not None:
                self._recorder.close()


def _without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch without the rows by which verl fills it up."""
    real = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    if len(real) == len(batch.keys):
        return batch
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[place] for place in real],
        tags=[batch.tags[place] for place in real],
        extra_info=batch.extra_info,
    )
