"""End to end: the loss's real inputs during training by the reference trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.grpo.config import TrainerConfig
from examples.grpo.model import build_model, response_log_probs
from examples.grpo.rollout import RolloutWorker
from examples.grpo.tokenizer import WordTokenizer
from examples.grpo.trainer import ReferenceTrainer
from examples.grpo.warm_start import warm_start
from tests.examples.runs import HOUSEHOLD, SORT, Train, environment, pool_of, replay
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import BatchRow, assign_group_ids, build_batch
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trajstore.errors import ConfigurationError


def plain_grpo(config: TrainerConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Run an independent GRPO without a hook; return mean rewards and final weights."""
    world = environment(config)
    tokenizer = WordTokenizer(world.words)
    model = build_model(config.model, len(tokenizer), config.seed)
    warm_start(model, tokenizer, world, steps=config.warm_start_steps, seed=config.seed)
    worker = RolloutWorker(model, tokenizer, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    tokens, order = torch.Generator().manual_seed(config.seed), torch.Generator().manual_seed(config.seed)
    waiting: list[int] = []
    rewards = []
    for _ in range(config.steps):
        while len(waiting) < config.tasks_per_step:
            waiting += torch.randperm(len(world.tasks), generator=order).tolist()
        chosen, waiting = waiting[: config.tasks_per_step], waiting[config.tasks_per_step :]
        positions = [position for position in range(len(chosen)) for _ in range(config.n_rollout)]
        rollouts = worker.run([world.tasks[chosen[position]] for position in positions], tokens)
        groups = assign_group_ids(positions, [False] * len(positions))
        rows = [BatchRow(trajectory=rollout, group_id=group) for rollout, group in zip(rollouts, groups, strict=True)]
        data = build_batch(rows, tokenizer.pad_id).tensors
        width = data["responses"].shape[1]
        outcomes = torch.tensor([rollout.reward.outcome for rollout in rollouts if rollout.reward is not None])
        token_rewards = torch.zeros(len(rows), width)
        token_rewards[:, 0] = outcomes
        advantages, _ = compute_grpo_outcome_advantage(token_rewards, data["response_mask"], groups)
        parts = torch.randperm(len(rows), generator=order).chunk(config.minibatches)
        old = torch.zeros(len(rows), width)

        def policy(part: Tensor, data: dict[str, Tensor] = data, width: int = width) -> tuple[Tensor, Tensor]:
            ids, attention, places = (data[name][part] for name in ("input_ids", "attention_mask", "position_ids"))
            return response_log_probs(model, ids, attention, places, width)

        with torch.no_grad():
            for part in parts:
                old[part] = policy(part)[0]
        for part in parts:
            log_probs, entropys = policy(part)
            mask = data["response_mask"][part]
            loss = het_compute_token_on_off_policy_loss(
                old[part],
                log_probs,
                advantages[part],
                mask,
                torch.zeros_like(mask),
                cliprange_low=config.cliprange_low,
                cliprange_high=config.cliprange_high,
            )["pg_loss"]
            objective = loss - config.entropy_coeff * (entropys * mask).sum() / mask.sum()
            optimizer.zero_grad()
            objective.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
        rewards.append(outcomes.sum().item() / len(outcomes))
    return rewards, model.state_dict()


@pytest.mark.parametrize(
    "config", [SORT, pytest.param(HOUSEHOLD, marks=pytest.mark.campaign)], ids=["sort", "household"]
)
def test_without_replay_the_curve_is_that_of_plain_grpo_to_the_bit(
    make: Train, config: TrainerConfig, store: dict[str, str]
) -> None:
    """Switched off, and before replay starts, while the pool fills."""
    trainer, waiting = make(config), make(config, replay_start_ratio=0.99, store=store)
    trainer.train()
    rewards, weights = plain_grpo(config)
    assert [point.reward for point in trainer.curve] == rewards
    assert all(weights[name].equal(value) for name, value in trainer.model.state_dict().items())
    assert trainer.metrics == {}
    assert trainer.hook.manager is None
    assert waiting.train() == trainer.curve
    assert len(waiting.hook.manager) > 0


def test_training_learns(make: Train) -> None:
    trainer = make(replace(SORT, steps=60, learning_rate=1e-3, warm_start_steps=100, evaluation_rollouts=8))
    before, _ = trainer.evaluate()
    trainer.train()
    after, by_level = trainer.evaluate()
    assert after > before + 0.2
    assert set(by_level) == {1, 2}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"steps": 0}, "steps"),
        ({"n_rollout": 1}, "n_rollout"),
        ({"minibatches": 1000}, "minibatches"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"environment": "chess"}, "chess"),
        ({"tasks_per_step": 10**6}, "tasks_per_step"),
        ({"replay": replay(offpolicy_trajectories_per_task=4)}, "offpolicy_trajectories_per_task"),
    ],
)
def test_a_wrong_configuration_is_named(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ReferenceTrainer(replace(SORT, **change))


def test_a_pool_of_another_tokenizer_is_refused(make: Train, store: dict[str, str]) -> None:
    trainer = make(SORT, store=store, experience_rbound=None)
    while not pool_of(trainer):
        trainer.train_step()
    trainer.close()
    with pytest.raises(ConfigurationError, match="tokenizer_fingerprint"):
        make(HOUSEHOLD, store=store)
    make(SORT, store=store)  # the store's lock was released
