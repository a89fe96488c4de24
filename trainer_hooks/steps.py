"""Rebuilds recorded training steps and compares them with their ledger (``trajstore replay-step``).

Only :func:`step_inputs` reads stores; the comparison is pure. Design: ``docs/design/ledger.md``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.masks import compute_response_mask
from trainer_hooks.plan import rows_of_rollout
from trainer_hooks.replay.late_values import SCORE, with_training
from trainer_hooks.trained import row_means
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.facts import GIVEN, RECORDED, session_of
from trajstore.errors import ConfigurationError, CorruptStoreError, TrajectoryUnavailableError, counted
from trajstore.ledger import LEDGER_FOLDER, TrainedStep, read
from trajstore.ledger.step import digest, mask_digest
from trajstore.trajectory import AgentTrajectory

TOLERANCE = 1e-6
"""Largest difference of advantages and weights that counts as equal; relative to the value where that is above 1."""

TENSORS = ("input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask", "response_mask", "step_ids")
"""The batch's tensors, as :func:`~trainer_hooks.batch.build_batch` makes them."""

NOTED = {"advantages": "stored_advantages", "rollout_is_weights": "stored_weights"}
"""Late value of a fresh row, reported by the trainer after the step -> name of its tensor."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step trained on. B rows of P prompt and R response positions.

    Attributes:
        step: the ledger's record.
        tensors: those of :data:`TENSORS`; ``rewards`` float64 [B], by which advantages are made; ``rollouts`` int64
            [B], the rollout of each row; ``old_log_probs`` [B, R], to which the loss's ratios are relative, and
            ``old_known`` bool [B, R], where they are recorded; of :data:`NOTED`, those that are late values of a fresh
            row, [B, R] with NaN elsewhere.
        rows: facts of each row's rollout: ``trajectory`` (its id), ``rollout_id``, ``task``, ``version``, ``replayed``,
            ``uid`` (name of the group that it was sampled in, or None), and ``corrected``: names of rewards that were
            changed since it was recorded, each with both values.
    """

    step: TrainedStep
    tensors: Mapping[str, Tensor]
    rows: Sequence[Mapping[str, Any]]


def step_inputs(
    path: str | Path, step: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> StepInputs:
    """Read the inputs of a step from a store of all rollouts with a ledger in its folder ``ledger``.

    All checksums of the rollouts' files are compared.

    Args:
        path: of the store, or a URL.
        step: number of the step.
        progress: called with the numbers of rollouts read and in all.

    Raises:
        StoreNotFoundError: there is no store, or no ledger.
        ConfigurationError: the ledger lacks the step, or does not have its padding token.
        TrajectoryUnavailableError: a row's rollout is in no store, or evicted; names step and row.
        CorruptStoreError: the store or the ledger is damaged, or a rollout lacks a row.
    """
    record = _record(path, step)
    if "pad_token_id" not in record.options:
        raise ConfigurationError(
            f"{path}: the record of step {step} has no options, so its batch cannot be rebuilt; pass options to "
            "the hook's step_done when recording"
        )
    ids = record.rows["trajectory"]
    if (unstored := ids < 0).any():
        raise TrajectoryUnavailableError(
            f"{path}: {counted(int(unstored.sum()), 'row')} of step {step} are of rollouts in no store, first row "
            f"{int(unstored.argmax())}; record all rollouts, with ReplayHook(rollouts=...) for example"
        )
    stored: dict[int, list[BatchRow]] = {}
    wanted = dict.fromkeys(ids.tolist())
    with Reader.open(path, verify_shards=True) as reader:
        for number, trajectory in enumerate(wanted):
            rollout = reader.get(trajectory)
            if not isinstance(rollout, AgentTrajectory):
                raise CorruptStoreError(f"{path}: trajectory {trajectory} of step {step} is not a rollout of an agent")
            trained = replace(with_training(rollout), metadata=rollout.metadata, notes=rollout.notes)
            stored[trajectory] = rows_of_rollout(trained, 0, number, is_replayed=False)
            progress(number + 1, len(wanted))
    return _inputs_of(record, stored, str(path))


def _inputs_of(record: TrainedStep, stored: Mapping[int, Sequence[BatchRow]], source: str) -> StepInputs:
    """Return the inputs of a step from the rows of its rollouts, by trajectory id.

    Raises:
        CorruptStoreError: a rollout lacks a row; names the source.
    """
    rows: list[BatchRow] = []
    facts: list[dict[str, Any]] = []
    of_score = record.options.get("advantages", {}).get("reward") == "score"
    times: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int | str, int], int] = {}
    rollouts: list[int] = []
    for place, (trajectory, part, group, replayed) in enumerate(
        record.rows[["trajectory", "row", "group", "replayed"]].tolist()
    ):
        parts = stored[trajectory]
        if not part < len(parts):
            raise CorruptStoreError(
                f"{source}: row {place} of step {record.step} is row {part} of trajectory {trajectory}, which has "
                f"{counted(len(parts), 'row')}"
            )
        row = parts[part]
        times[trajectory, part] = times.get((trajectory, part), -1) + 1  # replayed twice in a step: two rollouts
        session = session_of(row.trajectory.metadata)  # whose rows may be trajectories of their own
        name = trajectory if session is None else session[0]
        rollouts.append(numbers.setdefault((name, times[trajectory, part]), len(numbers)))
        rows.append(replace(row, group_id=group, is_experience_replay=bool(replayed)))
        facts.append(
            {
                "trajectory": trajectory,
                "rollout_id": row.trajectory.rollout_id,
                "task": row.trajectory.task_id,
                "version": row.trajectory.policy_version,
                "replayed": bool(replayed),
                "uid": row.trajectory.metadata.get("uid"),
                "corrected": _corrected(row.trajectory) if of_score else {},
            }
        )
    batch = build_batch(rows, record.options["pad_token_id"])
    old, known = _old_log_probs(rows, batch.tensors["response_mask"], record.options)
    reward_of = _score if of_score else _outcome
    tensors = {name: batch.tensors[name] for name in TENSORS} | {
        "rewards": torch.tensor([reward_of(row.trajectory) for row in rows], dtype=torch.float64),
        "rollouts": torch.tensor(rollouts),
        "old_log_probs": old,
        "old_known": known,
    }
    for name, tensor in NOTED.items():
        columns = [None if row.is_experience_replay else row.trajectory.notes.get(name) for row in rows]
        if any(column is not None for column in columns):
            tensors[tensor] = _padded(rows, columns)
    return StepInputs(record, tensors, facts)


def _record(path: str | Path, step: int) -> TrainedStep:
    """Return the ledger's record of a step."""
    folder = f"{path}/{LEDGER_FOLDER}"
    steps = read(folder, step, step).steps
    if step not in steps:
        raise ConfigurationError(f"{folder}: has no step {step}; `trajstore audit {folder}` lists its steps")
    return steps[step]


def _old_log_probs(
    rows: Sequence[BatchRow], response_mask: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the recorded log-probs that the loss uses, and where they are known; both [B, R]."""
    columns = []
    for row in rows:
        recorded = row.trajectory.old_log_probs
        if not row.is_experience_replay:  # where older weights sampled, the trainer's pass counts
            recorded = row.trajectory.notes.get("old_log_probs", recorded)
        columns.append(recorded if not row.is_experience_replay or options.get("recorded_log_probs", True) else None)
    padded = _padded(rows, columns)
    known = padded.isfinite() & (response_mask != 0)
    return torch.where(padded.isfinite(), padded, 0.0), known


def _padded(rows: Sequence[BatchRow], columns: Sequence[Tensor | None]) -> Tensor:
    """Return columns of responses as [B, R] float32, NaN where a response has no value."""
    padded = []
    for row, column in zip(rows, columns, strict=True):
        length = int(row.trajectory.input_ids.numel() - (row.trajectory.response_start or 0))  # type: ignore[union-attr]  # checked by build_batch
        whole = torch.full((length,), math.nan)
        if column is not None:
            whole[: len(column)] = column[:length].float()
        padded.append(whole)
    return pad_sequence(padded, batch_first=True, padding_value=math.nan)


def _score(trajectory: AgentTrajectory) -> float:
    """Return the score that the trainer reported, else that of the reward function; NaN = unknown."""
    score = None if trajectory.reward is None else trajectory.reward.metadata.get("score")
    return float(score) if isinstance(score, int | float) else math.nan


def _corrected(trajectory: AgentTrajectory) -> dict[str, list[float]]:
    """Return the rewards with another value than when the rollout was recorded: that one, then the present one."""
    late = trajectory.metadata.get(GIVEN, {})
    recorded = trajectory.metadata.get(RECORDED, {})
    pairs = {name: [recorded.get(name), late.get(name)] for name in ("outcome", SCORE)}
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def _outcome(trajectory: AgentTrajectory) -> float:
    """Return the outcome as recorded, without later corrections; NaN = unknown."""
    recorded = trajectory.metadata.get(RECORDED)
    if isinstance(recorded, dict) and "outcome" in recorded:
        return math.nan if recorded["outcome"] is None else float(recorded["outcome"])
    outcome = None if trajectory.reward is None else trajectory.reward.outcome
    return math.nan if outcome is None else float(outcome)


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
    """Recompute a step and compare it with the ledger's record."""
    rows = inputs.step.rows
    checks = (
        _rollouts(inputs),
        _masks(inputs),
        _rewards(inputs),
        *_of_advantages(inputs),
        _weights(inputs),
        _ratios(inputs),
    )
    return Report(inputs.step.step, len(rows), int(rows["replayed"].sum()), len(np.unique(rows["group"])), checks)


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
        *_differing("trained tokens", mask.sum(dim=1).numpy(), rows["tokens"], tolerance=0.0)[1],
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


def _of_advantages(inputs: StepInputs) -> list[Check]:
    """Compare recomputed and stored advantages with the ledger's."""
    rows, tensors = inputs.step.rows, inputs.tensors
    mask = tensors["response_mask"]
    advantages, reason = advantages_of(inputs)
    if advantages is None:
        checks = [Check("advantages", 0, left_out=reason)]
    else:
        means = row_means(mask, advantages=advantages)[1].numpy().astype(np.float32)
        result = _differing("advantage", means, rows["advantage"], rounding=_rounding(inputs, means))
        checks = [Check("advantages", len(rows), *result)]
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
        result = _differing("stored advantage", worst.float().numpy(), rows["advantage"])
        checks.append(Check("stored advantages", int(known.sum()), *result))
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
    result = _differing("weight", np.where(known, weights, rows["weight"]).astype(np.float32), rows["weight"])
    return Check("weights", int(known.sum()), *result)


def _correction(inputs: StepInputs) -> Mapping[str, Any]:
    correction: Mapping[str, Any] = inputs.step.options.get("rollout_correction", {})
    return correction


def _rejects(inputs: StepInputs) -> str:
    """Return why masks are unknown; empty if they are known."""
    rejects = _correction(inputs).get("rollout_rs")
    return f"rollout_correction.rollout_rs={rejects} rejects tokens, and which ones is not recorded" if rejects else ""


def _is_of_verl(inputs: StepInputs) -> bool:
    return bool(inputs.step.options.get("policy", {}).get("trainer") == "verl")


def _ratios(inputs: StepInputs) -> Check:
    """Check that ratios are finite; those of verl are from before its first update, so 1 in fresh rows."""
    rows, of_verl = inputs.step.rows, _is_of_verl(inputs)
    if "ratio" in inputs.step.unknown:
        return Check("ratios", 0, left_out="the ledger does not have them")
    problems = _first("has no finite importance ratio", torch.from_numpy(~np.isfinite(rows["ratio"])))
    if of_verl:
        wanted = np.where(rows["replayed"] == 0, 1.0, rows["ratio"])
        problems += _differing("ratio", wanted, rows["ratio"], tolerance=0.0)[1]
    found = "fresh rows 1, replayed ones finite" if of_verl else "finite"
    return Check("ratios", len(rows), problems=tuple(problems), found=found)


def _differing(
    what: str,
    computed: npt.NDArray[Any],
    recorded: npt.NDArray[Any],
    *,
    tolerance: float = TOLERANCE,
    rounding: npt.NDArray[np.float64] | float = 0.0,
) -> tuple[float, tuple[str, ...]]:
    """Return the largest difference, and a sentence on the values that differ; two NaN are equal."""
    one, other = computed.astype(np.float64), recorded.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    gaps = np.where(same, 0.0, np.abs(one - other))
    bad = ~(gaps <= tolerance * np.maximum(1.0, np.abs(other)) + rounding)
    largest = float(gaps.max(initial=0.0))
    if not bad.any():
        return largest, ()
    first = int(bad.argmax())
    number = f"; {counted(int(bad.sum()), 'value')} differ" if bad.sum() > 1 else ""
    return largest, (f"row {first}: {what} is {float(one[first])!r}, the ledger has {float(other[first])!r}{number}",)


def _first(problem: str, mask: Tensor) -> list[str]:
    """Return a sentence on the first row of a mask."""
    number = int(mask.sum())
    return [f"row {int(mask.int().argmax())} {problem} ({counted(number, 'row')} in all)"] if number else []
