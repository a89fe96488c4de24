"""Learning curves of several runs: a summary in words, and a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.common import write_file
from examples.grpo.config import CurvePoint
from trajstore.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class CurveSummary:
    """Summary of a learning curve.

    Attributes:
        steps, fresh_rollouts: of the whole curve.
        solved_after: fresh rollouts at the first evaluation that reached ``solved_at``; None = never.
        final: success rate of the last evaluation; None without one.
        best: highest success rate of all evaluations; None without one.
    """

    steps: int
    fresh_rollouts: int
    solved_after: int | None
    final: float | None
    best: float | None

    def __str__(self) -> str:
        if self.final is None or self.best is None:
            return f"{self.fresh_rollouts:,} fresh rollouts, not evaluated"
        end = f"solved after {self.solved_after:,}" if self.solved_after is not None else "not solved"
        success = f"success {self.final:.0%} at the end, {self.best:.0%} at best"
        return f"{self.fresh_rollouts:,} fresh rollouts, {end}; {success}"


def summarize(curve: Sequence[CurvePoint], solved_at: float) -> CurveSummary:
    """Summarize a curve; ``solved_at`` is the success rate that counts as solved."""
    evaluated = [(point.fresh_rollouts, point.success_rate) for point in curve if point.success_rate is not None]
    rates = [rate for _, rate in evaluated]
    return CurveSummary(
        steps=curve[-1].step if curve else 0,
        fresh_rollouts=curve[-1].fresh_rollouts if curve else 0,
        solved_after=next((rollouts for rollouts, rate in evaluated if rate >= solved_at), None),
        final=rates[-1] if rates else None,
        best=max(rates, default=None),
    )


def draw_curves(curves: Mapping[str, Sequence[CurvePoint]], solved_at: float, path: str | Path, title: str) -> None:
    """Write a picture (SVG, whole or not at all) of success rate over fresh rollouts, one line per curve.

    The same curves give the same bytes.

    Args:
        curves: label -> curve.
        solved_at: success rate that counts as solved; a dashed line.
        path: the file to write; its folder is made if absent.
        title: title of the figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file could not be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # without pyplot: no display and no global state
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "demo") from error
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        evaluated = [(point.fresh_rollouts, point.success_rate) for point in curve if point.success_rate is not None]
        axes.plot([rollouts for rollouts, _ in evaluated], [rate for _, rate in evaluated], label=label)
    axes.axhline(solved_at, color="grey", linestyle="--", linewidth=1.0, label="solved")
    axes.set(xlabel="fresh rollouts", ylabel="success rate over all tasks", ylim=(0.0, 1.02), title=title)
    axes.legend(loc="lower right")
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "trajstore"}):  # text as text, names not at random
        figure.savefig(file, format="svg", metadata={"Date": None})
    write_file(Path(path), file.getvalue())
