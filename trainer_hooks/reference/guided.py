"""Guidance in worlds of few words: the tokenizer knows no others, so experience is made of these."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_hooks.guidance import Experience, ExperienceTemplate, LocalMaker
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.replay import is_success
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory


class WordSummarizer:
    """One experience for each task that was solved: the replies of its shortest success, and nothing else."""

    def __call__(self, rollouts: Sequence[AgentTrajectory], /) -> list[Experience]:
        """Return what the rollouts of one task teach."""
        good = [one for one in rollouts if one.reward is not None and is_success(one.reward.outcome)]
        if not good:
            return []
        said = [[str(one["content"]) for one in rollout.messages if one.get("author") == "llm"] for rollout in good]
        place = min(range(len(good)), key=lambda number: len(said[number]))
        best = good[place]
        return [
            Experience(
                when_to_use="",
                content=" ".join(said[place]),
                query=str(best.messages[0]["content"]),
                task_id=best.task_id,
                score=1.0,
                sources=(best.rollout_id,),
            )
        ]


def word_template(config: GuidanceConfig) -> ExperienceTemplate:
    """Return the template, whose words are apart from the experience and from the message.

    Raises:
        ConfigurationError: they are not.
    """
    template = ExperienceTemplate.of(config.experience_template)
    if not template.before.endswith(" ") or not template.after.startswith(" ") or not template.after.endswith(" "):
        raise ConfigurationError(
            f"experience_template: {config.experience_template!r}: the reference trainer reads words; put spaces around"
            " {} and at the end, as in 'hint {} now '"
        )
    return template


def word_maker(config: GuidanceConfig) -> LocalMaker | None:
    """Return a maker in memory whose experiences are words of the world; ``None`` = what the configuration says.

    Raises:
        ConfigurationError: a service or a store is configured, whose experiences are of other words.
    """
    if not config.is_on:
        return None
    if config.base_url is not None or config.store is not None:
        raise ConfigurationError("base_url, store: the reference trainer keeps experience in memory; leave them out")
    return LocalMaker(summarizer=WordSummarizer(), present=lambda found: " ".join(one.content for one in found))
