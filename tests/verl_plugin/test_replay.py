"""The real V1 trainer with the plugin: recording, replaying, resuming."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer_hooks.steps import recompute, step_inputs
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.cli import main
from trajstore.ledger import Ledger, TrainedStep, read

from .rebuilt import check_steps
from .recount import check_loss_rows, recount
from .runs import GROUP, PROMPTS, REPLAY, TOLERANCE, TWO_WORKERS, Train, Training, check_replay_metrics, comparable

STEPS = 5
SAVED = 3
WITHOUT = 2
"""Steps before replay starts."""
STARTS = "++exp_manager.experience_replay.replay_start_ratio=0.4"


def replayed_rows(training: Training) -> int:
    """Check the loss's rows; return the number of replayed ones."""
    return check_loss_rows(training.rows, training.rollouts, group=lambda task: GROUP).replayed_rows


@pytest.fixture(scope="module")
def stock(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Training:
    options = ("data.train_max_samples=6", f"trainer.total_training_steps={WITHOUT}")
    return train(tmp_path_factory.mktemp("stock"), *options)


@pytest.fixture(scope="module")
def replaying(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(
        tmp_path_factory.mktemp("replaying"),
        *REPLAY,
        STARTS,
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED}",
        "trainer.val_before_train=True",
    )


def test_recording_and_replay_that_has_not_started_change_nothing(stock: Training, replaying: Training) -> None:
    assert len(stock.steps) == WITHOUT
    for ours, theirs in zip(replaying.steps[:WITHOUT], stock.steps, strict=True):
        wanted = comparable(theirs)
        assert {name: ours[name] for name in wanted} == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    assert not stock.rows, "the loss is verl's own"


def test_every_rollout_is_recorded(replaying: Training) -> None:
    rollouts = replaying.rollouts
    for step, record in enumerate(replaying.steps[:WITHOUT], start=1):
        made = [rollout for rollout in rollouts if rollout.policy_version == step]
        assert Counter(rollout.metadata["uid"] for rollout in made) == dict.fromkeys(
            {o.metadata["uid"] for o in made}, GROUP
        )
        scores = torch.tensor([rollout.reward.metadata["score"] for rollout in made])
        assert scores.mean().item() == pytest.approx(record["critic/score/mean"], abs=1e-6)
        lengths = torch.tensor([float(rollout.response_mask.numel()) for rollout in made])
        assert lengths.mean().item() == pytest.approx(record["response_length/mean"], abs=1e-6)
        for rollout in made:
            assert rollout.task_id.startswith("digit:")
            assert rollout.reward.outcome == rollout.reward.metadata["extra"]["hit"]
            assert rollout.metadata["max_global_steps"] == step - 1
            assert rollout.loss_mask[: rollout.response_start].sum() == 0
            assert torch.equal(rollout.loss_mask[rollout.response_start :], rollout.response_mask)
            assert rollout.entropys.shape == rollout.old_log_probs.shape == rollout.response_mask.shape
            # The tests' engine computes in float32, like the actor.
            torch.testing.assert_close(rollout.rollout_log_probs, rollout.old_log_probs, atol=1e-4, rtol=1e-4)


def test_the_loss_receives_what_the_store_holds(replaying: Training) -> None:
    assert len(replaying.rows) == STEPS * PROMPTS * GROUP
    replayed = replayed_rows(replaying)
    assert replayed == replaying.sum_of("replayed_rows")
    assert replayed >= STEPS - WITHOUT


FRESH_PROCESS = """
import sys
for name in ("verl", "ray", "transformers", "tensordict", "transfer_queue"):
    sys.modules[name] = None
from trajstore.cli import main
sys.exit(main(["replay-step", sys.argv[1], sys.argv[2], "--json"]))
"""


def record(run: Path, step: TrainedStep) -> None:
    """Replace the ledger of a store by one with a single step."""
    shutil.rmtree(run / "ledger")
    with Ledger(run / "ledger") as ledger:
        ledger.record(step)


def problems_of(run: Path, step: TrainedStep) -> tuple[str, ...]:
    record(run, step)
    return recompute(step_inputs(run, step.step)).problems


def test_each_step_is_rebuilt_from_store_and_ledger(
    replaying: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where verl and Ray cannot be imported; a changed value in store or ledger is named."""
    run = tmp_path / "run"
    shutil.copytree(replaying.folder / "checkpoints" / "trajstore" / "rollouts", run)
    for number in range(1, STEPS + 1):
        report = recompute(step_inputs(run, number))
        assert report.problems == ()
        assert not any(check.left_out for check in report.checks)
    assert main(["audit", str(run)]) == 0
    arguments = ["replay-step", str(run), str(STEPS)]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    of_run = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, *arguments[1:]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == of_run

    written = step_inputs(run, STEPS)
    config = read(run / "ledger").steps[STEPS].config
    assert config["verl"]["trainer"]["v1"]["trainer_mode"] == "sync_replay"
    assert len(config["contents"]) > 1, "the reward function and the tokenizer"
    step, fresh = written.step, int((written.step.rows["replayed"] == 0).argmax())
    replayed = int(step.rows["replayed"].argmax())
    for name, row, value, problem in (
        ("weight", replayed, 0.5, rf"^weights: row {replayed}: weight is 1\.0, the ledger has 0\.5$"),
        ("replayed", fresh, 1, rf"^rollouts: row {fresh} is replayed, but was sampled with the fresh rows"),
        ("replayed", replayed, 0, rf"^rollouts: row {replayed} is fresh, but was not sampled with the other fresh"),
    ):
        rows = step.rows.copy()
        rows[name][row] = value
        assert re.search(problem, "\n".join(problems_of(run, replace(step, rows=rows))), re.M), (name, problem)
    record(run, step)
    (recorded,) = (rollout for rollout in replaying.rollouts if rollout.rollout_id == written.rows[fresh]["rollout_id"])
    changed = {"advantages": [torch.full_like(recorded.old_log_probs, 3.0)], "reward_score": [0.75]}
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(run), seed=None) as buffer:
        annotate(buffer, [int(step.rows["trajectory"][fresh])], changed)
    assert main([*arguments, "--json"]) == 1
    problems = "\n".join(json.loads(capsys.readouterr().out)["problems"])
    assert re.search(rf"rewards: row {fresh}: reward_score is 0\.75, it was .* when the rollout was recorded", problems)
    assert re.search(r"advantages: row \d+: advantage is .*; \d values differ", problems)
    assert re.search(rf"stored advantages: row {fresh}: stored advantage is 3\.0, the ledger has ", problems)


def test_figures_of_replay_have_none_of_the_validation(replaying: Training) -> None:
    assert len(replaying.steps) == STEPS
    check_replay_metrics(replaying.steps)
    assert len(replaying.validations) == 1
    # Exactly the trained rollouts are recorded (counted by check_replay_metrics), none of the validation's.
    assert {int(rollout.task_id.split(":")[1]) for rollout in replaying.rollouts} <= set(range(32))


def test_resuming_goes_on_as_if_nothing_had_happened(replaying: Training, train: Train) -> None:
    """The stores are at step 5; the pool differs from the one at the checkpoint of step 3."""
    before = len(replaying.rollouts)
    resumed = train(
        replaying.folder,
        *REPLAY,
        STARTS,
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={replaying.folder}/checkpoints/global_step_{SAVED}",
    )
    assert [record["step"] for record in resumed.steps] == [4, 5]
    for ours, theirs in zip(resumed.steps, replaying.steps[SAVED:], strict=True):
        assert comparable(ours) == pytest.approx(comparable(theirs), rel=TOLERANCE, abs=TOLERANCE)
    replayed_rows(resumed)
    first, second = ((record["recording/rollouts"], record["recording/reused"]) for record in resumed.steps)
    assert first[0] == first[1] > 0, "the rollouts of the step after the checkpoint are in the store"
    assert second[1] == 0
    assert len(resumed.rollouts) == before + second[0], "rollouts recorded before and after the checkpoint remain"


@pytest.mark.campaign
def test_resuming_with_another_number_of_ranks(replaying: Training, train: Train) -> None:
    """verl's model checkpoint is bound to a number of ranks, so the model starts anew; the stores resume."""
    resumed = train(
        replaying.folder,
        *REPLAY,
        *TWO_WORKERS,
        f"trainer.total_training_steps={STEPS}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={replaying.folder}/checkpoints/global_step_{SAVED}",
        "actor_rollout_ref.actor.checkpoint.load_contents=[]",
    )
    assert [record["step"] for record in resumed.steps] == [4, 5]
    check_replay_metrics(resumed.steps)
    assert len(resumed.rows) == 2 * PROMPTS * GROUP
    assert replayed_rows(resumed) >= 1
    first, same = resumed.steps[0], replaying.steps[SAVED]
    assert first["experience_replay/experience_tasks"] == same["experience_replay/experience_tasks"]
    assert first["experience_replay/replayed_rows"] == same["experience_replay/replayed_rows"]
    assert first["experience_replay/age_mean"] == same["experience_replay/age_mean"]


LONGEST_AGE = 3


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("colocate_async_replay", 6),
        pytest.param("colocate_async_replay", 16, marks=pytest.mark.campaign),
        pytest.param("sync_replay", 16, marks=pytest.mark.campaign),
    ],
)
def test_ages_ratios_and_groups_are_those_of_the_store(mode: str, steps: int, train: Train, tmp_path: Path) -> None:
    """In asynchronous training a newer policy scores the rollouts, and histories are drawn a step ahead."""
    training = train(
        tmp_path,
        *REPLAY,
        f"+exp_manager.experience_replay.max_policy_age={LONGEST_AGE}",
        "+exp_manager.experience_replay.exp_ratio=1.0",
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.total_training_steps={steps}",
    )
    assert len(training.steps) == steps
    check_replay_metrics(training.steps)
    counted = recount(training.rows, training.rollouts, group=lambda task: GROUP, steps=training.steps)
    sys.stdout.write(f"\n{mode}, {steps} steps: {counted}\n")  # printed with -s
    assert not counted.differences
    assert len(counted.rows_of) == steps * PROMPTS
    assert counted.rows == steps * PROMPTS * GROUP
    assert counted.replayed_rows == training.sum_of("replayed_rows") > 0
    assert bool(counted.waited) == (mode == "colocate_async_replay")
    check_steps(training)
    assert max(max(ages) for ages in counted.ages.values()) == LONGEST_AGE
