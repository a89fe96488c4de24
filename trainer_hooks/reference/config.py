"""What a run of the reference trainer depends on, and what it shows of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.reference.model import ModelConfig
from trajstore.arguments import finite
from trajstore.checked import checked
from trajstore.errors import ConfigurationError

Rows = Literal["rollout", "turns"]
RowWeight = Literal["row", "rollout"]


@checked
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
    entropy_coeff: float = 0.003
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
    rows: Rows = "rollout"
    """``rollout``: each rollout is one row; ``turns``: each turn of the model is a row, and a rollout has several."""
    row_weight: RowWeight = "row"
    """What weighs as one in the loss: each row, or each rollout whatever its number of rows."""
    model: ModelConfig = field(default_factory=ModelConfig)
    replay: ExperienceReplayConfig = field(default_factory=ExperienceReplayConfig)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    """Guided rollouts. ``experience_template`` must be words around its place, such as ``"hint {} now "``."""

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "minibatches", "evaluate_every", "evaluation_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: {getattr(self, name)}, must be at least 1")
        if self.n_rollout < 2:
            raise ConfigurationError(f"n_rollout: {self.n_rollout}, must be at least 2: advantages compare rollouts")
        if self.minibatches > self.tasks_per_step * self.n_rollout:
            raise ConfigurationError(f"minibatches: {self.minibatches}, must not be above the rows of a batch")
        for name in ("learning_rate", "warm_start_learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}: {getattr(self, name)}, must be above 0 and finite")
        for name in ("entropy_coeff", "cliprange_low", "cliprange_high"):
            finite(name, getattr(self, name), 0)
        finite("clip_ratio_c", self.clip_ratio_c, 1)
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
