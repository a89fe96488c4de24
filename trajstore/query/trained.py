"""The rows of optimizer steps, from the training ledgers in the stores' directories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.files.base import Directory
from trajstore._core.store.run_ids import in_run
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.ledger import LEDGER_FOLDER, ROW, LedgerContents
from trajstore.ledger.contents import read_directory
from trajstore.query.engine import pl
from trajstore.query.texts import ID

TRAINED = "trained"
"""The relation of trained rows."""

COLUMNS: Mapping[str, str] = {
    "step": "optimizer step that trained the row",
    "place": "number of the row in the step",
    "rollout": "number of its rollout in the step's batch, if that is in no store",
    "rollout_row": "number of the row in its rollout",
    "group": "number of its prompt group in the step",
    "advantage": "mean over its trained tokens",
    "ratio": "mean importance ratio over its trained tokens",
    "weight": "further factor in the loss; 0 = it had no loss; importance weight of a loader's row",
    "probability": "chance of a loader's row in its draw",
    "tokens": "trained tokens; steps of a loader's transition or sequence",
    "version": "policy version that sampled it",
    "age": "policy versions from then to the step",
    "replayed": "whether it was replayed",
    "token_digest": "32-bit digest of its tokens, by which rows of two runs are compared",
    "mask_digest": "the same of the places of its trained tokens",
    "log_prob": "mean log-prob of its trained tokens",
}
"""Columns of the relation, besides ``trajectory_id``, ``task``, and the facts of the row's trajectory."""


def trained(directories: Mapping[int, Directory]) -> pl.DataFrame:
    """Return the trained rows of all ledgers, step by step.

    Args:
        directories: of the stores, by rank.

    Raises:
        StoreNotFoundError: none of the stores has a ledger.
        CorruptStoreError: a ledger is damaged.
    """
    tables = []
    for rank, directory in directories.items():
        try:
            tables.append(rows_of_ledger(rank, read_directory(directory.inner(LEDGER_FOLDER))))
        except StoreNotFoundError as error:
            absent = error
    if not directories:
        raise ConfigurationError(f"{TRAINED}: a buffer in memory has no training ledger")
    if not tables:
        raise absent
    return pl.concat(tables).sort("step", maintain_order=True)


def rows_of_ledger(rank: int, ledger: LedgerContents) -> pl.DataFrame:
    """Return the rows of a ledger with ``trajectory_id``, ``task`` and :data:`COLUMNS`, step by step."""
    table = ledger.table()
    ids = table["trajectory"]
    is_stored = ids >= 0
    steps = ledger.steps.values()
    places = [np.arange(len(step.rows)) for step in steps]
    names = [step.tasks[group] if step.tasks else None for step in steps for group in step.rows["group"]]

    def where(known: npt.NDArray[np.bool_], values: npt.NDArray[Any]) -> Any:
        return pl.Series(values).set(pl.Series(~known), None)

    def column(name: str) -> Any:
        values = table[name].astype(np.float64) if ROW[name].kind == "f" else table[name]
        lengths = [len(step.rows) for step in steps]
        return where(np.repeat([name not in step.unknown for step in steps], lengths).astype(np.bool_), values)

    return pl.DataFrame(
        {
            ID: where(is_stored, np.where(is_stored, in_run(rank, np.maximum(ids, 0)), 0)),
            "task": pl.Series(names, dtype=pl.String),
            "step": table["step"],
            "place": np.concatenate([np.zeros(0, np.int64), *places]),
            "rollout": where(~is_stored, -1 - ids),
            "rollout_row": table["row"],
            **{name: column(name) for name in ("group", "advantage", "ratio", "weight", "probability", "tokens")},
            "version": where(table["version"] >= 0, table["version"]),
            "age": where(~np.isnan(table["age"]), table["age"]),
            "replayed": table["replayed"] != 0,
            **{name: column(name) for name in ("token_digest", "mask_digest", "log_prob")},
        }
    )
