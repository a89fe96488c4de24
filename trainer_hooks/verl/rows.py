"""Conversion between rows of verl's data plane and trajectories. Pure: no data plane, no disk.

A row is one output of one session of a prompt; its key is ``{uid}_{session}_{index}``. A session with several outputs
(for example of an agent loop that summarises its context) has several rows and is one trajectory
(``trainer_hooks.replay.rows``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_hooks.guidance.context import GUIDANCE
from trainer_hooks.metrics import score_of
from trainer_hooks.plain import plain, restored
from trainer_hooks.replay.entry import EARLIER_RUN, is_demonstration, llm_mask
from trainer_hooks.replay.rows import ROWS, pack_rows, small_ids, small_mask, with_usual_columns
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import SECTION, OutcomeRule
from trainer_hooks.verl.offers import OFFER, Report, is_exchanged
from trainer_hooks.verl.tasks import task_name
from trajstore._core.columns.facts import SESSION
from trajstore._core.columns.facts import session_of as agent_session_of
from trajstore.attachments import ATTACHED, FILLED, attach, attached
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward

FIRST_REPLAYED_SESSION = 1000
"""First session number of replayed rows; verl numbers generated sessions from 0 to n - 1."""

TASK = ("index", "data_source")
"""Columns that identify a row's task."""

NEEDED = (*TASK, "prompts", "responses", "response_mask")
"""Required columns of recorded rows."""

REPLAYED = (*TASK, "response_mask", "old_log_probs", "exp_mask")
"""Required columns of replayed rows."""

WELCOME = ("rm_scores", "rollout_log_probs", "extra_fields", "raw_prompt", "reward_model", "num_turns")
"""Optional columns, recorded if present."""

ROUTES = "routed_experts"
"""Column with the expert routes, ``[L, layers, k]``."""

MEDIA = "multi_modal_inputs"
"""Column with the processor's tensors of images, sound and video, by name."""

REUSE = "trajstore_reuse"
"""Column of a prompt with its finished rollouts, and key of ``extra_fields`` of a row that comes from the store."""

_KNOWN_EXTRA = frozenset(
    (
        "reward_extra_info",
        "min_global_steps",
        "max_global_steps",
        "turn_scores",
        "tool_rewards",
        "raw_prompt",
        OFFER,
        REUSE,
    )
)
"""Extra fields of verl's agent loop that are recorded separately."""

LEFT_OUT = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "loss_mask",
    "global_steps",
    "agent_name",
    "exp_mask",
    OFFER,
    REUSE,
)
"""Columns of a first put that are not recorded: the others and the tag determine them, or the plugin added them."""

_RECORDED = frozenset((*NEEDED, *WELCOME, "uid", "session_id", *LEFT_OUT))
"""Columns that a trajectory's own fields have, or that are left out."""

NOT_GUIDED = "not_guided"
"""Key of ``metadata``: reason why a rollout was not shown its experience."""

SAMPLING = "sampling"
"""Key of ``metadata``: digest of the options that a rollout depends on."""

_OF_ONE_OUTPUT = ("token_scores", SESSION, ATTACHED, FILLED)
"""Keys of ``metadata`` with a value per output of a session."""

_OF_THIS_SAMPLE = (ROUTES, "teacher_ids", "teacher_logprobs")
"""Per-token columns of which the pool has none, so rows with one of them cannot be replayed."""


def session_of(key: str) -> str:
    """Return ``{uid}_{session}`` of a row's key.

    Raises:
        ConfigurationError: the key does not have three parts, for example because a uid contains an underscore.
    """
    parts = key.split("_")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise ConfigurationError(
            f"row {key!r}: not {{uid}}_{{session}}_{{index}}; a uid must have no '_', or verl loses the row's group"
        )
    return key.rpartition("_")[0]


def is_reused(row: Row) -> bool:
    """Return whether a row comes from the store, and was not generated."""
    return REUSE in (row.columns.get("extra_fields") or {})


def output_of(key: str) -> int:
    """Return the number of an output in its session, from a row's key."""
    return int(key.rpartition("_")[2])


def rollout_of(outputs: Sequence[Row], outcome: OutcomeRule, *, run: str, fingerprint: str) -> AgentTrajectory:
    """Return the generated rows of a session as its rollout.

    Tensors are not shared with the rows; ids and masks use small dtypes (``trainer_hooks.replay.rows``).
    ``messages`` is the prompt. ``reward.outcome`` is ``None`` if the reward gave none. The engine's log-probs are left
    out if the row's prompt differs from the one it was sampled with. Log-probs and entropies of the actor come later
    (``trainer_hooks.replay.late_values``). ``metadata`` has:

    - ``run``, ``uid`` of the group, and ``step``: that after the newest weights that sampled, or the one that asked;
    - ``min_global_steps``, ``max_global_steps``: the weights that sampled;
    - ``token_scores``: ``[[position in the response, score], ...]``, per row if a session has several ``outputs``;
    - if present: ``ground_truth``, ``num_turns``, ``turn_scores``, ``tool_rewards``, ``extra_fields`` with all
      other fields of the agent loop, and ``columns`` with all other columns;
    - ``session``: which row of an agent session it is, if the agent loop returned one; per row;
    - ``attached``: tensors, arrays, bytes and images of these, by dotted name (:func:`trajstore.attached`); their
      place in ``extra_fields``, ``columns`` and ``messages`` has ``{"trajstore.attached": name}``;
    - after an offer: ``guidance``, the experience shown, or ``not_guided``, the reason for showing none.

    Args:
        outputs: in order, with the columns of :data:`NEEDED`.
        outcome: rule of the outcome.
        run: identifies the process that made them.
        fingerprint: fingerprint of tokenizer and chat template.
    """
    step = _step_of(outputs[-1])
    parts = [_trajectory_of(row, outcome, step=step, run=run, fingerprint=fingerprint) for row in outputs]
    made = parts[0] if len(parts) == 1 else _session(parts)
    made.metadata["outputs"] = len(outputs)
    return made


def _step_of(row: Row) -> int:
    """Return the step after the newest weights that sampled; without these, the step that asked for the rollout."""
    versions = [row.tag.get(name) for name in ("min_global_steps", "max_global_steps")]
    known = [int(version) for version in versions if version is not None]
    return max(known) + 1 if len(known) == len(versions) else int(row.tag.get("global_steps", 1))


def finished_of(rows: Sequence[Row], outcome: OutcomeRule, *, step: int) -> list[AgentTrajectory]:
    """Return the rollouts of a step's rows, in order of arrival, without tokens, which the recorder has.

    They have ids, version, reward, and ``metadata["task_rollouts"]``: the task's number of sessions in this step, as a
    crash may lose part of a group.

    Args:
        rows: all rows of the step, with ``index`` and ``data_source``; optionally ``rm_scores`` and ``extra_fields``.
        outcome: rule of the outcome.
        step: number of the training step.
    """
    made = []
    for outputs in sessions_of(rows):
        first = _identity(outputs[0], step)
        made.append(AgentTrajectory(messages=[], reward=_reward(outputs[-1], outcome), **first))
    count = Counter(trajectory.task_id for trajectory in made)
    for trajectory in made:
        trajectory.metadata["task_rollouts"] = count[trajectory.task_id]
    return made


def sessions_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the outputs of each session, in order.

    Raises:
        ConfigurationError: a row's key is not in verl's format.
    """
    sessions: dict[str, list[Row]] = {}
    for row in rows:
        sessions.setdefault(session_of(row.key), []).append(row)
    for outputs in sessions.values():
        if len(outputs) > 1:
            outputs.sort(key=lambda row: output_of(row.key))
    return list(sessions.values())


def _session(outputs: Sequence[AgentTrajectory]) -> AgentTrajectory:
    """Return the outputs of a session as one rollout.

    verl scores a session by its last output, which also has the facts of the whole session.
    """
    first, last = outputs[0], outputs[-1]
    own = {name: value for name, value in first.metadata.items() if name in (*_OF_ONE_OUTPUT, "min_global_steps")}
    first.metadata = {name: value for name, value in last.metadata.items() if name not in _OF_ONE_OUTPUT} | own
    session = pack_rows(outputs, per_row=_OF_ONE_OUTPUT)
    session.reward = last.reward
    return session


def in_order(made: Iterable[AgentTrajectory]) -> list[AgentTrajectory]:
    """Return the rollouts of one step in a reproducible order.

    Sorted by task and session, so that the pool is the same in two equal runs: uids and the order of arrival differ
    between runs.
    """
    return sorted(made, key=lambda rollout: (rollout.task_id, int(rollout.rollout_id.split("_")[1])))


def _trajectory_of(row: Row, outcome: OutcomeRule, *, step: int, run: str, fingerprint: str) -> AgentTrajectory:
    columns = row.columns
    prompt, mask, scores = columns["prompts"], small_mask(columns["response_mask"]).clone(), columns.get("rm_scores")
    engines = columns.get("rollout_log_probs")
    placed = [] if scores is None else [[place, float(scores[place])] for place in scores.nonzero().flatten().tolist()]
    extra = columns.get("extra_fields") or {}
    if is_exchanged(extra):  # they belong to another prompt
        engines = None
    values: dict[str, Any] = {}
    agent = {SESSION: plain(extra[SESSION])} if agent_session_of(extra) else {}
    rest = {name: value for name, value in extra.items() if name not in agent}
    metadata = {
        "run": run,
        "step": step,
        "uid": row.key.split("_")[0],
        "min_global_steps": row.tag.get("min_global_steps"),
        "max_global_steps": row.tag.get("max_global_steps"),
        "token_scores": plain(placed),
        **_told_by_the_loop(columns, rest, values),
        **agent,
        **_told_of_guidance(Report.of(extra)),
    }
    messages = messages_of(columns.get("raw_prompt"), values)
    return AgentTrajectory(
        messages=messages,
        input_ids=small_ids(torch.cat([prompt, columns["responses"]])),
        loss_mask=torch.cat([torch.zeros(len(prompt), dtype=mask.dtype), mask]),
        response_start=len(prompt),
        response_mask=mask,
        rollout_log_probs=None if engines is None else engines.clone(),
        reward=_reward(row, outcome),
        tokenizer_fingerprint=fingerprint,
        metadata=_with_attached(metadata, values) if values else metadata,
        **_identity(row, step),
    )


def _identity(row: Row, step: int) -> dict[str, Any]:
    """Return task, ids and policy version of a rollout, by its first row."""
    tags = [row.tag.get(name) for name in ("min_global_steps", "max_global_steps")]
    return {
        "task_id": task_name(row.columns["data_source"], row.columns["index"]),
        "data_id": str(row.columns["data_source"]),
        "rollout_id": row.key,
        "policy_version": min([step - 1, *(int(tag) for tag in tags if tag is not None)]) + 1,
    }


def _with_attached(metadata: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Attach values; reports the rows without expert routes, which verl fills with zeros at the end."""
    result = attach(metadata, values)
    routes = values.get(ROUTES)
    if isinstance(routes, Tensor) and routes.ndim > 1:
        given = routes.flatten(1).any(1).nonzero()
        filled = len(routes) - (int(given[-1]) + 1 if len(given) else 0)
        result |= {FILLED: {ROUTES: filled}} if filled else {}
    return result


def _reward(row: Row, rule: OutcomeRule) -> Reward | None:
    scores = row.columns.get("rm_scores")
    if scores is None:
        return None
    score = float(scores.sum())  # like verl, in the column's precision
    extra = plain((row.columns.get("extra_fields") or {}).get("reward_extra_info") or {})
    try:
        outcome: float | None = rule.of(score, extra)
    except InvalidTrajectoryError:
        outcome = None  # one such reward must not end the run; the session logs it
    if outcome is not None and not math.isfinite(outcome):
        outcome = None
    return Reward(outcome=outcome, metadata={"score": plain(score), "extra": extra})


def attached_names(metadata: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors attached to a rollout, of all rows."""
    owners = [metadata, *metadata.get(ROWS, [])]
    return [name for owner in owners for name in owner.get(ATTACHED, {}).get("tensors", {})]


def messages_of(prompt: Any, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the prompt's messages as JSON values; empty if it is not a list of messages.

    Args:
        prompt: the column ``raw_prompt``.
        values: receives images and bytes, see :func:`plain`.
    """
    messages = plain(prompt, values, "messages")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        return []
    return messages


def _told_by_the_loop(columns: Mapping[str, Any], extra: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the facts from data set and agent loop for ``metadata``; tensors and bytes go to ``values``."""
    facts: dict[str, Any] = {}
    truth = columns.get("reward_model")
    if isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
        facts["ground_truth"] = plain(truth["ground_truth"])
    if columns.get("num_turns") is not None:
        facts["num_turns"] = plain(columns["num_turns"])
    for name in ("turn_scores", "tool_rewards"):
        if extra.get(name) is not None and extra[name] != []:
            facts[name] = plain(extra[name])
    groups = (("extra_fields", extra, _KNOWN_EXTRA, "extra_fields."), ("columns", columns, _RECORDED, ""))
    for group, given, known, prefix in groups:
        rest = {
            name: plain(value, values, f"{prefix}{name}")
            for name, value in given.items()
            if name not in known and value is not None and (prefix or not isinstance(value, dict) or value)
        }
        if rest:
            facts[group] = rest
    return facts


def _told_of_guidance(report: Report | None) -> dict[str, Any]:
    """Return the shown experience, or the reason for showing none, for ``metadata``."""
    if report is None:
        return {}
    if report.guidance is not None:
        return {GUIDANCE: report.guidance.to_json()}
    return {NOT_GUIDED: report.trouble} if report.trouble else {}


def replayed_row(template: Row, trajectory: AgentTrajectory, number: int, *, own_group: bool, output: int = 0) -> Row:
    """Return a recorded trajectory as a row for the group of a row generated in this step.

    The row has all columns of the template, as a column that one row lacks would be dropped for all rows. Task columns
    come from the template; tokens, masks, scores and versions from the trajectory.

    Args:
        template: a row of the same prompt.
        trajectory: one row of a history. From :func:`rollout_of`, after training; from another program, with its
            outcome as score; or a demonstration, whose log-probs the actor computes later.
        number: number of the history within the prompt, from 0.
        output: number of the row in its history.
        own_group: make the row its own GRPO group.

    Raises:
        ConfigurationError: the rows have columns that cannot be replayed.
        InvalidTrajectoryError: the trajectory lacks tokens, mask or log-probs.
    """
    present = [name for name in _OF_THIS_SAMPLE if template.columns.get(name) is not None]
    if template.columns.get(MEDIA):
        present.append(MEDIA)
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
        # Not sampled by weights of this run: exclude it from verl's lag metrics.
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
        # A demonstration gets the actor's log-probs later, so that rollout correction weighs it 1.
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
    """Return the trajectory's extra fields for a replayed row; absent ones of the template are ``None``."""
    of_rollout = restored(trajectory.metadata.get("extra_fields", {}), attached(trajectory.metadata))
    of_rollout |= {
        name: trajectory.metadata.get(name, []) for name in ("turn_scores", "tool_rewards") if name in template
    }
    if "raw_prompt" in template:  # same task, same prompt
        of_rollout["raw_prompt"] = template["raw_prompt"]
    return {
        **dict.fromkeys(template),
        **of_rollout,
        "min_global_steps": oldest,
        "max_global_steps": newest,
        "reward_extra_info": (trajectory.reward.metadata if trajectory.reward else {}).get("extra", {}),
    }


def recorded_log_probs(trajectory: AgentTrajectory, length: int) -> tuple[Tensor, Tensor]:
    """Return the recorded log-probs of a trajectory's response and their presence mask, both [length]."""
    recorded = torch.zeros(length, dtype=torch.float32)
    held = trajectory.old_log_probs
    if held is not None:
        count = min(length, held.numel())
        recorded[:count] = held[:count]
    known = torch.arange(length) < (0 if held is None else held.numel())
    known &= recorded.isfinite()
    return torch.where(known, recorded, 0.0), known


def _versions(trajectory: AgentTrajectory) -> tuple[int, int]:
    """Return the oldest and newest weights that sampled, as in verl's tags: the step's number minus 1."""
    step = trajectory.policy_version
    before = 0 if step is None else step - 1
    versions = [trajectory.metadata.get(name) for name in ("min_global_steps", "max_global_steps")]
    oldest, newest = (before if value is None else int(value) for value in versions)
    return oldest, newest


def _scores(trajectory: AgentTrajectory, length: int) -> Tensor:
    scores = torch.zeros(length, dtype=torch.float32)
    placed = trajectory.metadata.get("token_scores")
    if placed is None:  # another program's rollout, or a demonstration
        placed = [] if (score := score_of(trajectory)) is None else [(-1, score)]
    for place, score in placed:
        scores[place] = torch.nan if score is None else float(score)  # NaN is stored as the text "nan"
    return scores


def why_no_outcome(trajectory: AgentTrajectory, rule: OutcomeRule) -> str:
    """Return the reason why a rollout has no outcome, as a clause that names the option."""
    if trajectory.reward is None:
        return "it was dropped before it had a reward"
    extra = trajectory.reward.metadata.get("extra", {})
    if rule.key is None:
        return f"its score is {trajectory.reward.metadata.get('score')}"
    if rule.key in extra:
        return f"{SECTION}.outcome.key: {rule.key!r} is {extra[rule.key]!r}, no finite number"
    known = ", ".join(sorted(extra)) or "none"
    return f"{SECTION}.outcome.key: the reward function gave no {rule.key!r}; it gave: {known}"
