"""Configuration of the reference trainer, and the record of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from examples.grpo.model import ModelConfig
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trajstore.errors import ConfigurationError
from trajstore.ledger import LEDGER_FOLDER

Rows = Literal["rollout", "turns"]
RowWeight = Literal["row", "rollout"]

_LEAST = {
    **dict.fromkeys(("steps", "tasks_per_step", "minibatches", "evaluate_every", "evaluation_rollouts"), 1),
    **dict.fromkeys(("warm_start_steps", "entropy_coeff", "cliprange_low", "cliprange_high"), 0),
    **{"n_rollout": 2, "clip_ratio_c": 1},
}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Configuration of a run.

    Raises:
        ConfigurationError: a value is out of range; the message names the key.
    """

    environment: str = "household"
    steps: int = 120
    """Training steps of the whole run; training progress is measured against it."""
    tasks_per_step: int = 16
    n_rollout: int = 8
    """Rows per task: fresh rollouts, plus histories if there are any. Advantages compare rollouts."""
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
    evaluate_every: int = 5
    """Steps between evaluations; these use their own generator and do not count as rollouts."""
    evaluation_rollouts: int = 4
    """Rollouts of each task in an evaluation."""
    solved_at: float = 0.9
    """Success rate over all tasks at which the environment counts as solved."""
    seed: int = 0
    device: str = "cpu"
    rows: Rows = "rollout"
    """``rollout``: each rollout is one row; ``turns``: each turn of the model is a row, and a rollout has several."""
    row_weight: RowWeight = "row"
    """Unit of weight in the loss: each row, or each rollout regardless of its number of rows."""
    model: ModelConfig = field(default_factory=ModelConfig)
    replay: ExperienceReplayConfig = field(default_factory=ExperienceReplayConfig)
    ledger: bool | str = True
    """Record each step in this folder; true = folder ``ledger`` in the pool's store, none for a pool in memory or in
    object storage; false = none."""
    rollouts: str | None = None
    """Record every fresh rollout of training in a store in this folder, for ``trajstore replay-step``. With ``ledger:
    true`` the training ledger is its folder ``ledger``."""
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    """Guided rollouts. ``experience_template`` needs spaces around ``{}`` and at the end: ``"hint {} now "``."""

    @property
    def ledger_folder(self) -> str | None:
        """Folder of the training ledger; None if there is none."""
        if self.ledger is not True:
            return self.ledger or None
        if self.rollouts is not None:
            return str(Path(self.rollouts) / LEDGER_FOLDER)
        store = (self.replay.store or {}).get("path") if self.replay.enable else None
        return None if store is None or "://" in store else str(Path(store) / LEDGER_FOLDER)

    def step_options(self, pad_token_id: int) -> dict[str, Any]:
        """Return the options by which ``trajstore replay-step`` rebuilds a step, as JSON values."""
        return {"pad_token_id": pad_token_id, "advantages": {"estimator": "grpo", "row_weight": self.row_weight}}

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r}, must be at least {least}")
        for name in ("learning_rate", "max_grad_norm", "solved_at"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r}, must be above 0")
        if self.minibatches > self.tasks_per_step * self.n_rollout:
            raise ConfigurationError(f"minibatches: {self.minibatches}, must not be above the rows of a batch")
        if self.rollouts is not None and not self.ledger:
            raise ConfigurationError("rollouts: needs a ledger, whose steps refer to them; leave out ledger: false")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One training step of a learning curve."""

    step: int
    fresh_rollouts: int
    """Rollouts made in training so far, this step's included."""
    reward: float
    """Mean outcome of this step's fresh rollouts."""
    loss: float
    """Mean over the minibatches."""
    success_rate: float | None = None
    """Success rate over all tasks, if this step was followed by an evaluation."""
    success_by_level: Mapping[int, float] = field(default_factory=dict)
