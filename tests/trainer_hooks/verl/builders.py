"""Rows in the format of verl's agent loop, and micro-batches in that of verl's engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils import tensordict_utils as tu

from trainer_hooks.replay.late_values import TASK_ROLLOUTS, TRAINED_STEP, with_training
from trainer_hooks.replay.rows import join_responses, lengths_of_rows
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.rows import rollout_of, sessions_of
from trajstore._core.columns.facts import GIVEN
from trajstore.trajectory import AgentTrajectory

VOCABULARY = 50
RULE = OutcomeRule()


def fresh_row(
    uid: str,
    session: int = 0,
    *,
    prompt: int = 3,
    response: int = 4,
    score: float = 1.0,
    index: Any = 0,
    seed: int = 0,
    log_probs: bool = True,
    output: int = 0,
    weights: tuple[int, int] = (4, 5),
) -> Row:
    """Return the row that verl's agent loop writes for one output of a session, before scoring.

    Args:
        uid: of the prompt.
        session: number of the rollout.
        prompt: tokens.
        response: tokens; if more than two, the second is not the model's.
        score: of the reward; stored at the last token.
        index: of the task.
        seed: of tokens and log-probs.
        log_probs: whether the rollout engine returned any.
        output: number of the output in the session.
        weights: versions that began and ended it.
    """
    versions = dict(zip(("min_global_steps", "max_global_steps"), weights, strict=True))
    random = np.random.default_rng([seed, session, prompt, response])
    mask = [0 if place == 1 and response > 2 else 1 for place in range(response)]
    made = AgentLoopOutput(
        prompt_ids=random.integers(0, VOCABULARY, prompt).tolist(),
        response_ids=random.integers(0, VOCABULARY, response).tolist(),
        response_mask=mask,
        response_logprobs=(-random.random(response)).tolist() if log_probs else None,
        reward_score=score,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {"acc": np.float64(score)}, **versions},
    )
    columns = made.as_dict()
    ids = torch.cat([columns["prompts"], columns["responses"]])
    columns |= {
        "uid": uid,
        "session_id": session,
        "index": index,
        "data_source": "sums",
        "raw_prompt": [{"role": "user", "content": f"task {index}"}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "global_steps": 6,
        "loss_mask": columns["response_mask"],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "multi_modal_inputs": {},
    }
    tag = {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": 6,
        **versions,
    }
    return Row(f"{uid}_{session}_{output}", tag, columns)


def new_prompts(*indices: int, content: str = "task") -> TensorDict:
    """Return prompts of the data loader, with the ``uid`` ``new0``, ``new1``, ..."""
    columns: dict[str, list[Any]] = {
        "uid": [f"new{place}" for place in range(len(indices))],
        "index": list(indices),
        "data_source": ["sums"] * len(indices),
        "raw_prompt": [[{"role": "user", "content": f"{content} {index}"}] for index in indices],
    }
    return TensorDict({name: NonTensorStack(*values) for name, values in columns.items()}, batch_size=len(indices))


def recorded_of(rows: Sequence[Row], outcome: OutcomeRule = RULE, fingerprint: str = "tokens") -> list[AgentTrajectory]:
    """Return the rollouts of rows as they are recorded on arrival."""
    return [rollout_of(outputs, outcome, run="run-a", fingerprint=fingerprint) for outputs in sessions_of(rows)]


def trained_of(rows: Sequence[Row], outcome: OutcomeRule = RULE, step: int = 5) -> list[AgentTrajectory]:
    """Return the rollouts of :func:`rated` rows as a store shows them after the step that trained on them."""
    late = {"old_log_probs": "old_log_probs", "entropy": "entropys"}
    arrived = [Row(row.key, row.tag, {k: v for k, v in row.columns.items() if k not in late}) for row in rows]
    rollouts, sessions = recorded_of(arrived, outcome), sessions_of(rows)
    counts = Counter(rollout.task_id for rollout in rollouts)
    for rollout, outputs in zip(rollouts, sessions, strict=True):
        prompts = [prompt for _, prompt in lengths_of_rows(rollout)]
        for column, name in late.items():
            if all(column in row.columns for row in outputs):
                rollout.notes[name] = join_responses([row.columns[column] for row in outputs], prompts)
        rollout.metadata[GIVEN] = {TRAINED_STEP: step, TASK_ROLLOUTS: counts[rollout.task_id]}
    return list(map(with_training, rollouts))


def rated(row: Row, seed: int = 0) -> Row:
    """Return a row with the columns that a policy pass adds."""
    random = torch.Generator().manual_seed(seed)
    length = len(row.columns["responses"])
    added = {"old_log_probs": -torch.rand(length, generator=random), "entropy": torch.rand(length, generator=random)}
    return Row(row.key, row.tag, {**row.columns, **added})


@dataclass(frozen=True)
class GlobalBatch:
    """Totals of the global batch, by which verl divides micro-batch losses."""

    dp_size: int = 1
    tokens: int | None = None
    rows: int | None = None


def loss_rows(
    seed: int, lengths: Sequence[tuple[int, int]], *, spread: float = 0.5, replayed: Sequence[int] = ()
) -> list[dict[str, Tensor]]:
    """Return rows of these (prompt, response) lengths with all columns that a policy loss may read.

    Args:
        seed: of every number.
        lengths: at least one token each.
        spread: standard deviation of log ratios.
        replayed: rows whose counted tokens are off-policy.
    """
    random = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, response) in enumerate(lengths):
        mask = (torch.rand(response, generator=random) > 0.3).long()
        mask[0] = 1
        whole = -torch.rand(prompt + response, generator=random)
        # A token's log-prob is stored at the previous token.
        current = whole[prompt - 1 : -1]
        rows.append(
            {
                "prompts": torch.randint(0, VOCABULARY, (prompt,), generator=random),
                "responses": torch.randint(0, VOCABULARY, (response,), generator=random),
                "response_mask": mask,
                "exp_mask": mask.clone() if number in replayed else torch.zeros_like(mask),
                "old_log_probs": current - spread * torch.randn(response, generator=random),
                "ref_log_prob": current - 0.3 * torch.randn(response, generator=random),
                "advantages": torch.randn((), generator=random).expand(response).clone(),
                "rollout_is_weights": 2 * torch.rand(response, generator=random),
                "log_probs": whole,
                "entropy": torch.rand(prompt + response, generator=random),
            }
        )
    return rows


def micro_batch(
    rows: Sequence[Mapping[str, Tensor]], whole: GlobalBatch, columns: Sequence[str] = ()
) -> tuple[TensorDict, dict[str, Tensor], dict[str, Tensor]]:
    """Return verl's micro-batch, its model output, and the tensors to differentiate a loss by.

    Args:
        rows: of :func:`loss_rows`.
        whole: the batch that contains them.
        columns: columns to include beside those of every batch.
    """
    always = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
    data = tu.get_tensordict({name: jagged([row[name] for row in rows]) for name in (*always, *columns)})
    tu.assign_non_tensor(
        data, dp_size=whole.dp_size, batch_num_tokens=whole.tokens, global_batch_size=whole.rows, max_response_len=-1
    )
    offsets = torch.tensor([0, *(len(row["log_probs"]) for row in rows)]).cumsum(0)
    leaves = {name: torch.cat([row[name] for row in rows]).requires_grad_() for name in ("log_probs", "entropy")}
    output = {name: torch.nested.nested_tensor_from_jagged(leaf, offsets) for name, leaf in leaves.items()}
    return data, output, leaves


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of different lengths as a nested tensor."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
