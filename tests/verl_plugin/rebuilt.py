"""Compares the steps of a run, rebuilt from its store and ledger, with the rows that reached the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from trainer_hooks.steps import StepInputs, advantages_of, recompute, step_inputs

from .runs import Training
from .witness import LossRow

Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[float]]
"""Tokens, masks and old log-probs of a row, by which rows are ordered."""


def store_of(folder: Path) -> Path:
    """Return the store of a run's rollouts, with its ledger."""
    return folder / "checkpoints" / "trajstore" / "rollouts"


def check_steps(done: Training) -> None:
    """Check all steps of a run: no problems, and exactly the loss's rows.

    Rows of a step are compared as a multiset of tokens, masks and advantages; log-probs where they are recorded.
    """
    remaining = iter([row for row in done.rows if row.response_mask.any()])  # others are verl's padding
    for record in done.steps:
        inputs = step_inputs(store_of(done.folder), int(record["step"]))
        report = recompute(inputs)
        assert report.problems == ()
        assert not any(check.left_out for check in report.checks)
        advantages, reason = advantages_of(inputs)
        assert advantages is not None, reason
        check_rows(inputs, advantages, list(islice(remaining, len(inputs.rows))))
    assert next(remaining, None) is None


def check_rows(inputs: StepInputs, advantages: torch.Tensor, seen: Sequence[LossRow]) -> None:
    """Check the rows of one step."""
    tensors = inputs.tensors
    width = tensors["response_mask"].shape[1]

    def key_of(tokens: torch.Tensor, mask: torch.Tensor, exp_mask: torch.Tensor, old: torch.Tensor) -> Key:
        return tuple(tokens.tolist()), tuple(mask.tolist()), tuple(exp_mask.tolist()), old.tolist()

    def rebuilt(place: int) -> tuple[Key, torch.Tensor, torch.Tensor, torch.Tensor]:
        attended = tensors["attention_mask"][place] != 0
        response = slice(0, int(attended[-width:].sum()))
        mask, exp_mask = tensors["response_mask"][place, response], tensors["exp_mask"][place, -width:][response]
        old, known = tensors["old_log_probs"][place, response], tensors["old_known"][place, response]
        key = key_of(tensors["input_ids"][place][attended], mask, exp_mask, old)
        return key, old, known, advantages[place, response][mask != 0]

    def trained(row: LossRow) -> tuple[Key, torch.Tensor, torch.Tensor]:
        exp_mask = row.exp_mask[: row.response.numel()]
        key = key_of(torch.tensor(row.tokens), row.response_mask, exp_mask, row.old_log_probs)
        return key, row.old_log_probs, row.advantages[row.response_mask != 0]

    of_store = sorted(map(rebuilt, range(len(inputs.rows))), key=lambda row: row[0])
    of_loss = sorted(map(trained, seen), key=lambda row: row[0])
    assert [row[0][:3] for row in of_store] == [row[0][:3] for row in of_loss]
    for (_, old, known, advantage), (_, wanted, given) in zip(of_store, of_loss, strict=True):
        assert known.any()
        assert old[known].equal(wanted[known])
        torch.testing.assert_close(advantage[0], given[0], atol=1e-3, rtol=0.0)
