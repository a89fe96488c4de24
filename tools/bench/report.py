"""Figures of a benchmark, as JSON lines and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class SkippedError(Exception):
    """A benchmark cannot run here; the message names the requirement."""


def needs(*modules: str, extra: str = "") -> None:
    """Skip a benchmark where a module is not installed; ``extra`` of trajstore would bring it.

    Raises:
        SkippedError: names those that are missing.
    """
    if missing := [module for module in modules if find_spec(module) is None]:
        raise SkippedError(f"needs {', '.join(missing)}{f': install trajstore[{extra}]' if extra else ''}")


@dataclass(frozen=True)
class Options:
    """How a benchmark runs.

    Attributes:
        folder: an empty folder of its own on the disk that is measured.
        repeats: how often each thing is timed, after a warm-up.
        scale: size of the workloads; 1 is the size that the goals name, less is a trial of the code.
    """

    folder: Path
    repeats: int = 7
    scale: float = 1.0

    def count(self, full: int, least: int = 1) -> int:
        """Return a number of things at this scale, ``least`` or more."""
        return max(least, round(full * self.scale))


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        id: the goal, ``T1`` ... ``T17``, or the name of the benchmark.
        name: the measured quantity.
        value: the number, in ``unit``.
        target: the upper limit, or the lower one with ``at_least``; None without a promise.
        unit: ``ratio``, ``s``, ``MB`` (10^6 bytes), ``ms``, ``requests``.
        at_least: more is better.
        details: further numbers, by name.
    """

    id: str
    name: str
    value: float
    target: float | None
    unit: str = "ratio"
    at_least: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def line(self) -> str:
        """Return the figure as a line of JSON."""
        number = (
            {"ratio": _rounded(self.value)}
            if self.unit == "ratio"
            else {"value": _rounded(self.value), "unit": self.unit}
        )
        details = {name: _rounded(value) for name, value in self.details.items()}
        return json.dumps({"id": self.id, "name": self.name, **number, "target": self.target, "ok": self.ok, **details})


def table(figures: Sequence[Figure]) -> str:
    """Return figures as a table for people."""
    rows = [("id", "what", "reached", "target", "")]
    words = {True: "ok", False: "MISSED", None: ""}
    for figure in figures:
        unit = "" if figure.unit == "ratio" else f" {figure.unit}"
        sign = "≥" if figure.at_least else "≤"
        target = "none" if figure.target is None else f"{sign} {figure.target:g}{unit}"
        rows.append((figure.id, figure.name, f"{_rounded(figure.value):g}{unit}", target, words[figure.ok]))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rounded(value: Any) -> Any:
    """Return a float with four significant digits; anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
