"""Overrides and checks shared by the trainings of this folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.pages import unexplained
from trainer_hooks.verl.arrival import recorded_rollouts
from trajstore import AgentTrajectory, TrajectoryReplayBuffer

from .witness import LossRow

GROUP = 4
PROMPTS = 4

# Few tasks, so that they recur; a success is the reward function's hit.
REPLAY = (
    "trainer.v1.trainer_mode=sync_replay",
    "data.train_max_samples=6",
    "+exp_manager.outcome.key=hit",
    "+exp_manager.experience_replay.enable=true",
)
# Each worker gets half of the 16 rows, and verl requires whole micro-batches.
TWO_WORKERS = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)

# Rows arrive in any order, and float32 sums depend on the order.
TOLERANCE = 1e-4


def is_measured(name: str) -> bool:
    """Return whether a metric is a time, memory use or speed, which varies between runs."""
    return name.startswith("timing_") or "perf/" in name or "seconds" in name or name.startswith("recording/")


def comparable(record: dict[str, Any]) -> dict[str, float]:
    """Return the step's metrics that equal runs share."""
    return {name: value for name, value in record.items() if not is_measured(name)}


COLUMNS = (
    ("fresh rollouts", "recording/rollouts"),
    ("dropped", "recording/dropped"),
    ("replayed rows", "experience_replay/replayed_rows"),
    ("fresh score", "experience_replay/fresh_score_mean"),
    ("critic/score/mean", "critic/score/mean"),
    ("fresh success rate", "experience_replay/fresh_success_rate"),
    ("fresh length", "experience_replay/fresh_response_length_mean"),
    ("response_length/mean", "response_length/mean"),
    ("on_ppo_kl", "experience_replay/on_ppo_kl"),
    ("off_ppo_kl", "experience_replay/off_ppo_kl"),
)


def table(records: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]] = COLUMNS) -> str:
    """Return a Markdown table of each step's figures."""
    rows = [["step", *(name for name, _ in columns)], ["---"] * (len(columns) + 1)]
    for record in records:
        values = [record.get(name) for _, name in columns]
        rows.append([str(record["step"]), *("" if value is None else f"{value:.3g}" for value in values)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def recorded(folder: Path) -> list[AgentTrajectory]:
    """Return all rollouts recorded by a run, through a read-only buffer."""
    with TrajectoryReplayBuffer.open(folder / "checkpoints" / "trajstore" / "rollouts") as reader:
        return list(recorded_rollouts(reader))


@dataclasses.dataclass(frozen=True)
class Training:
    """Results of a training: metrics of steps and separate validations, and the loss's rows."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    rows: list[LossRow]
    folder: Path

    @property
    def rollouts(self) -> list[AgentTrajectory]:
        """The rollouts recorded in its folder."""
        return recorded(self.folder)

    def sum_of(self, figure: str) -> float:
        """Return a replay figure summed over the steps."""
        return sum(step[f"experience_replay/{figure}"] for step in self.steps)


Train = Callable[..., Training]
"""Trains with a folder and overrides."""


def log_probs_of(model: Path, row: LossRow) -> torch.Tensor:
    """Return the response's log-probs by plain transformers, [R]."""
    from transformers import LlamaForCausalLM

    ids = torch.tensor(row.tokens)
    with torch.no_grad():
        scores = LlamaForCausalLM.from_pretrained(model).float()(ids[None]).logits[0].log_softmax(-1)
    return scores[len(row.prompt) - 1 : -1].gather(-1, row.response[:, None])[:, 0]


def check_replay_metrics(records: Sequence[dict[str, Any]]) -> None:
    """Check that figures are finite, no step has padding rows, and steps with history report it."""
    for record in records:
        figures = {name: value for name, value in record.items() if name.startswith("experience_replay/")}
        assert figures
        assert unexplained({*figures, *(name for name in record if name.startswith("recording/"))}) == set()
        assert all(isinstance(value, float) and math.isfinite(value) for value in figures.values())
        assert figures["experience_replay/rows"] == PROMPTS * GROUP
        assert record["recording/rollouts"] == PROMPTS * GROUP - figures["experience_replay/replayed_rows"]
        if figures["experience_replay/replayed_rows"]:
            assert figures["experience_replay/off_ratio_mean"] > 0.0
            assert 0.0 < figures["experience_replay/off_policy_share"] < 0.5
            assert figures["experience_replay/age_min"] >= 1.0
            assert figures["experience_replay/recorded_difference_mean"] >= 0.0
