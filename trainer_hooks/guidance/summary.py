"""Experiences extracted from rollouts without a model: a task's success and failure. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from trainer_hooks.guidance.context import plain_messages
from trainer_hooks.guidance.maker import Experience
from trainer_hooks.replay import is_success
from trainer_hooks.replay.outcomes import known_outcome
from trajstore.trajectory import AgentTrajectory

_MOST_CHARACTERS = 1200
"""Maximum characters of a rollout's replies in an experience."""

_MOST_OF_A_QUERY = 400
"""Maximum characters of the task in ``when_to_use``."""


class Summarizer(Protocol):
    """Makes experiences of the rollouts of one task."""

    def __call__(self, rollouts: Sequence[AgentTrajectory], /) -> list[Experience]:
        """Return the experiences; may be empty.

        Args:
            rollouts: of one task, their messages without experience; at least one.
        """


def unguided(rollout: AgentTrajectory) -> AgentTrajectory:
    """Return a rollout whose messages hold no experience, so that experience is not made of experience.

    Args:
        rollout: not changed.

    Raises:
        InvalidTrajectoryError: the messages do not match the guidance record.
    """
    metadata = {key: value for key, value in rollout.metadata.items() if key != "guidance"}
    return AgentTrajectory(
        messages=[dict(message) for message in plain_messages(rollout)],
        reward=rollout.reward,
        task_id=rollout.task_id,
        rollout_id=rollout.rollout_id,
        query=rollout.query,
        policy_version=rollout.policy_version,
        metadata=metadata,
    )


def query_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text before the model's first message, without system prompts."""
    return conversation_of(takewhile(lambda message: message.get("role") != "assistant", messages))


def conversation_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of messages, without system prompts."""
    return "\n".join(text_of(message) for message in messages if message.get("role") != "system")


def rated(rollouts: Iterable[AgentTrajectory]) -> list[tuple[float, AgentTrajectory]]:
    """Return the rollouts that have an outcome, with it."""
    return [(outcome, rollout) for rollout in rollouts if (outcome := known_outcome(rollout)) is not None]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return content if isinstance(content, str) else ""


def unicode_of(text: str) -> str:
    """Return a text that UTF-8 can encode: unpaired surrogates, which JSON allows, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ExtractiveSummarizer:
    """One experience for each task: the replies of its shortest success, and those of a failure to avoid.

    A success has an outcome of at least 1. A task without one gives its best failure, as a way that did not work. A
    task without known outcomes gives nothing.
    """

    def __call__(self, rollouts: Sequence[AgentTrajectory], /) -> list[Experience]:
        known = rated(rollout for rollout in rollouts if _replies(rollout))
        good = [rollout for outcome, rollout in known if is_success(outcome)]
        bad = [(outcome, rollout) for outcome, rollout in known if not is_success(outcome)]
        success = min(good, key=lambda rollout: len("".join(_replies(rollout))), default=None)
        failure = max(bad, key=lambda pair: pair[0], default=(0.0, None))[1]
        parts = []
        if success is not None:
            parts.append(f"This worked:\n{_shown(_replies(success))}")
        if failure is not None and (success is None or _replies(failure) != _replies(success)):
            parts.append(f"This did not work:\n{_shown(_replies(failure))}")
        source = success or failure
        if source is None:
            return []
        query = source.query or query_of(source.messages)
        return [
            Experience(
                when_to_use=f"For tasks like: {_cut(query, _MOST_OF_A_QUERY)}",
                content="\n".join(parts),
                query=query,
                task_id=source.task_id,
                score=known_outcome(source),
                sources=tuple(rollout.rollout_id for rollout in (success, failure) if rollout is not None),
            )
        ]


def by_task(rollouts: Sequence[AgentTrajectory]) -> list[list[AgentTrajectory]]:
    """Return the rollouts of each task, in order of first appearance."""
    tasks: dict[str, list[AgentTrajectory]] = {}
    for rollout in rollouts:
        tasks.setdefault(rollout.task_id, []).append(rollout)
    return list(tasks.values())


def _replies(rollout: AgentTrajectory) -> list[str]:
    texts = [
        text_of(message)
        for message in rollout.messages
        if message.get("role") == "assistant" or message.get("author") == "llm"
    ]
    return [text for text in texts if text]


def _shown(replies: Sequence[str]) -> str:
    """Return replies as a list, each shortened to an equal share of the space."""
    each = max(_MOST_CHARACTERS // len(replies), 40)
    return "\n".join(f"- {_cut(reply, each)}" for reply in replies)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
