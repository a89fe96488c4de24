"""Training ledgers for the page: curves over optimizer steps, the rows of a step, the steps that trained a rollout."""

from __future__ import annotations

from collections.abc import Mapping

from trajstore._core.files.base import Directory
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError
from trajstore.ledger import LEDGER_FOLDER, LedgerContents
from trajstore.ledger.contents import read_directory, segments_of
from trajstore.query.engine import pl
from trajstore.query.texts import ID
from trajstore.query.trained import rows_of_ledger
from trajstore.view.answers import Answer, plain, plain_dict

MOST_POINTS = 2000
"""Maximum number of points of a curve; more steps are shown in part, evenly spaced."""

MOST_ROWS = 2000
"""Maximum number of rows of an answer."""

_ROW = ("group", "advantage", "ratio", "weight", "probability", "tokens", "version", "replayed", "age")
"""Columns of the relation ``trained`` that a row of an answer has unchanged."""


class Training:
    """The ledgers in the stores' directories. They are read again when a file of them has grown. For one thread."""

    def __init__(self) -> None:
        self._files: list[tuple[int, str, int]] = []
        self._ledgers: dict[int, LedgerContents] = {}
        self._rows: pl.DataFrame | None = None
        """The rows of all ledgers, as of the relation ``trained``; None without ledgers."""

    def is_there(self, directories: Mapping[int, Directory]) -> bool:
        """Return whether any of the stores, by rank, has a ledger."""
        try:
            return any(segments_of(directory.inner(LEDGER_FOLDER)) for directory in directories.values())
        except CorruptStoreError:  # reading it names the damage
            return True

    def read(self, directories: Mapping[int, Directory]) -> Training:
        """Read the ledgers of the stores by rank, and return this object; damaged records are left out.

        Raises:
            CorruptStoreError: a file of a ledger is absent.
        """
        folders = {rank: directory.inner(LEDGER_FOLDER) for rank, directory in directories.items()}
        segments = {rank: segments_of(folder) for rank, folder in folders.items()}
        files = [
            (rank, segment.name, folders[rank].size(segment.name))
            for rank, some in segments.items()
            for segment in some
        ]
        if files != self._files:
            self._ledgers = {
                rank: read_directory(folders[rank], strict=False) for rank, some in segments.items() if some
            }
            tables = [rows_of_ledger(rank, ledger) for rank, ledger in self._ledgers.items()]
            self._rows = pl.concat(tables) if tables else None
            self._files = files
        return self

    def curves(self) -> Answer:
        """Return figures over steps: ``{"steps", "of", "curves", "damaged", "replaced"}``.

        ``curves`` has the means over the rows of a step of all ranks, by name, null where unknown: ``rows`` (their
        number), ``replayed`` and ``no_loss`` (shares), ``ratio`` and ``advantage`` (of its absolute value), ``age`` in
        policy versions; and each loss term ``loss/NAME``, its mean over the ranks. ``damaged`` has a sentence for each
        damaged record.
        """
        steps = [step for ledger in self._ledgers.values() for step in ledger.steps.values()]
        names = sorted({name for step in steps for name in step.loss})
        terms = {f"loss/{name}": pl.Series([step.loss.get(name) for step in steps], dtype=pl.Float64) for name in names}
        numbers = pl.Series([step.step for step in steps], dtype=pl.Int64)
        curves = pl.DataFrame({"step": numbers, **terms}).group_by("step").agg(_mean(pl.exclude("step"))).sort("step")
        if self._rows is not None and len(self._rows):
            means = self._rows.group_by("step").agg(
                rows=pl.len(),
                replayed=pl.col("replayed").mean(),
                no_loss=(pl.col("weight") == 0).mean(),
                ratio=_mean(pl.col("ratio")),
                advantage=_mean(pl.col("advantage").abs()),
                age=_mean(pl.col("age")),
            )
            joined = curves.join(means, "step", "left", maintain_order="left").with_columns(pl.col("rows").fill_null(0))
            curves = joined.select(*means.columns, *terms)
        chosen = sorted({at * (len(curves) - 1) // (MOST_POINTS - 1) for at in range(MOST_POINTS)} if steps else ())
        known = [column for column in curves.drop("step") if column.null_count() < len(column)]
        return {
            "steps": curves["step"][chosen].to_list(),
            "of": len(curves),
            "curves": {column.name: column[chosen].to_list() for column in known},
            "damaged": [sentence for ledger in self._ledgers.values() for sentence in ledger.damaged],
            "replaced": sum(len(ledger.replaced) for ledger in self._ledgers.values()),
        }

    def step(self, number: int) -> Answer:
        """Return a step: ``{"step", "previous", "next", "ranks", "rows", "of"}``.

        Of each rank: ``rank``, ``policy`` (before, after), ``loss``, ``data``, ``seeds``. Of each row its ``id`` as
        displayed (null for rollouts in no store), its ``task``, and columns of the relation ``trained``.

        Raises:
            TrajectoryUnavailableError: no ledger has the step.
        """
        numbers = sorted({step for ledger in self._ledgers.values() for step in ledger.steps})
        if self._rows is None or number not in numbers:
            recorded = f"{numbers[0]} to {numbers[-1]}" if numbers else "no step"
            raise TrajectoryUnavailableError(f"step {number}: not in the training ledger, which has {recorded}")
        at = numbers.index(number)
        ranks = [
            {
                "rank": rank,
                "policy": [step.policy_before, step.policy_after],
                "loss": plain_dict(step.loss),
                "data": dict(step.data),
                "seeds": dict(step.seeds),
            }
            for rank, ledger in self._ledgers.items()
            if (step := ledger.steps.get(number)) is not None
        ]
        rows = self._rows.filter(pl.col("step") == number)
        return {
            "step": number,
            "previous": numbers[at - 1] if at else None,
            "next": numbers[at + 1] if at + 1 < len(numbers) else None,
            "ranks": ranks,
            "rows": _answers(rows.head(MOST_ROWS), "task"),
            "of": len(rows),
        }

    def trained(self, number: int) -> Answer:
        """Return the rows by which steps trained a trajectory: ``{"trained", "of"}``, in order, the newest 2,000.

        Args:
            number: its id.
        """
        if self._rows is None:
            return {"trained": [], "of": 0}
        rows = self._rows.filter(pl.col(ID) == number).sort("step", maintain_order=True)
        return {"trained": _answers(rows.tail(MOST_ROWS), "step"), "of": len(rows)}


def _mean(values: pl.Expr) -> pl.Expr:
    """Return the mean of the finite values; null if there are none."""
    return values.filter(values.is_finite()).mean()


def _answers(rows: pl.DataFrame, more: str) -> list[Answer]:
    """Return rows of the relation ``trained`` as JSON values; NaN, which is no known value, is null."""
    return [
        {
            "id": None if row[ID] is None else shown_id(row[ID]),
            "rollout": row["rollout"],
            "row": row["rollout_row"],
            more: row[more],
            **{name: plain(row[name]) for name in _ROW},
        }
        for row in rows.fill_nan(None).iter_rows(named=True)
    ]
