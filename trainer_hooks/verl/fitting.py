"""Which histories may stand beside the rollouts of a prompt: those that keep to the run's lengths.

That they answer the same prompt is known when they are drawn (``trajstore.experience.prompts``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer_hooks.verl.first_told import FirstTold
from trajstore.experience.rows import rows_of
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


class Fitting:
    """Tells of the first history that is refused, and counts them.

    Args:
        max_prompt_length: tokens; ``None`` = any.
        max_response_length: tokens; ``None`` = any.
    """

    def __init__(self, max_prompt_length: int | None, max_response_length: int | None) -> None:
        self._max_prompt_length = max_prompt_length
        self._max_response_length = max_response_length
        self._too_long = FirstTold(logger)

    def fitting(self, histories: Sequence[AgentTrajectory]) -> tuple[AgentTrajectory, ...]:
        """Return the histories that may stand beside the rollouts of their task, in their order."""
        fits = [not self._is_too_long(one) for one in histories]
        long = [one for one, fit in zip(histories, fits, strict=True) if not fit]
        if long:
            self._too_long.add(
                len(long),
                "experience replay: rollout %r of task %r is not replayed: it is longer than data.max_prompt_length or"
                " data.max_response_length allows. histories_refused/too_long counts such histories of a step",
                long[0].rollout_id,
                long[0].task_id,
            )
        return tuple(one for one, fit in zip(histories, fits, strict=True) if fit)

    def take(self) -> dict[str, float]:
        """Return how many were refused since the last call."""
        return {"experience_replay/histories_refused/too_long": float(self._too_long.take())}

    def _is_too_long(self, history: AgentTrajectory) -> bool:
        for number, row in enumerate(rows_of(history)):
            start = row.response_start or 0
            length = 0 if row.input_ids is None else row.input_ids.numel()
            # The prompts of later outputs are what the agent loop makes of its context.
            if self._max_prompt_length is not None and not number and start > self._max_prompt_length:
                return True
            if self._max_response_length is not None and length - start > self._max_response_length:
                return True
        return False
