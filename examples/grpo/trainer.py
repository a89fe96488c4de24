"""GRPO with experience replay in one process: a short but complete training loop.

Two random generators are part of the trainer's state: one for tokens (on the model's device), one for the order of
tasks and rows. On a CPU with the same number of threads, two runs are bit-identical, as are a resumed and an
uninterrupted run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from torch import Tensor

from examples.grpo.config import CurvePoint, TrainerConfig
from examples.grpo.curves import summarize
from examples.grpo.environments import Environment, TextTask, make_environment
from examples.grpo.guided import word_maker, word_template
from examples.grpo.model import build_model, response_log_probs
from examples.grpo.rollout import RolloutWorker, turns_as_rows
from examples.grpo.tokenizer import WordTokenizer
from examples.grpo.warm_start import warm_start
from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import Batch, BatchRow, build_batch
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.guidance.manager import RolloutMode
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.plan import PlannedTask, rows_of_rollout
from trainer_hooks.replay.rows import whole_sessions
from trajstore.errors import ConfigurationError, CorruptStoreError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_STATE_VERSION = 1
_STATE_KEYS = ("tokenizer_fingerprint", "model", "optimizer", "tokens", "order", "waiting", "curve", "replay")
_PATIENCE = 60.0
"""Maximum seconds that a step waits for its summaries."""

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class ReferenceTrainer:
    """Trains one small policy on one environment.

    Args:
        config: the run.
        environment: used instead of the default one of the configured name.

    Raises:
        ConfigurationError: the environment is unknown, has too few tasks for a step, or replay is misconfigured.
        MissingDependencyError: transformers is not installed.
    """

    def __init__(self, config: TrainerConfig, environment: Environment | None = None) -> None:
        self.config = config
        self.environment = environment if environment is not None else make_environment(config.environment)
        self._tasks = {task.task_id: task for task in self.environment.tasks}
        if config.tasks_per_step > len(self._tasks):
            raise ConfigurationError(
                f"tasks_per_step: {config.tasks_per_step}, but {self.environment.name} has {len(self._tasks)} tasks"
            )
        self._template = word_template(config.guidance) if config.guidance.is_on else None
        of_guidance = "" if self._template is None else self._template.fill(" ")
        self.tokenizer = WordTokenizer(dict.fromkeys([*self.environment.words, *of_guidance.split()]))
        self.model = build_model(config.model, len(self.tokenizer), config.seed)
        self.model.to(torch.device(config.device))
        self.hook: ReplayHook[TextTask] = ReplayHook(
            config.replay,
            n_rollout=config.n_rollout,
            get_task=self._tasks.get,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            current_entropy=self._current_entropy,
            task_text=lambda task: self.environment.begin(task).first_message,
            ledger=config.ledger_folder,
            rollouts=config.rollouts,
        )
        self.guidance = GuidanceHook(config.guidance, maker=word_maker(config.guidance), tokenizer=self.tokenizer)
        self.worker = RolloutWorker(self.model, self.tokenizer, self.environment)
        self.curve: list[CurvePoint] = []
        self.metrics: dict[str, float] = {}
        """The hooks' metrics of the newest step; empty if replay and guidance are off."""
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        self._tokens = torch.Generator(config.device).manual_seed(config.seed)
        self._order = torch.Generator().manual_seed(config.seed)
        self._waiting: list[str] = []
        self._first_pass: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        """A step's first minibatch and the policy's outputs for it, with gradient, until the first update."""

    # ---- running ----

    @property
    def step(self) -> int:
        """Number of finished training steps."""
        return self.curve[-1].step if self.curve else 0

    @property
    def fresh_rollouts(self) -> int:
        """Number of rollouts made in training so far."""
        return self.curve[-1].fresh_rollouts if self.curve else 0

    @property
    def solved_after(self) -> int | None:
        """Fresh rollouts at the first evaluation that reached ``solved_at``; ``None`` = not yet."""
        return summarize(self.curve, self.config.solved_at).solved_after

    def warm_start(self, progress: Callable[[int, float], None] | None = None) -> float:
        """Run the supervised start, once, before the first step; return its last loss in nats per token.

        ``progress`` is called after each of its steps, see :func:`~examples.grpo.warm_start.warm_start`.
        """
        return warm_start(
            self.model,
            self.tokenizer,
            self.environment,
            steps=self.config.warm_start_steps,
            seed=self.config.seed,
            template=self._template,
            progress=progress,
        )

    def train(self, until: int | None = None, *, stop_when_solved: bool = False) -> list[CurvePoint]:
        """Train up to step ``until`` (all steps of the configuration if None) and return the whole curve.

        With ``guidance.init_experience_before_training`` the rollouts of an evaluation become experience before the
        first step.
        """
        last = self.config.steps if until is None else min(until, self.config.steps)
        while self.step < last and not (stop_when_solved and self.solved_after is not None):
            self.train_step()
        return self.curve

    def train_step(self) -> CurvePoint:
        """Do one step: choose tasks, roll out, update the policy, fill the pool; evaluate now and then."""
        step = self.step + 1
        if step == 1:
            self._fill()
        rows, fresh = self._rows(step)
        batch = self._batch(rows)

        parts = self._parts(len(rows))
        current, entropys = self._log_probs(batch, parts)
        old_log_probs = self._old_log_probs(batch, current)
        advantages = self._advantages(batch, [_outcome(row.trajectory) for row in rows])
        losses = [self._update(batch, part, old_log_probs, advantages) for part in parts]
        position = step * self.config.tasks_per_step
        self.metrics = self.hook.step_done(
            batch,
            fresh,
            current,
            entropys,
            data={"name": self.environment.name, "tasks": len(self._tasks), "position": position},
            seeds={"trainer": self.config.seed},
            options=self.config.step_options(self.tokenizer.pad_id),
        )
        self.metrics |= self.guidance.step_done(fresh, step)
        self.guidance.wait(_PATIENCE)  # for reproducible runs; other trainers need not wait

        success, by_level = self.evaluate() if step % self.config.evaluate_every == 0 else (None, {})
        point = CurvePoint(
            step=step,
            fresh_rollouts=self.fresh_rollouts + len(fresh),
            reward=sum(map(_outcome, fresh)) / len(fresh),
            loss=sum(losses) / len(losses),
            success_rate=success,
            success_by_level=by_level,
        )
        self.curve.append(point)
        return point

    def evaluate(self) -> tuple[float, dict[int, float]]:
        """Return the success rate over all tasks and per level, deterministic for a given policy.

        Rollouts are guided by ``guidance.val_rollout_expmode``, and become experience with
        ``guidance.val_summarizer_save``.
        """
        made = self._evaluated()
        self.guidance.validated(made)
        self.guidance.wait(_PATIENCE)
        outcomes = list(map(_outcome, made))
        levels: dict[int, list[float]] = {}
        for rollout, outcome in zip(made, outcomes, strict=True):
            levels.setdefault(self._tasks[rollout.task_id].level, []).append(outcome)
        return sum(outcomes) / len(outcomes), {level: sum(held) / len(held) for level, held in levels.items()}

    # ---- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, generators, curve and pool as tensors and plain containers."""
        return {
            "version": _STATE_VERSION,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "tokens": self._tokens.get_state(),
            "order": self._order.get_state(),
            "waiting": list(self._waiting),
            "curve": [asdict(point) for point in self.curve],
            "replay": self.hook.state_dict(),
            "guidance": self.guidance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, from a trainer with the same configuration.

        Raises:
            ConfigurationError: the state is of another environment or model size.
            CorruptStoreError: not a state of a trainer.
        """
        if state.get("version") != _STATE_VERSION:
            raise CorruptStoreError(f"trainer state: version {state.get('version')!r}, must be {_STATE_VERSION}")
        if lacking := [key for key in _STATE_KEYS if key not in state]:
            raise CorruptStoreError(f"trainer state: lacks {', '.join(lacking)}")
        if state["tokenizer_fingerprint"] != self.tokenizer.fingerprint:
            raise ConfigurationError("trainer state: made with another tokenizer; resume with the same environment")
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:  # raised by torch when names or shapes differ
            raise ConfigurationError(f"trainer state: another size of model: {error}") from error
        self._optimizer.load_state_dict(state["optimizer"])
        self._tokens.set_state(state["tokens"])
        self._order.set_state(state["order"])
        self._waiting = list(state["waiting"])
        self.curve = [CurvePoint(**point) for point in state["curve"]]
        self.hook.resume(state["replay"], self.step)
        self.guidance.load_state_dict(state.get("guidance", {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush the pool and the experiences, and close their stores."""
        self.guidance.close()
        self.hook.close()

    # ---- inside a step ----

    def _fill(self) -> None:
        """Make experience of an evaluation before the first step, if configured."""
        wanted = self.config.guidance.init_experience_before_training and self.step == 0
        if wanted and not self.guidance.begin(self._evaluated(), _PATIENCE):
            logger.warning("guidance: not all of the evaluation has become experience in %.0f s", _PATIENCE)

    def _next_tasks(self) -> list[TextTask]:
        """Return the next tasks of an order that is reshuffled after each pass."""
        while len(self._waiting) < self.config.tasks_per_step:
            names = list(self._tasks)
            self._waiting += [names[index] for index in torch.randperm(len(names), generator=self._order).tolist()]
        chosen = self._waiting[: self.config.tasks_per_step]
        del self._waiting[: self.config.tasks_per_step]
        return [self._tasks[name] for name in chosen]

    def _rows(self, step: int) -> tuple[list[BatchRow], list[AgentTrajectory]]:
        """Return the rows of the step's batch, and its fresh rollouts."""
        mixed = self.hook.tasks_chosen(self._next_tasks(), (step - 1) / self.config.steps, step)
        plan = self.hook.before_rollout(mixed)
        fresh = self._roll_out(plan, step)
        fresh += self._roll_out(self.hook.replacements(plan, fresh), step, len(fresh))
        return self.hook.batch_rows(plan, fresh), fresh

    def _parts(self, rows: int) -> Sequence[Tensor]:
        """Return the row numbers of each minibatch."""
        return torch.randperm(rows, generator=self._order).chunk(self.config.minibatches)

    def _old_log_probs(self, batch: Batch, current: Tensor) -> Tensor:
        """Return the log-probabilities that the ratios of the loss are relative to, [B, R]."""
        return self.hook.log_probs_computed(batch, current)

    def _roll_out(
        self, plan: Sequence[PlannedTask[TextTask]], step: int, first_number: int = 0
    ) -> list[AgentTrajectory]:
        if not plan:
            return []
        done = self._guided(plan, "sample", self._tokens)
        for number, trajectory in enumerate(done, first_number):
            trajectory.rollout_id = f"{step}-{number}"
            trajectory.policy_version = step
        return done if self.config.rows == "rollout" else [turns_as_rows(rollout) for rollout in done]

    def _evaluated(self) -> list[AgentTrajectory]:
        """Return the rollouts of an evaluation."""
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        plan = [PlannedTask(task, self.config.evaluation_rollouts, ()) for task in self.environment.tasks]
        return self._guided(plan, "validate", generator)

    def _guided(
        self, plan: Sequence[PlannedTask[TextTask]], mode: RolloutMode, generator: torch.Generator
    ) -> list[AgentTrajectory]:
        """Return the plan's rollouts, some of them guided."""
        tasks = [planned.task for planned in plan for _ in range(planned.fresh_rollouts)]
        configs = self.guidance.before_rollout(plan, mode)
        openings = [
            self.guidance.context([{"role": "user", "content": self.environment.begin(task).first_message}], config)
            for task, config in zip(tasks, configs, strict=True)
        ]
        texts = [str(messages[0]["content"]) for messages in openings]
        made = whole_sessions(self.worker.run(tasks, generator, texts))
        return [self.guidance.finished(rollout, config) for rollout, config in zip(made, configs, strict=True)]

    def _batch(self, rows: Sequence[BatchRow]) -> Batch:
        """Return the padded batch on the model's device."""
        batch = build_batch(rows, self.tokenizer.pad_id)
        tensors = {name: tensor.to(self.config.device) for name, tensor in batch.tensors.items()}
        return replace(batch, tensors=tensors)

    @torch.no_grad()
    def _log_probs(self, batch: Batch, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probabilities and entropies, [B, R].

        Computed per minibatch, because rounding depends on the shape of a matrix product: so the first minibatch's
        ratio is exactly 1 on a CPU. The first minibatch's pass is kept with its gradient for :meth:`_update`.
        """
        shape, device = batch.tensors["responses"].shape, self.config.device
        log_probs, entropys = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        for number, part in enumerate(parts):
            with torch.set_grad_enabled(number == 0):
                outputs = self._policy(batch, part)
            if number == 0:
                self._first_pass = (part, outputs)
            log_probs[part], entropys[part] = (output.detach() for output in outputs)
        return log_probs, entropys

    def _policy(self, batch: Batch, part: Tensor) -> tuple[Tensor, Tensor]:
        ids, attention, positions = (batch.tensors[name][part] for name in _MODEL_INPUTS)
        return response_log_probs(self.model, ids, attention, positions, batch.tensors["responses"].shape[1])

    def _advantages(self, batch: Batch, outcomes: Sequence[float]) -> Tensor:
        """Return the advantages, [B, R], with each row's reward on its last token."""
        rewards = torch.zeros(batch.tensors["responses"].shape)
        rewards[torch.arange(len(outcomes)), batch.response_lengths - 1] = torch.tensor(outcomes)
        advantages, _ = compute_grpo_outcome_advantage(
            rewards.to(self.config.device),
            batch.tensors["response_mask"],
            batch.tensors["group_ids"],
            rollouts=batch.rollouts,
        )
        return advantages if self.config.row_weight == "row" else share_by_rollout(advantages, batch.rollouts)

    def _update(self, batch: Batch, part: Tensor, old_log_probs: Tensor, advantages: Tensor) -> float:
        """Take one optimizer step on some rows; return their loss."""
        config = self.config
        response_mask = batch.tensors["response_mask"][part]
        kept, self._first_pass = self._first_pass, None  # of no use once the weights have changed
        log_probs, entropys = kept[1] if kept is not None and kept[0] is part else self._policy(batch, part)
        loss = het_compute_token_on_off_policy_loss(
            old_log_prob=old_log_probs[part],
            log_prob=log_probs,
            advantages=advantages[part],
            response_mask=response_mask,
            exp_mask=batch.tensors["exp_mask"][part],
            cliprange_low=config.cliprange_low,
            cliprange_high=config.cliprange_high,
            clip_ratio_c=config.clip_ratio_c,
            **self.hook.loss_options,
        )
        objective = loss["pg_loss"]
        if config.entropy_coeff:
            counted = self.hook.regularizer_masks(batch)[0][part]
            objective = objective - config.entropy_coeff * (entropys * counted).sum() / counted.sum().clamp(min=1)
        self._optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self._optimizer.step()
        self.hook.loss_computed(batch, part.tolist(), loss, advantages[part])
        return loss["pg_loss"].item()

    @torch.no_grad()
    def _current_entropy(self, trajectories: Sequence[AgentTrajectory]) -> list[float]:
        """Return the mean entropy of each trajectory's own tokens under the current policy."""
        rows = [
            row
            for number, trajectory in enumerate(trajectories)
            for row in rows_of_rollout(trajectory, 0, number, is_replayed=False)
        ]
        batch = self._batch(rows)
        mask, rollouts = batch.tensors["response_mask"], batch.rollouts.to(self.config.device)
        _, entropys = self._policy(batch, torch.arange(len(rows)))
        sums = [
            torch.zeros(len(trajectories), device=mask.device).index_add_(0, rollouts, values.float().sum(dim=-1))
            for values in (entropys * mask, mask)
        ]
        means: list[float] = (sums[0] / sums[1]).tolist()
        return means


def _outcome(trajectory: AgentTrajectory) -> float:
    """Return the outcome of a trajectory; raises without one."""
    if trajectory.reward is None or trajectory.reward.outcome is None:
        raise InvalidTrajectoryError(f"field reward: task {trajectory.task_id!r} has no outcome to learn from")
    return trajectory.reward.outcome
