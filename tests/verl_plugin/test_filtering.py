"""The real V1 trainer with DAPO's group filtering, rewards in [0, 1], and half of each group replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .recount import check_loss_rows
from .runs import GROUP, PROMPTS, REPLAY, Train, check_replay_metrics, table

pytestmark = [pytest.mark.timeout(400), pytest.mark.campaign]

STEPS = 5


def test_successes_are_replayed_beside_filtering_and_everything_is_recorded(train: Train, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        *REPLAY,
        "+exp_manager.experience_replay.offpolicy_trajectories_per_task=2",
        "+exp_manager.experience_replay.exp_ratio=0.5",
        "++algorithm.filter_groups.enable=True",
        "++algorithm.filter_groups.metric=hit",
        "++data.gen_batch_size=1",
        f"trainer.total_training_steps={STEPS}",
    )
    records = done.steps
    sys.stdout.write("\n" + table(records) + "\n")  # printed with -s, for the how-to
    assert len(records) == STEPS
    check_replay_metrics(records)

    rollouts = done.rollouts
    trained = [rollout for rollout in rollouts if rollout.metadata["trained"]]
    dropped = len(rollouts) - len(trained)
    assert dropped == sum(record["recording/dropped"] for record in records)
    assert dropped, "groups of equal rewards were filtered, and are on disk"
    assert len(trained) == sum(record["recording/rollouts"] for record in records)
    lost = [
        rollout
        for rollout in rollouts
        if not rollout.metadata["trained"] and rollout.reward and rollout.reward.outcome == 1.0
    ]
    assert len(lost) == sum(record["recording/dropped_successes"] for record in records)
    assert "experience_replay/refused/no_entropy" not in records[-1], "dropped rollouts are not offered"

    replayed = check_loss_rows(done.rows, trained, group=lambda task: GROUP).replayed_rows
    assert replayed == done.sum_of("replayed_rows")
    assert replayed >= STEPS - 1
    for record in records:
        fresh = [
            rollout.reward.metadata["score"]
            for rollout in trained
            if rollout.policy_version == record["step"] and rollout.reward
        ]
        assert record["experience_replay/fresh_score_mean"] == pytest.approx(sum(fresh) / len(fresh), abs=1e-5)
        if record["experience_replay/replayed_rows"]:
            assert record["experience_replay/fresh_score_mean"] < record["critic/score/mean"]
            assert "experience_replay/off_ppo_kl" in record
    assert len(trained) + replayed == PROMPTS * GROUP * STEPS
