"""Whether a history answers the prompt of a row. A hook that knows no rows compares it with its task's rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trajstore.experience.prompts import prompt_of, prompt_of_row
from trajstore.guidance import Guidance, put_in
from trajstore.guidance.context import GUIDANCE
from trajstore.trajectory import AgentTrajectory, Reward


def rollout(first: int, name: str, outcome: float = 1.0) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.tensor([first, 1, 2 + len(name)]),
        loss_mask=torch.tensor([0, 0, 1]),
        response_start=2,
        old_log_probs=torch.tensor([-0.5]),
        reward=Reward(outcome=outcome),
        task_id="a",
        rollout_id=name,
    )


def test_histories_of_another_prompt_are_left_out_of_the_batch_and_drawn_no_more() -> None:
    config = ExperienceReplayConfig(enable=True, replay_start_ratio=0.0, exp_ratio=1.0)
    with ReplayHook(config, n_rollout=3, get_task=str) as hook:
        made = [rollout(7, "old"), rollout(7, "failed", 0.0), rollout(7, "failed too", 0.0)]
        assert hook.admit(made) == {"experience_replay/refused_share": 0.0}
        plan = hook.before_rollout(hook.tasks_chosen(["a"], 0.5, 1))
        assert [len(one.histories) for one in plan] == [1]
        rows = hook.batch_rows(plan, [rollout(8, "x"), rollout(8, "y", 0.0)])
        assert [row.is_experience_replay for row in rows] == [False, False], "the row asks something else by now"
        assert not hook.tasks_chosen(["a"], 0.5, 2).experience
        assert [one.task_id for one in hook.manager.of_other_rows()] == ["a"]


PROMPT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2?"}]
SHOWN, INSERTION = put_in(PROMPT, "tip: fingers\n")
ANSWER = {"role": "assistant", "content": "4", "author": "llm"}
KEPT = Guidance("keep", ("7",), (INSERTION,), False).to_json()


@pytest.mark.parametrize(
    ("messages", "metadata", "differs"),
    [
        (PROMPT, {}, False),
        ([*PROMPT, ANSWER], {}, False),
        ([*PROMPT, ANSWER, {"role": "user", "content": "sure?"}, ANSWER], {}, False),
        ([], {}, False),
        (SHOWN, {GUIDANCE: KEPT}, False),
        (SHOWN, {}, True),
        (PROMPT[1:], {}, True),
        (PROMPT[:1], {}, True),
        ([PROMPT[0], {"role": "user", "content": "2 + 3?"}, ANSWER], {}, True),
    ],
)
def test_a_history_answers_a_row_if_its_conversation_begins_with_the_prompt(
    messages: list[dict[str, Any]], metadata: dict[str, Any], differs: bool
) -> None:
    held = prompt_of(AgentTrajectory(messages=messages, metadata=metadata))
    assert held.differs(prompt_of_row(PROMPT)) == differs
    assert not held.differs(prompt_of_row([])), "nothing is known of the row"
