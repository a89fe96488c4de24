"""``ReplaySession``: the state of a replay trainer, and its hooks in a step.

In a step, :meth:`plan` chooses tasks and draws histories before prompts go to the rollout engine. Rollouts are recorded
as they arrive (:mod:`trainer_hooks.transfer_queue`). :meth:`join` adds the histories as rows to the finished rollouts.
:meth:`dropped` reports groups that the sampler drops. :meth:`scored` reports the step, restores the log-probs of
replayed rows, and admits rollouts to the pool.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from trainer_hooks.hook import ReplayHook
from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay.late_values import DROPPED_STEP, REUSED_BY, SCORE, TASK_ROLLOUTS, TRAINED_STEP
from trainer_hooks.replay.outcomes import is_success, known_outcome, outcome_of
from trainer_hooks.replay.store import BufferStore
from trainer_hooks.transfer_queue import RecordedPool, RecorderHandle, Row, StoreOptions
from trainer_hooks.transfer_queue.recorder import Status
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.arrival import VerlRollouts
from trainer_hooks.verl.config import SECTION, ReplayBlock, guides_training, naming
from trainer_hooks.verl.cuts import Cut, find_cut, read_cut, restorable_cuts, write_cut
from trainer_hooks.verl.guided import GuidedRollouts
from trainer_hooks.verl.histories import FirstTold, Histories, spread
from trainer_hooks.verl.reading import RunTokenizer
from trainer_hooks.verl.reuse import Reuse
from trainer_hooks.verl.rows import (
    FIRST_REPLAYED_SESSION,
    NEEDED,
    REPLAYED,
    TASK,
    WELCOME,
    finished_of,
    in_order,
    is_reused,
    messages_of,
    output_of,
    session_of,
    why_no_outcome,
)
from trainer_hooks.verl.tasks import TaskTable, task_name
from trainer_hooks.verl.trained import TOKENS, TRAINED, WEIGHTS, ScoredRow, step_of_rows
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreError, StoreNotFoundError, StoreWriteError
from trajstore.interop.rollouts import rollout_of, row_of
from trajstore.ledger import Ledger
from trajstore.trajectory import AgentTrajectory, Reward

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

WARN_EVERY = 100
"""Number of failures between two warnings about failed writes."""


class ReplaySession:
    """Recording and replay of one training run, in the trainer's process. Not thread-safe.

    Args:
        block: the configuration.
        tasks: the tasks of the training data; None without replay.
        tokenizer: tokenizer of the run.
        run: id of this process, stored in every recorded rollout.
        checkpoints: ``trainer.default_local_dir``.

    Raises:
        ConfigurationError: the pool was made with another tokenizer.
        StoreLockedError: another process writes to a store.
        CorruptStoreError: a store or a checkpoint's cut cannot be continued.
    """

    def __init__(
        self, block: ReplayBlock, tasks: TaskTable | None, *, tokenizer: RunTokenizer, run: str, checkpoints: str | Path
    ) -> None:
        self._block = block
        self._tasks = tasks
        self._run = run
        self._checkpoints = Path(checkpoints).absolute()
        self._histories = Histories(
            block.n_rollout,
            own_group=block.experience_replay.group_offpolicy == "separate",
            max_policy_age=block.experience_replay.max_policy_age,
        )
        self.expect, self.join_finished = self._histories.expect, self._histories.join_finished
        """Methods of :class:`Histories`."""
        self._resumed_from: Mapping[str, Any] | None = None
        """State of the pool of the checkpoint resumed from, which may be elsewhere."""
        self._dropped = self._dropped_successes = 0
        self._failures: Counter[str] = Counter()
        """Tolerated errors by consequence."""
        self.reuse = Reuse(block.sampling, block.agent_loop, tokenizer.fingerprint)
        self._reused_names: set[str] = set()
        self._generated = 0
        self.prompts = 0
        """Prompts taken from the training data."""
        self._scored: dict[str, ScoredRow] = {}
        """Rows of the current step by key."""
        self._without_outcome = FirstTold(logger)
        self._is_closed = False
        recording, path = block.recording, (f"{SECTION}.recording.path", block.recording_path)
        self._format = VerlRollouts(block.outcome, tokenizer, run, text=recording.text, sampling=block.sampling)
        with naming(*path):
            self._recorder = RecorderHandle()
            self._recorder.open(StoreOptions(block.recording_path, recording.format, recording.capacity), self._format)
        try:
            with naming(*path):
                self.hook: ReplayHook[str] = ReplayHook(
                    block.experience_replay,
                    n_rollout=block.n_rollout,
                    get_task=lambda task: task if tasks is not None and task in tasks else None,
                    task_text=None if tasks is None else tasks.text,
                    task_prompt=None if tasks is None else lambda task: messages_of(tasks.row(task)["raw_prompt"]),
                    tokenizer_fingerprint=tokenizer.fingerprint,
                    draws_ahead=block.draws_ahead,
                    max_prompt_length=block.max_prompt_length,
                    max_response_length=block.max_response_length,
                    store=cast(BufferStore, RecordedPool(self._recorder)) if block.experience_replay.enable else None,
                )
            self.guided = GuidedRollouts(block, tokenizer.decoder)
            self._ledger = Ledger(block.ledger_folder)
        except BaseException:
            self.close()
            raise

    @property
    def replays(self) -> bool:
        """True if rows are replayed, False if they are only recorded."""
        return self._block.experience_replay.enable

    # ---- before the rollouts ----

    def plan(self, task_ids: Sequence[str], progress: float, step: int) -> list[PlannedTask[str]]:
        """Return the tasks of a step with their histories; tasks with histories come first.

        Args:
            task_ids: tasks from the data loader; the plan has the same number.
            progress: progress of the training, in [0, 1].
            step: number of the step.
        """
        self._histories.step = step
        plan = self._on_disk(lambda: self.hook.before_rollout(self.hook.tasks_chosen(task_ids, progress, step)))
        return plan or [PlannedTask(task, self._block.n_rollout, ()) for task in task_ids]

    def task_row(self, task_id: str) -> Mapping[str, Any]:
        """Return the training data's row of a task."""
        if self._tasks is None:
            raise ConfigurationError(f"task {task_id!r}: there is no table of tasks; nothing is replayed")
        return self._tasks.row(task_id)

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts with the experience for their rollouts, and with those that the store has."""
        return self.reuse.offered(self.guided.offered(prompts))

    # ---- after the rollouts ----

    def join(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return a sampled batch with the replayed rows added; see :meth:`Histories.sampled`.

        Without replay and guidance the batch is unchanged.

        Args:
            batch: batch sampled by verl.

        Raises:
            ConfigurationError: a row's key or columns do not support replay.
        """
        for key in batch.keys:
            session_of(key)
        return self._histories.sampled(batch, self.guided.exchanged(batch)) if self._block.masks_rows else batch

    def balanced(self, batch: KVBatchMeta, ranks: int, multiple: int) -> KVBatchMeta:
        """Distribute the replayed rows of a padded batch evenly over the mini-batches.

        Args:
            batch: batch balanced over the ranks by verl; reordered, unless it has no replayed rows.
            ranks: number of ranks of the actor.
            multiple: rows of a mini-batch over all ranks.
        """
        joined = self._histories.joined
        if joined and len(batch.keys) > multiple and len(batch.keys) % multiple == 0:
            kinds = [
                2 if tag.get("is_padding", False) else int(key in joined)
                for key, tag in zip(batch.keys, batch.tags, strict=True)
            ]
            batch.reorder(spread(kinds, ranks, len(kinds) // multiple))
        return batch

    def validated(self, batch: KVBatchMeta) -> None:
        """Collect validation rollouts as experience, if configured.

        Args:
            batch: the rows.
        """
        if not self.guided.wants_validation:
            return
        rows = dataplane.read_rows(batch, NEEDED, WELCOME)
        made = [rollout for rollout, _ in self._format.rollouts(rows)]
        self._format.finish(made)
        self.guided.validated(made)

    def dropped(self, batch: KVBatchMeta, step: int) -> None:
        """Report rollouts that are not trained on: of groups that were filtered, failed, too old, or too many.

        They have no log-probs of the actor, so they are not replayed, but they update the statistics of their task: a
        task whose rollouts all succeed is filtered, and solved. ``metadata["trained"]`` is False.

        Args:
            batch: the rows, replayed ones included.
            step: number of the step.

        Raises:
            ConfigurationError: rows lack a column.
            StoreWriteError: a store could not write (``on_error: raise``).
        """
        groups: dict[str, list[int]] = {}
        for place, key in enumerate(batch.keys):
            groups.setdefault(key.split("_")[0], []).append(place)
        made: list[AgentTrajectory] = []
        asked: Counter[str] = Counter()
        for uid, places in groups.items():
            wanted = self._histories.take(uid)
            fresh = [place for place in places if int(batch.keys[place].split("_")[1]) < FIRST_REPLAYED_SESSION]
            rows = dataplane.read_rows(dataplane.part_of(batch, fresh), TASK, ("extra_fields", "rm_scores"))
            if rows:
                made += self._finished(rows, step)
                asked[made[-1].task_id] += wanted
        self._dropped += len(made)
        self._dropped_successes += sum(is_success(outcome_of(rollout)) for rollout in made)
        self._report(made, DROPPED_STEP, step)
        if self.guided.is_on:
            self.guided.finished(self._whole(made), trained=False)
        self._judge(made, asked)

    # ---- after the log-probs are computed ----

    def scored(self, batch: KVBatchMeta, step: int) -> dict[str, float]:
        """Report the rollouts, replace log-probs of replayed rows, fill the pool; return metrics.

        Args:
            batch: the step's rows, with rewards, and ``old_log_probs`` and ``entropy`` of the current policy.
            step: number of the step.

        Raises:
            ConfigurationError: rows lack a column.
            StoreWriteError: a store could not write.
        """
        real, joined = dataplane.without_padding(batch), self._histories.joined
        fresh, replayed = (
            [place for place, key in enumerate(real.keys) if (key in joined) is is_replayed]
            for is_replayed in (False, True)
        )
        rows = dataplane.read_rows(dataplane.part_of(real, fresh), (*TASK, "rm_scores"), ("extra_fields",))
        again = dataplane.read_rows(dataplane.part_of(real, replayed), REPLAYED, ("rollout_log_probs",))
        made = self._finished(rows, step)
        self._scored = self._scored_rows(rows, again, made)
        dataplane.forget_log_probs(rows, batch.partition_id)
        figures = self._report(made, TRAINED_STEP, step)
        figures["recording/dropped"] = float(self._dropped)
        figures["recording/dropped_successes"] = float(self._dropped_successes)
        figures["recording/without_outcome"] = float(self._without_outcome.take())
        figures["recording/reused"] = float(len(self._reused_names))
        figures["recording/generated"] = float(self._generated)
        self._reused_names.clear()
        self._dropped = self._dropped_successes = self._generated = 0
        whole = self._whole(made)
        self.guided.finished(whole)
        figures |= self.guided.step_done(whole, step)
        if not self.replays:
            return figures
        dataplane.replace_log_probs(self.hook, again, joined, batch.partition_id)
        scored = self._scored.values()  # metrics of the batch count rows, and a rollout may have several
        asked: Counter[str] = Counter()
        for uid, task in {
            key.split("_")[0]: row.task for key, row in self._scored.items() if row.actor is None
        }.items():
            asked[task] += self._histories.asked.get(uid, self._block.n_rollout)
        figures |= self._histories.take_refused()
        taken = self._on_disk(
            lambda: self.hook.rollouts_done(
                in_order(whole),
                [row.actor is not None for row in scored],
                [row.version for row in scored],
                asked,
                list(self._histories.whole.values()),
            )
        )
        return figures | (taken or {})

    def _scored_rows(
        self, fresh: Sequence[Row], replayed: Sequence[Row], made: Sequence[AgentTrajectory]
    ) -> dict[str, ScoredRow]:
        whole = {session_of(rollout.rollout_id): rollout for rollout in made} | self._histories.whole
        actors = [None] * len(fresh) + [row.columns["old_log_probs"] for row in replayed]
        result = {}
        for row, actor in zip((*fresh, *replayed), actors, strict=True):
            rollout = whole[session_of(row.key)]
            task = task_name(row.columns["data_source"], row.columns["index"])
            result[row.key] = ScoredRow(task, rollout.rollout_id, rollout.policy_version, actor)
        return result

    # ---- after the update ----

    def trained(self, batch: KVBatchMeta, step: int, *, bypass: bool, **header: Any) -> None:
        """Record the step in the ledger; it and its rollouts are durable on return.

        Args:
            batch: the step's rows.
            step: number of the step.
            bypass: ``old_log_probs`` are the engine's.
            header: further arguments of :func:`~trainer_hooks.verl.trained.step_of_rows`.

        Raises:
            StoreError, InvalidTrajectoryError, OSError: the step, or a rollout, could not be written
                (``on_error: raise``).
        """
        recorder, ledger, scored = self._recorder, self._ledger, self._scored
        rows = dataplane.read_rows(dataplane.without_padding(batch), (*TRAINED, *TOKENS), (WEIGHTS,))
        self._recorded(recorder.flush)
        with self._tolerating(f"step {step} is not in the ledger", StoreError, OSError):
            names = sorted({scored[row.key].rollout for row in rows})
            numbers = dict(zip(names, recorder.find(names), strict=True))
            drops = self._block.experience_replay.drop_negative_off_policy
            record = step_of_rows(rows, scored, numbers, step, drops_negative=drops, bypass=bypass, **header)
            if ledger.last is not None and step <= ledger.last:  # with trainer.resume_mode=disable
                ledger.continue_from(step - 1 or None)
            ledger.record(record)

    def _report(self, made: Sequence[AgentTrajectory], name: str, step: int) -> dict[str, float]:
        """Report the step that trained on rollouts, or dropped them, to the recorder; return figures.

        Raises:
            StoreError, InvalidTrajectoryError: rollouts could not be written (``on_error: raise``).
        """
        start = time.perf_counter()
        rewards = [rollout.reward or Reward() for rollout in made]
        scores = [reward.metadata.get("score") for reward in rewards]
        values = {
            name: [step] * len(made),
            TASK_ROLLOUTS: [rollout.metadata["task_rollouts"] for rollout in made],
            "outcome": [reward.outcome for reward in rewards],
            SCORE: [score if isinstance(score, int | float) else None for score in scores],
            REUSED_BY: [self._run if rollout.rollout_id in self._reused_names else None for rollout in made],
        }
        self._recorded(lambda: self._recorder.set_values([rollout.rollout_id for rollout in made], values))
        status = self._recorded(self._recorder.status)
        figures = {"recording/rollouts": float(len(made)), "recording/seconds": time.perf_counter() - start}
        if status is None:
            return figures
        return figures | {
            "recording/waiting": float(status.waiting),
            "recording/lost": float(status.lost),
            "recording/without_text": float(status.problems["without_text"]),
        }

    def _recorded(self, ask: Callable[[], Status | None]) -> Status | None:
        """Ask the recorder; with ``on_error: warn`` its failures are only logged.

        Raises:
            StoreError, InvalidTrajectoryError: rollouts could not be written (``on_error: raise``).
        """
        status: Status | None = None
        with self._tolerating("rollouts are not recorded", StoreError, InvalidTrajectoryError):
            status = ask()
            if status is not None and status.error is not None:
                raise status.error
        return status

    def _finished(self, rows: Sequence[Row], step: int) -> list[AgentTrajectory]:
        """Return rollouts without tokens, which the recorder has; count those without outcome, log the first."""
        made = finished_of(rows, self._block.outcome, step=step)
        reused = {row.key for row in rows if output_of(row.key) == 0 and is_reused(row)}
        self._reused_names |= reused
        self._generated += len(made) - len(reused)
        if without := [rollout for rollout in made if known_outcome(rollout) is None]:
            self._without_outcome.add(
                len(without),
                "%d of %d rollouts have no outcome (%s is the first): %s. They are recorded, and neither successes nor"
                " failures; recording/without_outcome counts them",
                len(without),
                len(made),
                without[0].rollout_id,
                why_no_outcome(without[0], self._block.outcome),
            )
        return made

    def _whole(self, made: Sequence[AgentTrajectory]) -> Sequence[AgentTrajectory]:
        """Return rollouts with tokens and messages, as the recorder has them; those that it lost are left out."""
        if not (self.replays or self.guided.is_on):
            return made
        return self._recorder.rollouts([rollout.rollout_id for rollout in made])

    def _judge(self, made: Sequence[AgentTrajectory], asked: Mapping[str, int]) -> None:
        """Update the statistics of tasks with rollouts without log-probs; they are not admitted to the pool."""
        manager, rollouts = self.hook.manager, in_order(made)
        if manager is None or not rollouts:
            return
        self._on_disk(lambda: manager.judge(rollouts, asked))

    def _on_disk(self, action: Callable[[], Result]) -> Result | None:
        """Run an action that writes to the pool's store; with ``on_error: warn`` errors are only logged and counted.

        A failed write leaves the pool unchanged.
        """
        with self._tolerating("experience pool: a change was not made", StoreWriteError):
            return action()
        return None

    @contextmanager
    def _tolerating(self, consequence: str, *kinds: type[Exception]) -> Iterator[None]:
        """With ``on_error: warn``, only count errors of these kinds, and log every hundredth with its consequence."""
        try:
            yield
        except kinds as error:
            if self._block.recording.on_error == "raise":
                raise
            if self._failures[consequence] % WARN_EVERY == 0:
                logger.warning("%s, training goes on: %s", consequence, error)
            self._failures[consequence] += 1

    # ---- checkpoint and resume ----

    def save(self, folder: Path, step: int) -> None:
        """Write the state of recording and replay, just before verl writes a checkpoint.

        Raises:
            StoreWriteError: the state, or the data it refers to, did not reach the disk.
        """
        self._recorded(self._recorder.flush)
        pool = self._on_disk(self.hook.state_dict) or None
        expected = {uid: [row_of(history, {}) for history in held] for uid, held in self._histories.expected.items()}
        guidance = self.guided.hook.state_dict() if self.guided.is_on else None
        wanted = self._histories.wanted
        cut = Cut(step, self._run, pool, expected, guidance, wanted, self.prompts)
        self._on_disk(lambda: write_cut(folder, cut))

    def hold_checkpoints(self) -> None:
        """Keep the pool's points of the checkpoints that verl can load, and of the one resumed from."""
        if self.replays:
            states = [cut.pool for cut in restorable_cuts(self._checkpoints)] + [self._resumed_from]
            self._on_disk(lambda: self.hook.hold([state for state in states if state is not None]))

    def resume(self, folder: Path | None, step: int) -> None:
        """Restore the pool of a checkpoint. Rollouts recorded since then stay recorded.

        If no checkpoint has a cut, the pool is used as stored. Without a checkpoint, restore the pool with which the
        training began. With ``on_error: warn``, failed writes are logged and training continues.

        Args:
            folder: the checkpoint; ``None`` if there is none yet.
            step: step of the checkpoint.

        Raises:
            CorruptStoreError: the checkpoint's cut is damaged.
            ConfigurationError: the cut was made with another tokenizer.
            StoreWriteError: the pool's store could not write.
        """
        cut = None if folder is None else find_cut(folder, step)
        if self.guided.is_on and cut is not None and cut.guidance is not None:
            self.guided.hook.load_state_dict(cut.guidance)
        own = cut if cut is not None and cut.step == step else None
        self.prompts = 0 if own is None else own.prompts
        if self.hook.manager is not None:
            self._go_back(cut, folder, step)
        self._find_finished(own, folder, step)
        self._ledger.continue_from(step or None)

    def _find_finished(self, cut: Cut | None, folder: Path | None, step: int) -> None:
        """Find the rollouts that the checkpoint's weights sampled, and note in it that this process samples with them.

        Without a checkpoint: those that the first weights sampled.
        """
        if not self._block.recording.reuse or guides_training(self._block.guidance):
            return
        runs: set[str] | None = None
        if folder is not None:
            if cut is None:
                logger.warning("%s does not say which run wrote it: its finished rollouts are not reused", folder)
                return
            runs = {cut.run, *cut.resumed}
            try:
                write_cut(folder, dataclasses.replace(cut, resumed=(*cut.resumed, self._run)))
            except StoreWriteError as error:
                logger.warning("after another crash, rollouts of this step will be generated again: %s", error)
        with TrajectoryReplayBuffer.open(self._block.recording_path) as reader:
            self.reuse.find(reader, step, runs)
        if (manager := self.hook.manager) is not None:  # which could add a scored rollout to its own group
            manager.withdraw(step + 1, self.reuse.waits_for)

    def close(self) -> None:
        """Flush and close the stores. Idempotent.

        Raises:
            StoreWriteError: a flush failed.
        """
        if self._is_closed:  # the recorder may be another session's now
            return
        self._is_closed = True
        with ExitStack() as last_first:
            last_first.callback(self._recorded, self._recorder.close)
            for name in ("_ledger", "guided", "hook"):  # absent if __init__ failed
                if (made := getattr(self, name, None)) is not None:
                    last_first.callback(self._on_disk, made.close)

    def _go_back(self, cut: Cut | None, folder: Path | None, step: int) -> None:
        """Restore the pool of a checkpoint."""
        if cut is not None and cut.pool is not None:
            if cut.step != step:
                logger.warning("%s says nothing of the experience pool; it goes back to step %d", folder, cut.step)
            self.hook.load_state_dict(cut.pool)
            self._resumed_from = cut.pool
            if cut.step == step:
                self._histories.expected = {uid: tuple(map(rollout_of, held)) for uid, held in cut.expected.items()}
                self._histories.wanted = dict(cut.wanted)
        else:
            if folder is not None:
                logger.warning("%s says nothing of the experience pool", folder)
            elif self._went_to_beginning():
                return
            self.hook.resume(None, step)
            if folder is None:
                self._note_beginning()

    def _went_to_beginning(self) -> bool:
        """Restore the pool with which a training without a checkpoint began; return False if it begins now."""
        begun, manager = read_cut(self._checkpoints), self.hook.manager
        if begun is None or not begun.pool or manager is None or begun.pool["store_id"] != manager.store_id:
            return False
        try:
            self.hook.load_state_dict(begun.pool)
        except StoreNotFoundError as error:
            logger.warning("experience pool: stays as it is, for its state before step 1 was removed: %s", error)
            return False
        self._resumed_from = begun.pool
        return True

    def _note_beginning(self) -> None:
        """Save the pool before step 1, for a crash before the first checkpoint."""
        pool = self._on_disk(self.hook.state_dict)
        if pool:
            self._on_disk(lambda: write_cut(self._checkpoints, Cut(0, self._run, pool, {})))
            self._resumed_from = pool
