"""Rollouts that are looked at in tests, and what is read of the page."""

from __future__ import annotations

from typing import Any

import torch

from tools.browser import Page
from trajstore import AgentTrajectory, Reward

PROMPT = 4


def text_of(page: Page, selector: str) -> str:
    """Return the text of the first element that a selector finds."""
    text: str = page.run("return document.querySelector(arguments[0]).textContent", selector)
    return text


def opened(page: Page, address: str, drawn: str, *arguments: Any) -> Any:
    """Open an address, and wait until an expression of JavaScript is true; return its value."""
    page.open(address)
    return page.until(drawn, *arguments)


def clicked(page: Page, selector: str, drawn: str, *arguments: Any) -> Any:
    """Click on an element, and wait until an expression of JavaScript is true; return its value."""
    page.click(selector)
    return page.until(drawn, *arguments)


def rollout(number: int, tokens: int = 24, **changed: Any) -> AgentTrajectory:
    """Return the rollout of a number: four of each task, two tasks of each policy version, outcomes 0 and 1 in turn."""
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
