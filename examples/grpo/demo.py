"""``python -m examples.demo --task replay``: the same policy trained without and with experience replay.

Directory of a run::

    pool/                    the store of the run with replay: its experience pool
    checkpoints/warm/        the policy before reinforcement learning, where both runs begin
    checkpoints/without/     checkpoints of the two runs
    checkpoints/with/
    curves.svg               success rate over fresh rollouts, both runs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from examples.common import DemoSettings, Progress, one_thread
from examples.grpo.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from examples.grpo.config import CurvePoint, TrainerConfig
from examples.grpo.curves import draw_curves, summarize
from examples.grpo.environments import SortEnvironment
from examples.grpo.trainer import ReferenceTrainer
from trainer_hooks.config import ExperienceReplayConfig
from trajstore.errors import ConfigurationError

POOL_FOLDER = "pool"
CHECKPOINT_FOLDER = "checkpoints"
CURVES_FILE = "curves.svg"

BASE = TrainerConfig()
"""The run of the demo and of the benchmark, without replay."""

_ARMS = ("without", "with")


def replay_config(
    path: Path | None = None, seed: int = 0, environment: str = BASE.environment
) -> ExperienceReplayConfig:
    """Return the replay of the demo and of the benchmark; its pool lies in ``path``, or in memory.

    In *sort* tasks without a success keep their places: their answers are found by chance, while the policy still draws
    evenly; later they are not found any more, and there is nothing to replay.
    """
    return ExperienceReplayConfig(
        enable=True,
        unsolved_first=environment == SortEnvironment.name,
        seed=seed,
        store=None if path is None else {"path": str(path)},
    )


def run(settings: DemoSettings, say: Callable[[str], None], progress: Progress) -> Path:
    """Train both runs to their end or as long as the budget lasts; return the directory of the pool's store.

    Args:
        settings: path, budget and seed. ``updates`` counts training steps, of each run.
        say: prints a message for the user.
        progress: called with (finished training steps of both runs, their total, note).

    Raises:
        MissingDependencyError: transformers or matplotlib is not installed.
        StoreLockedError: another process trains in this directory.
    """
    if settings.sampler is not None:
        raise ConfigurationError(f"sampler: {settings.sampler!r}, has no effect on this task; use --task cartpole")
    base = replace(BASE, seed=settings.seed, steps=settings.updates or BASE.steps)
    deadline = None if settings.seconds is None else time.monotonic() + settings.seconds
    pool, warm = settings.path / POOL_FOLDER, settings.path / CHECKPOINT_FOLDER / "warm"
    curves: dict[str, list[CurvePoint]] = {}
    with one_thread():
        for number, arm in enumerate(_ARMS):
            config = base if arm == "without" else replace(base, replay=replay_config(pool, settings.seed))
            half_deadline = deadline if number else _halfway(deadline)
            with ReferenceTrainer(config) as trainer:
                folder = settings.path / CHECKPOINT_FOLDER / arm
                newest = newest_checkpoint(folder) or newest_checkpoint(warm)
                if newest is not None:
                    load_checkpoint(trainer, newest)
                else:
                    _warm_start(trainer, say)
                    save_checkpoint(trainer, warm)
                if trainer.step:
                    say(f"{arm} replay: going on after step {trainer.step}")
                _train(trainer, folder, half_deadline, arm, number, progress)
                curves[f"{arm} replay"] = trainer.curve
                say(f"{arm} replay: {summarize(trainer.curve, config.solved_at)}")
    picture = settings.path / CURVES_FILE
    draw_curves(curves, base.solved_at, picture, f"GRPO on {base.environment}, seed {base.seed}")
    say(f"both curves: {picture}")
    return pool


def _warm_start(trainer: ReferenceTrainer, say: Callable[[str], None]) -> None:
    steps = trainer.config.warm_start_steps
    say(f"supervised start: the policy learns to write well-formed replies, {steps} steps")

    def report(step: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            say(f"supervised start: step {step} of {steps}, loss {loss:.2f}")

    trainer.warm_start(report)


def _train(
    trainer: ReferenceTrainer, folder: Path, deadline: float | None, arm: str, number: int, progress: Progress
) -> None:
    """Train one run, and save it however it ends."""
    steps = trainer.config.steps
    note = ""
    try:
        while trainer.step < steps and (deadline is None or time.monotonic() < deadline):
            point = trainer.train_step()
            if point.success_rate is not None:
                note = f"{arm} replay: success {point.success_rate:.0%}"
            progress(number * steps + point.step, len(_ARMS) * steps, note)
    finally:  # also on Ctrl-C
        save_checkpoint(trainer, folder)


def _halfway(deadline: float | None) -> float | None:
    return None if deadline is None else (time.monotonic() + deadline) / 2
