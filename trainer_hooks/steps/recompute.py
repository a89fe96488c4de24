"""Recomputes a training step from its inputs and compares it with the ledger. Pure, apart from a policy that learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.masks import compute_response_mask, regularizer_masks
from trainer_hooks.steps.inputs import StepInputs
from trainer_hooks.trained import row_means
from trajstore.errors import ConfigurationError, counted


class Policy(Protocol):
    """A model and its optimizer at the beginning of a step."""

    def log_probs(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of rows of a batch, [M, R], with gradient."""

    def learn(self, objective: Tensor) -> None:
        """Take one optimizer step."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one comparison.

    Attributes:
        name: of the check.
        values: number of values compared; 0 if it was left out.
        difference: the largest difference of numbers.
        problems: differences beyond the tolerance, each with its first row.
        left_out: why it was left out; empty if it was not.
        found: the result without problems, in a word.
    """

    name: str
    values: int
    difference: float = 0.0
    problems: tuple[str, ...] = ()
    left_out: str = ""
    found: str = "equal"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of :func:`recompute`.

    Attributes:
        step: number of the step.
        rows: number of its rows.
        replayed: number of them that are replayed.
        groups: number of prompt groups.
        checks: in order.
    """

    step: int
    rows: int
    replayed: int
    groups: int
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems, each with the name of its check."""
        return tuple(f"{check.name}: {problem}" for check in self.checks for problem in check.problems)


def recompute(inputs: StepInputs) -> Report:
    """Recompute a step and compare it with the ledger's record.

    Checks that need log-probs are left out without :func:`with_log_probs`, the others are not.
    """
    rows = inputs.step.rows
    checks = [_rollouts(inputs), _masks(inputs), _rewards(inputs)]
    advantages, reason = advantages_of(inputs)
    checks += _of_advantages(inputs, advantages, reason)
    checks += _of_log_probs(inputs, advantages, reason)
    groups = len(np.unique(rows["group"]))
    return Report(inputs.step.step, len(rows), int(rows["replayed"].sum()), groups, tuple(checks))


def with_log_probs(
    inputs: StepInputs, policy: Policy, progress: Callable[[int, int], None] = lambda done, total: None
) -> StepInputs:
    """Return the inputs with log-probs of a policy, which takes the step's updates one after another.

    Args:
        inputs: of the step.
        policy: as before the step.
        progress: called with the numbers of passes made and in all.

    Raises:
        ConfigurationError: the ledger does not have the updates, or the loss of this step cannot be recomputed.
    """
    tensors, updates = dict(inputs.tensors), inputs.step.updates
    advantages, reason = advantages_of(inputs)
    if advantages is None or not updates or not inputs.step.options.get("loss"):
        raise ConfigurationError(f"step {inputs.step.step}: {reason or 'the ledger has no options of its loss'}")
    current = torch.zeros_like(tensors["old_log_probs"])
    total, done = 2 * len(updates), itertools.count(1)
    with torch.no_grad():
        for rows in updates:
            current[list(rows)] = policy.log_probs(tensors, rows)[0].cpu()
            progress(next(done), total)
    tensors["current_log_probs"] = current
    tensors["old_log_probs"] = torch.where(tensors["old_known"], tensors["old_log_probs"], current)
    filled = replace(inputs, tensors=tensors)
    coefficient = inputs.step.options.get("entropy_coeff", 0.0)
    parts = []
    for rows in updates:
        log_probs, entropys = policy.log_probs(tensors, rows)
        objective = _loss(filled, rows, log_probs, advantages)["pg_loss"]
        if coefficient:
            counted_tokens = regularizer_masks(*_masks_of(filled, rows))[0].to(entropys.device)
            objective = objective - coefficient * (entropys * counted_tokens).sum() / counted_tokens.sum().clamp(min=1)
        policy.learn(objective)
        parts.append(log_probs.detach().cpu())
        progress(next(done), total)
    return replace(filled, tensors={**tensors, "log_probs": torch.cat(parts)})


def advantages_of(inputs: StepInputs) -> tuple[Tensor | None, str]:
    """Return the advantages [B, R] from the outcomes of the groups; or None and the reason."""
    options, tensors = inputs.step.options.get("advantages", {}), inputs.tensors
    if options.get("estimator") != "grpo":
        return None, f"the ledger names the estimator {options.get('estimator')!r}, not 'grpo'"
    if not tensors["outcomes"].isfinite().all():
        return None, "a rollout has no outcome"
    mask = tensors["response_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = tensors["outcomes"].float()
    advantages, _ = compute_grpo_outcome_advantage(
        rewards,
        mask,
        torch.from_numpy(inputs.step.rows["group"].astype(np.int64)),
        norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True),
        rollouts=tensors["rollouts"],
    )
    shared = options.get("row_weight", "row") == "rollout"
    return (share_by_rollout(advantages, tensors["rollouts"]) if shared else advantages), ""


def _masks_of(inputs: StepInputs, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    return inputs.tensors["response_mask"][list(rows)], inputs.tensors["exp_mask"][list(rows)]


def _loss(inputs: StepInputs, rows: Sequence[int], log_probs: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return the loss of one update."""
    given = (inputs.tensors["old_log_probs"][list(rows)], advantages[list(rows)], *_masks_of(inputs, rows))
    old, advantage, mask, exp_mask = (tensor.to(log_probs.device) for tensor in given)
    return het_compute_token_on_off_policy_loss(
        old, log_probs, advantage, mask, exp_mask, **inputs.step.options["loss"]
    )


def _rollouts(inputs: StepInputs) -> Check:
    """Compare each row's rollout with the ledger: task of its group, and policy version."""
    problems = []
    step = inputs.step
    pairs = zip(inputs.rows, step.rows["group"].tolist(), step.rows["version"].tolist(), strict=True)
    for place, (fact, group, version) in enumerate(pairs):
        if step.tasks and fact["task"] != step.tasks[group]:
            problems.append(f"row {place} is of task {fact['task']!r}, its group of {step.tasks[group]!r}")
        if version >= 0 and fact["version"] is not None and fact["version"] != version:
            problems.append(f"row {place} was sampled by policy {fact['version']}, the ledger has {version}")
    return Check("rollouts", 2 * len(step.rows), problems=tuple(problems))


def _masks(inputs: StepInputs) -> Check:
    """Check the masks: trained tokens as recorded, and off-policy tokens in replayed rows."""
    tensors, rows = inputs.tensors, inputs.step.rows
    mask = tensors["response_mask"] != 0
    off_policy = compute_response_mask(tensors["exp_mask"], mask.shape[1]) != 0
    attended = compute_response_mask(tensors["attention_mask"], mask.shape[1]) != 0
    replayed = torch.from_numpy(rows["replayed"] != 0)
    problems = [
        *_differing("trained tokens", mask.sum(dim=1).double().numpy(), rows["tokens"].astype(np.float64), 0.0)[1],
        *_first("has trained tokens outside its attention mask", (mask & ~attended).any(dim=1)),
        *_first("is replayed, but its mask of replayed tokens differs", replayed & (mask != off_policy).any(dim=1)),
    ]
    return Check("masks", 3 * mask.numel(), problems=tuple(problems), found="consistent")


def _rewards(inputs: StepInputs) -> Check:
    outcomes, rollouts = inputs.tensors["outcomes"], inputs.tensors["rollouts"]
    firsts = {rollout: outcome for outcome, rollout in zip(outcomes.tolist(), rollouts.tolist(), strict=True)}
    other = torch.tensor(
        [outcome != firsts[rollout] for outcome, rollout in zip(outcomes, rollouts.tolist(), strict=True)]
    )
    problems = [
        *_first("has no finite outcome", ~outcomes.isfinite()),
        *_first("has another outcome than the other rows of its rollout", other & outcomes.isfinite()),
    ]
    return Check("rewards", len(outcomes), problems=tuple(problems), found="finite")


def _of_advantages(inputs: StepInputs, advantages: Tensor | None, reason: str) -> list[Check]:
    """Compare advantages and weights with the ledger's."""
    rows, mask = inputs.step.rows, inputs.tensors["response_mask"]
    loss = inputs.step.options.get("loss", {})
    if advantages is None:
        return [Check(name, 0, left_out=reason) for name in ("advantages", "weights")]
    means = row_means(mask, advantages=advantages)[1].numpy()
    tolerance = inputs.tolerances["advantages"]
    largest, problems = _differing("advantage", means.astype(np.float32), rows["advantage"], tolerance)
    dropped = (rows["replayed"] != 0) & (means < 0) & loss.get("drop_negative_off_policy", False)
    weights = np.where(dropped, 0.0, 1.0)
    return [
        Check("advantages", len(rows), largest, tuple(problems)),
        Check("weights", len(rows), *_as_check(_differing("weight", weights, rows["weight"], 0.0))),
    ]


def _of_log_probs(inputs: StepInputs, advantages: Tensor | None, reason: str) -> list[Check]:
    """Compare log-probs, ratios and loss terms with the recorded ones."""
    rows, tensors = inputs.step.rows, inputs.tensors
    finite = _first("has no finite importance ratio", torch.from_numpy(~np.isfinite(rows["ratio"])))
    if "log_probs" not in tensors or advantages is None:
        reason = reason or "needs log-probs of the policy; give the checkpoint of the step before"
        only_finite = Check("ratios", len(rows), problems=tuple(finite), found="finite")
        return [Check("log-probs", 0, left_out=reason), only_finite, Check("loss", 0, left_out=reason)]
    fresh = torch.from_numpy(rows["replayed"] == 0)[:, None] & tensors["old_known"]
    gaps = (tensors["current_log_probs"] - tensors["old_log_probs"]).abs().where(fresh, 0.0).amax(dim=1).numpy()
    passed = _differing("difference of log-probs", gaps, np.zeros(len(gaps)), inputs.tolerances["log-probs"])
    ratios = np.zeros(len(rows), np.float32)
    terms: list[dict[str, Tensor]] = []
    ends = itertools.accumulate(map(len, inputs.step.updates))
    for update, end in zip(inputs.step.updates, ends, strict=True):
        loss = _loss(inputs, update, tensors["log_probs"][end - len(update) : end], advantages)
        ratios[list(update)] = row_means(_masks_of(inputs, update)[0], ratios=loss["importance_ratio"])[1].numpy()
        terms.append({name: term for name, term in loss.items() if name in inputs.step.loss})
    names = list(terms[0])
    means = np.array([float(torch.stack([term[name] for term in terms]).mean()) for name in names])
    recorded = np.array([inputs.step.loss[name] for name in names])
    of_ratios = _differing("ratio", ratios, rows["ratio"], inputs.tolerances["ratios"])
    of_loss = _differing("", means, recorded, inputs.tolerances["loss"], names)
    return [
        Check("log-probs", int(fresh.sum()), *_as_check(passed)),
        Check("ratios", len(rows), *_as_check(of_ratios)),
        Check("loss", len(names), *_as_check(of_loss)),
    ]


def _as_check(result: tuple[float, list[str]]) -> tuple[float, tuple[str, ...]]:
    return result[0], tuple(result[1])


def _differing(
    what: str,
    computed: npt.NDArray[Any],
    recorded: npt.NDArray[Any],
    tolerance: float,
    names: Sequence[str] | None = None,
) -> tuple[float, list[str]]:
    """Return the largest difference, and a sentence on the values that differ; two NaN are equal."""
    one, other = computed.astype(np.float64), recorded.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    gaps = np.where(same, 0.0, np.abs(one - other))
    bad = ~(gaps <= tolerance * np.maximum(1.0, np.abs(other)))
    largest = float(gaps.max(initial=0.0))
    if not bad.any():
        return largest, []
    first = int(bad.argmax())
    where = f"row {first}: {what}" if names is None else f"{names[first]}"
    number = f"; {counted(int(bad.sum()), 'value')} differ" if bad.sum() > 1 else ""
    return largest, [f"{where} is {float(one[first])!r}, the ledger has {float(other[first])!r}{number}"]


def _first(problem: str, mask: Tensor) -> list[str]:
    """Return a sentence on the first row of a mask."""
    number = int(mask.sum())
    return [f"row {int(mask.int().argmax())} {problem} ({counted(number, 'row')} in all)"] if number else []
