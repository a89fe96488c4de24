"""Guided rollouts: summaries of past trajectories in the prompts of new ones.

Imports run downward: ``manager``, ``worker`` → ``local``, ``client`` → ``summary`` → ``maker``
→ ``context``. ``docs/design/experience.md`` has a diagram of the data flow.
"""

from trainer_hooks.guidance.client import EMClient
from trainer_hooks.guidance.context import (
    EXPERIENCE_TEMPLATE,
    ExperienceTemplate,
    Guidance,
    Insertion,
    TrainMode,
    plain_messages,
    put_in,
    strip_template,
    take_out,
    with_guidance,
)
from trainer_hooks.guidance.local import LocalMaker, as_text
from trainer_hooks.guidance.maker import Experience, ExperienceMaker, MakerError, Retrieved
from trainer_hooks.guidance.manager import AllocationRules, GuidanceManager, RolloutExpMode, SampleExpMode, UpdateQueue
from trainer_hooks.guidance.summary import ExtractiveSummarizer, Summarizer
from trainer_hooks.guidance.worker import ExperienceWorker, TrajExpConfig
from trainer_hooks.retrieval import Hit, RetrievalIndex

__all__ = [
    "EXPERIENCE_TEMPLATE",
    "AllocationRules",
    "EMClient",
    "Experience",
    "ExperienceMaker",
    "ExperienceTemplate",
    "ExperienceWorker",
    "ExtractiveSummarizer",
    "Guidance",
    "GuidanceManager",
    "Hit",
    "Insertion",
    "LocalMaker",
    "MakerError",
    "RetrievalIndex",
    "Retrieved",
    "RolloutExpMode",
    "SampleExpMode",
    "Summarizer",
    "TrainMode",
    "TrajExpConfig",
    "UpdateQueue",
    "as_text",
    "plain_messages",
    "put_in",
    "strip_template",
    "take_out",
    "with_guidance",
]
