"""verl's rows as rollouts of the recorder, and recorded rollouts with the late fields of their training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer_hooks.replay import mean_entropy
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.reading import RunTokenizer, Scribe
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION, NEEDED_UNRATED, WELCOME, session_of, trajectories_of
from trajstore.core.buffer.reader import Reader
from trajstore.core.columns.facts import GIVEN
from trajstore.trajectory import AgentTrajectory

TRAINED_STEP, DROPPED_STEP, TASK_ROLLOUTS = "trained_step", "dropped_step", "task_rollouts"
"""Late values: the step that trained on a rollout, or dropped it; the number of its task's rollouts in that step."""

LATE = {"old_log_probs": "old_log_probs", "entropy": "entropys", "advantages": "advantages"}
"""Late values by row, by column of the data plane."""


class VerlRollouts:
    """Rows of verl's agent loop; a session is one rollout. See :class:`trainer_hooks.transfer_queue.RolloutFormat`.

    Args:
        outcome: rule of the outcome.
        tokenizer: of the run.
        run: id of the trainer's process.
        text: decode the response's turns.
    """

    partitions = ("train",)
    begins = "responses"
    columns = (*NEEDED_UNRATED, "rm_scores", *WELCOME)
    late: Mapping[str, str] = LATE

    def __init__(self, outcome: OutcomeRule, tokenizer: RunTokenizer, run: str, *, text: bool) -> None:
        self._outcome = outcome
        self._tokenizer = dataclasses.replace(tokenizer, messages=None)
        self._run = run
        self._text = text
        self._scribe: Scribe | None = None

    def rollouts(self, rows: Sequence[Row]) -> list[tuple[AgentTrajectory, list[int]]]:
        """Return the rollouts among rows, without replayed rows and padding."""
        sessions: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            if not row.tag.get("is_padding", False):
                session = session_of(row.key)
                if int(session.rpartition("_")[2]) < FIRST_REPLAYED_SESSION:
                    sessions.setdefault(session, []).append(place)
        made = []
        for places in sessions.values():
            places.sort(key=lambda place: int(rows[place].key.rpartition("_")[2]))
            outputs = [rows[place] for place in places]
            (rollout,) = trajectories_of(
                outputs,
                self._outcome,
                step=_step_of(outputs[-1]),
                run=self._run,
                fingerprint=self._tokenizer.fingerprint,
            )
            for name in ("trained", "task_rollouts"):  # not known yet
                del rollout.metadata[name]
            made.append((rollout, places))
        return made

    def finish(self, rollouts: Sequence[AgentTrajectory]) -> None:
        """Add query, tokenizer and text."""
        if self._scribe is None:  # here, in the recorder's process
            self._scribe = Scribe(self._tokenizer, text=self._text)
        self._scribe.introduce(rollouts)
        self._scribe.write(rollouts)

    @property
    def problems(self) -> Mapping[str, int]:
        """Return the number of rollouts without text."""
        return {"without_text": 0 if self._scribe is None else self._scribe.without_text}


def _step_of(row: Row) -> int:
    """Return the step after the newest weights that sampled; without these, the step that asked for the rollout."""
    versions = [row.tag.get(name) for name in ("min_global_steps", "max_global_steps")]
    known = [int(version) for version in versions if version is not None]
    return max(known) + 1 if len(known) == len(versions) else int(row.tag.get("global_steps", 1))


def recorded_rollouts(reader: Reader, newest: int = -1) -> Iterator[AgentTrajectory]:
    """Yield recorded rollouts with ids above ``newest``, with the late fields of their training in place."""
    for number in reader.trajectory_ids.tolist():
        if number > newest:
            rollout = reader.get(number)
            if isinstance(rollout, AgentTrajectory):
                yield with_training(rollout)


def with_training(rollout: AgentTrajectory) -> AgentTrajectory:
    """Return a recorded rollout with the late fields of its training in place.

    ``old_log_probs``, ``entropys`` and ``entropy`` are the actor's; where weights older than the actor's sampled, the
    log-probs are the engine's. ``metadata`` has ``step``, ``trained`` and ``task_rollouts``; a rollout whose step did
    not finish has no ``trained``.
    """
    late: Mapping[str, Any] = rollout.metadata.get(GIVEN, {})
    trained = late.get(TRAINED_STEP)
    step = trained if trained is not None else late.get(DROPPED_STEP)
    if step is None:
        return rollout
    metadata = {name: value for name, value in rollout.metadata.items() if not name.startswith("trajstore.")}
    metadata |= {"step": int(step), "trained": trained is not None}
    if late.get(TASK_ROLLOUTS) is not None:
        metadata["task_rollouts"] = int(late[TASK_ROLLOUTS])
    result = dataclasses.replace(rollout, metadata=metadata, notes={})
    if result.policy_version is not None:
        result.policy_version = min(result.policy_version, int(step))
    if trained is None:
        return result
    result.entropys = rollout.notes.get("entropys")
    if result.entropys is not None and result.response_mask is not None:
        result.entropy = mean_entropy(result.entropys, result.response_mask)
    lags = result.policy_version is not None and result.policy_version < int(step)
    engine: Tensor | None = rollout.rollout_log_probs
    result.old_log_probs = engine if lags and engine is not None else rollout.notes.get("old_log_probs")
    return result
