"""``GuidanceHook``: guided rollouts as a few calls at fixed points of any training loop.

One step, beside the calls of ``ReplayHook``::

    plan = replay.before_rollout(...)                     # tasks, and how many rollouts each makes
    configs = guidance.before_rollout(plan)               # one TrajExpConfig for each of these rollouts, in order
    messages = guidance.context(messages, configs[i])     # the model's input
    fresh[i] = guidance.finished(trajectory, configs[i])  # the messages to train on, the experience shown
    ...
    metrics |= guidance.step_done(fresh, step)            # queue rollouts for summarizing

A loop that makes token ids gives the hook its tokenizer, since the prompt of a discarded rollout is tokenized again.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_hooks.completion import HandedOver
from trainer_hooks.guidance import (
    EMClient,
    ExperienceMaker,
    ExperienceTemplate,
    ExperienceWorker,
    Guidance,
    LocalMaker,
    TrajExpConfig,
    UpdateQueue,
    take_out,
    with_guidance,
)
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.manager import GuidanceManager, RolloutMode
from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay.contract import task_id_of
from trainer_hooks.replay.control_tokens import ControlTokens
from trainer_hooks.replay.conversation import ChatTemplate, with_prompt
from trainer_hooks.replay.outcomes import known_outcome
from trajstore._core.base.arguments import seconds, whole
from trajstore._core.base.closing import Closing, of_no_use_when_closed
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@of_no_use_when_closed(but=("metrics",))
class GuidanceHook(Closing):
    """Guided rollouts for one training loop. :meth:`context` is thread-safe, the rest is for the loop's thread.

    After :meth:`close` only :meth:`metrics` may be called.

    Args:
        config: of guidance; with everything off the calls return their arguments.
        maker: makes and finds experience; ``None`` = as configured.
        tokenizer: the policy's, as Hugging Face's, with its chat template. It tokenizes the prompts of discarded
            rollouts again, and defines the control tokens that experience must not hold.
        chat_template_kwargs: the loop's further arguments of the chat template, such as ``tools``.

    Raises:
        StoreLockedError: another process writes to the store of experiences.
    """

    def __init__(
        self,
        config: GuidanceConfig,
        *,
        maker: ExperienceMaker | None = None,
        tokenizer: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._tokens: ChatTemplate | None = None
        if config.is_on and tokenizer is not None:
            self._tokens = ChatTemplate.of(tokenizer, **(chat_template_kwargs or {}))
        self._handed_over = HandedOver()
        template = ExperienceTemplate.of(config.experience_template)
        self._store = config.open_store() if config.is_on else None
        try:
            self.maker = self._make(maker)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        self._updates: UpdateQueue | None = None
        if config.enable_summarizer and self.maker is not None:
            self._updates = UpdateQueue(self.maker, batch_size=config.summary_batch_size, workers=config.workers)
        self.manager = GuidanceManager(config.rules(), seed=config.seed)
        retriever = self.maker if config.enable_context_generator else None
        control = None
        if retriever is not None and tokenizer is not None:
            control = ControlTokens.of(copy.deepcopy(tokenizer))  # a copy, since several rollout threads use it
        self._worker = ExperienceWorker(
            retriever, template=template, retrieve_top_k=config.retrieve_top_k, control=control
        )
        self._refused = 0
        if retriever is not None and tokenizer is None:
            logger.warning(
                "guidance: no tokenizer is given, so control tokens in an experience reach prompts as they are"
            )
        if config.enable_summarizer and not config.updated_freq and not config.init_experience_before_training:
            logger.warning(
                "guidance: enable_summarizer has no effect: updated_freq is 0, init_experience_before_training false"
            )

    def _make(self, maker: ExperienceMaker | None) -> ExperienceMaker | None:
        config = self.config
        if maker is not None or not config.is_on:
            return maker
        if config.base_url is None:
            return LocalMaker(self._store)
        return EMClient(
            config.base_url,
            workspace_id=config.workspace_id,
            dialect=config.dialect,
            retrieve_timeout=config.retrieve_timeout,
            summary_timeout=config.summary_timeout,
        )

    # ---- the fixed points of a step ----

    def before_rollout(self, plan: Sequence[PlannedTask[Any]], mode: RolloutMode = "sample") -> list[TrajExpConfig]:
        """Return one configuration for each fresh rollout, in the order of the plan.

        Args:
            plan: from ``ReplayHook.before_rollout``, or tasks with their numbers of rollouts.
            mode: ``sample`` in training; ``validate`` in validation, which does not affect the random choices of
                training.
        """
        before = self.manager.state_dict()
        train_modes = self.manager.allocate_train_mode(plan)
        guided = self.manager.allocate_add_exp([planned.fresh_rollouts for planned in plan], mode)
        if mode == "validate":
            self.manager.load_state_dict(before)
        return [
            TrajExpConfig(add_exp=add_exp, train_mode=train_mode, task_id=task_id_of(planned.task))
            for planned, train_mode, flags in zip(plan, train_modes, guided, strict=True)
            for add_exp in flags
        ]

    def context(self, messages: Sequence[Mapping[str, Any]], config: TrajExpConfig) -> list[dict[str, Any]]:
        """Return the messages to send to the model; see ``ExperienceWorker.manage_rollout_context``."""
        return self._worker.manage_rollout_context(messages, config)

    def finished(self, trajectory: AgentTrajectory, config: TrajExpConfig) -> AgentTrajectory:
        """Return the rollout with its guidance record and the messages that it is trained on.

        A discarded rollout loses its sampled log-probs, which belong to another prompt. If it has tokens, its prompt is
        tokenized again without the experience; the response stays as sampled.

        Args:
            trajectory: with the messages as the model read and wrote them; not changed.
            config: of this rollout.

        Raises:
            ConfigurationError: a discarded rollout has tokens, and the hook has no tokenizer.
            InvalidTrajectoryError: a message does not begin with its insertion, or the tokens do not begin with those
                of the prompt: the rollout cannot be trained on (``guidance/discard_refused`` counts).
        """
        discarded = config.train_mode == "discard"
        guidance = config.guidance(taken_out=discarded)
        if guidance is None:
            return trajectory
        if discarded:
            if trajectory.input_ids is not None and self._tokens is None:
                raise ConfigurationError(
                    "tokenizer: missing, but a rollout that is trained on without its experience has token ids that"
                    " contain it; pass the tokenizer to GuidanceHook, or set train_sample_expmode=allkeep"
                )
            try:
                trajectory = self._without(trajectory, take_out(trajectory.messages, config.insertions))
            except InvalidTrajectoryError:
                self._refused += 1
                raise
        return with_guidance(trajectory, guidance)

    def _without(self, trajectory: AgentTrajectory, messages: list[dict[str, Any]]) -> AgentTrajectory:
        if trajectory.input_ids is None or self._tokens is None:
            return dataclasses.replace(trajectory, messages=messages, old_log_probs=None, rollout_log_probs=None)
        return with_prompt(trajectory, messages, self._tokens)

    def step_done(self, fresh: Sequence[AgentTrajectory], global_steps: int) -> dict[str, float]:
        """Queue rollouts for summarizing in every ``updated_freq``-th step, without waiting; return the metrics.

        Args:
            fresh: the step's rollouts, with outcomes; not to be changed afterwards.
            global_steps: number of the step, at least 0.

        Raises:
            ConfigurationError: ``global_steps`` is out of range.
            InvalidTrajectoryError: a rollout was handed over already in this step.
        """
        whole("global_steps", global_steps, 0)
        if not self.config.is_on:
            return {}
        self._handed_over.check(global_steps, fresh)
        guided = [Guidance.of(rollout) is not None for rollout in fresh]
        frequency = self.config.updated_freq
        if self._updates is not None and frequency and global_steps % frequency == 0:
            self._updates.submit(fresh)
        self._handed_over.note(global_steps, fresh)
        figures = {"guidance/guided_rollouts": float(sum(guided))}
        for name, side in (("guided", True), ("unguided", False)):
            sided = (
                known_outcome(rollout) for rollout, is_guided in zip(fresh, guided, strict=True) if is_guided is side
            )
            if outcomes := [outcome for outcome in sided if outcome is not None]:
                figures[f"guidance/outcome/{name}"] = sum(outcomes) / len(outcomes)
        return figures | self.metrics()

    def validated(self, rollouts: Sequence[AgentTrajectory]) -> None:
        """Queue validation rollouts for summarizing, with ``val_summarizer_save``."""
        if self._updates is not None and self.config.val_summarizer_save:
            self._updates.submit(rollouts)

    def begin(self, rollouts: Sequence[AgentTrajectory], timeout: float) -> bool:
        """Fill the pool before the first step, with ``init_experience_before_training``; waits for the summaries.

        Args:
            rollouts: of the current policy; none are needed if this is off.
            timeout: maximum number of seconds to wait.

        Returns:
            Whether everything was summarized in that time; True if this is off.
        """
        seconds("timeout", timeout)
        if self._updates is None or not self.config.init_experience_before_training:
            return True
        self._updates.submit(rollouts)
        return self.wait(timeout)

    def wait(self, timeout: float) -> bool:
        """Wait until experiences were made of all queued rollouts; for reproducible runs."""
        seconds("timeout", timeout)
        return self._updates is None or self._updates.wait(timeout)

    def metrics(self) -> dict[str, float]:
        """Return all figures since the beginning."""
        figures = self._worker.metrics() | {"guidance/discard_refused": float(self._refused)}
        return figures if self._updates is None else figures | self._updates.metrics()

    # ---- checkpoint and end ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random choices. Experiences are in their own store."""
        return self.manager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        if state:
            self._handed_over.forget()
            self.manager.load_state_dict(state)

    def close(self, timeout: float = 10.0) -> None:
        """Wait up to ``timeout`` seconds for running summaries, log unfinished ones, and close the store."""
        seconds("timeout", timeout)
        if self._updates is not None:
            self._updates.close(timeout)
        if self.maker is not None:
            self.maker.close()
        if self._store is not None:
            self._store.close()
