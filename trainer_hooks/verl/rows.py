"""Between the rows of verl's data plane and trajectories. Pure: no data plane, no disk.

A row is one output of one session of a prompt; its key is ``{uid}_{session}_{index}``. A session with more than one
output (an agent loop that summarises its context, say) has several rows and is one trajectory
(``trainer_hooks.replay.rows``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_hooks.guidance.context import GUIDANCE
from trainer_hooks.metrics import score_of
from trainer_hooks.replay import mean_entropy
from trainer_hooks.replay.compact import with_usual_columns
from trainer_hooks.replay.entry import EARLIER_RUN, is_demonstration, llm_mask
from trainer_hooks.replay.rows import pack_rows, row_count
from trainer_hooks.verl.config import SECTION, OutcomeRule
from trainer_hooks.verl.offers import OFFER, Report, is_exchanged
from trainer_hooks.verl.tasks import task_name
from trainer_hooks.verl.tokens import Tokens, tokens_of
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward

FIRST_REPLAYED_SESSION = 1000
"""Sessions from here on are replayed rows; verl numbers those it generates from 0 to n - 1."""

NEEDED_UNRATED = ("index", "data_source", "prompts", "responses", "response_mask")
"""Columns that every row must have to be recorded."""

NEEDED = (*NEEDED_UNRATED, "rm_scores", "old_log_probs")
"""Columns that every row of a batch must have that is trained on."""

WELCOME = ("entropy", "rollout_log_probs", "extra_fields", "raw_prompt", "reward_model", "num_turns")
"""Columns that are recorded where rows have them."""

_KNOWN_EXTRA = frozenset(
    ("reward_extra_info", "min_global_steps", "max_global_steps", "turn_scores", "tool_rewards", "raw_prompt", OFFER)
)
"""Extra fields of verl's agent loop that are recorded in places of their own."""

NOT_GUIDED = "not_guided"
"""Key of ``metadata``: why a rollout was not shown the experience that there was for it."""

_LEAST, _MOST = -(2**63), 2**64 - 1
"""Integers that the store has."""

_OF_ONE_OUTPUT = ("token_scores",)
"""Keys of ``metadata`` that each output of a session has for itself."""

_OF_THIS_SAMPLE = ("routed_experts", "teacher_ids", "teacher_logprobs")
"""Columns that say something of each token and are not recorded, so that a row which has one cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the data plane holds it."""

    key: str
    tag: Mapping[str, Any]
    columns: Mapping[str, Any]
    """By name; token columns are tensors of this row's own length."""


def session_of(key: str) -> str:
    """Return ``{uid}_{session}`` of a row's key.

    Raises:
        ConfigurationError: the key has not three parts, as when a uid has an underscore in it.
    """
    parts = key.split("_")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise ConfigurationError(
            f"row {key!r}: not {{uid}}_{{session}}_{{index}}; a uid must have no '_', or verl loses the row's group"
        )
    return key.rpartition("_")[0]


def output_of(key: str) -> int:
    """Return the number of an output in its session, by a row's key."""
    return int(key.rpartition("_")[2])


def trajectories_of(
    rows: Sequence[Row], outcome: OutcomeRule, *, step: int, run: str, fingerprint: str, trained: bool = True
) -> list[AgentTrajectory]:
    """Return the rows that were generated in a step as trajectories, one for each session, in order of arrival.

    Tensors are not shared with the rows. ``metadata`` has the ``run`` and the ``step``, the ``uid`` of the group, the
    weights that sampled (``min_global_steps``, ``max_global_steps``) and ``token_scores``: what the reward gave,
    ``[[position in the response, score], ...]``, of each row by itself where a session has several ``outputs``.
    ``task_rollouts``, the task's sessions of this step, tells a reader whether it has all of a group, of which a crash
    may have taken a part. ``trained`` is false for rows of a group that the sampler dropped; they
    have no log-probs of the actor. Where rows have them: ``ground_truth``, ``num_turns``, ``turn_scores``,
    ``tool_rewards``, and under ``extra_fields`` what else the agent loop gave; ``messages`` is the prompt. Ids and
    masks are in few bytes (``trainer_hooks.replay.compact``). ``guidance`` says what a rollout was shown,
    ``not_guided`` why it was not, where something was offered; the engine's log-probs are left out where the row has
    another prompt than it was sampled with.
    A rollout whose reward gave no outcome has none: its ``reward.outcome`` is ``None``.

    Args:
        rows: all of the step, with the columns of :data:`NEEDED`.
        outcome: says what a success is.
        step: number of the training step; the policy version of the trajectories.
        run: identifies the process that made them.
        fingerprint: tokenizer and chat template.
        trained: whether they are trained on.

    Raises:
        ConfigurationError: a row's key is none of verl's.
    """
    sessions: dict[str, list[Row]] = {}
    for row in rows:
        sessions.setdefault(session_of(row.key), []).append(row)
    several = [outputs for outputs in sessions.values() if len(outputs) > 1]
    for outputs in several:
        outputs.sort(key=lambda row: output_of(row.key))
    ordered = [row for outputs in sessions.values() for row in outputs]
    parted = zip(ordered, tokens_of([row.columns for row in ordered]), strict=True)
    made = []
    for outputs in sessions.values():
        parts = [
            _trajectory_of(row, tokens, outcome, step=step, run=run, fingerprint=fingerprint)
            for row, tokens in itertools.islice(parted, len(outputs))
        ]
        made.append(parts[0] if len(parts) == 1 else _session(parts))
    count = Counter(one.task_id for one in made)
    for one, outputs in zip(made, sessions.values(), strict=True):
        one.metadata |= {"outputs": len(outputs), "task_rollouts": count[one.task_id], "trained": trained}
    return made


def _session(outputs: Sequence[AgentTrajectory]) -> AgentTrajectory:
    """Return the outputs of a session as one rollout.

    verl scores a session by its last output, and counts that one in the group; what is known of the whole session
    stands there too.
    """
    first, last = outputs[0], outputs[-1]
    first.metadata = last.metadata | {name: first.metadata[name] for name in (*_OF_ONE_OUTPUT, "min_global_steps")}
    one = pack_rows(outputs, per_row=_OF_ONE_OUTPUT)
    one.reward = last.reward
    if one.entropys is not None and one.response_mask is not None:
        one.entropy = mean_entropy(one.entropys, one.response_mask)
    return one


def replayable(made: Iterable[AgentTrajectory]) -> list[AgentTrajectory]:
    """Return the rollouts of one step that can be replayed, in an order that is not that of their arrival.

    Earlier versions recorded each output of a session by itself; where there were several, these stay out. What the
    pool makes of them, and which it draws later, shall be the same in two equal runs. A uid is another one in every
    run, so they are ordered by task and session.
    """
    chosen = [one for one in made if one.metadata.get("outputs", 1) == row_count(one)]
    return sorted(chosen, key=lambda one: (one.task_id, int(one.rollout_id.split("_")[1])))


def _trajectory_of(
    row: Row, tokens: Tokens, outcome: OutcomeRule, *, step: int, run: str, fingerprint: str
) -> AgentTrajectory:
    columns = row.columns
    extra = columns.get("extra_fields") or {}
    reward_extra = plain(extra.get("reward_extra_info") or {})
    return AgentTrajectory(
        messages=messages_of(columns.get("raw_prompt")),
        input_ids=tokens.input_ids,
        loss_mask=tokens.loss_mask,
        response_start=tokens.prompt,
        old_log_probs=tokens.old_log_probs,
        entropys=tokens.entropys,
        entropy=tokens.entropy,
        response_mask=tokens.response_mask,
        # Of another prompt, where experience was taken out of it.
        rollout_log_probs=None if is_exchanged(extra) else tokens.rollout_log_probs,
        reward=None if tokens.score is None else _reward(tokens.score, reward_extra, outcome),
        task_id=task_name(columns["data_source"], columns["index"]),
        data_id=str(columns["data_source"]),
        rollout_id=row.key,
        policy_version=step,
        tokenizer_fingerprint=fingerprint,
        metadata={
            "run": run,
            "step": step,
            "uid": row.key.split("_")[0],
            "min_global_steps": row.tag.get("min_global_steps"),
            "max_global_steps": row.tag.get("max_global_steps"),
            "token_scores": [[place, plain(score)] for place, score in tokens.scores],
            **_told_by_the_loop(columns, extra),
            **_told_of_guidance(Report.of(extra)),
        },
    )


def _reward(score: float, extra: Mapping[str, Any], rule: OutcomeRule) -> Reward:
    try:
        outcome: float | None = rule.of(score, extra)
    except InvalidTrajectoryError:
        outcome = None  # one such reward must not end the run; the session tells of it
    if outcome is not None and not math.isfinite(outcome):
        outcome = None
    return Reward(outcome=outcome, metadata={"score": plain(score), "extra": extra})


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Return the prompt's messages as JSON; nothing if it is no list of messages."""
    found = plain(prompt)
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        return []
    return found


def _told_by_the_loop(columns: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the data set and the agent loop tell of a rollout beyond its tokens, for ``metadata``."""
    told: dict[str, Any] = {}
    truth = columns.get("reward_model")
    if isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
        told["ground_truth"] = plain(truth["ground_truth"])
    if columns.get("num_turns") is not None:
        told["num_turns"] = plain(columns["num_turns"])
    for name in ("turn_scores", "tool_rewards"):
        if extra.get(name) is not None and extra[name] != []:
            told[name] = plain(extra[name])
    rest = {name: plain(value) for name, value in extra.items() if name not in _KNOWN_EXTRA and value is not None}
    return told | ({"extra_fields": rest} if rest else {})


def _told_of_guidance(report: Report | None) -> dict[str, Any]:
    """Return what a rollout was shown, or why nothing was, for ``metadata``."""
    if report is None:
        return {}
    if report.guidance is not None:
        return {GUIDANCE: report.guidance.to_json()}
    return {NOT_GUIDED: report.trouble} if report.trouble else {}


def replayed_row(template: Row, trajectory: AgentTrajectory, number: int, *, own_group: bool, output: int = 0) -> Row:
    """Return the row by which a recorded trajectory joins the group of a row that was generated in this step.

    It has every column that the template has: a column that one row lacks would vanish from all of them. What
    the dataset says of the task is the template's; tokens, masks, scores and versions are the trajectory's.

    Args:
        template: a row of the same prompt.
        trajectory: as :func:`trajectories_of` made it, or another program's, whose outcome is its score, or a
            demonstration, whose log-probs the actor's pass will give; of several rows, one of them.
        number: counts the histories of the prompt from 0.
        output: number of the row in its history.
        own_group: it shall be a group of GRPO of its own.

    Raises:
        ConfigurationError: the rows have columns that a replayed row cannot have.
        InvalidTrajectoryError: the trajectory lacks its tokens.
    """
    present = [name for name in _OF_THIS_SAMPLE if template.columns.get(name) is not None]
    if template.columns.get("multi_modal_inputs"):
        present.append("multi_modal_inputs")
    if present:
        raise ConfigurationError(
            f"rows have {', '.join(present)}, which recorded trajectories have not: they cannot be replayed beside"
            " them. Set exp_manager.experience_replay.enable=false; recording works"
        )
    trajectory = with_usual_columns(trajectory)
    ids, start, mask = trajectory.input_ids, trajectory.response_start, llm_mask(trajectory)
    demonstration = is_demonstration(trajectory)
    if ids is None or start is None or mask is None or (trajectory.old_log_probs is None and not demonstration):
        raise InvalidTrajectoryError(f"rollout {trajectory.rollout_id!r}: lacks tokens, mask or log-probs")
    response = ids[start:]
    session = FIRST_REPLAYED_SESSION + number
    uid = str(template.columns["uid"])
    oldest, newest = _versions(trajectory)
    if demonstration or EARLIER_RUN in trajectory.metadata:
        # No weights of this run sampled it: verl's figures of lag shall not speak of it.
        oldest, newest = (int(template.tag[name]) for name in ("min_global_steps", "max_global_steps"))
    columns: dict[str, Any] = {
        **template.columns,
        "prompts": ids[:start],
        "responses": response,
        "input_ids": ids,
        "position_ids": torch.arange(ids.numel(), dtype=torch.int64),
        "response_mask": mask.long(),
        "loss_mask": mask.long(),
        "rm_scores": _scores(trajectory, response.numel()),
        "uid": f"{uid}-replayed-{number}" if own_group else uid,
        "session_id": session,
        "extra_fields": _extra_fields(template.columns.get("extra_fields") or {}, trajectory, oldest, newest),
    }
    if "num_turns" in template.columns:
        columns["num_turns"] = trajectory.metadata.get("num_turns", template.columns["num_turns"])
    if "attention_mask" in template.columns:
        columns["attention_mask"] = torch.ones_like(ids)
    if "rollout_log_probs" in template.columns:
        recorded = trajectory.old_log_probs if trajectory.rollout_log_probs is None else trajectory.rollout_log_probs
        # A demonstration's are written when the actor has given it some: rollout correction then weighs it 1.
        columns["rollout_log_probs"] = torch.zeros(response.numel()) if recorded is None else recorded.float()
    tag = {
        **template.tag,
        "prompt_len": start,
        "response_len": response.numel(),
        "seq_len": ids.numel(),
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }
    return Row(f"{template.key.split('_')[0]}_{session}_{output}", tag, columns)


def _extra_fields(template: Mapping[str, Any], trajectory: AgentTrajectory, oldest: int, newest: int) -> dict[str, Any]:
    """Return the extra fields of a replayed row: the trajectory's own. Names that it has none for are ``None``."""
    of_rollout = {**trajectory.metadata.get("extra_fields", {})}
    of_rollout |= {
        name: trajectory.metadata.get(name, []) for name in ("turn_scores", "tool_rewards") if name in template
    }
    if "raw_prompt" in template:  # of the task, which is the template's too
        of_rollout["raw_prompt"] = template["raw_prompt"]
    return {
        **dict.fromkeys(template),
        **of_rollout,
        "min_global_steps": oldest,
        "max_global_steps": newest,
        "reward_extra_info": (trajectory.reward.metadata if trajectory.reward else {}).get("extra", {}),
    }


def recorded_log_probs(trajectory: AgentTrajectory, length: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs that a trajectory holds for its response, [length], and where it holds one."""
    recorded = torch.zeros(length, dtype=torch.float32)
    held = trajectory.old_log_probs
    if held is not None:
        count = min(length, held.numel())
        recorded[:count] = held[:count]
    known = torch.arange(length) < (0 if held is None else held.numel())
    known &= recorded.isfinite()
    return torch.where(known, recorded, 0.0), known


def plain(value: Any) -> Any:
    """Return a value as the store has it: numbers of numpy and torch as Python's, what it has no equal of as its text.

    Those are objects, numbers that are not finite, and integers beyond 64 bits. Half of a surrogate pair, which no
    file can hold, is told by its escape. What is told of a rollout is for reading, and must not cost the rollout.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | Mapping):  # most are dicts, which is seen much faster
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | Tensor) and value.ndim:
        return plain(value.tolist())
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.item()
    storable = isinstance(value, int) and _LEAST <= value <= _MOST
    storable = storable or (isinstance(value, float) and math.isfinite(value))
    return value if storable else plain(str(value))


def _versions(trajectory: AgentTrajectory) -> tuple[int, int]:
    """Return the weights that sampled, oldest and newest, as verl's tags have them: one below the step's number."""
    step = trajectory.policy_version
    before = 0 if step is None else step - 1
    found = [trajectory.metadata.get(name) for name in ("min_global_steps", "max_global_steps")]
    oldest, newest = (before if value is None else int(value) for value in found)
    return oldest, newest


def _scores(trajectory: AgentTrajectory, length: int) -> Tensor:
    scores = torch.zeros(length, dtype=torch.float32)
    placed = trajectory.metadata.get("token_scores")
    if placed is None:  # another program's rollout, or a demonstration
        placed = [] if (score := score_of(trajectory)) is None else [(-1, score)]
    for place, score in placed:
        scores[place] = torch.nan if score is None else float(score)  # JSON has no NaN: it is the text "nan"
    return scores


def has_outcome(trajectory: AgentTrajectory) -> bool:
    """Return whether a rollout's reward told whether it succeeded."""
    return trajectory.reward is not None and trajectory.reward.outcome is not None


def why_no_outcome(trajectory: AgentTrajectory, rule: OutcomeRule) -> str:
    """Return why a rollout has no outcome, in a clause that names the option."""
    if trajectory.reward is None:
        return "it was dropped before it had a reward"
    extra = trajectory.reward.metadata.get("extra", {})
    if rule.key is None:
        return f"its score is {trajectory.reward.metadata.get('score')}"
    if rule.key in extra:
        return f"{SECTION}.outcome.key: {rule.key!r} is {extra[rule.key]!r}, no finite number"
    known = ", ".join(sorted(extra)) or "none"
    return f"{SECTION}.outcome.key: the reward function gave no {rule.key!r}; it gave: {known}"
