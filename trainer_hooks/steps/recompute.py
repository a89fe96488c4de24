"""Recomputes a training step from its inputs and compares it with the ledger. Pure, apart from a policy that learns."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.losses import LossAggMode, het_compute_token_on_off_policy_loss
from trainer_hooks.masks import compute_response_mask, regularizer_masks
from trainer_hooks.steps.inputs import StepInputs
from trainer_hooks.trained import row_means
from trajstore.errors import ConfigurationError, counted, listed
from trajstore.ledger import TrainedStep
from trajstore.ledger.step import digest, mask_digest

OF_VERL = ("mode", "kl_loss_coef", "loss_scale_factor")
"""Options of verl's loss that the policy loss does not have."""

LOSS_MODES = ("vanilla", "het")
"""Policy losses of verl that can be recomputed. ``vanilla`` is ``het`` without replayed tokens."""

_NORM = "seq-mean-token-sum-norm"

VERL_TERMS = ("pg_loss",)
"""Loss terms of verl that do not depend on the sizes of its micro-batches."""


class Policy(Protocol):
    """A model and its optimizer at the beginning of a step."""

    def log_probs(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of rows of a batch, [M, R], with gradient."""

    def learn(self, objective: Tensor) -> None:
        """Take one optimizer step. Not called for a step of verl."""


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
    checks += [*_of_advantages(inputs, advantages, reason), _weights(inputs), _mini_batches(inputs)]
    checks += _of_log_probs(inputs, advantages, reason)
    groups = len(np.unique(rows["group"]))
    return Report(inputs.step.step, len(rows), int(rows["replayed"].sum()), groups, tuple(checks))


def with_log_probs(
    inputs: StepInputs, policy: Policy, progress: Callable[[int, int], None] = lambda done, total: None
) -> StepInputs:
    """Return the inputs with log-probs of a policy, which takes the step's updates one after another.

    Of verl, only those before the first update: the optimizers of its workers are not rebuilt.

    Args:
        inputs: of the step.
        policy: as before the step.
        progress: called with the numbers of passes made and in all.

    Raises:
        ConfigurationError: the ledger does not have the updates, or the loss of this step cannot be recomputed.
    """
    tensors, updates = dict(inputs.tensors), inputs.step.updates
    advantages, reason = advantages_of(inputs)
    reason = reason or _no_pass(inputs)
    if advantages is None or reason or not updates or not inputs.step.options.get("loss"):
        raise ConfigurationError(f"step {inputs.step.step}: {reason or 'the ledger has no options of its loss'}")
    current = torch.zeros_like(tensors["old_log_probs"])
    repeats = not _is_of_verl(inputs)
    total, done = len(updates) * (1 + repeats), itertools.count(1)
    with torch.no_grad():
        for rows in updates:
            current[list(rows)] = policy.log_probs(tensors, rows)[0].cpu()
            progress(next(done), total)
    tensors["current_log_probs"] = current
    tensors["old_log_probs"] = torch.where(tensors["old_known"], tensors["old_log_probs"], current)
    filled = replace(inputs, tensors=tensors)
    if not repeats:
        return (
            filled if len(updates) > 1 else replace(filled, tensors={**tensors, "log_probs": current[list(updates[0])]})
        )
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
    if reason := _rejects(inputs):
        return None, reason
    if options.get("kl_in_reward"):
        return None, "the rewards have a KL term, which is not recorded"
    if not tensors["rewards"].isfinite().all():
        return None, "a rollout has no reward"
    mask = tensors["response_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = tensors["rewards"].float()
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
    parts = (inputs.tensors["old_log_probs"][list(rows)], advantages[list(rows)], *_masks_of(inputs, rows))
    old, advantage, mask, exp_mask = (tensor.to(log_probs.device) for tensor in parts)
    given = inputs.step.options["loss"]
    options = {name: value for name, value in given.items() if name not in OF_VERL}
    width = given.get("loss_scale_factor")
    if divides := width and options["loss_agg_mode"] == _NORM:
        options["loss_agg_mode"] = "seq-mean-token-sum"
    loss = het_compute_token_on_off_policy_loss(old, log_probs, advantage, mask, exp_mask, **options)
    return {**loss, "pg_loss": loss["pg_loss"] / width} if divides else loss


def _rollouts(inputs: StepInputs) -> Check:
    """Compare each row's rollout with the ledger: task of its group, policy version, and whether it is a fresh one."""
    problems = []
    step = inputs.step
    uids: dict[int, Counter[str]] = defaultdict(Counter)
    for fact, group in zip(inputs.rows, step.rows["group"].tolist(), strict=True):
        if not fact["replayed"] and fact.get("uid") is not None:
            uids[group][fact["uid"]] += 1
    names = {group: counts.most_common(1)[0][0] for group, counts in uids.items()}
    pairs = zip(inputs.rows, step.rows["group"].tolist(), step.rows["version"].tolist(), strict=True)
    for place, (fact, group, version) in enumerate(pairs):
        if step.tasks and fact["task"] != step.tasks[group]:
            problems.append(f"row {place} is of task {fact['task']!r}, its group of {step.tasks[group]!r}")
        if version >= 0 and fact["version"] is not None and fact["version"] != version:
            problems.append(f"row {place} was sampled by policy {fact['version']}, the ledger has {version}")
        if fact.get("uid") is not None and group in names and fact["replayed"] == (fact["uid"] == names[group]):
            problems.append(
                f"row {place} is replayed, but was sampled with the fresh rows of its group"
                if fact["replayed"]
                else f"row {place} is fresh, but was not sampled with the other fresh rows of its group"
            )
    attended = inputs.tensors["attention_mask"] != 0
    tokens = [digest(row[mask].numpy()) for row, mask in zip(inputs.tensors["input_ids"], attended, strict=True)]
    problems += _first("has other tokens than those that were trained", _others(step, "token_digest", tokens))
    return Check("rollouts", (2 + bool(names)) * len(step.rows), problems=tuple(problems))


def _others(step: TrainedStep, name: str, digests: Sequence[int]) -> Tensor:
    """Return which rows have another digest than the ledger's, if it has them; [B]."""
    return torch.from_numpy((step.rows[name] != digests) & (name not in step.unknown))


def _masks(inputs: StepInputs) -> Check:
    """Check the masks: trained tokens as recorded, and off-policy tokens in replayed rows."""
    if reason := _rejects(inputs):
        return Check("masks", 0, left_out=reason)
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
    other = _others(inputs.step, "mask_digest", [mask_digest(row) for row in mask.numpy()])
    problems += _first("has its trained tokens in other places than the ledger", other)
    if (stored := tensors.get("stored_advantages")) is not None:
        outside = (stored.nan_to_num() != 0) & ~mask
        problems += _first("has stored advantages outside its mask of trained tokens", outside.any(dim=1))
    return Check("masks", 3 * mask.numel(), problems=tuple(problems), found="consistent")


def _rewards(inputs: StepInputs) -> Check:
    rewards, rollouts = inputs.tensors["rewards"], inputs.tensors["rollouts"]
    firsts = {rollout: reward for reward, rollout in zip(rewards.tolist(), rollouts.tolist(), strict=True)}
    other = torch.tensor(
        [reward != firsts[rollout] for reward, rollout in zip(rewards, rollouts.tolist(), strict=True)]
    )
    problems = [
        *_first("has no finite reward", ~rewards.isfinite()),
        *_first("has another reward than the other rows of its rollout", other & rewards.isfinite()),
        *(
            f"row {place}: {name} is {now!r}, it was {before!r} when the rollout was recorded"
            for place, fact in enumerate(inputs.rows)
            for name, (before, now) in fact.get("corrected", {}).items()
        ),
    ]
    return Check("rewards", len(rewards), problems=tuple(problems), found="finite")


def _of_advantages(inputs: StepInputs, advantages: Tensor | None, reason: str) -> list[Check]:
    """Compare recomputed and stored advantages with the ledger's."""
    rows, tensors = inputs.step.rows, inputs.tensors
    mask, tolerance = tensors["response_mask"], inputs.tolerances["advantages"]
    if advantages is None:
        checks = [Check("advantages", 0, left_out=reason)]
    else:
        means = row_means(mask, advantages=advantages)[1].numpy().astype(np.float32)
        result = _differing("advantage", means, rows["advantage"], tolerance, rounding=_rounding(inputs, means))
        checks = [Check("advantages", len(rows), *_as_check(result))]
    if (stored := tensors.get("stored_advantages")) is not None and not _rejects(inputs):
        trained = mask != 0
        ledger = torch.from_numpy(rows["advantage"].copy())[:, None]
        if advantages is None:  # of another estimator, whose tokens may differ
            stored = row_means(mask, advantages=stored)[1][:, None]
            trained = stored.isfinite()
        gaps = (stored - ledger).abs().where(trained & stored.isfinite(), -1.0)
        widest = gaps.argmax(dim=1, keepdim=True)
        known = gaps.amax(dim=1) >= 0
        worst = torch.where(known, stored.gather(1, widest)[:, 0], ledger[:, 0])
        result = _differing("stored advantage", worst.float().numpy(), rows["advantage"], tolerance)
        checks.append(Check("stored advantages", int(known.sum()), *_as_check(result)))
    return checks


def _rounding(inputs: StepInputs, means: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the bound of the rounding errors of a trainer that computes mean and deviation in float32; else 0.

    The errors of the scores' mean are divided by the deviation, and are large where all scores of a group are equal.
    """
    options = inputs.step.options["advantages"]
    if options.get("precision") != "float32":
        return np.zeros(len(means))
    rewards, groups = inputs.tensors["rewards"].numpy(), inputs.step.rows["group"]
    bound = np.zeros(len(means))
    for group in np.unique(groups):
        scores = rewards[groups == group]
        error = np.finfo(np.float32).eps * len(scores) * np.abs(scores).max()
        divisor = scores.std(ddof=1) + 1e-6 if len(scores) > 1 else 1.0
        bound[groups == group] = error / (divisor if options.get("norm_adv_by_std_in_grpo", True) else 1.0)
    return bound * (1.0 + np.abs(means))


def _weights(inputs: StepInputs) -> Check:
    """Compare the weights of rows: 0 without a loss, else those of the rollout correction that the store has, or 1."""
    rows, mask = inputs.step.rows, inputs.tensors["response_mask"]
    if reason := _rejects(inputs):
        return Check("weights", 0, left_out=reason)
    weights = np.ones(len(rows))
    if (stored := inputs.tensors.get("stored_weights")) is not None:
        weights = row_means(mask, advantages=stored)[1].numpy()
    elif _correction(inputs).get("rollout_is"):
        weights[:] = np.nan
    elif _is_of_verl(inputs) and inputs.step.options["loss"]["loss_agg_mode"] == "seq-mean-token-mean":
        rollouts, tokens = inputs.tensors["rollouts"], (mask != 0).sum(dim=1).double()
        of_session = (rollouts[:, None] == rollouts).double() @ tokens  # all its rows are one sequence
        weights = (tokens / of_session.clamp(min=1)).numpy()
    weights = np.where(rows["tokens"] > 0, weights, 1.0)
    drops = inputs.step.options.get("loss", {}).get("drop_negative_off_policy", False)
    weights = np.where((rows["replayed"] != 0) & (rows["advantage"] < 0) & drops, 0.0, weights)
    known = np.isfinite(weights)
    result = _differing("weight", np.where(known, weights, rows["weight"]).astype(np.float32), rows["weight"], 1e-6)
    return Check("weights", int(known.sum()), *_as_check(result))


def _mini_batches(inputs: StepInputs) -> Check:
    """Check that each row is in equally many mini-batches."""
    if not inputs.step.updates:
        return Check("mini-batches", 0, left_out="the ledger does not have them")
    times = np.zeros(len(inputs.step.rows))
    for update in inputs.step.updates:
        np.add.at(times, list(update), 1)
    result = _differing("number of mini-batches", times, np.full(len(times), np.median(times)), 0.0)
    return Check("mini-batches", len(times), *_as_check(result), found="consistent")


def _correction(inputs: StepInputs) -> Mapping[str, Any]:
    correction: Mapping[str, Any] = inputs.step.options.get("rollout_correction", {})
    return correction


def _rejects(inputs: StepInputs) -> str:
    """Return why masks are unknown; empty if they are known."""
    rejects = _correction(inputs).get("rollout_rs")
    return f"rollout_correction.rollout_rs={rejects} rejects tokens, and which ones is not recorded" if rejects else ""


def _is_of_verl(inputs: StepInputs) -> bool:
    return bool(inputs.step.options.get("policy", {}).get("trainer") == "verl")


def _no_pass(inputs: StepInputs) -> str:
    """Return why the log-probs before the first update are unknown; empty if a policy has them."""
    bypass = _correction(inputs).get("bypass_mode")
    return "the trainer's policy made no pass before the update (bypass_mode)" if bypass else ""


def _no_loss(inputs: StepInputs) -> str:
    """Return why the loss of a step of verl is not recomputed; empty if it is."""
    loss, updates = inputs.step.options["loss"], len(inputs.step.updates)
    for option, name, known in (
        ("policy_loss.loss_mode", "mode", LOSS_MODES),
        ("loss_agg_mode", "loss_agg_mode", get_args(LossAggMode)),
    ):
        if loss.get(name) not in known:
            return f"{option}={loss.get(name)} is not recomputed, only {listed(known)}"
    if loss["loss_agg_mode"] == _NORM and not loss.get("loss_scale_factor"):
        return f"{_NORM} divides by a width that is not recorded; verl's option loss_scale_factor sets it"
    if correction := _correction(inputs).get("rollout_is"):
        return f"rollout_correction.rollout_is={correction} has weights of replayed tokens, which are not recorded"
    return (
        f"the step has {updates} updates, and the optimizers of verl's workers are not rebuilt" if updates > 1 else ""
    )


def _of_log_probs(inputs: StepInputs, advantages: Tensor | None, reason: str) -> list[Check]:
    """Compare log-probs, ratios and loss terms with the recorded ones."""
    rows, tensors = inputs.step.rows, inputs.tensors
    of_verl = _is_of_verl(inputs)
    if "current_log_probs" not in tensors or advantages is None:
        reason = reason or _no_pass(inputs) or "needs log-probs of the policy; give the checkpoint of the step before"
        finite = _first("has no finite importance ratio", torch.from_numpy(~np.isfinite(rows["ratio"])))
        ratios = Check("ratios", len(rows), problems=tuple(finite), found="finite")
        return [
            Check("log-probs", 0, left_out=reason),
            _first_ratios(inputs) if of_verl else ratios,
            Check("loss", 0, left_out=reason),
        ]
    fresh = torch.from_numpy(rows["replayed"] == 0)[:, None] & tensors["old_known"]
    gaps = (tensors["current_log_probs"] - tensors["old_log_probs"]).abs().where(fresh, 0.0).amax(dim=1).numpy()
    passed = _differing("difference of log-probs", gaps, np.zeros(len(gaps)), inputs.tolerances["log-probs"])
    log_probs = Check("log-probs", int(fresh.sum()), *_as_check(passed))
    if of_verl:
        ratio = (tensors["current_log_probs"] - tensors["old_log_probs"]).exp()
        before = row_means(tensors["response_mask"], ratios=ratio)[1].numpy()
    if of_verl and (absent := _no_loss(inputs)):
        return [log_probs, _ratios(inputs, before), Check("loss", 0, left_out=absent)]
    after = np.zeros(len(rows), np.float32)
    terms: list[dict[str, Tensor]] = []
    ends = itertools.accumulate(map(len, inputs.step.updates))
    for update, end in zip(inputs.step.updates, ends, strict=True):
        loss = _loss(inputs, update, tensors["log_probs"][end - len(update) : end], advantages)
        after[list(update)] = row_means(_masks_of(inputs, update)[0], ratios=loss["importance_ratio"])[1].numpy()
        compared = VERL_TERMS if of_verl else loss.keys()
        terms.append({name: loss[name] for name in compared if name in inputs.step.loss})
    names = list(terms[0])
    means = np.array([float(torch.stack([term[name] for term in terms]).mean()) for name in names])
    recorded = np.array([inputs.step.loss[name] for name in names])
    of_loss = _differing("", means, recorded, inputs.tolerances["loss"], names)
    return [log_probs, _ratios(inputs, before if of_verl else after), Check("loss", len(names), *_as_check(of_loss))]


def _ratios(inputs: StepInputs, ratios: npt.NDArray[np.float32]) -> Check:
    result = _differing("ratio", ratios, inputs.step.rows["ratio"], inputs.tolerances["ratios"])
    return Check("ratios", len(ratios), *_as_check(result))


def _first_ratios(inputs: StepInputs) -> Check:
    """Check ratios of a trainer that records those before its first update: 1 in fresh rows."""
    rows = inputs.step.rows
    if _correction(inputs).get("bypass_mode"):
        return Check("ratios", 0, left_out="the trainer's policy made no pass before the update (bypass_mode)")
    wanted = np.where(rows["replayed"] == 0, np.float32(1.0), rows["ratio"])
    _, problems = _differing("ratio", wanted, rows["ratio"], 0.0)
    problems += _first("has no finite importance ratio", torch.from_numpy(~np.isfinite(rows["ratio"])))
    return Check("ratios", len(rows), problems=tuple(problems), found="fresh rows 1, replayed ones finite")


def _as_check(result: tuple[float, list[str]]) -> tuple[float, tuple[str, ...]]:
    return result[0], tuple(result[1])


def _differing(
    what: str,
    computed: npt.NDArray[Any],
    recorded: npt.NDArray[Any],
    tolerance: float,
    names: Sequence[str] | None = None,
    rounding: npt.NDArray[np.float64] | float = 0.0,
) -> tuple[float, list[str]]:
    """Return the largest difference, and a sentence on the values that differ; two NaN are equal."""
    one, other = computed.astype(np.float64), recorded.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    gaps = np.where(same, 0.0, np.abs(one - other))
    bad = ~(gaps <= tolerance * np.maximum(1.0, np.abs(other)) + rounding)
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
