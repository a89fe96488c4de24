"""``ReplayHook``: experience replay as a few calls at fixed points of any training loop.

One step of any GRPO trainer, with the calls in their order::

    mixed = hook.tasks_chosen(tasks, progress, step)          # some tasks give way to tasks with history
    plan = hook.before_rollout(mixed)                         # histories are drawn; rollouts left to make
    fresh = ...                                               # plan[i].fresh_rollouts for each plan[i].task
    fresh += ...                                              # the same for hook.replacements(plan, fresh), often none
    batch = build_batch(hook.batch_rows(plan, fresh), pad_id)
    current, entropys = ...                                   # one pass of the policy over the batch
    old = hook.log_probs_computed(batch, current)             # recorded log-probs for replayed tokens
    loss = het_compute_token_on_off_policy_loss(old, ..., **hook.loss_options)
    hook.loss_computed(batch, rows, loss, advantages)         # optional: figures for the metrics
    metrics = hook.step_done(batch, fresh, current, entropys) # good rollouts enter the pool

``exp_mask`` in ``...`` is the batch's, [B, P + R]. ``state_dict`` goes into the trainer's checkpoint, and
``resume(state, step)`` is called when the trainer resumes. With ``enable: false`` the calls return their input.

``fresh`` may have the rows of agent sessions (``metadata["session"]``), all of a session: the calls take them for one
rollout (:func:`~trainer_hooks.replay.rows.whole_sessions`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from trainer_hooks import metrics
from trainer_hooks.batch import Batch, BatchRow
from trainer_hooks.completion import HandedOver, check_lengths, completed_rollouts
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.losses import LossOptions
from trainer_hooks.masks import compute_response_mask, regularizer_masks, replace_recorded_old_log_probs
from trainer_hooks.parts import ReplayParts
from trainer_hooks.plan import MixedTasks, PlannedTask, rows_of_plan, with_replacements
from trainer_hooks.replay import CurrentEntropy, ExperienceManager
from trainer_hooks.replay.contract import task_id_of
from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.replay.prompts import Message, RowPrompts, prompt_of
from trainer_hooks.replay.rows import whole_sessions
from trainer_hooks.replay.store import BufferStore
from trainer_hooks.trained import StepRecorder
from trajstore._core.base.arguments import path_or_url, share, whole
from trajstore._core.base.closing import Closing, of_no_use_when_closed
from trajstore.errors import ConfigurationError
from trajstore.ledger import LEDGER_FOLDER
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@of_no_use_when_closed()
class ReplayHook(Closing, Generic[Task]):
    """Experience replay for one training loop. Not thread-safe. After :meth:`close` only properties can be read.

    Args:
        config: the section ``exp_manager.experience_replay``.
        n_rollout: rows of every task in a batch.
        get_task: returns the task of an id; ``None`` if the training data have no such task.
        tokenizer_fingerprint: tokenizer and chat template of the trainer; a pool made with another is refused. Empty =
            ``tokenizer``'s, or unknown.
        tokenizer: of the trainer, as Hugging Face's, with its chat template; or a ``MessageTokenizer``, which can also
            make several rows of a conversation (``linear_think``). It makes rows of histories that have messages only,
            as in AgentEvolver's pools; without it such pools are refused on load.
        current_entropy: mean entropy of trajectories under the current policy, for choosing among histories. It scores
            those of each experience task that has more than are drawn. ``None``: the recorded entropy decides.
        task_text: returns a task's text; ``task_sampling: similar`` needs it.
        task_prompt: returns a task's prompt, messages or token ids [P]; histories that do not begin with it are not
            drawn. An empty one matches every history of the task: for prompts with a clock or a first observation.
            Without it, histories are left out of the batch if their prompt differs from that of the task's rollouts;
            a task whose own rollouts have different prompts is not compared.
        draws_ahead: steps between :meth:`tasks_chosen` and the step that trains on its histories, in an asynchronous
            trainer; ``max_policy_age`` applies to that step.
        max_prompt_length: tokens of the longest prompt in a batch; histories with a longer one are not drawn. ``None``:
            no limit.
        max_response_length: the same of responses.
        ledger: local folder of the training ledger (``trajstore.ledger``), in which :meth:`step_done` records each
            step, also with ``enable: false``; one for each rank. ``None``: none is written.
        rollouts: local folder of a store in which :meth:`step_done` records all fresh rollouts, with which
            ``trajstore replay-step`` rebuilds steps. The ledger is then its folder ``ledger``, unless given. The pool
            is a choice of these rollouts, and has no store of its own.
        store: of the pool, instead of that of the configuration: among the rollouts that the trainer records itself.

    Raises:
        ConfigurationError: k is not below ``n_rollout``, ``store`` is invalid, or the pool has another tokenizer or
            demonstrations that would never be replayed.
        StoreLockedError: another process writes to the pool's store or the ledger.
        CorruptStoreError: the pool's store or the ledger cannot be continued.
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
        draws_ahead: int = 0,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        ledger: str | Path | None = None,
        rollouts: str | Path | None = None,
        store: BufferStore | None = None,
    ) -> None:
        for name, folder in (("ledger", ledger), ("rollouts", rollouts)):
            if folder is not None:
                path_or_url(name, folder)
        if rollouts is not None and config.enable and config.store is not None:
            raise ConfigurationError(
                f"store: {config.store['path']}, would have copies of the rollouts in {rollouts}, among which the pool"
                " chooses; leave out store"
            )
        if ledger is None and rollouts is not None:
            ledger = Path(rollouts) / LEDGER_FOLDER
        if ledger is not None and draws_ahead:
            raise ConfigurationError(
                f"ledger: {ledger}, cannot be written with draws_ahead = {draws_ahead}, which draws for a step before "
                "the steps before it end; record steps with trainer_hooks.trained.trained_step"
            )
        self.config = config
        self._n_rollout = whole("n_rollout", n_rollout, 1)
        self._handed_over = HandedOver()
        rules = config.pool_rules(
            n_rollout, max_prompt_length=max_prompt_length, max_response_length=max_response_length
        )
        self._store = config.open_store() if config.enable and rollouts is None and store is None else store
        self._replay: ReplayParts[Task] | None = None
        self._recorder: StepRecorder | None = None
        try:
            if ledger is not None:
                drops_negative = config.drop_negative_off_policy
                self._recorder = StepRecorder(ledger, drops_negative=drops_negative, rollouts=rollouts)
            if not config.enable:
                return
            if self._recorder is not None and self._recorder.buffer is not None:
                self._store = BufferStore(self._recorder.buffer, self._recorder.find)
            if tokenizer is not None and not isinstance(tokenizer, MessageTokenizer):
                tokenizer = MessageTokenizer.of(tokenizer)
            manager = ExperienceManager(
                rules,
                store=self._store,
                tokenizer_fingerprint=tokenizer_fingerprint,
                tokenizer=tokenizer,
                current_entropy=current_entropy,
                rows=RowPrompts(get_task, task_prompt),
                draws_ahead=whole("draws_ahead", draws_ahead, 0),
            )
            self._replay = ReplayParts(config, manager, get_task, task_text)
        except BaseException:
            self.close()
            raise
        config.warn()

    # ---- the fixed points of a step ----

    def tasks_chosen(self, tasks: Sequence[Task], training_progress: float, global_steps: int) -> MixedTasks[Task]:
        """Return the tasks of this step, as many as given.

        Args:
            tasks: the trainer's own choice.
            training_progress: in [0, 1].
            global_steps: number of this step, at least 0; the policy version of its rollouts.

        Raises:
            ConfigurationError: an argument is out of range.
        """
        share("training_progress", training_progress)
        whole("global_steps", global_steps, 0)
        if self._recorder is not None:
            self._recorder.begin(global_steps)
        replay = self._replay
        if replay is None:
            return MixedTasks((), tuple(tasks))
        with replay.figures.times.measure("tasks_chosen"):
            replay.begin()
            replay.manager.global_steps = global_steps
            replay.watch.waiting(training_progress, self.config.replay_start_ratio)
            experience, on_policy = replay.collate(tasks, training_progress)
            replay.watch.chosen(replay.collate.metrics)
        return MixedTasks(tuple(experience), tuple(on_policy))

    def before_rollout(self, mixed: MixedTasks[Task]) -> list[PlannedTask[Task]]:
        """Draw the histories; return all tasks, experience tasks first. Every task has ``n_rollout`` rows in all."""
        replay = self._replay
        if replay is None:
            return [PlannedTask(task, self._n_rollout, ()) for task in mixed.on_policy]
        with replay.figures.times.measure("before_rollout"):
            histories = replay.draw(mixed.experience)
            fresh = replay.collate.fresh_rollouts(mixed.experience, mixed.on_policy, histories)
        tasks = (*mixed.experience, *mixed.on_policy)
        replay.ask(zip(tasks, fresh, strict=True))
        # A task may appear twice; it has history only as an experience task.
        histories_of_tasks = [tuple(histories.get(task_id_of(task), ())) for task in mixed.experience]
        histories_of_tasks += [()] * len(mixed.on_policy)
        return [
            PlannedTask(task, count, held) for task, count, held in zip(tasks, fresh, histories_of_tasks, strict=True)
        ]

    def replacements(
        self, plan: Sequence[PlannedTask[Task]], fresh: Sequence[AgentTrajectory]
    ) -> list[PlannedTask[Task]]:
        """Return the rollouts to make in place of histories that cannot join the batch; usually none.

        Without ``task_prompt`` a history is first compared with the prompts of its task's rollouts in this run. Make
        these rollouts and append them to ``fresh`` before :meth:`batch_rows`; otherwise such tasks have fewer rows.

        Args:
            plan: from :meth:`before_rollout`.
            fresh: the rollouts made, in the order of the plan.
        """
        if self._replay is None:
            return []
        fresh = whole_sessions(fresh)
        pairs = zip(plan, self._joining(plan, fresh), strict=True)
        missing = [(asked.task, len(asked.histories) - len(joined.histories)) for asked, joined in pairs]
        return [PlannedTask(task, count, ()) for task, count in missing if count]

    def batch_rows(self, plan: Sequence[PlannedTask[Task]], fresh: Sequence[AgentTrajectory]) -> list[BatchRow]:
        """Return the rows of the batch, task by task, each task's fresh rollouts before its histories.

        Args:
            plan: from :meth:`before_rollout`.
            fresh: the rollouts made, in the order of the plan; then those of :meth:`replacements`, if any.

        Raises:
            ConfigurationError: there are more or fewer rollouts than planned, or they are in another order.
        """
        fresh = whole_sessions(fresh)
        if self._replay is None:
            return rows_of_plan(plan, fresh, self.config.group_offpolicy)
        joining = self._joining(plan, fresh)
        if len(fresh) != sum(planned.fresh_rollouts for planned in plan):
            joining, fresh = with_replacements(plan, joining, fresh)
        self._replay.joined(plan, joining)
        return rows_of_plan(joining, fresh, self.config.group_offpolicy)

    def _joining(self, plan: Sequence[PlannedTask[Task]], fresh: Sequence[AgentTrajectory]) -> list[PlannedTask[Task]]:
        """Return a plan with the histories that join the batch: readable ones with the prompt of their task."""
        replay, rollouts = self._replay, iter(fresh)
        if replay is None:
            return list(plan)
        for planned in plan:
            made = list(islice(rollouts, planned.fresh_rollouts))
            for rollout in made if planned.histories else made[:1]:
                replay.manager.note_prompt(task_id_of(planned.task), prompt_of(rollout))
        return [
            dataclasses.replace(
                planned,
                histories=tuple(
                    history
                    for history in planned.histories
                    if replay.manager.answers(task_id_of(planned.task), prompt_of(history))
                ),
            )
            for planned in plan
        ]

    def log_probs_computed(self, batch: Batch, old_log_probs: Tensor) -> Tensor:
        """Return the old log-probabilities for the loss, [B, R].

        Args:
            batch: the padded batch, on the device of ``old_log_probs``.
            old_log_probs: [B, R], under the current policy; not changed.
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
        """As :meth:`log_probs_computed`, for a trainer with its own batches.

        Args:
            old_log_probs: [B, R], under the current policy; not changed.
            recorded_old_log_probs: [B, R], the trajectories' recorded log-probs.
            recorded_mask: [B, R], nonzero where a log-prob is recorded.
            exp_mask: [B, P + R] (its response part counts) or [B, R], nonzero on off-policy tokens.
            response_mask: [B, R].
        """
        replay = self._replay
        if replay is None:
            return old_log_probs
        with replay.figures.times.measure("log_probs_computed"):
            off_policy = compute_response_mask(exp_mask, old_log_probs.shape[1]) * response_mask
            replay.figures.note(metrics.record_sums(old_log_probs, recorded_old_log_probs, recorded_mask, off_policy))
            if not self.config.exp_is_correct:
                return old_log_probs
            return replace_recorded_old_log_probs(old_log_probs, recorded_old_log_probs, recorded_mask, exp_mask)

    def _for_loss(self, batch: Batch, old_log_probs: Tensor) -> Tensor:
        """As :meth:`log_probs_computed`, without metrics."""
        if self._replay is None or not self.config.exp_is_correct:
            return old_log_probs
        names = ("recorded_old_log_probs", "recorded_mask", "exp_mask")
        on_device = (batch.tensors[name].to(old_log_probs.device) for name in names)
        return replace_recorded_old_log_probs(old_log_probs, *on_device)

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
        """Return the masks of a batch's tokens for the entropy term and the KL term: ``masks.regularizer_masks``."""
        return regularizer_masks(batch.tensors["response_mask"], batch.tensors["exp_mask"])

    def loss_computed(self, batch: Batch, rows: Sequence[int], loss: Mapping[str, Tensor], advantages: Tensor) -> None:
        """Record one loss computation, for the ledger and the figures over all tokens that :meth:`step_done` returns.

        Args:
            batch: the whole batch.
            rows: the M rows of the batch in this loss.
            loss: from ``het_compute_token_on_off_policy_loss``.
            advantages: [M, R], as given to it.
        """
        if self._recorder is not None:
            self._recorder.loss_computed(batch, rows, loss, advantages)
        if (replay := self._replay) is not None:
            with replay.figures.times.measure("loss_computed"):
                replay.figures.note_loss(batch, rows, loss, advantages)

    def watch(self, figures: Mapping[str, float]) -> None:
        """Warn of bad figures of the loss, under the names of ``metrics.figures_of``."""
        if (replay := self._replay) is not None:
            replay.figures.warn(figures)

    def step_done(
        self,
        batch: Batch,
        fresh: Sequence[AgentTrajectory],
        old_log_probs: Tensor,
        entropys: Tensor,
        asked: Mapping[str, int] | None = None,
        *,
        data: Mapping[str, Any] | None = None,
        seeds: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Admit the step's rollouts to the pool and record the step in the ledger; return metrics (empty if disabled).

        On return both are durable. Save a checkpoint of the step after that.

        Args:
            batch: the padded batch.
            fresh: the rollouts made, not changed; their rows are located by task and rollout id.
            old_log_probs: [B, R], natural logarithm, under the policy that sampled: not the replaced ones.
            entropys: [B, R], nats, under the same policy.
            asked: as for :meth:`rollouts_done`.
            data: for the ledger: identity of the data set and position in it, JSON values.
            seeds: for the ledger, by name.
            options: for the ledger, as for :func:`~trainer_hooks.trained.trained_step`. The configuration's are added.
            config: for the ledger: the trainer's whole configuration. Credentials are left out, by their names.

        Raises:
            ConfigurationError: ``old_log_probs`` or ``entropys`` has another shape; or there is a ledger, and no loss
                was passed to :meth:`loss_computed`.
            OSError: the ledger could not be written.
            InvalidTrajectoryError: a rollout is not in the batch, two have the same ids, or was handed over already.
            StoreWriteError: the pool's store could not write.
        """
        replay, recorder, fresh = self._replay, self._recorder, whole_sessions(fresh)
        completed: list[AgentTrajectory] = []
        if replay is not None:
            with replay.figures.times.measure("step_done"):
                completed = completed_rollouts(batch, fresh, old_log_probs, entropys, replay.manager.global_steps)
        elif recorder is not None and recorder.buffer is not None:
            completed = completed_rollouts(batch, fresh, old_log_probs, entropys, recorder.step)
        if recorder is not None:
            recorder.keep(completed)
        figures: dict[str, float] = {}
        if replay is not None:
            extras = batch.non_tensors["extras"]
            figures = self.rollouts_done(
                completed,
                [row_extras["is_experience_replay"] for row_extras in extras],
                [row_extras["policy_version"] for row_extras in extras],
                asked,
            )
        if recorder is not None:
            if replay is not None and recorder.buffer is None:
                recorder.ids = replay.manager.admitted
            recorder.record(
                batch,
                self._for_loss(batch, old_log_probs),
                data=data,
                seeds={"replay": self.config.seed} | dict(seeds or {}),
                options=None if options is None else self._options(options),
                config=config,
            )
        return figures

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step's options with the configuration's."""
        loss = {"drop_negative_off_policy": self.config.drop_negative_off_policy, **given.get("loss", {})}
        return {**given, "loss": loss, "recorded_log_probs": self.config.exp_is_correct}

    def rollouts_done(
        self,
        done: Sequence[AgentTrajectory],
        is_experience_replay: Sequence[bool],
        policy_versions: Sequence[int | None],
        asked: Mapping[str, int] | None = None,
        replayed: Sequence[AgentTrajectory] | None = None,
    ) -> dict[str, float]:
        """As :meth:`step_done`, for a trainer with its own batches.

        Args:
            done: the rollouts made, with ``old_log_probs``, ``entropys`` and ``response_mask`` of the policy that
                sampled them; not changed.
            is_experience_replay: for every row of the batch.
            policy_versions: for every row of the batch; None = unknown.
            asked: number of requested rollouts, by task; ``None`` = those of the newest :meth:`before_rollout`.
                Requested rollouts that did not come back are unknown: neither successes nor failures.
            replayed: histories in the batch, for the figures; ``None`` = all that were drawn for this step.

        Raises:
            InvalidTrajectoryError: a rollout lacks its task, or was handed over already in this step.
            StoreWriteError: the pool's store could not write.
        """
        check_lengths(is_experience_replay=is_experience_replay, policy_versions=policy_versions)
        replay, done = self._replay, whole_sessions(done, strict=False)
        if replay is None:
            return {}
        with replay.figures.times.measure("step_done"):
            self._handed_over.check(replay.manager.global_steps, done)
            figures = self.admit(done, replay.asked if asked is None else asked)
            self._handed_over.note(replay.manager.global_steps, done)
            figures |= replay.figures.rollouts(done, replayed)
            replay.manager.flush()
        return {**replay.figures.take(is_experience_replay, policy_versions), **replay.collate.metrics, **figures}

    def admit(self, done: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None) -> dict[str, float]:
        """Admit the rollouts of one step to the pool; return the refused share. Part of :meth:`step_done`.

        Also for existing rollouts, which need no ``entropys``. Arguments are those of :meth:`rollouts_done`.
        """
        if self._replay is None:
            return {}
        self._replay.watch.made(done)
        offered, refused = self._replay.manager.admit(done, asked)
        return {f"{metrics.PREFIX}refused_share": refused / offered} if offered else {}

    # ---- checkpoint and resume ----

    def state_dict(self) -> dict[str, Any]:
        """Return the pool's state for the checkpoint, as plain containers; empty if disabled.

        With a durable store it names a saved point of the store, which stays until :meth:`hold` releases it; for a pool
        in memory it has the trajectories.
        """
        return {} if self._replay is None else self._replay.manager.state_dict()

    def hold(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Keep the saved points of the checkpoints that still exist, and remove those of all others.

        Args:
            states: the results of :meth:`state_dict` in these checkpoints.

        Raises:
            StoreWriteError: the pool's store could not write.
        """
        if self._replay is not None:
            self._replay.manager.hold(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; later entries leave the pool. An empty state changes nothing.

        Raises:
            ConfigurationError: the state has another tokenizer, or another dataset.
            CorruptStoreError: ``state`` is not a pool's state.
        """
        if self._replay is not None and state:
            self._handed_over.forget()
            self._replay.restore(state)

    def resume(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore pool and ledger to their state at a step, and log the choice; without a state the pool stays.

        Args:
            state: from :meth:`state_dict`; empty or ``None`` = there is none.
            step: number of finished training steps.

        Raises as :meth:`load_state_dict`.
        """
        whole("step", step, 0)
        if self._recorder is not None:
            self._recorder.ledger.continue_from(step)
        if state:
            self.load_state_dict(state)
        elif self._replay is not None:
            self._handed_over.forget()
            self._replay.begin()

    @property
    def manager(self) -> ExperienceManager | None:
        """The pool; ``None`` if disabled."""
        return None if self._replay is None else self._replay.manager

    def close(self) -> None:
        """Flush and close the pool's store and the ledger. Idempotent."""
        with ExitStack() as closing:
            for part in (self._recorder, self._store, self._replay):
                if part is not None:
                    closing.callback(part.close)
