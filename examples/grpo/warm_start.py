"""A short supervised start that teaches the policy well-formed replies only.

With random weights a correct reply of three words has a chance of one in tens of thousands. So the policy first
imitates replies drawn without looking at the goal: it learns the grammar and the available actions, but not the goal.
Reinforcement learning begins at the success rate of such replies.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import torch

from examples.grpo.environments import Environment, TextTask
from examples.grpo.model import response_log_probs
from examples.grpo.tokenizer import WordTokenizer
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.guidance import ExperienceTemplate
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_ROWS = 32
_LEARNING_RATE = 2e-3


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: WordTokenizer,
    environment: Environment,
    *,
    steps: int,
    seed: int,
    template: ExperienceTemplate | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train the model to write well-formed replies; return the last step's loss, in nats per token.

    The learning rate falls in a straight line to 0.

    Args:
        model: changed.
        tokenizer: of the model.
        environment: whose replies are imitated.
        steps: optimizer steps.
        seed: of the episodes.
        template: if given, every other episode begins with experience that contains its replies. So the model learns to
            read experience, like a language model; it does not learn correct replies, as these ignore the goal.
        progress: called after each step with its number, from 1, and its loss.
    """
    random = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(steps, 1))
    value = 0.0
    for step in range(steps):
        episodes = [
            _any_episode(
                tokenizer, environment, random.choice(environment.tasks), random, template if row % 2 else None
            )
            for row in range(_ROWS)
        ]
        rows = [BatchRow(trajectory=trajectory, group_id=0) for trajectory in episodes]
        batch = {name: tensor.to(model.device) for name, tensor in build_batch(rows, tokenizer.pad_id).tensors.items()}
        written = batch["response_mask"]
        log_probs, _ = response_log_probs(
            model, batch["input_ids"], batch["attention_mask"], batch["position_ids"], written.shape[1]
        )
        loss = -(log_probs * written).sum() / written.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        value = loss.item()
        if progress is not None:
            progress(step + 1, value)
    return value


def _any_episode(
    tokenizer: WordTokenizer,
    environment: Environment,
    task: TextTask,
    random: Random,
    template: ExperienceTemplate | None,
) -> AgentTrajectory:
    """Return an episode whose replies ignore the goal; a template's experience in the prompt has the same replies."""
    episode = environment.begin(task)
    opening = episode.first_message
    ids: list[int] = []
    loss_mask: list[int] = []
    replies: list[str] = []
    done = False
    while not done:
        reply = episode.any_reply(random)
        replies.append(reply)
        written = tokenizer.reply(reply)
        answer = episode.answer(reply)
        done = answer.done
        read = [] if done else tokenizer.turn(answer.observation)
        ids += written + read
        loss_mask += [1] * len(written) + [0] * len(read)
    if template is not None:
        opening = template.fill(" ".join(replies)) + opening
    prompt = tokenizer.opening(opening)
    return AgentTrajectory(
        input_ids=torch.tensor(prompt + ids),
        loss_mask=torch.tensor([0] * len(prompt) + loss_mask),
        response_start=len(prompt),
    )
