"""Compares the steps of a run, rebuilt from its store and ledger, with the rows that reached the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer_hooks.steps import StepInputs, recompute, step_inputs, with_log_probs
from trainer_hooks.steps.hugging_face import HuggingFacePolicy
from trainer_hooks.steps.recompute import advantages_of

from .runs import Training
from .witness import LossRow

SAVES_HUGGING_FACE = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"

Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[float]]
"""Tokens, masks and old log-probs of a row, by which rows are ordered."""


def store_of(folder: Path) -> Path:
    """Return the store of a run's rollouts, with its ledger."""
    return folder / "checkpoints" / "trajstore" / "rollouts"


def check_steps(done: Training, first_model: Path | None = None) -> int:
    """Check all steps of a run: no problems, and mini-batches with exactly the loss's rows.

    Rows of a mini-batch are compared as a multiset of tokens, masks and advantages; log-probs where they are recorded.

    Args:
        done: the run.
        first_model: model before step 1; with it, log-probs and loss are recomputed too, from the step's checkpoint.

    Returns:
        The number of steps whose loss was recomputed.
    """
    micro_batches = list(dict.fromkeys(row.micro_batch for row in done.rows))
    rows_of = {each: [row for row in done.rows if row.micro_batch is each] for each in micro_batches}
    remaining = iter(micro_batches)
    recomputed = 0
    for record in done.steps:
        step = int(record["step"])
        inputs = step_inputs(store_of(done.folder), step)
        expected = {"log-probs", "loss"}
        if first_model is not None:
            model = first_model if step == 1 else done.folder / "checkpoints" / f"global_step_{step - 1}"
            inputs = with_log_probs(inputs, HuggingFacePolicy(model, step, inputs.step.options["policy"]))
            expected = {"loss"} if len(inputs.step.updates) > 1 else set()
        report = recompute(inputs)
        assert report.problems == ()
        assert {check.name for check in report.checks if check.left_out} == expected
        recomputed += "loss" not in expected
        advantages, reason = advantages_of(inputs)
        assert advantages is not None, reason
        assert inputs.step.updates
        for update in inputs.step.updates:
            seen: list[LossRow] = []
            while len(seen) < len(update):
                seen += [row for row in rows_of[next(remaining)] if row.response_mask.any()]  # else verl's padding
            check_rows(inputs, update, advantages, seen)
    assert next(remaining, None) is None
    return recomputed


def check_rows(inputs: StepInputs, update: Sequence[int], advantages: torch.Tensor, seen: Sequence[LossRow]) -> None:
    """Check one mini-batch."""
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

    of_store = sorted(map(rebuilt, update), key=lambda row: row[0])
    of_loss = sorted(map(trained, seen), key=lambda row: row[0])
    assert [row[0][:3] for row in of_store] == [row[0][:3] for row in of_loss]
    for (_, old, known, advantage), (_, wanted, given) in zip(of_store, of_loss, strict=True):
        assert known.any()
        assert old[known].equal(wanted[known])
        torch.testing.assert_close(advantage[0], given[0], atol=1e-3, rtol=0.0)
