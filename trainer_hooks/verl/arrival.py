"""verl's rows as rollouts of the recorder, and recorded rollouts with the late fields of their training.

Does not import verl, whose import loads this plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ray import cloudpickle

from trainer_hooks.replay.late_values import with_training
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.reading import RunTokenizer, Scribe
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION, LEFT_OUT, SAMPLING, rollout_of, sessions_of
from trajstore._core.buffer.reader import Reader
from trajstore.trajectory import AgentTrajectory

LATE = {"old_log_probs": "old_log_probs", "entropy": "entropys", "advantages": "advantages"}
"""Late values by row, by column of the data plane."""

LEFT_OUT_LATE = (
    *("log_probs", "rm_scores", "response_mask", "loss_mask", "exp_mask"),
    *("values", "returns", "token_level_rewards"),
)
"""Later columns that are not recorded: the others, or the ledger, determine them; a critic computes them anew."""


class VerlRollouts:
    """Rows of verl's agent loop; a session is one rollout. See :class:`trainer_hooks.transfer_queue.RolloutFormat`.

    Args:
        outcome: rule of the outcome.
        tokenizer: of the run.
        run: id of the trainer's process.
        text: decode the response's turns.
        sampling: digest of the options that rollouts depend on.
    """

    partitions: Sequence[str] = ("train",)
    begins = "responses"
    left_out: Collection[str] = LEFT_OUT
    left_out_late: Collection[str] = LEFT_OUT_LATE
    prompt_tag = "is_prompt"
    late: Mapping[str, str] = LATE

    def __init__(
        self, outcome: OutcomeRule, tokenizer: RunTokenizer, run: str, *, text: bool, sampling: str = ""
    ) -> None:
        self._outcome = outcome
        self._run = run
        self._sampling = sampling
        self._fingerprint = tokenizer.fingerprint
        # Pickled on its own: code of a model's repository may be absent in the recorder's process.
        wanted = text and tokenizer.decoder is not None
        decoder: bytes = cloudpickle.dumps(tokenizer.decoder) if wanted else b""  # type: ignore[no-untyped-call]
        self._scribe = Scribe(tokenizer.name, decoder)

    def keys(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Return the keys of a put: verl puts the outputs of a session at once, in order."""
        outputs: Counter[str] = Counter()
        keys = []
        for uid, session in zip(columns["uid"], columns["session_id"], strict=True):
            name = f"{uid}_{int(session)}"
            keys.append(f"{name}_{outputs[name]}")
            outputs[name] += 1
        return keys

    def rollouts(self, rows: Sequence[Row]) -> list[tuple[AgentTrajectory, list[int]]]:
        """Return the rollouts among rows, without replayed rows and padding."""
        places = {row.key: place for place, row in enumerate(rows)}
        made = []
        for outputs in sessions_of(row for row in rows if not row.tag.get("is_padding", False)):
            if int(outputs[0].key.split("_")[1]) < FIRST_REPLAYED_SESSION:
                rollout = rollout_of(outputs, self._outcome, run=self._run, fingerprint=self._fingerprint)
                rollout.metadata[SAMPLING] = self._sampling
                made.append((rollout, [places[row.key] for row in outputs]))
        return made

    def finish(self, rollouts: Sequence[AgentTrajectory]) -> None:
        """Add query, tokenizer, the experience that the model read, and text."""
        self._scribe.finish(rollouts)

    @property
    def problems(self) -> Mapping[str, int]:
        """Return the number of rollouts without text, although it was wanted."""
        return {"without_text": self._scribe.without_text}


def recorded_rollouts(reader: Reader, ids: Iterable[int] | None = None) -> Iterator[AgentTrajectory]:
    """Yield recorded rollouts (``ids``: these), with the late fields of their training in place."""
    for number in reader.trajectory_ids.tolist() if ids is None else ids:
        rollout = reader.get(number)
        if isinstance(rollout, AgentTrajectory):
            yield with_training(rollout)
