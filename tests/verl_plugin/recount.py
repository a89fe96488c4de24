"""Recomputes a run's ages, denominators, advantages, losses and group sizes from its store.

Nothing of ``trainer_hooks`` is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajstore import AgentTrajectory

from .witness import LossRow, MicroBatch

LOW = HIGH = 0.2
"""verl's clip range."""
DUAL_CLIP = 3.0


@dataclasses.dataclass(frozen=True)
class OffPolicyLoss:
    """A run's loss options for replayed tokens."""

    shaping: float | None = None
    drop_negative: bool = False
    clip: bool = True
    high: float = 1.0


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a recorded session, with its rollout."""

    rollout: AgentTrajectory
    number: int
    count: int
    prompt: tuple[int, ...]
    response_mask: torch.Tensor
    log_probs: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of :func:`recount`."""

    differences: Counter[str]
    """Number of differences between the loss's rows, the store and the logged figures, by kind; empty if all agree."""
    rows: int
    """Rows of the loss without padding."""
    replayed_rows: int
    replayed_of_several: int
    """Replayed rows of sessions with several outputs."""
    rows_of: dict[str, int]
    """Sessions per group, by ``uid``."""
    beyond_clip: int
    """Replayed tokens whose loss clipping changes or would change."""
    ages: dict[int, list[int]]
    """Steps since each replayed row of this run was sampled, in the step that trained it."""
    waited: int
    """Replayed rows sampled by other weights than those that scored them."""

    def __str__(self) -> str:
        ages = [age for held in self.ages.values() for age in held]
        wrong = ", ".join(f"{count} {kind}" for kind, count in self.differences.items()) or "none"
        return (
            f"{self.rows} rows, {self.replayed_rows} replayed ({self.waited} sampled by older weights than those that"
            f" scored them), {len(self.rows_of)} groups, {len(ages)} ages up to {max(ages, default=0)};"
            f" differences: {wrong}"
        )


def check_loss_rows(*args: Any, **options: Any) -> Counted:
    """As :func:`recount`; fails if there is a difference."""
    counted = recount(*args, **options)
    assert not counted.differences, str(counted)
    return counted


def recount(
    rows: Sequence[LossRow],
    rollouts: Sequence[AgentTrajectory],
    *,
    group: Callable[[str], int],
    separate: bool = False,
    loss: OffPolicyLoss | None = None,
    steps: Sequence[Mapping[str, float]] = (),
) -> Counted:
    """Compare the loss's rows with the store, every loss with its rows, and the logged ages with those of the store.

    A row is an output of a recorded session with the same tokens and exactly the log-probs of the policy that sampled.
    Fresh rows that waited have those of the step's actor instead. The sessions of a
    group made by this run share a prompt and are complete. ``exp_mask`` is the response mask for sessions made in
    another group. Advantages are GRPO's over the recorded session scores. Every micro-batch with counted tokens has a
    fresh row, and its loss follows the formula.

    Args:
        rows: all of the run.
        rollouts: the store's trained rollouts.
        group: maximum number of sessions per group.
        separate: each replayed session forms its own group.
        loss: of replayed tokens; ``None`` = the defaults.
        steps: the logged metrics of each step.
    """
    differences: Counter[str] = Counter()
    recorded: dict[tuple[int, ...], list[Output]] = defaultdict(list)
    for rollout in rollouts:
        for tokens, output in _outputs(rollout):
            recorded[tokens].append(output)
    groups: dict[str, list[tuple[LossRow, Output, bool]]] = defaultdict(list)
    micro_batches: dict[MicroBatch, list[tuple[LossRow, bool]]] = defaultdict(list)
    for row in rows:
        if not row.response_mask.any():  # verl's padding row
            continue
        uid, _, apart = row.uid.partition("-replayed-")
        match = [candidate for candidate in recorded[row.tokens] if _has_log_probs_of(row, candidate, uid, apart)]
        if not match:
            differences["denominators" if row.tokens in recorded else "unknown tokens"] += 1
            continue
        own = [candidate for candidate in match if candidate.rollout.metadata["uid"] == uid and not apart]
        recorded_row = (own or match)[0]
        replayed = not own
        mask = row.exp_mask[: row.response.numel()]
        wanted_mask = recorded_row.response_mask if replayed else torch.zeros_like(mask)
        differences["groups of their own"] += bool(apart) != (replayed and separate)
        differences["response masks"] += not torch.equal(row.response_mask, recorded_row.response_mask)
        differences["exp_mask"] += not torch.equal(mask, wanted_mask) or bool(row.exp_mask[len(mask) :].any())
        groups[uid].append((row, recorded_row, replayed))
        micro_batches[row.micro_batch].append((row, replayed))
    for held in groups.values():
        differences += _differences_of(held, group, separate=separate)
    for micro_batch, seen in micro_batches.items():
        differences["micro-batches of replayed rows alone"] += all(replayed for _, replayed in seen)
        wanted = sum(_loss(row, loss or OffPolicyLoss(), off=replayed) for row, replayed in seen)
        wanted /= micro_batch.batch_tokens
        differences["losses"] += not math.isclose(micro_batch.loss, wanted, rel_tol=1e-3, abs_tol=1e-5)
    everything = [candidate for held in groups.values() for candidate in held]
    step_of = {rollout.metadata["uid"]: rollout.metadata.get("step") for rollout in rollouts}
    ages: dict[int, list[int]] = defaultdict(list)
    for uid, held in groups.items():
        for _, recorded_row, replayed in held:
            sampled = recorded_row.rollout.metadata.get("min_global_steps")
            if replayed and sampled is not None:
                ages[step_of[uid]].append(step_of[uid] - (sampled + 1))
    for rollout in rollouts:
        sampled = rollout.metadata.get("min_global_steps")
        differences["policy versions"] += sampled is not None and rollout.policy_version != sampled + 1
    for step in steps:
        differences["logged ages"] += _ages_differ(step, ages.get(int(step["step"]), []))
    return Counted(
        differences=+differences,
        rows=len(everything),
        replayed_rows=sum(replayed for _, _, replayed in everything),
        replayed_of_several=sum(replayed and recorded_row.count > 1 for _, recorded_row, replayed in everything),
        rows_of={
            uid: len({recorded_row.rollout.rollout_id for _, recorded_row, _ in held}) for uid, held in groups.items()
        },
        ages=dict(ages),
        waited=sum(replayed and _has_waited(recorded_row.rollout) for _, recorded_row, replayed in everything),
        beyond_clip=sum(_beyond_clip(row, loss or OffPolicyLoss()) for row, _, replayed in everything if replayed),
    )


def _has_waited(rollout: AgentTrajectory) -> bool:
    """Return whether weights before those of its step sampled some of a rollout."""
    oldest, step = rollout.metadata.get("min_global_steps"), rollout.metadata.get("step")
    return oldest is not None and step is not None and oldest < step - 1


def _has_log_probs_of(row: LossRow, output: Output, uid: str, apart: str) -> bool:
    """Return whether a row has exactly the sampling policy's log-probs on the model's tokens."""
    if output.rollout.metadata["uid"] == uid and not apart and _has_waited(output.rollout):
        return True
    written = row.response_mask.bool()
    return output.log_probs is not None and torch.equal(output.log_probs[written], row.old_log_probs[written])


def _differences_of(
    held: Sequence[tuple[LossRow, Output, bool]], group: Callable[[str], int], *, separate: bool
) -> Counter[str]:
    """Return the differences of a group."""
    differences: Counter[str] = Counter()
    sessions = {recorded_row.rollout.rollout_id: (recorded_row.rollout, replayed) for _, recorded_row, replayed in held}
    task, *others = {rollout.task_id for rollout, _ in sessions.values()}
    asked = {recorded_row.prompt for _, recorded_row, _ in held if not recorded_row.number}
    rows = sum(recorded_row.count for _, recorded_row, _ in held if not recorded_row.number)
    differences["tasks of a group"] += bool(others)
    differences["prompts of a group"] += len(asked) != 1
    differences["group sizes"] += len(sessions) != group(task)
    differences["incomplete sessions"] += len(held) != rows
    scores = {name: rollout.reward.metadata["score"] for name, (rollout, _) in sessions.items() if rollout.reward}
    together = torch.tensor([scores[name] for name, (_, replayed) in sessions.items() if not (separate and replayed)])
    mean, deviation = (together.mean(), together.std() + 1e-6) if len(together) > 1 else (torch.tensor(0.0), 1.0)
    for row, recorded_row, replayed in held:
        score = scores[recorded_row.rollout.rollout_id]
        value = score if separate and replayed else float((score - mean) / deviation)
        wanted = value * row.response_mask.float()
        differences["advantages"] += not torch.allclose(row.advantages, wanted, atol=1e-4, rtol=1e-4)
    return differences


def _ages_differ(step: Mapping[str, float], ages: Sequence[int]) -> bool:
    """Return whether a step's logged ages are not those of its replayed rows."""
    logged = [step.get(f"experience_replay/age_{name}", math.nan) for name in ("mean", "max", "min")]
    wanted = [sum(ages) / len(ages), max(ages), min(ages)] if ages else [math.nan] * 3
    return not np.allclose(logged, wanted, equal_nan=True)


def _loss(row: LossRow, options: OffPolicyLoss, *, off: bool) -> float:
    """Return the sum of a row's token losses."""
    return sum(_token_losses(row, options, off=off))


def _beyond_clip(row: LossRow, options: OffPolicyLoss) -> int:
    """Return the number of a replayed row's tokens whose loss clipping changes by more than rounding."""
    both = (_token_losses(row, dataclasses.replace(options, clip=clip), off=True) for clip in (True, False))
    return sum(not math.isclose(*pair, rel_tol=1e-2, abs_tol=1e-3) for pair in zip(*both, strict=True))


def _token_losses(row: LossRow, options: OffPolicyLoss, *, off: bool) -> list[float]:
    losses = []
    columns = (row.log_probs, row.old_log_probs, row.advantages, row.response_mask)
    for current, old, advantage, counts in zip(*(column.tolist() for column in columns), strict=True):
        if not counts or (off and options.drop_negative and advantage < 0):
            continue
        ratio = math.exp(current - old)
        if off and options.shaping is not None:
            ratio /= ratio + options.shaping
        if options.clip or not off:
            high = options.high if off else HIGH
            ratio = min(ratio, 1 + high) if advantage >= 0 else min(max(ratio, 1 - LOW), DUAL_CLIP)
        losses.append(-advantage * ratio)
    return losses


def _outputs(rollout: AgentTrajectory) -> list[tuple[tuple[int, ...], Output]]:
    """Return the outputs of a recorded session with their tokens."""
    ids = rollout.input_ids.tolist()
    parts = rollout.metadata.get("rows", [{"tokens": len(ids), "prompt": rollout.response_start}])
    made = []
    first = 0
    for number, part in enumerate(parts):
        start, end = first + part["prompt"], first + part["tokens"]
        response = slice(start - rollout.response_start, end - rollout.response_start)
        column = rollout.rollout_log_probs if _has_waited(rollout) else rollout.old_log_probs
        log_probs = None if column is None else column[response]
        mask = rollout.response_mask[response]
        output = Output(rollout, number, len(parts), tuple(ids[first:start]), mask, log_probs)
        made.append((tuple(ids[first:end]), output))
        first = end
    assert first == len(ids)
    return made


def check_choices(
    rows: Sequence[LossRow],
    rollouts: Sequence[AgentTrajectory],
    *,
    count: int,
    value: Callable[[AgentTrajectory], float],
    least_used_first: bool,
) -> int:
    """Check that each group has the histories that the options prefer; return how often some were left out.

    A task's pool before a step is recomputed from the record: the distinct token sequences of its successes in all
    earlier steps, since all of its rollouts last succeeded.

    Args:
        rows: all of the run.
        rollouts: those of the store that were trained on.
        count: histories per group, if the pool has enough.
        value: sort key, smallest first.
        least_used_first: less used histories come first.
    """
    replayed: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for row in rows:
        if row.exp_mask.any():
            replayed[row.uid.partition("-replayed-")[0]].add(row.tokens)
    made: dict[int, dict[str, list[AgentTrajectory]]] = defaultdict(lambda: defaultdict(list))
    for rollout in rollouts:
        made[int(rollout.policy_version or 0)][rollout.metadata["uid"]].append(rollout)
    pool: dict[str, dict[tuple[int, ...], AgentTrajectory]] = defaultdict(dict)
    uses: Counter[tuple[int, ...]] = Counter()
    left = 0
    for _, groups in sorted(made.items()):
        for uid, fresh in groups.items():
            if uid not in replayed:
                continue
            held = pool[fresh[0].task_id]
            ranks = {key: (uses[key] if least_used_first else 0, value(success)) for key, success in held.items()}
            outputs = {key: {tokens for tokens, _ in _outputs(success)} for key, success in held.items()}
            chosen = [key for key, tokens in outputs.items() if tokens <= replayed[uid]]
            assert replayed[uid] == set().union(*(outputs[key] for key in chosen))
            assert sorted(ranks[key] for key in chosen) == sorted(ranks.values())[:count]
            left += len(held) > len(chosen)
            uses.update(chosen)
        for fresh in groups.values():
            held = pool[fresh[0].task_id]
            successes = [success for success in fresh if success.reward and success.reward.outcome == 1.0]
            if len(successes) == len(fresh):
                held.clear()
                continue
            for success in successes:
                held.setdefault(tuple(success.input_ids.tolist()), success)
    return left


def mean_entropy(rollout: AgentTrajectory) -> float:
    """Return the mean entropy over the model's tokens, in nats."""
    return float(rollout.entropys[rollout.response_mask.bool()].double().mean())
