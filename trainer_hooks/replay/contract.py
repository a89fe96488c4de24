"""A pool's requirements on trajectories.

All must come from one tokenizer and chat template, since token ids mean nothing to another. And the rules must allow
demonstrations to be drawn, if there are any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trainer_hooks.replay.rules import PoolRules
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory


def task_id_of(task: Any) -> str:
    """Return the id of a task: the string itself, or the object's ``task_id``.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(task, str):
        return task
    if not hasattr(task, "task_id"):
        raise ConfigurationError(
            f"tasks: {shown(task)} is a {type(task).__name__}, must be a task's id (a text) or have a task_id"
        )
    return str(task.task_id)


def task_ids_of(tasks: Sequence[Any]) -> list[str]:
    """Return the distinct ids of tasks.

    Raises:
        ConfigurationError: a task has no id; or ``tasks`` is one string, whose letters would pass for tasks.
    """
    if isinstance(tasks, str):
        raise ConfigurationError(f"tasks: {shown(tasks)} is one text, must be a list of tasks: [{shown(tasks)}]")
    return list(dict.fromkeys(map(task_id_of, tasks)))


def check_same(other: str, ours: str, name: str) -> None:
    """Refuse a fingerprint that differs from ours. An empty one is unknown and passes.

    Raises:
        ConfigurationError: they differ; the message has both, and the refused object's ``name``.
    """
    if other and ours and other != ours:
        raise ConfigurationError(
            f"tokenizer_fingerprint: {name} was made with tokenizer {other!r}, this pool uses {ours!r};"
            " token ids of one mean nothing to the other: use the same tokenizer, or begin an empty pool"
        )


def check_trajectories(trajectories: Sequence[AgentTrajectory], ours: str) -> str:
    """Check that trajectories have tasks and one tokenizer, and return the tokenizer's fingerprint.

    Args:
        trajectories: candidates for the pool.
        ours: the pool's fingerprint; if empty (unknown), the first known one counts.

    Raises:
        ConfigurationError: there are two tokenizers.
        InvalidTrajectoryError: a trajectory has no ``task_id``.
    """
    for trajectory in trajectories:
        rollout = f"rollout {trajectory.rollout_id!r}"
        if not trajectory.task_id:
            raise InvalidTrajectoryError(f"field task_id: empty ({rollout}); the pool keeps them by task, set it")
        check_same(trajectory.tokenizer_fingerprint, ours, f"{rollout} of task {trajectory.task_id!r}")
        ours = ours or trajectory.tokenizer_fingerprint
    return ours


def check_demonstrations(count: int, rules: PoolRules) -> None:
    """Refuse demonstrations in a pool whose rules would never draw them.

    Raises:
        ConfigurationError: there are some, and the rules require a policy version; the message names the option.
    """
    if count and rules.max_policy_age is not None:
        raise ConfigurationError(
            f"{count} demonstrations in the experience pool would never be replayed: max_policy_age:"
            f" {rules.max_policy_age}, but demonstrations have no policy version: set null"
        )


def fingerprint_of(tokenizer: Any) -> str:
    """Return a Hugging Face tokenizer's fingerprint: 16 hex digits of a hash over vocabulary and chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, getattr(tokenizer, "chat_template", None)], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
