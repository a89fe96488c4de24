"""Agent sessions as outputs of an agent loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.replay.conftest import build
from tests.support.sessions import session_rows
from tests.trainer_hooks.test_sessions import BRANCHED
from trainer_hooks.verl.reused_loop import session_outputs
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory


@pytest.mark.parametrize("outcome", [None, 0.5])
def test_a_session_is_the_outputs_of_an_agent_loop(outcome: float | None) -> None:
    rows = session_rows(BRANCHED, outcome, version=7)
    outputs = session_outputs([rows[1], rows[0]])
    for output, row in zip(outputs, rows, strict=True):
        columns = output.as_dict()
        assert torch.equal(torch.cat([columns["prompts"], columns["responses"]]), row.input_ids)
        assert columns["response_mask"].tolist() == row.response_mask.tolist()  # type: ignore[union-attr]
        assert columns["rollout_log_probs"].tolist() == row.rollout_log_probs.tolist()  # type: ignore[union-attr]
        assert output.reward_score == outcome
        extra = {"session": row.metadata["session"], "min_global_steps": 6, "max_global_steps": 6}
        assert output.extra_fields.items() >= extra.items()
        assert ("reward_extra_info" in output.extra_fields) == (outcome is not None)


def _without_version(rows: list[AgentTrajectory]) -> list[AgentTrajectory]:
    del rows[0].metadata["session"]["calls"][0]["policy_version"]
    return rows


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: rows[:1], r"has the paths \[0\] here"),
        (lambda rows: [build("a")], "rows: of 1 rollouts, must be those of one agent session"),
        (lambda rows: [*rows, *session_rows(BRANCHED, 1.0, rollout_id="s")], "rows: of 2 rollouts"),
        (lambda rows: [replace(row, response_mask=None) for row in rows], "lacks tokens or mask"),
        (_without_version, "a call has no policy_version; pass verl's training step"),
    ],
)
def test_what_is_no_session_is_named(
    damage: Callable[[list[AgentTrajectory]], list[AgentTrajectory]], message: str
) -> None:
    with pytest.raises(InvalidTrajectoryError, match=message):
        session_outputs(damage(session_rows(BRANCHED, 1.0)))
