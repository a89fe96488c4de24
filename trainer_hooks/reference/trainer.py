"""GRPO with experience replay on one process: a loop short enough to be read, complete enough to be measured.

Random numbers come from two generators that are part of the trainer's state: one draws tokens (on the model's
device), one the order of tasks and rows. On a CPU, with the same number of threads, two runs are equal to the
bit, and so are a resumed and an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import Batch, BatchRow, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import PlannedTask, ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.masks import compute_response_mask
from trainer_hooks.reference.environments import Environment, TextTask, make_environment
from trainer_hooks.reference.model import ModelConfig, build_model, response_log_probs
from trainer_hooks.reference.rollout import RolloutWorker
from trainer_hooks.reference.tokenizer import WordTokenizer
from trainer_hooks.reference.warm_start import warm_start
from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.trajectory import AgentTrajectory

_STATE_VERSION = 1
_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Everything that a run depends on.

    Raises:
        ConfigurationError: a value is out of range; the message names the key.
    """

    environment: str = "household"
    steps: int = 120
    """Training steps of the whole run; training progress is measured against it."""
    tasks_per_step: int = 16
    n_rollout: int = 8
    """Rows per task: fresh rollouts, plus histories if there are any."""
    minibatches: int = 2
    """Optimizer steps per training step; each takes an equal share of the rows, drawn at random."""
    learning_rate: float = 5e-4
    entropy_coeff: float = 0.0
    """Weight of the mean entropy that is added to the objective."""
    cliprange_low: float = 0.2
    cliprange_high: float = 0.28
    clip_ratio_c: float = 3.0
    max_grad_norm: float = 1.0
    warm_start_steps: int = 200
    """Supervised steps on replies that ignore the goal; see ``warm_start``."""
    warm_start_learning_rate: float = 2e-3
    evaluate_every: int = 5
    """Steps between evaluations; these draw from a generator of their own and do not count as rollouts."""
    evaluation_rollouts: int = 4
    """Rollouts of each task in an evaluation."""
    solved_at: float = 0.9
    """Success rate over all tasks at which the environment counts as solved."""
    seed: int = 0
    device: str = "cpu"
    model: ModelConfig = field(default_factory=ModelConfig)
    replay: ExperienceReplayConfig = field(default_factory=ExperienceReplayConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "minibatches", "evaluate_every", "evaluation_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: {getattr(self, name)}, must be at least 1")
        if self.n_rollout < 2:
            raise ConfigurationError(f"n_rollout: {self.n_rollout}, must be at least 2: advantages compare rollouts")
        if self.minibatches > self.tasks_per_step * self.n_rollout:
            raise ConfigurationError(f"minibatches: {self.minibatches}, must not be above the rows of a batch")
        for name in ("learning_rate", "warm_start_learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)}, must be above 0")
        if self.warm_start_steps < 0:
            raise ConfigurationError(f"warm_start_steps: {self.warm_start_steps}, must be at least 0")
        if not 0 < self.solved_at <= 1:
            raise ConfigurationError(f"solved_at: {self.solved_at}, must be in (0, 1]")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One training step, as curves show it."""

    step: int
    fresh_rollouts: int
    """Rollouts made in training so far, this step's included."""
    reward: float
    """Mean outcome of this step's fresh rollouts."""
    loss: float
    """Mean over the minibatches."""
    success_rate: float | None = None
    """Over all tasks, if this step was followed by an evaluation."""
    success_by_level: Mapping[int, float] = field(default_factory=dict)


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
        self.tokenizer = WordTokenizer(self.environment.words)
        self.hook: ReplayHook[TextTask] = ReplayHook(
            config.replay,
            n_rollout=config.n_rollout,
            get_task=self._tasks.get,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            current_entropy=self._current_entropy,
        )
        self.model = build_model(config.model, len(self.tokenizer), config.seed).to(config.device)
        self.worker = RolloutWorker(self.model, self.tokenizer, self.environment)
        self.curve: list[CurvePoint] = []
        self.metrics: dict[str, float] = {}
        """The hook's metrics of the newest step; empty if replay is off."""
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        self._tokens = torch.Generator(config.device).manual_seed(config.seed)
        self._order = torch.Generator().manual_seed(config.seed)
        self._waiting: list[str] = []

    # ---- running ----

    @property
    def step(self) -> int:
        """Number of training steps that are done."""
        return self.curve[-1].step if self.curve else 0

    @property
    def fresh_rollouts(self) -> int:
        """Number of rollouts made in training so far."""
        return self.curve[-1].fresh_rollouts if self.curve else 0

    @property
    def solved_after(self) -> int | None:
        """Fresh rollouts at the first evaluation that reached ``solved_at``; ``None`` = not yet."""
        for point in self.curve:
            if point.success_rate is not None and point.success_rate >= self.config.solved_at:
                return point.fresh_rollouts
        return None

    def warm_start(self) -> float:
        """Do the supervised start, once, before the first step; return its last loss in nats per token."""
        return warm_start(
            self.model,
            self.tokenizer,
            self.environment,
            steps=self.config.warm_start_steps,
            learning_rate=self.config.warm_start_learning_rate,
            seed=self.config.seed,
        )

    def train(
        self,
        until: int | None = None,
        *,
        stop_when_solved: bool = False,
        after_step: Callable[[CurvePoint], None] | None = None,
    ) -> list[CurvePoint]:
        """Train up to step ``until`` (all steps of the configuration if None) and return the whole curve."""
        last = self.config.steps if until is None else min(until, self.config.steps)
        while self.step < last and not (stop_when_solved and self.solved_after is not None):
            point = self.train_step()
            if after_step is not None:
                after_step(point)
        return self.curve

    def train_step(self) -> CurvePoint:
        """Do one step: choose tasks, roll out, update the policy, fill the pool; evaluate now and then."""
        step = self.step + 1
        mixed = self.hook.tasks_chosen(self._next_tasks(), (step - 1) / self.config.steps, step)
        plan = self.hook.before_rollout(mixed)
        fresh = self._roll_out(plan, step)
        batch = build_batch(self.hook.batch_rows(plan, fresh), self.tokenizer.pad_id)
        tensors = batch.tensors
        tensors.update({name: tensor.to(self.config.device) for name, tensor in tensors.items()})

        parts = torch.randperm(len(tensors["input_ids"]), generator=self._order).chunk(self.config.minibatches)
        current, entropys = self._log_probs(batch, parts)
        old_log_probs = self.hook.log_probs_computed(batch, current)
        advantages = self._advantages(batch, [_outcome(row) for row in self._batch_trajectories(plan, fresh)])
        losses = [self._update(batch, part, old_log_probs, advantages) for part in parts]
        self.metrics = self.hook.step_done(batch, fresh, current, entropys)

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
        """Return the success rate over all tasks, and that of each level. The same draws for the same policy."""
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        tasks = [task for task in self.environment.tasks for _ in range(self.config.evaluation_rollouts)]
        outcomes = list(map(_outcome, self.worker.run(tasks, generator)))
        levels: dict[int, list[float]] = {}
        for task, outcome in zip(tasks, outcomes, strict=True):
            levels.setdefault(task.level, []).append(outcome)
        return sum(outcomes) / len(outcomes), {level: sum(held) / len(held) for level, held in levels.items()}
