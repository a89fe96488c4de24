"""Small training runs that demonstrate a store. ``trajstore demo`` starts them.

A task is a module with a function ``run(settings, say, progress) -> Path``, which trains, reports in sentences and
returns the directory of its store. Tasks are listed here by name, so that listing them imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

TASKS: Mapping[str, str] = {
    "replay": "trainer_hooks.reference.demo",
    "cartpole": "trainer_hooks.demo.cartpole",
}
"""Module of each task."""

DEFAULT_TASK = "replay"

SAMPLERS: Mapping[str, Mapping[str, Any] | None] = {
    "uniform": None,
    "prioritized": {"name": "weighted", "priorities": {"alpha": 0.6, "beta": 0.4}},
    "recency": {"name": "weighted", "recency": {"half_life": 50}},
    "staleness": {"name": "weighted", "staleness": {"max_age": 1600}},
    "epochs": {"name": "epochs"},
}
"""Samplers for tasks that sample transitions, as for ``sampling.sampler_of``; None = the buffer's own."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of all tasks.

    Attributes:
        path: directory of the run, for the store and the learner's checkpoint.
        updates: gradient steps after which training ends; None = the task's own number.
        seconds: time after which training ends; None = no limit.
        seed: of all random choices.
        sampler: a name of :data:`SAMPLERS`; None = uniform. For tasks that sample transitions.
    """

    path: Path
    updates: int | None = None
    seconds: float | None = None
    seed: int = 0
    sampler: str | None = None


class Progress(Protocol):
    """Receives the progress of training, and may show it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` gradient steps are finished."""


class Task(Protocol):
    """The function ``run`` of a task's module."""

    def __call__(self, settings: DemoSettings, say: Callable[[str], None], progress: Progress) -> Path:
        """Train, and return the directory of the store."""


def load_task(name: str) -> Task:
    """Return the task with this name; imports its module.

    Raises:
        KeyError: there is none.
        MissingDependencyError: a package of the extra ``demo`` is not installed.
    """
    return cast(Task, import_module(TASKS[name]).run)
