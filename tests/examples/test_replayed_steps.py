"""``trajstore replay-step``: steps of the reference trainer, and what cannot be rebuilt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from examples.grpo.checkpoint import load_checkpoint, save_checkpoint
from examples.grpo.config import TrainerConfig
from examples.grpo.policy import ReferencePolicy
from examples.grpo.trainer import ReferenceTrainer
from tests.examples.runs import HOUSEHOLD, SORT, Train
from trainer_hooks.batch import Batch
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.steps import StepInputs, recompute, step_inputs, with_log_probs
from trainer_hooks.steps.hugging_face import HuggingFacePolicy
from trainer_hooks.steps.recompute import advantages_of
from trainer_hooks.trained import trained_step
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError
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


def policy_of(folder: Path, inputs: StepInputs) -> ReferencePolicy:
    number = inputs.step.step
    return ReferencePolicy(folder / f"step_{number - 1:08d}.pt", number, inputs.step.options["policy"])


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (HOUSEHOLD, 4),
        pytest.param(SORT, 12, marks=pytest.mark.campaign),
        pytest.param(replace(HOUSEHOLD, rows="turns", row_weight="rollout"), 8, marks=pytest.mark.campaign),
        pytest.param(replace(HOUSEHOLD, steps=20, minibatches=3), 20, marks=pytest.mark.campaign),
    ],
    ids=["household", "sort", "turns", "three-minibatches"],
)
def test_steps_are_recomputed_to_the_bit_also_after_a_resume(
    make: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: TrainerConfig, steps: int
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
    for number in Random(0).sample(sorted(seen), min(10, len(seen))):
        inputs = step_inputs(run, number)
        batch, old = seen[number]
        for name, tensor in inputs.tensors.items():
            assert name not in batch.tensors or batch.tensors[name].equal(tensor), name
        assert inputs.tensors["rollouts"].equal(batch.rollouts)
        assert recompute(inputs).problems == ()
        filled = with_log_probs(inputs, policy_of(saved, inputs))
        trained = batch.tensors["response_mask"] != 0
        assert filled.tensors["old_log_probs"][trained].equal(old[trained])
        report = recompute(filled)
        assert report.problems == ()
        assert {check.name: check.difference for check in report.checks if check.values} == dict.fromkeys(
            ("rollouts", "masks", "rewards", "advantages", "weights", "mini-batches", "log-probs", "ratios", "loss"),
            0.0,
        )
        replayed += report.replayed
    assert replayed > 0

    arguments = ["replay-step", str(run), str(steps), "--checkpoint", str(saved / f"step_{steps - 1:08d}.pt"), "--json"]
    arguments += ["--policy", "examples.grpo.policy:ReferencePolicy"]
    assert main(arguments) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert all(check["values"] and not check["left_out"] for check in checks)
    with pytest.raises(ConfigurationError, match=f"is of step {steps - 2}; step {steps} began with that of step"):
        ReferencePolicy(saved / f"step_{steps - 2:08d}.pt", steps, inputs.step.options["policy"])


class Table:
    """A policy whose log-probs depend on the token alone."""

    def __init__(self) -> None:
        self.weights = torch.linspace(-1.0, 1.0, 16).requires_grad_()

    def log_probs(self, tensors: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tensors["input_ids"][list(rows), -tensors["response_mask"].shape[1] :]
        chosen = self.weights.log_softmax(0)[tokens]
        return chosen, -chosen

    def learn(self, objective: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(objective, self.weights)
        with torch.no_grad():
            self.weights -= 0.1 * gradient


def made_inputs(folder: Path) -> StepInputs:
    """Return the inputs of a recorded step of two groups; its loss is recorded wrongly."""
    policy, random = Table(), np.random.default_rng(0)
    rollouts = []
    for number in range(6):
        tokens = torch.from_numpy(random.integers(1, 16, 5 + number))
        mask = torch.tensor([0, 0, 0] + [1] * (2 + number))
        log_probs = policy.weights.detach().log_softmax(0)[tokens[3:]] - 0.25 * (number == 5)
        outcome = Reward(outcome=float(number % 2))
        rollouts.append(
            AgentTrajectory(
                input_ids=tokens,
                loss_mask=mask,
                response_start=3,
                old_log_probs=log_probs,
                reward=outcome,
                task_id=f"t{number // 3}",
                rollout_id=str(number),
                policy_version=6 if number == 5 else 7,
            )
        )
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(folder), seed=None) as buffer:
        ids = buffer.add_trajectories(rollouts)
    loss = {"cliprange_low": 0.2, "cliprange_high": 0.28, "drop_negative_off_policy": True}
    options = {"pad_token_id": 0, "advantages": {"estimator": "grpo"}, "loss": loss, "entropy_coeff": 0.01}
    facts: dict[str, Any] = {
        "uids": [0, 0, 0, 1, 1, 1], "task_ids": [each.task_id for each in rollouts], "replayed": [False] * 5 + [True],
        "versions": [7] * 5 + [6], "trajectories": ids, "policy_before": 7, "policy_after": 8,
        "options": options, "updates": [[4, 0, 5], [2, 1, 3]],
        "mask": torch.ones(6, 7).cumsum(1) <= torch.arange(2, 8)[:, None],
    }  # fmt: skip
    advantages = torch.tensor([-0.57735, 1.154699, -0.57735, 0.57735, -1.154699, 0.57735])
    with Ledger(folder / "ledger") as ledger:
        ledger.record(trained_step(7, **facts, advantages=advantages, ratios=torch.ones(6), loss={"pg_loss": 9.0}))
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
    # Before the step, the policy is another one than the table that sampled; row 5 was replayed.
    learned = Table()
    learned.learn(learned.weights[3])
    names = [problem.split(":")[0] for problem in recompute(with_log_probs(inputs, learned)).problems]
    assert names == ["log-probs", "ratios", "loss"]
    names = [problem.split(":")[0] for problem in recompute(with_log_probs(inputs, Table())).problems]
    assert names == ["ratios", "loss"]


def test_steps_that_cannot_be_rebuilt_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    made_inputs(run)
    with pytest.raises(TrajectoryUnavailableError, match=r"1 row of step 8 .*row 5"):
        step_inputs(run, 8)
    for arguments, message in (
        ([str(run), "9"], "has no step 9"),
        ([str(run), "7", "--checkpoint", "x"], "step 7 was trained by None; name the class of its policy"),
        ([str(run), "7", "--checkpoint", "x", "--policy", "nowhere:X"], "--policy nowhere:X: cannot be imported"),
        ([str(run), "7", "--policy", "nowhere:X"], "--policy: has no effect without --checkpoint"),
    ):
        assert main(["replay-step", *arguments]) == 2
        assert message in capsys.readouterr().err

    # Steps of verl: parts that the ledger does not have.
    inputs = step_inputs(run, 7)

    def of_verl(
        updates: Sequence[Sequence[int]] = (range(6),), loss: Mapping[str, Any] | None = None, **other: Any
    ) -> StepInputs:
        options = {
            **inputs.step.options,
            "policy": {"trainer": "verl", "dtype": "bfloat16"},
            "loss": {**inputs.step.options["loss"], "mode": "het", "loss_agg_mode": "token-mean", **(loss or {})},
            **other,
        }
        return replace(inputs, step=replace(inputs.step, options=options, updates=updates))

    for of_step, reason in (
        (of_verl(updates=[[4, 0, 5], [2, 1, 3]]), "the step has 2 updates, and the optimizers of verl's workers"),
        (of_verl(loss={"mode": "gspo"}), "policy_loss.loss_mode=gspo is not recomputed, only vanilla, het"),
        (of_verl(loss={"loss_agg_mode": "seq-mean-token-sum-norm"}), "not recorded; verl's option loss_scale_factor"),
        (of_verl(loss={"loss_agg_mode": "token-max"}), "loss_agg_mode=token-max is not recomputed, only token-mean, "),
        (of_verl(rollout_correction={"rollout_is": "token"}), "rollout_is=token has weights of replayed tokens"),
    ):
        checks = {check.name: check for check in recompute(with_log_probs(of_step, Table())).checks}
        assert reason in checks["loss"].left_out
        assert checks["log-probs"].values
        assert not checks["log-probs"].problems
        assert checks["ratios"].problems, "the ledger's are made up"
    filled = with_log_probs(of_verl(), Table())
    names = ("old_log_probs", "current_log_probs", "response_mask", "exp_mask")
    old, current, mask, exp_mask = (filled.tensors[name] for name in names)
    advantages, _ = advantages_of(filled)
    clips: Any = inputs.step.options["loss"]
    terms = het_compute_token_on_off_policy_loss(old, current, advantages, mask, exp_mask, **clips)  # type: ignore[arg-type]
    total = float(terms["pg_losses"].sum())
    for agg_mode, width, wanted in (
        ("token-sum", None, total),
        ("token-sum", 25, total),
        ("seq-mean-token-sum-norm", 25, total / 6 / 25),
        ("seq-mean-token-sum-norm", 4, total / 6 / 4),
    ):
        one = of_verl(loss={"loss_agg_mode": agg_mode, "loss_scale_factor": width})
        one = replace(one, step=replace(one.step, loss={"pg_loss": wanted}))
        (check,) = [check for check in recompute(with_log_probs(one, Table())).checks if check.name == "loss"]
        assert (check.values, check.problems, check.left_out) == (1, (), "")
    with pytest.raises(ConfigurationError, match="made no pass before the update"):
        with_log_probs(of_verl(rollout_correction={"bypass_mode": True}), Table())
    with pytest.raises(ConfigurationError, match="step 7: the ledger names the dtype 'bf32'"):
        HuggingFacePolicy(run, 7, {"trainer": "verl", "dtype": "bf32"})
