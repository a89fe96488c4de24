"""The whole path: what the loss really receives while the reference trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.runs import HOUSEHOLD, SORT, Train, environment, pool_of, replay
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import Batch, BatchRow, assign_group_ids, build_batch
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.reference import trainer as trainer_module
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.model import build_model, response_log_probs
from trainer_hooks.reference.rollout import RolloutWorker
from trainer_hooks.reference.tokenizer import WordTokenizer
from trainer_hooks.reference.trainer import ReferenceTrainer
from trainer_hooks.reference.warm_start import warm_start
from trajstore.errors import ConfigurationError


@dataclass
class LossCall:
    """What one loss computation received and returned, and the tokens that the policy saw for it."""

    input_ids: Tensor
    attention_mask: Tensor
    arguments: dict[str, Any]
    result: dict[str, Tensor]


@dataclass
class Spy:
    """One step's calls."""

    losses: list[LossCall] = field(default_factory=list)
    groups: Tensor | None = None
    batch: Batch | None = None
    seen: tuple[Tensor, Tensor] | None = None


@contextmanager
def watched(trainer: ReferenceTrainer) -> Iterator[Spy]:
    """Record what goes through the trainer's own calls."""
    spy = Spy()

    def policy(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        spy.seen = (ids, mask)
        return response_log_probs(model, ids, mask, positions, length)

    def loss(**arguments: Any) -> dict[str, Tensor]:
        result = het_compute_token_on_off_policy_loss(**arguments)
        assert spy.seen is not None
        seen = {**arguments, "log_prob": arguments["log_prob"].detach()}
        seen["exp_mask"] = seen["exp_mask"][:, -seen["log_prob"].shape[1] :]
        spy.losses.append(LossCall(*spy.seen, seen, result))
        return result

    def advantage(rewards: Tensor, mask: Tensor, groups: Tensor, rollouts: Tensor | None) -> tuple[Tensor, Tensor]:
        spy.groups = groups
        return compute_grpo_outcome_advantage(rewards, mask, groups, rollouts=rollouts)

    done = trainer.hook.step_done

    def step_done(batch: Batch, *rest: Any) -> dict[str, float]:
        spy.batch = batch
        return done(batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "response_log_probs", policy)
        patch.setattr(trainer_module, "het_compute_token_on_off_policy_loss", loss)
        patch.setattr(trainer_module, "compute_grpo_outcome_advantage", advantage)
        patch.setattr(trainer.hook, "step_done", step_done)
        yield spy


@pytest.mark.parametrize(("config", "histories"), [(SORT, 1), (HOUSEHOLD, 2)], ids=["sort", "household"])
def test_the_loss_receives_replayed_rows_exactly_as_they_were_stored(
    make: Train, store: dict[str, str], config: TrainerConfig, histories: int
) -> None:
    trainer = make(config, store=store, offpolicy_trajectories_per_task=histories, experience_rbound=None)
    replayed_rows = 0
    for _ in range(config.steps):
        pool = pool_of(trainer)
        with watched(trainer) as spy:
            trainer.train_step()
        step = trainer.step
        assert len(spy.losses) == config.minibatches
        replayed_of_group = [0] * config.tasks_per_step
        for call in spy.losses:
            arguments = call.arguments
            response = arguments["exp_mask"].shape[1]
            for row, exp_mask in enumerate(arguments["exp_mask"]):
                real = call.attention_mask[row].bool()
                tokens = tuple(call.input_ids[row][real].tolist())
                if not exp_mask.any():
                    continue
                stored = pool[tokens]
                length = len(tokens) - (stored.response_start or 0)
                assert real[-response:].sum() == length
                assert exp_mask[:length].equal(stored.loss_mask[stored.response_start :])
                assert not exp_mask[length:].any()
                written = exp_mask.bool()
                assert arguments["old_log_prob"][row][written].equal(stored.old_log_probs[written[:length]])
                assert stored.policy_version < step
                replayed_rows += 1
        extras = spy.batch.non_tensors["extras"]
        for row, group in enumerate(spy.groups.tolist()):
            replayed_of_group[group] += extras[row]["is_experience_replay"]
        assert spy.groups.bincount().tolist() == [config.n_rollout] * config.tasks_per_step
        for group, count in enumerate(replayed_of_group):
            tasks = set(spy.batch.non_tensors["task_ids"][(spy.groups == group).numpy()])
            assert len(tasks) == 1
            assert count <= histories
        on_policy = spy.losses[0].arguments["response_mask"].bool() & ~spy.losses[0].arguments["exp_mask"].bool()
        assert on_policy.any()
        assert (spy.losses[0].result["importance_ratio"][on_policy] == 1.0).all()
    assert replayed_rows > 0


def test_what_enters_the_pool_has_the_log_probs_of_the_policy_that_sampled(make: Train) -> None:
    """Not those that replaced them, and not those of the policy after the update."""
    trainer = make(SORT, experience_rbound=None)
    entered = 0
    for _ in range(SORT.steps):
        before = pool_of(trainer)
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train_step()
        policy = build_model(SORT.model, len(trainer.tokenizer), seed=0)
        policy.load_state_dict(weights)
        for tokens, trajectory in pool_of(trainer).items():
            if tokens in before:
                continue
            assert trajectory.policy_version == trainer.step
            ids = torch.tensor([tokens])
            with torch.no_grad():
                log_probs, entropys = response_log_probs(
                    policy, ids, torch.ones_like(ids), torch.arange(len(tokens))[None], len(trajectory.old_log_probs)
                )
            torch.testing.assert_close(trajectory.old_log_probs, log_probs[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(trajectory.entropys, entropys[0], atol=1e-5, rtol=0)
            entered += 1
    assert entered > 0


def plain_grpo(config: TrainerConfig) -> tuple[list[float], dict[str, Tensor]]:
    """GRPO without a hook, written down once more; returns mean rewards and final weights."""
    world = environment(config)
    tokenizer = WordTokenizer(world.words)
    model = build_model(config.model, len(tokenizer), config.seed)
    warm_start(
        model,
        tokenizer,
        world,
        steps=config.warm_start_steps,
        learning_rate=config.warm_start_learning_rate,
        seed=config.seed,
    )
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
        rows = [BatchRow(trajectory=one, group_id=group) for one, group in zip(rollouts, groups, strict=True)]
        data = build_batch(rows, tokenizer.pad_id).tensors
        width = data["responses"].shape[1]
        outcomes = torch.tensor([one.reward.outcome for one in rollouts if one.reward is not None])
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


@pytest.mark.parametrize("config", [SORT, HOUSEHOLD], ids=lambda one: one.environment)
def test_switched_off_the_curve_is_that_of_plain_grpo_to_the_bit(make: Train, config: TrainerConfig) -> None:
    trainer = make(config)
    trainer.train()
    rewards, weights = plain_grpo(config)
    assert [point.reward for point in trainer.curve] == rewards
    assert all(weights[name].equal(value) for name, value in trainer.model.state_dict().items())
    assert trainer.metrics == {}
    assert trainer.hook.manager is None


def test_before_replay_starts_the_pool_fills_and_the_curve_is_the_same(make: Train, store: dict[str, str]) -> None:
    off, waiting = make(SORT), make(SORT, replay_start_ratio=1.0, store=store)
    assert off.train() == waiting.train()
    assert len(waiting.hook.manager) > 0


def test_two_runs_give_the_same_curve(make: Train, store: dict[str, str]) -> None:
    """One with the pool in memory and one with it on disk; another seed gives another curve."""
    first, on_disk = make(SORT, seed=1), make(SORT, seed=1, store=store)
    assert first.train() == on_disk.train()
    assert first.metrics["experience_replay/replayed_rows"] > 0
    other = make(replace(SORT, seed=9, replay=replay()))
    assert other.train() != first.curve


def test_replay_saves_rollouts_and_says_so(make: Train) -> None:
    trainer = make(SORT, experience_rbound=None)
    before = 0
    for point in trainer.train(after_step=lambda _: None):
        made, before = point.fresh_rollouts - before, point.fresh_rollouts
    metrics = trainer.metrics
    assert made == metrics["experience_replay/rows"] - metrics["experience_replay/replayed_rows"]
    assert metrics["experience_replay/rows"] == SORT.tasks_per_step * SORT.n_rollout
    assert metrics["experience_replay/recorded_share"] == 1.0
    assert 0 < metrics["experience_replay/off_policy_share"] < 0.5
    assert all(isinstance(value, float) for value in metrics.values())


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
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"warm_start_steps": -1}, "warm_start_steps"),
        ({"solved_at": 1.5}, "solved_at"),
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
    make(SORT, store=store)  # the store was not left locked
