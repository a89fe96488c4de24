"""AgentEvolver's pools and rows in ``shared/fixtures``, read without the tested code."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KnownRow:
    """A row: token ids, loss mask, response start, response log-probs (``None`` = not recorded)."""

    ids: list[int]
    mask: list[int]
    start: int
    log_probs: list[float] | None


@dataclass(frozen=True)
class KnownRollout:
    """A pool's rollout: its prompt messages and its rows."""

    task: str
    rollout: str
    asked: list[dict[str, str]]
    rows: list[KnownRow]


class _Anything(dict[Any, Any]):
    """Stands in for any pickled class; keeps its fields."""

    def __init__(self, *_arguments: Any) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state.get("__dict__", state) if isinstance(state, dict) else {}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "collections"):
            return super().find_class(module, name)
        return _Anything


def _pickled(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return each rollout's metadata, or its ``steps`` if there is nothing else."""
    with (folder / "task2trajectories.pkl").open("rb") as file:
        pool = _Plain(file).load()
    return {
        (task, trajectory.fields["rollout_id"]): {
            "steps": trajectory.fields.get("steps"),
            **trajectory.fields["metadata"],
        }
        for task, held in pool.items()
        for trajectory in held
    }


def of_conversations(base: Path) -> list[KnownRollout]:
    """Return a pool's rollouts with the rows of ``expected.json``."""
    held = _pickled(base / "step_40")
    rollouts = []
    for document in json.loads((base / "expected.json").read_text()):
        if (document["task_id"], document["rollout_id"]) not in held:
            continue
        log_probs = held[document["task_id"], document["rollout_id"]]["old_log_probs"]
        rows = []
        for row in document["samples"]:
            start, length = row["response_start"], len(row["input_ids"])
            rows.append(KnownRow(row["input_ids"], row["loss_mask"], start, log_probs[: length - start]))
            log_probs = log_probs[length - start :]
        assert not log_probs
        rollouts.append(KnownRollout(document["task_id"], document["rollout_id"], document["messages"][:2], rows))
    return rollouts
