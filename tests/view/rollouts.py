"""Rollouts for tests of the page, and helpers that read the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.stores import writer_to
from tools.browser import Page
from trajstore import AgentTrajectory, Reward

PROMPT = 4

HOSTILE_CALL = "<img src=x onerror='window.stolen = 1'>"


def text_of(page: Page, selector: str) -> str:
    """Return the text of a selector's first element."""
    text: str = page.run("return document.querySelector(arguments[0]).textContent", selector)
    return text


def opened(page: Page, address: str, drawn: str, *arguments: Any) -> Any:
    """Open an address and wait for a true JavaScript expression; return its value."""
    page.open(address)
    return page.until(drawn, *arguments)


def clicked(page: Page, selector: str, drawn: str, *arguments: Any) -> Any:
    """Click an element and wait for a true JavaScript expression; return its value."""
    page.click(selector)
    return page.until(drawn, *arguments)


def rollout(number: int, tokens: int = 24, **changed: Any) -> AgentTrajectory:
    """Return rollout ``number``: four per task, two tasks per policy version, outcomes alternating 0 and 1."""
    response = tokens - PROMPT
    mask = torch.ones(tokens, dtype=torch.int64)
    mask[:PROMPT] = 0
    log_probs = -torch.arange(response, dtype=torch.float32) / 7
    fields: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"question of task {number // 4 % 5}"},
            {"role": "assistant", "content": f"answer {number}", "tool_calls": [{"function": {"name": "find"}}]},
        ],
        "input_ids": torch.arange(tokens) + 100,
        "attention_mask": torch.ones(tokens, dtype=torch.int64),
        "loss_mask": mask,
        "response_start": PROMPT,
        "old_log_probs": log_probs,
        "rollout_log_probs": log_probs - 0.125,
        "entropys": torch.full((response,), 0.5),
        "response_mask": mask[PROMPT:],
        "reward": Reward(outcome=float(number % 2), metadata={"judge": number / 1024}),
        "task_id": f"task-{number // 4 % 5}",
        "policy_version": number // 8,
        "metadata": {"advantages": [(-1.0) ** at for at in range(response)]},
    }
    return AgentTrajectory(**{**fields, **changed})


def session_in(store: Path) -> None:
    """Record a session of four paths: two samples of a prompt, a retried call, one without log-probs, a new context."""
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on it"}]
    with writer_to(store) as writer:
        writer.add_trajectories([rollout(0)])
        session = writer.session("task", "it's one")
        session.add_call([1, 2, 3], [4], [-0.5], call_id="plan", policy_version=3, messages=messages)
        more = {"policy_version": 4, "finish_reason": "length"}
        session.add_call([1, 2, 3, 4, 5, 6], [7, 8], [-0.5, -0.25], call_id=HOSTILE_CALL, **more)
        session.add_call([1, 2, 3, 4, 9], [10], call_id="search")
        session.incomplete("again", "timeout")
        session.add_call([1, 2, 3, 4, 9], [11], call_id="again")
        session.incomplete("lost", "timeout")
        session.add_call([1, 2, 100, 101], [5], call_id="small")
        session.finish(Reward(outcome=1.0))
