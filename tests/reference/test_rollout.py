"""Rollouts are token-faithful: ids, masks and log-probabilities are those of what was sampled."""

from __future__ import annotations

import pytest
import torch

from tests.reference.runs import HOUSEHOLD, SORT, Train
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.model import response_log_probs

CONFIGS = [SORT, HOUSEHOLD]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.environment)
def test_log_probs_of_the_draw_equal_those_of_one_row_alone(make: Train, config: TrainerConfig) -> None:
    """Rows of other lengths, holes and the cache leave no trace: each row equals its own plain forward pass."""
    trainer = make(config)
    tasks = [task for task in trainer.environment.tasks for _ in range(3)]
    lengths = set()
    for trajectory in trainer.worker.run(tasks, torch.Generator().manual_seed(1)):
        assert trajectory.input_ids is not None
        assert trajectory.old_log_probs is not None
        assert trajectory.response_mask is not None
        ids = trajectory.input_ids[None]
        lengths.add(ids.shape[1])
        response = ids.shape[1] - (trajectory.response_start or 0)
        with torch.no_grad():
            log_probs, _ = response_log_probs(
                trainer.model, ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], response
            )
        written = trajectory.response_mask.bool()
        torch.testing.assert_close(trajectory.old_log_probs[written], log_probs[0][written], atol=1e-5, rtol=0)
    assert len(lengths) > 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.environment)
def test_masks_are_1_exactly_on_the_messages_of_the_model(make: Train, config: TrainerConfig) -> None:
    trainer = make(config)
    tokenizer = trainer.tokenizer
    for trajectory in trainer.worker.run(trainer.environment.tasks, torch.Generator().manual_seed(1)):
        assert trajectory.input_ids is not None
        assert trajectory.loss_mask is not None
        assert trajectory.response_mask is not None
        assert trajectory.loss_mask[trajectory.response_start :].equal(trajectory.response_mask)
        assert trajectory.response_mask[0] == 1
        written: list[list[int]] = [[]]
        for token, mine in zip(trajectory.input_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
            if mine:
                written[-1].append(token)
            elif written[-1]:
                written.append([])
        replies = [message["content"] for message in trajectory.messages if message["author"] == "llm"]
        assert [tokenizer.reply_text(reply) for reply in written if reply] == replies
        assert all(len(reply) <= trainer.environment.max_reply_tokens for reply in written)


def test_messages_and_tokens_say_the_same_and_the_outcome_is_the_environments(make: Train) -> None:
    trainer = make(HOUSEHOLD)
    for task in trainer.environment.tasks:
        for trajectory in trainer.worker.run([task] * 4, torch.Generator().manual_seed(2)):
            episode = trainer.environment.begin(task)
            ids, reward = trainer.tokenizer.opening(episode.first_message), 0.0
            assert trajectory.messages[0]["content"] == episode.first_message
            replies = [message["content"] for message in trajectory.messages if message["author"] == "llm"]
            for number, reply in enumerate(replies):
                answer = episode.answer(reply)
                reward = answer.reward
                assert answer.done == (number == len(replies) - 1)
            assert trajectory.reward is not None
            assert trajectory.reward.outcome == reward
            assert trajectory.input_ids is not None
            assert trajectory.input_ids[: len(ids)].tolist() == ids
            assert trajectory.task_id == task.task_id


def test_draws_follow_the_policys_distribution(make: Train) -> None:
    """4,000 first words of one task: frequencies are the policy's probabilities (chi-square)."""
    trainer = make(SORT)
    task = trainer.environment.tasks[0]
    drawn = trainer.worker.run([task] * 4000, torch.Generator().manual_seed(3))
    prompt = trainer.tokenizer.opening(trainer.environment.begin(task).first_message)
    with torch.no_grad():
        expected = trainer.model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1) * len(drawn)
    first = torch.stack([one.input_ids[one.response_start] for one in drawn if one.input_ids is not None])
    seen = torch.bincount(first, minlength=len(expected)).float()
    often = expected > 5
    statistic = ((seen - expected)[often].square() / expected[often]).sum()
    assert statistic < 4 * often.sum()


def test_the_generator_alone_decides(make: Train) -> None:
    trainer = make(HOUSEHOLD)
    tasks = trainer.environment.tasks
    torch.manual_seed(0)
    first = trainer.worker.run(tasks, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again = trainer.worker.run(tasks, torch.Generator().manual_seed(5))
    other = trainer.worker.run(tasks, torch.Generator().manual_seed(6))
    assert [one.messages for one in first] == [one.messages for one in again]
    assert [one.messages for one in first] != [one.messages for one in other]


def test_no_tasks_make_no_rollouts(make: Train) -> None:
    assert make(SORT).worker.run([], torch.Generator()) == []
