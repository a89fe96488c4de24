"""Histories that are longer than the run's rows stand beside no rollouts."""

from __future__ import annotations

import torch

from trainer_hooks.verl.fitting import Fitting
from trajstore.trajectory import AgentTrajectory


def test_a_history_that_is_too_long_is_refused_and_counted() -> None:
    def history(prompt: int, response: int) -> AgentTrajectory:
        tokens = torch.arange(prompt + response)
        mask = (tokens >= prompt).long()
        return AgentTrajectory(
            input_ids=tokens, loss_mask=mask, response_start=prompt, old_log_probs=-torch.ones(response)
        )

    fitting, fits = Fitting(3, 2), history(3, 2)
    assert fitting.fitting([history(4, 2), fits, history(3, 3)]) == (fits,)
    assert fitting.take() == {"experience_replay/histories_refused/too_long": 2.0}
    assert not any(fitting.take().values())
