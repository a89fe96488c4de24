"""A training loop as verl's older trainers have it, with replay: small, but all of it real except the model's size."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_docs import blocks
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.dataproto import loss_arguments, replace_old_log_probs, step_done, to_dataproto
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trajstore.trajectory import AgentTrajectory, Reward

pytest.importorskip("verl", exc_type=ImportError)

from verl import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage

STEPS = 3


class Toy:
    """A table of logits for the next token; a task is solved by ending with its own number."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.table = torch.zeros(5, 5, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.table], lr=2.0)

    def roll_out(self, task: str, name: str) -> AgentTrajectory:
        ids, turns = [int(task)], 1 + int(torch.randint(3, (), generator=self.generator))
        for _ in range(turns):
            distribution = self.table.detach()[ids[-1]].softmax(-1)
            ids.append(int(torch.multinomial(distribution, 1, generator=self.generator)))
        return AgentTrajectory(
            input_ids=torch.tensor(ids),
            loss_mask=torch.tensor([0] + [1] * turns),
            response_start=1,
            reward=Reward(outcome=float(ids[-1] == int(task))),
            task_id=task,
            rollout_id=name,
        )

    def log_probs(self, data: Any) -> tuple[Tensor, Tensor]:
        responses = data.batch["responses"]
        logits = self.table[data.batch["input_ids"][:, -responses.shape[1] - 1 : -1]].log_softmax(-1)
        return logits.gather(-1, responses[..., None])[..., 0], -(logits.exp() * logits).sum(-1)


def outcome(row: BatchRow) -> float:
    return row.trajectory.reward.outcome


def test_a_training_loop_replays_history_with_the_log_probs_of_its_time() -> None:
    toy, tasks = Toy(), [str(number) for number in range(5)]
    config = ExperienceReplayConfig(enable=True, replay_start_ratio=0.0, offpolicy_trajectories_per_task=2)
    hook = ReplayHook(config, n_rollout=6, get_task=lambda name: name)
    generator = torch.Generator().manual_seed(5)
    sampled: dict[tuple[str, str], tuple[int, list[int], Tensor]] = {}  # what the policy gave when it sampled
    replayed_rows = []
    for step in range(1, STEPS + 1):
        plan = hook.before_rollout(hook.tasks_chosen(tasks, step / STEPS, step))
        fresh = [toy.roll_out(one.task, f"{step}/{number}") for one in plan for number in range(one.fresh_rollouts)]
        rows = hook.batch_rows(plan, fresh)
        batch = build_batch(rows, pad_token_id=0)
        data: Any = to_dataproto(batch)
        rewards = torch.zeros(batch.tensors["responses"].shape)
        rewards[torch.arange(len(rows)), batch.response_lengths - 1] = torch.tensor([outcome(row) for row in rows])
        data.batch["token_level_rewards"] = rewards
        data.reorder(torch.randperm(len(rows), generator=generator))

        workers = []
        for chunk in data.chunk(2):  # as they come back from two data-parallel ranks
            with torch.no_grad():
                log_probs, entropys = toy.log_probs(pickle.loads(pickle.dumps(chunk)))
            workers.append(DataProto.from_dict({"old_log_probs": log_probs, "entropys": entropys}))
        data = data.union(DataProto.concat(workers))
        replace_old_log_probs(data, hook)

        replayed = 0
        for place, extras in enumerate(data.non_tensor_batch["extras"]):
            name = (data.non_tensor_batch["task_ids"][place], data.non_tensor_batch["rollout_ids"][place])
            length = int(data.batch["response_mask"][place].sum())
            old = data.batch["old_log_probs"][place][:length]
            current = data.batch["current_old_log_probs"][place][:length]
            if extras["is_experience_replay"]:
                replayed += 1
                made_in, ids, recorded = sampled[name]
                assert made_in < step
                assert extras["policy_version"] == made_in
                assert data.batch["responses"][place][:length].tolist() == ids
                assert old.equal(recorded)
                assert not old.equal(current), "the policy has moved since"
            else:
                assert old.equal(current)
                sampled[name] = (step, data.batch["responses"][place][:length].tolist(), current.clone())
        replayed_rows.append(replayed)

        data = compute_advantage(data, AdvantageEstimator.GRPO)
        parts = data.split(10)
        ratios = []
        for part in parts:
            arguments = loss_arguments(part.batch, part.meta_info)
            loss = het_compute_token_on_off_policy_loss(log_prob=toy.log_probs(part)[0], cliprange=0.2, **arguments)
            toy.optimizer.zero_grad()
            loss["pg_loss"].backward()  # type: ignore[no-untyped-call]
            toy.optimizer.step()
            ratios.append(loss["importance_ratio"])
        on_policy = parts[0].batch["exp_mask"][:, 1:] == 0
        torch.testing.assert_close(ratios[0][on_policy], torch.ones(int(on_policy.sum())))
        metrics = step_done(data, fresh, hook)
        assert metrics["experience_replay/replayed_rows"] == replayed
    assert replayed_rows[0] == 0
    assert min(replayed_rows[1:]) > 0
    held = [one for several in hook.manager.task2trajectories.values() for one in several]
    assert {one.policy_version for one in held} == set(range(1, STEPS + 1))
    for one in held:
        assert one.old_log_probs.equal(sampled[one.task_id, one.rollout_id][2])


def test_the_code_of_the_page_runs(project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: another one would spend seconds on importing verl."""
    monkeypatch.chdir(tmp_path)
    page = project_root / "docs" / "howto" / "dataproto.md"
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {"__name__": "__main__"})
