"""Guided rollouts: summaries of past trajectories in the prompts of new ones.

Floor 7 of ``docs/design/house.md``: imports from lower floors only.

Imports run downward: ``manager`` → ``updates``, ``worker`` → ``local``, ``client`` →
``summary`` → ``maker``, ``experience`` → ``context``.
``docs/design/self-navigating.md`` draws the data's way.
"""

from trajstore.guidance.client import EMClient, EndpointSummarizer
from trajstore.guidance.context import (
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
from trajstore.guidance.experience import Experience
from trajstore.guidance.local import LocalMaker, as_text
from trajstore.guidance.maker import ExperienceMaker, MakerError, Retrieved
from trajstore.guidance.manager import AllocationRules, GuidanceManager, RolloutExpMode, SampleExpMode, TaskExpConfig
from trajstore.guidance.summary import ExtractiveSummarizer, Summarizer
from trajstore.guidance.updates import UpdateQueue
from trajstore.guidance.worker import ExperienceWorker, TrajExpConfig
from trajstore.retrieval import Hit, RetrievalIndex

__all__ = [
    "EXPERIENCE_TEMPLATE",
    "AllocationRules",
    "EMClient",
    "EndpointSummarizer",
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
    "TaskExpConfig",
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
