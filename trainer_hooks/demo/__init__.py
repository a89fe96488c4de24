"""Small training runs that show a store at work. ``trajstore demo`` starts them.

A task is a module with a function ``run(settings, say, progress) -> Path`` which trains, says in words
what it does and returns the directory of the store that it wrote. Tasks are named here, so that
listing them imports none.
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
"""Name of a task, and the module that runs it."""

DEFAULT_TASK = "replay"

SAMPLERS: Mapping[str, Mapping[str, Any] | None] = {
    "uniform": None,
    "prioritized": {"name": "weighted", "priorities": {"alpha": 0.6, "beta": 0.4}},
    "recency": {"name": "weighted", "recency": {"half_life": 50}},
    "staleness": {"name": "weighted", "staleness": {"max_age": 1600}},
    "epochs": {"name": "epochs"},
}
"""What a task that samples transitions may sample by, as ``sampling.sampler_of`` takes it; None = the buffer's own."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What all tasks are told.

    Attributes:
        path: directory of the run: the store and the learner's checkpoint lie below it.
        updates: gradient steps after which training ends; None = the task's own number.
        seconds: time after which training ends; None = no limit.
        seed: seeds everything that is drawn.
        sampler: a name of :data:`SAMPLERS`; None = uniform. For tasks that sample transitions.
    """

    path: Path
    updates: int | None = None
    seconds: float | None = None
    seed: int = 0
    sampler: str | None = None


class Progress(Protocol):
    """Told how far training is; may show it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` gradient steps are behind us."""


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
