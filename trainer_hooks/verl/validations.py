"""Rollouts of verl's validations as a source of experience."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


class ValidationRollouts:
    """Collects the rollouts of a validation and submits them at its end. Not thread-safe.

    Args:
        config: options of guidance.
        hook: receives the rollouts.
    """

    def __init__(self, config: GuidanceConfig, hook: GuidanceHook) -> None:
        self._config = config
        self._hook = hook
        self._held: list[AgentTrajectory] = []
        self._begun = not config.init_experience_before_training

    @property
    def wanted(self) -> bool:
        """True if rollouts of the validation become experience."""
        return self._config.enable_summarizer and (self._config.val_summarizer_save or not self._begun)

    def add(self, made: Sequence[AgentTrajectory]) -> None:
        """Collect rollouts of a validation, until :meth:`done`."""
        self._held += made

    def done(self, step: int) -> None:
        """Submit the validation's rollouts as experience; blocks only before the first step, if configured.

        Args:
            step: last finished step.
        """
        held, self._held = self._held, []
        begun, self._begun = self._begun, True
        config = self._config
        if begun or step > 0:  # a resumed run has begun already
            self._hook.validated(held)
            return
        limit = config.summary_timeout * math.ceil(max(len(held), 1) / config.summary_batch_size)
        if not self._hook.begin(held, limit):
            logger.warning(
                "guidance: init_experience_before_training: training begins although not all of %d validation rollouts"
                " have become experience in %.0f s; the rest follows",
                len(held),
                limit,
            )
