"""Guided rollouts: summaries of past trajectories in the prompts of new ones.

Imports run downward: ``record`` → ``allocation``, ``context``. ``docs/design/self-navigating.md`` draws the data's way.
"""

from trajstore.guidance.allocation import (
    RolloutExpMode,
    SampleExpMode,
    TaskExpConfig,
    TrainMode,
    allocate_add_exp,
    allocate_train_mode,
)
from trajstore.guidance.context import (
    EXPERIENCE_TEMPLATE,
    ExperienceTemplate,
    Insertion,
    put_in,
    strip_template,
    take_out,
)
from trajstore.guidance.record import Guidance, plain_messages, with_guidance

__all__ = [
    "EXPERIENCE_TEMPLATE",
    "ExperienceTemplate",
    "Guidance",
    "Insertion",
    "RolloutExpMode",
    "SampleExpMode",
    "TaskExpConfig",
    "TrainMode",
    "allocate_add_exp",
    "allocate_train_mode",
    "plain_messages",
    "put_in",
    "strip_template",
    "take_out",
    "with_guidance",
]
