"""``trajstore replay-step``: steps of the reference trainer, and what cannot be rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.grpo.checkpoint import load_checkpoint, save_checkpoint
from examples.grpo.config import TrainerConfig
from examples.grpo.trainer import ReferenceTrainer
from tests.examples.runs import HOUSEHOLD, SORT, Train
from trainer_hooks.batch import Batch
from trainer_hooks.steps import StepInputs, recompute, step_inputs
from trainer_hooks.trained import trained_step
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import TrajectoryUnavailableError
from trajstore.ledger import Ledger


def train(trainer: ReferenceTrainer, folder: Path, until: int) -> dict[int, tuple[Batch, torch.Tensor]]:
    """Train with a checkpoint of each step; return the batches and old log-probs of the loss."""
    seen: dict[int, tuple[Batch, torch.Tensor]] = {}
    replaced = trainer.hook.log_probs_computed

    def log_probs_computed(batch: Batch, current: torch.Tensor) -> torch.Tensor:
        old = replaced(batch, current)
        seen[trainer.step + 1] = batch, old
        return old

    trainer.hook.log_probs_computed = log_probs_computed  # type: ignore[method-assign]
    while trainer.step < until:
        save_checkpoint(trainer, folder)
        trainer.train_step()
    return seen


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (HOUSEHOLD, 4),
        pytest.param(replace(SORT, steps=12), 12, marks=pytest.mark.campaign),
        pytest.param(replace(HOUSEHOLD, rows="turns", row_weight="rollout"), 8, marks=pytest.mark.campaign),
    ],
    ids=["household", "sort", "turns"],
)
def test_steps_are_rebuilt_to_the_bit_also_after_a_resume(
    make: Train, tmp_path: Path, config: TrainerConfig, steps: int
) -> None:
    run, saved = tmp_path / "rollouts", tmp_path / "checkpoints"
    config = replace(config, rollouts=str(run))
    pool = {"offpolicy_trajectories_per_task": 2, "experience_rbound": None}
    first = make(config, **pool)
    train(first, saved, 2)
    first.close()
    resumed = make(config, **pool)
    with pytest.warns(UserWarning, match="1 step after step 1 will be replaced"):
        load_checkpoint(resumed, saved / "step_00000001.pt")
    seen = train(resumed, saved, steps)
    resumed.close()
    replayed = 0
    for number, (batch, old) in seen.items():
        inputs = step_inputs(run, number)
        for name, tensor in inputs.tensors.items():
            assert name not in batch.tensors or batch.tensors[name].equal(tensor), name
        assert inputs.tensors["rollouts"].equal(batch.rollouts)
        known = inputs.tensors["old_known"]
        assert inputs.tensors["old_log_probs"][known].equal(old[known])
        report = recompute(inputs)
        assert report.problems == ()
        assert {check.name: check.difference for check in report.checks if check.values} == dict.fromkeys(
            ("rollouts", "masks", "rewards", "advantages", "weights", "ratios"), 0.0
        )
        replayed += report.replayed
    assert replayed > 0


def made_inputs(folder: Path) -> StepInputs:
    """Return the inputs of a recorded step of two groups."""
    random = np.random.default_rng(0)
    rollouts = []
    for number in range(6):
        tokens = torch.from_numpy(random.integers(1, 16, 5 + number))
        mask = torch.tensor([0, 0, 0] + [1] * (2 + number))
        rollouts.append(
            AgentTrajectory(
                input_ids=tokens,
                loss_mask=mask,
                response_start=3,
                reward=Reward(outcome=float(number % 2)),
                task_id=f"t{number // 3}",
                rollout_id=str(number),
                policy_version=6 if number == 5 else 7,
            )
        )
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(folder), seed=None) as buffer:
        ids = buffer.add_trajectories(rollouts)
    options = {
        "pad_token_id": 0,
        "advantages": {"estimator": "grpo"},
        "loss": {"drop_negative_off_policy": True, "loss_agg_mode": "token-mean", "cliprange_low": 0.2},
        "entropy_coeff": 0.01,  # this one and the clip range were recorded earlier, and are read over
    }
    facts: dict[str, Any] = {
        "uids": [0, 0, 0, 1, 1, 1], "task_ids": [each.task_id for each in rollouts], "replayed": [False] * 5 + [True],
        "versions": [7] * 5 + [6], "trajectories": ids, "policy_before": 7, "policy_after": 8,
        "options": options,
        "mask": torch.ones(6, 7).cumsum(1) <= torch.arange(2, 8)[:, None],
    }  # fmt: skip
    advantages = torch.tensor([-0.57735, 1.154699, -0.57735, 0.57735, -1.154699, 0.57735])
    with Ledger(folder / "ledger") as ledger:
        ledger.record(trained_step(7, **facts, advantages=advantages, ratios=torch.ones(6)))
        facts["trajectories"] = [*ids[:5], None]
        ledger.record(trained_step(8, **facts, advantages=advantages, ratios=torch.ones(6)))
    return step_inputs(folder, 7)


def changed(inputs: StepInputs, name: str, change: Callable[[torch.Tensor], Any]) -> StepInputs:
    tensor = inputs.tensors[name].clone()
    change(tensor)
    return replace(inputs, tensors={**inputs.tensors, name: tensor})


def test_each_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    inputs = made_inputs(run)
    assert main(["replay-step", str(run), "7"]) == 0
    assert "step 7, 6 rows in 2 groups, 1 of them replayed" in capsys.readouterr().out

    def put(place: tuple[int, ...], value: float) -> Callable[[torch.Tensor], Any]:
        return lambda tensor: tensor.__setitem__(place, value)

    for name, change, problem in (
        ("rewards", put((3,), 0.0), r"advantages: row 3: advantage is -0\.577.*, the ledger has 0\.577.*; 3 values"),
        ("rewards", put((2,), np.nan), r"rewards: row 2 has no finite reward \(1 row in all\)"),
        ("response_mask", put((1, 0), 0), r"masks: row 1: trained tokens is 2\.0, the ledger has 3\.0"),
        ("exp_mask", put((5, -1), 0), r"masks: row 5 is replayed, but its mask of replayed tokens differs"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=problem):
            assert recompute(changed(inputs, name, change)).problems == ()
    rows = inputs.step.rows.copy()
    rows["mask_digest"][4] += 1
    other_rows = replace(inputs, step=replace(inputs.step, rows=rows, unknown=("probability",)))
    assert recompute(other_rows).problems == (
        "rollouts: row 0 has other tokens than those that were trained (6 rows in all)",
        "masks: row 4 has its trained tokens in other places than the ledger (1 row in all)",
    )
    other = [{**inputs.rows[0], "task": "t9", "version": 3}, *inputs.rows[1:]]
    assert recompute(replace(inputs, rows=other)).problems == (
        "rollouts: row 0 is of task 't9', its group of 't0'",
        "rollouts: row 0 was sampled by policy 3, the ledger has 7",
    )
    rows = inputs.step.rows.copy()
    rows["ratio"] = [1.0, 1.5, 1.0, 1.0, 1.0, 1.5]
    for options, problems in (
        ({}, ()),
        ({"policy": {"trainer": "verl"}}, ("ratios: row 1: ratio is 1.0, the ledger has 1.5",)),
    ):
        of_step = replace(inputs.step, rows=rows, options={**inputs.step.options, **options})
        assert recompute(replace(inputs, step=of_step)).problems == problems
    unknown = replace(inputs.step, unknown=(*inputs.step.unknown, "ratio"))
    assert recompute(replace(inputs, step=unknown)).checks[-1].left_out == "the ledger does not have them"


def test_steps_that_cannot_be_rebuilt_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    made_inputs(run)
    with pytest.raises(TrajectoryUnavailableError, match=r"1 row of step 8 .*row 5"):
        step_inputs(run, 8)
    assert main(["replay-step", str(run), "9"]) == 2
    assert "has no step 9" in capsys.readouterr().err
