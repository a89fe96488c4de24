"""``ReplayHook``: experience replay as a few calls at fixed points of a training loop, whoever wrote the loop.

One step of any GRPO trainer, with the calls in their order::

    mixed = hook.tasks_chosen(tasks, progress, step)          # some tasks give way to tasks with history
    plan = hook.before_rollout(mixed)                         # histories are drawn; rollouts left to make
    fresh = ...                                               # plan[i].fresh_rollouts for each plan[i].task
    batch = build_batch(hook.batch_rows(plan, fresh), pad_id)
    current, entropys = ...                                   # one pass of the policy over the batch
    old = hook.log_probs_computed(batch, current)             # recorded log-probs for replayed tokens
    loss = het_compute_token_on_off_policy_loss(old, ..., **hook.loss_options)
    hook.loss_computed(batch, rows, loss, advantages)         # optional: figures for the metrics
    metrics = hook.step_done(batch, fresh, current, entropys) # good rollouts enter the pool

``exp_mask`` in ``...`` is the batch's, [B, P + R]. ``state_dict`` goes into the trainer's checkpoint, ``resume(state,
step)`` is called where the trainer resumes. With ``enable: false`` the calls hand back what they were given.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from trainer_hooks import metrics
from trainer_hooks.background import ReplayParts
from trainer_hooks.batch import Batch, BatchRow
from trainer_hooks.completion import HandedOver, check_lengths, completed_rollouts
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.losses import LossOptions
from trainer_hooks.masks import compute_response_mask, regularizer_masks, replace_recorded_old_log_probs
from trainer_hooks.plan import MixedTasks, PlannedTask, prompts_of_rollouts, rows_of_plan
from trainer_hooks.replay import CurrentEntropy, ExperienceManager
from trainer_hooks.replay.contract import task_id_of
from trainer_hooks.replay.cut import PoolCut
from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.replay.prompts import Message, RowPrompts
from trajstore.core.base.arguments import finite, share, whole
from trajstore.core.base.closing import Closing, of_no_use_when_closed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@of_no_use_when_closed()
class ReplayHook(Closing, Generic[Task]):
    """Experience replay for one training loop. Not thread-safe. After :meth:`close` only properties can be read.

    Args:
        config: the section ``exp_manager.experience_replay``.
        n_rollout: rows that every task has in a batch.
        get_task: returns the task of an id; ``None`` if the training data have no such task.
        tokenizer_fingerprint: tokenizer and chat template of the trainer; a pool made with another is refused. Empty =
            ``tokenizer``'s, or unknown.
        tokenizer: of the trainer, as Hugging Face's, with its chat template; or a ``MessageTokenizer``, which can also
            make several rows of a conversation (``linear_think``). It makes rows of histories that have messages only,
            such as pools of AgentEvolver; without it such pools are refused when they are loaded.
        current_entropy: mean entropy of trajectories under the current policy, for choosing among histories. With
            ``prepare_in_background`` it is called by a thread while the rollouts are made.
        task_text: returns what a task asks for; ``task_sampling: similar`` needs it.
        task_prompt: returns a task's prompt, messages or token ids [P]: histories with another one are not drawn.
            Without it they are left out of the batch if the task's rollouts in it have another prompt.

    Raises:
        ConfigurationError: k is not below ``n_rollout``, a wrong ``store``, a pool of another tokenizer, or one with
            demonstrations that could never come out.
        StoreLockedError: another process writes to the pool's store.
        CorruptStoreError: the pool's store cannot be continued.
    """

    def __init__(
        self,
        config: ExperienceReplayConfig,
        *,
        n_rollout: int,
        get_task: Callable[[str], Task | None],
        tokenizer_fingerprint: str = "",
        tokenizer: Any = None,
        current_entropy: CurrentEntropy | None = None,
        task_text: Callable[[Task], str] | None = None,
        task_prompt: Callable[[Task], Sequence[Message] | Tensor] | None = None,
    ) -> None:
        self.config = config
        self._n_rollout = whole("n_rollout", n_rollout, 1)
        self._handed_over = HandedOver()
        rules = config.pool_rules(n_rollout)
        self._store = config.open_store() if config.enable else None
        self._made: ReplayParts[Task] | None = None
        if not config.enable:
            return
        try:
            manager = ExperienceManager(
                rules,
                store=self._store,
                tokenizer_fingerprint=tokenizer_fingerprint,
                tokenizer=(
                    tokenizer
                    if tokenizer is None or isinstance(tokenizer, MessageTokenizer)
                    else MessageTokenizer.of(tokenizer)
                ),
                current_entropy=current_entropy,
                reward_fingerprint=config.reward_fingerprint or "",
                rows=RowPrompts(get_task, task_prompt),
            )
            self._made = ReplayParts(config, manager, get_task, task_text)
        except BaseException:
            self.close()
            raise
        config.warn(knows_entropy=current_entropy is not None)

    # ---- the fixed points of a step ----

    def tasks_chosen(self, tasks: Sequence[Task], training_progress: float, global_steps: int) -> MixedTasks[Task]:
        """Return the tasks of this step, as many as were chosen.

        Args:
            tasks: what the trainer would train on.
            training_progress: in [0, 1].
            global_steps: number of this step, at least 0; the policy version of its rollouts.

        Raises:
            ConfigurationError: one of them is out of range.
        """
        share("training_progress", training_progress)
        whole("global_steps", global_steps, 0)
        replay = self._replay
        if replay is None:
            return MixedTasks((), tuple(tasks))
        with replay.figures.times.measure("tasks_chosen"):
            if not replay.files.begun:
                replay.files.load_newest(global_steps - 1)
                replay.collate.check_tasks()
            replay.manager.global_steps = global_steps
            experience, on_policy = replay.collate(tasks, training_progress)
            replay.watch.chosen(replay.collate.metrics)
        return MixedTasks(tuple(experience), tuple(on_policy))

    def before_rollout(self, mixed: MixedTasks[Task]) -> list[PlannedTask[Task]]:
        """Draw the histories; return all tasks, experience tasks first. Every task has ``n_rollout`` rows in all.

        With ``prepare_in_background`` they are drawn while the rollouts are made: whatever looks at them, or calls the
        hook, waits. The same ones come, unless a stored record is damaged: then its task has a row less.
        """
        replay = self._replay
        if replay is None:
            return [PlannedTask(task, self._n_rollout, ()) for task in mixed.on_policy]
        with replay.figures.times.measure("before_rollout"):
            histories = replay.coming(mixed.experience)
            fresh = replay.collate.fresh_rollouts(mixed.experience, mixed.on_policy, histories)
        tasks = (*mixed.experience, *mixed.on_policy)
        replay.asked = Counter()
        for task, count in zip(tasks, fresh, strict=True):
            replay.asked[task_id_of(task)] += count
        # A task may stand in the batch twice; only as an experience task does it bring history.
        found = [histories.get(task_id_of(task), ()) for task in mixed.experience]
        found += [()] * len(mixed.on_policy)
        return [PlannedTask(task, count, held) for task, count, held in zip(tasks, fresh, found, strict=True)]

    def batch_rows(self, plan: Sequence[PlannedTask[Task]], fresh: Sequence[AgentTrajectory]) -> list[BatchRow]:
        """Return the rows of the batch, task by task, each task's fresh rollouts before its histories.

        Args:
            plan: what :meth:`before_rollout` returned.
            fresh: the rollouts made, in the order of the plan.

        Raises:
            ConfigurationError: there are more or fewer rollouts than planned, or they are in another order.
        """
        if self._made is not None:
            self._made.settle()
            for task, prompt in prompts_of_rollouts(plan, fresh).items():
                self._made.manager.tell_prompt(task, prompt)
        return rows_of_plan(plan, fresh, self.config.group_offpolicy)

    def log_probs_computed(self, batch: Batch, old_log_probs: Tensor) -> Tensor:
        """Return the log-probabilities to which the loss compares the policy, [B, R].

        Args:
            batch: the padded batch, on the device of ``old_log_probs``.
            old_log_probs: [B, R], as the current policy gives them; not changed.
        """
        names = ("recorded_old_log_probs", "recorded_mask", "exp_mask", "response_mask")
        return self.replace_log_probs(old_log_probs, *(batch.tensors[name] for name in names))

    def replace_log_probs(
        self,
        old_log_probs: Tensor,
        recorded_old_log_probs: Tensor,
        recorded_mask: Tensor,
        exp_mask: Tensor,
        response_mask: Tensor,
    ) -> Tensor:
        """Do what :meth:`log_probs_computed` does, for a trainer with batches of its own.

        Args:
            old_log_probs: [B, R], as the current policy gives them; not changed.
            recorded_old_log_probs: [B, R], the log-probs that trajectories hold.
            recorded_mask: [B, R], nonzero where there is one.
            exp_mask: [B, P + R] (its response part counts) or [B, R], nonzero on off-policy tokens.
            response_mask: [B, R].
        """
        replay = self._replay
        if replay is None:
            return old_log_probs
        with replay.figures.times.measure("log_probs_computed"):
            off_policy = compute_response_mask(exp_mask, old_log_probs.shape[1]) * response_mask
            replay.figures.note(
                metrics.record_metrics(old_log_probs, recorded_old_log_probs, recorded_mask, off_policy)
            )
            if not self.config.exp_is_correct:
                return old_log_probs
            return replace_recorded_old_log_probs(old_log_probs, recorded_old_log_probs, recorded_mask, exp_mask)

    @property
    def loss_options(self) -> LossOptions:
        """Keyword arguments for ``het_compute_token_on_off_policy_loss``."""
        return {
            "off_cliprange_high": self.config.off_cliprange_high,
            "off_policy_shaping": self.config.off_policy_shaping,
            "drop_negative_off_policy": self.config.drop_negative_off_policy,
            "clip_off_policy": self.config.clip_off_policy,
        }

    def regularizer_masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return which tokens of a batch count in the entropy term and in the KL term: ``masks.regularizer_masks``."""
        return regularizer_masks(batch.tensors["response_mask"], batch.tensors["exp_mask"])

    def loss_computed(
        self, batch: Batch, rows: Sequence[int], loss: Mapping[str, Tensor], advantages: Tensor, cliprange_low: float
    ) -> None:
        """Take the figures of one loss computation; :meth:`step_done` returns those of all tokens of a step.

        Args:
            batch: the whole batch.
            rows: of the batch, those of this loss, M of them.
            loss: what ``het_compute_token_on_off_policy_loss`` returned.
            advantages: [M, R], as given to it.
            cliprange_low: as given to it.
        """
        finite("cliprange_low", cliprange_low, 0)
        if (replay := self._replay) is not None:
            with replay.figures.times.measure("loss_computed"):
                replay.figures.note_loss(batch, rows, loss, advantages, cliprange_low, self.config.off_cliprange_high)

    def watch(self, figures: Mapping[str, float]) -> None:
        """Warn of figures of the loss, under the names of ``token_sums.figures_of``, that are wrong."""
        if (replay := self._replay) is not None:
            replay.figures.warn(figures)

    def step_done(
        self,
        batch: Batch,
        fresh: Sequence[AgentTrajectory],
        old_log_probs: Tensor,
        entropys: Tensor,
        asked: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """Let what the step made enter the pool; return the step's metrics (none if switched off).

        Args:
            batch: the padded batch.
            fresh: the rollouts made, not changed; their rows are found by task and rollout id.
            old_log_probs: [B, R], natural logarithm, as the policy that sampled gives them: not the replaced ones.
            entropys: [B, R], nats, under the same policy.
            asked: as for :meth:`rollouts_done`.

        Raises:
            ConfigurationError: ``old_log_probs`` or ``entropys`` has another shape.
            InvalidTrajectoryError: a rollout is not in the batch, two have the same ids, or was handed over already.
            StoreWriteError: the pool's store could not write.
        """
        replay = self._replay
        if replay is None:
            return {}
        with replay.figures.times.measure("step_done"):
            done = completed_rollouts(batch, fresh, old_log_probs, entropys, replay.manager.global_steps)
        extras = batch.non_tensors["extras"]
        return self.rollouts_done(
            done,
            batch.non_tensors["task_ids"].tolist(),
            [one["is_experience_replay"] for one in extras],
            [one["policy_version"] for one in extras],
            asked,
        )

    def rollouts_done(
        self,
        done: Sequence[AgentTrajectory],
        task_ids: Sequence[str],
        is_experience_replay: Sequence[bool],
        policy_versions: Sequence[int | None],
        asked: Mapping[str, int] | None = None,
        replayed: Sequence[AgentTrajectory] | None = None,
    ) -> dict[str, float]:
        """Do what :meth:`step_done` does, for a trainer with batches of its own.

        Args:
            done: the rollouts made, with ``old_log_probs``, ``entropys`` and ``response_mask`` of the policy that
                sampled them; not changed.
            task_ids: for every row of the batch.
            is_experience_replay: for every row of the batch.
            policy_versions: for every row of the batch; None = unknown.
            asked: rollouts that were to be made, by task; ``None`` = as the newest :meth:`before_rollout` said. Those
                that did not come back are unknown: neither successes nor failures.
            replayed: histories that were in the batch, for the figures; ``None`` = all that were drawn for this step.

        Raises:
            InvalidTrajectoryError: a rollout lacks its task, or was handed over already in this step.
            StoreWriteError: the pool's store could not write.
        """
        check_lengths(task_ids=task_ids, is_experience_replay=is_experience_replay, policy_versions=policy_versions)
        replay = self._replay
        if replay is None:
            return {}
        with replay.figures.times.measure("step_done"):
            self._handed_over.check(replay.manager.global_steps, done)
            figures = self.admit(done, replay.asked if asked is None else asked)
            self._handed_over.note(replay.manager.global_steps, done)
            figures |= replay.figures.rollouts(done, replayed)
            replay.files.save_if_due()
        taken = replay.figures.take(task_ids, is_experience_replay, policy_versions)
        return metrics.shown({**taken, **replay.collate.metrics, **figures}, self.config.figures)

    def admit(self, done: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None) -> dict[str, float]:
        """Let the rollouts of one step enter the pool; return the share that it refused. Part of :meth:`step_done`.

        Also for rollouts that exist already, which need no ``entropys``. Arguments are those of :meth:`rollouts_done`.
        """
        if self._replay is None:
            return {}
        self._replay.watch.made(done)
        offered, refused = self._replay.manager.admit(done, asked)
        return {f"{metrics.PREFIX}refused_share": refused / offered} if offered else {}

    # ---- checkpoint and resume ----

    def flush(self) -> None:
        """Return when the pool would survive a crash as it is now. In memory there is nothing to wait for."""
        if self._replay is not None:
            self._replay.manager.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the pool's cut, for the checkpoint: plain containers, with the trajectories; empty if switched off."""
        if self._replay is None:
            return {}
        manager = self._replay.manager
        cut = PoolCut.from_dict(manager.state_dict())
        return dataclasses.replace(cut, entries={}, trajectories=manager.task2trajectories).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a cut; what entered the pool since leaves it. An empty state changes nothing.

        Raises:
            ConfigurationError: the cut is of another tokenizer, or of another dataset.
            CorruptStoreError: this is no such state.
        """
        if self._replay is not None and state:
            self._handed_over.forget()
            self._replay.files.load_cut(state)
            self._replay.collate.check_tasks()

    def resume(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Put the pool to where it stood at a step, and log what that did and what else could have been.

        To a cut if there is one; else to the newest ``step_N`` of ``pool_path`` not after ``step``; else it stays.

        Args:
            state: what :meth:`state_dict` returned; empty or ``None`` = there is none.
            step: number of training steps that are done.

        It raises as :meth:`load_state_dict`.
        """
        whole("step", step, 0)
        if state:
            self.load_state_dict(state)
        elif self._replay is not None:
            self._handed_over.forget()
            self._replay.files.load_newest(step)
            self._replay.collate.check_tasks()

    @property
    def _replay(self) -> ReplayParts[Task] | None:
        """What there is when replay is switched on; no history is under way any more."""
        if self._made is not None:
            self._made.settle()
        return self._made

    @property
    def manager(self) -> ExperienceManager | None:
        """The pool; ``None`` if switched off."""
        return None if self._replay is None else self._replay.manager

    def close(self) -> None:
        """Write what is left and close the pool's store. Closing again does nothing."""
        try:
            if self._made is not None:
                self._made.close()
        finally:
            if self._store is not None:
                self._store.close()
