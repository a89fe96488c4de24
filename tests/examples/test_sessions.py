"""A step on agent sessions with branches: advantages, weights and loss are those of a recount by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from examples.grpo.model import build_model, response_log_probs
from tests.examples.runs import SORT, Train
from tests.support.sessions import Call, session_rows
from trajstore.ledger import read
from trajstore.trajectory import AgentTrajectory

OUTCOMES = (0.0, 0.0, 1.0, 1.0)


class Agent:
    """A worker whose rollouts are sessions: of one call, of two, with a branch, and with a compacted context."""

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        self.rows: list[list[AgentTrajectory]] = []

    def run(self, tasks: Sequence[Any], *_: Any) -> list[AgentTrajectory]:
        self.rows = []
        for place, task in enumerate(tasks):
            goal = sum(map(ord, task.task_id)) % 5 + 3
            a, b, c, d = ((place + self.begun // 4 + 3 * at) % 5 + 3 for at in range(4))
            first: Call = (None, [3, goal], [b, c, d])
            shapes: list[list[Call]] = [
                [first],
                [first, (0, [a], [d])],
                [first, (0, [a], [d, b]), (0, [c, c], [a]), (2, [b], [c, c])],
                [first, (0, [a], [d]), (None, [3, goal, d, d], [b, b])],
            ]
            self.begun += 1
            name = f"{self.begun}"
            self.rows.append(
                session_rows(shapes[place % 4], OUTCOMES[place % 4], task_id=task.task_id, rollout_id=name)
            )
        return [row for rows in self.rows for row in reversed(rows)]


def by_hand(sessions: Sequence[Sequence[AgentTrajectory]]) -> tuple[list[list[float]], int]:
    """Return each row's advantages by token, and the number of trained tokens."""
    groups: dict[str, list[float]] = {}
    for rows in sessions:
        groups.setdefault(rows[0].task_id, []).append(rows[0].reward.outcome)  # type: ignore[union-attr, arg-type]
    advantages, tokens = [], 0
    for rows in sessions:
        scores = groups[rows[0].task_id]
        advantage = (rows[0].reward.outcome - mean(scores)) / (stdev(scores) + 1e-6)  # type: ignore[union-attr, operator]
        for row in rows:
            mask = row.response_mask.tolist()  # type: ignore[union-attr]
            advantages.append([advantage * counts for counts in mask])
            tokens += sum(mask)
    return advantages, tokens


@pytest.mark.parametrize("row_weight", ["row", "rollout"])
def test_a_step_on_sessions_is_that_of_a_recount(
    make: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_weight: str
) -> None:
    config = replace(SORT, minibatches=1, entropy_coeff=0.0, rollouts=str(tmp_path), evaluate_every=99)
    trainer = make(replace(config, row_weight=row_weight), experience_rbound=None)
    agent = trainer.worker = Agent()  # type: ignore[assignment]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    taken: list[torch.Tensor] = []
    compute = trainer._advantages
    monkeypatch.setattr(trainer, "_advantages", lambda *given: taken.append(compute(*given)) or taken[-1])
    point = trainer.train_step()
    sessions = agent.rows
    assert len(sessions) == point.fresh_rollouts == config.tasks_per_step * config.n_rollout
    rows = [row for session in sessions for row in session]
    advantages, tokens = by_hand(sessions)
    assert tokens == config.tasks_per_step * sum((3, 3 + 1, 3 + 2 + 1 + 2, 3 + 1 + 2)), "each sampled token once"

    shares = [1 / len(session) if row_weight == "rollout" else 1.0 for session in sessions for _ in session]
    for given, by_token, share in zip(taken[0].tolist(), advantages, shares, strict=True):
        wanted = [value * share for value in by_token]
        assert given == pytest.approx(wanted + [0.0] * (len(given) - len(wanted)), abs=1e-6)
    loss = -sum(share * sum(by_token) for share, by_token in zip(shares, advantages, strict=True)) / tokens
    assert point.loss == pytest.approx(loss, abs=1e-6)

    step = read(tmp_path / "ledger").steps[1]
    assert step.rows["tokens"].tolist() == [sum(row.response_mask.tolist()) for row in rows]  # type: ignore[union-attr]
    assert step.rows["weight"].tolist() == [1.0] * len(rows)
    assert len(set(step.rows["trajectory"].tolist())) == len(sessions)
    assert step.rows["row"].tolist() == [number for session in sessions for number in range(len(session))]

    policy = build_model(config.model, len(trainer.tokenizer), seed=0)
    policy.load_state_dict(weights)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=0.0)
    objective = torch.zeros(())
    for row, by_token, share in zip(rows, advantages, shares, strict=True):
        ids = row.input_ids[None]  # type: ignore[index]
        log_probs, _ = response_log_probs(
            policy, ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], len(by_token)
        )
        ratio = (log_probs[0] - log_probs[0].detach()).exp()
        objective = objective - (torch.tensor(by_token) * share * ratio).sum() / tokens
    objective.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    optimizer.step()
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, atol=2e-5, rtol=0)
