"""Guidance for toy environments; experience text uses only the tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_hooks.guidance import Experience, ExperienceTemplate, LocalMaker
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.replay import is_success
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory


class WordSummarizer:
    """Makes one experience per solved task: the replies of its shortest success."""

    def __call__(self, rollouts: Sequence[AgentTrajectory], /) -> list[Experience]:
        """Return the experience of one task's rollouts; empty without a success."""
        successes = [
            rollout for rollout in rollouts if rollout.reward is not None and is_success(rollout.reward.outcome)
        ]
        if not successes:
            return []
        replies = [
            [str(message["content"]) for message in rollout.messages if message.get("author") == "llm"]
            for rollout in successes
        ]
        place = min(range(len(successes)), key=lambda number: len(replies[number]))
        best = successes[place]
        return [
            Experience(
                when_to_use="",
                content=" ".join(replies[place]),
                query=str(best.messages[0]["content"]),
                task_id=best.task_id,
                score=1.0,
                sources=(best.rollout_id,),
            )
        ]


def word_template(config: GuidanceConfig) -> ExperienceTemplate:
    """Return the template.

    Raises:
        ConfigurationError: ``{}`` is not surrounded by spaces, or the template does not end with one.
    """
    template = ExperienceTemplate.of(config.experience_template)
    if not template.before.endswith(" ") or not template.after.startswith(" ") or not template.after.endswith(" "):
        raise ConfigurationError(
            f"experience_template: {config.experience_template!r}: the reference trainer reads words; put spaces around"
            " {} and at the end, as in 'hint {} now '"
        )
    return template


def word_maker(config: GuidanceConfig) -> LocalMaker | None:
    """Return an in-memory maker whose experiences use the environment's words; ``None`` without guidance.

    Raises:
        ConfigurationError: a service or a store is configured, whose experiences may have other words.
    """
    if not config.is_on:
        return None
    if config.base_url is not None or config.store is not None:
        raise ConfigurationError("base_url, store: the reference trainer keeps experience in memory; leave them out")
    return LocalMaker(
        summarizer=WordSummarizer(), present=lambda found: " ".join(experience.content for experience in found)
    )
