"""Demonstrations on their way through a training: the current policy's log-probs stand where none were recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.reference.runs import SORT, environment, pool_of
from tests.reference.runs import replay as replaying
from trainer_hooks.batch import Batch
from trainer_hooks.reference.trainer import ReferenceTrainer
from trajstore.experience.entry import DEMONSTRATION
from trajstore.trajectory import AgentTrajectory, Reward


def demonstrations(trainer: ReferenceTrainer) -> list[AgentTrajectory]:
    """The right answer of every task."""
    made = []
    for task in trainer.environment.tasks:
        prompt = trainer.tokenizer.opening(trainer.environment.begin(task).first_message)
        reply = trainer.tokenizer.reply(" ".join(sorted(task.words)))
        mask = torch.tensor([0] * len(prompt) + [1] * len(reply))
        made.append(
            AgentTrajectory(
                input_ids=torch.tensor(prompt + reply),
                loss_mask=mask,
                response_mask=mask[len(prompt) :],
                response_start=len(prompt),
                reward=Reward(outcome=1.0),
                task_id=task.task_id,
                rollout_id=f"demo-{task.task_id}",
                tokenizer_fingerprint=trainer.tokenizer.fingerprint,
                metadata={DEMONSTRATION: True},
            )
        )
    return made


@pytest.mark.parametrize("correct", [True, False])
def test_demonstrations_are_trained_on_with_the_log_probs_of_the_policy(correct: bool) -> None:
    config = replace(SORT, steps=3, replay=replaying(experience_rbound=None, exp_is_correct=correct))
    with ReferenceTrainer(config, environment(config)) as trainer:
        manager = trainer.hook.manager
        assert manager is not None
        assert not manager.seed(demonstrations(trainer))
        seen: list[tuple[Batch, Tensor, Tensor]] = []
        computed = trainer.hook.log_probs_computed

        def noting(batch: Batch, current: Tensor) -> Tensor:
            seen.append((batch, current, computed(batch, current)))
            return seen[-1][2]

        trainer.hook.log_probs_computed = noting  # type: ignore[method-assign]
        trainer.warm_start()
        for _ in range(config.steps):
            point = trainer.train_step()
            assert torch.tensor(point.loss).isfinite()
            batch, current, old = seen[-1]
            rows = [
                row
                for row, name in enumerate(batch.non_tensors["rollout_ids"].tolist())
                if name.startswith("demo-") and batch.non_tensors["extras"][row]["is_experience_replay"]
            ]
            replayed = sum(one["is_experience_replay"] for one in batch.non_tensors["extras"])
            assert torch.equal(old[rows], current[rows]), "the ratio of the first update is 1"
            assert not batch.tensors["recorded_mask"][rows].any()
            assert torch.equal(batch.tensors["exp_mask"][rows], batch.tensors["loss_mask"][rows])
            assert trainer.metrics["experience_replay/demonstration_rows"] == len(rows)
            if trainer.step == 1:
                assert len(rows) == replayed == 3
        assert any(one.old_log_probs is None for one in pool_of(trainer).values())
        state = trainer.state_dict()
    with ReferenceTrainer(config, environment(config)) as resumed:
        resumed.load_state_dict(state)
        assert resumed.hook.manager.metrics()["experience_replay/pool_demonstrations"] > 0
