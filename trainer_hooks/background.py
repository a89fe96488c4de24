"""What a hook works with, and histories that a thread reads, scores and chooses while the rollouts are made."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.figures import ReplayFigures, ReplayWatch
from trainer_hooks.poolfiles import PoolFiles
from trajstore.experience import ExperienceManager, ExperienceMixCollateFn
from trajstore.experience.prompts import Prompt
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""

Prepare = Callable[[], Mapping[str, Sequence[AgentTrajectory]]]
"""Returns histories by task."""


class Preparation:
    """Histories of one step, on their way.

    Args:
        executor: of one thread.
        prepare: what it does there; nothing else may touch the pool meanwhile.
    """

    def __init__(self, executor: ThreadPoolExecutor, prepare: Prepare) -> None:
        self.seconds = 0.0
        """That the thread took."""
        self._thread: int | None = None
        self._future: Future[Mapping[str, Sequence[AgentTrajectory]]] = executor.submit(self._timed, prepare)

    @property
    def is_here(self) -> bool:
        """Whether the caller is the thread that prepares, which cannot wait for itself."""
        return self._thread == threading.get_ident()

    @property
    def done(self) -> bool:
        """Whether they are there, or failed."""
        return self._future.done()

    def wait(self) -> Mapping[str, Sequence[AgentTrajectory]]:
        """Return the histories when they are there; raises what the preparation raised."""
        return self._future.result()

    def _timed(self, prepare: Prepare) -> Mapping[str, Sequence[AgentTrajectory]]:
        self._thread = threading.get_ident()
        begun = time.perf_counter()
        try:
            return prepare()
        finally:
            self._thread = None
            self.seconds = time.perf_counter() - begun


class ComingHistories(Sequence[AgentTrajectory]):
    """The histories of one task. Their number is known at once; looking at one of them waits.

    Args:
        preparation: which they come from.
        task: their task.
        count: how many there will be. A record that turns out to be damaged makes them fewer.
    """

    def __init__(self, preparation: Preparation, task: str, count: int) -> None:
        self._preparation = preparation
        self._task = task
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> AgentTrajectory: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[AgentTrajectory]: ...

    def __getitem__(self, place: int | slice) -> AgentTrajectory | Sequence[AgentTrajectory]:
        return self._found()[place]

    def __iter__(self) -> Iterator[AgentTrajectory]:
        return iter(self._found())

    def _found(self) -> Sequence[AgentTrajectory]:
        return self._preparation.wait().get(self._task, ())


@dataclass(slots=True)
class ReplayParts(Generic[Task]):
    """What a hook that is switched on works with."""

    manager: ExperienceManager
    collate: ExperienceMixCollateFn[Task]
    figures: ReplayFigures
    files: PoolFiles
    watch: ReplayWatch
    executor: ThreadPoolExecutor | None = None
    """Its one thread draws histories; ``None``: they are drawn when they are asked for."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """Rollouts that are to be made in this step, by task."""
    pending: Preparation | None = None
    """While it is under way, nothing else may touch the pool."""

    @staticmethod
    def of(
        config: ExperienceReplayConfig,
        manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        task_text: Callable[[Task], str] | None,
    ) -> ReplayParts[Task]:
        """Return what a hook with this configuration works with."""
        collate = ExperienceMixCollateFn(
            manager,
            get_task,
            exp_ratio=config.ratio(),
            replay_start_ratio=config.replay_start_ratio,
            offpolicy_trajectories_per_task=config.offpolicy_trajectories_per_task,
            unsolved_first=config.unsolved_first,
            text_of=task_text,
        )
        files = PoolFiles(manager, config.pool_path, config.pool_save_freq)
        made = ReplayParts(manager, collate, ReplayFigures(manager), files, ReplayWatch(manager))
        if config.prepare_in_background:
            made.begin_background()
        return made

    def begin_background(self) -> None:
        """Draw histories in a thread from now on."""
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="trajstore-histories")

    def coming(self, tasks: Sequence[Task]) -> Mapping[str, Sequence[AgentTrajectory]]:
        """Return the histories of tasks, drawn now or by the thread."""
        if self.executor is None:
            drawn = self.collate.get_histories(tasks)
            self.figures.note_drawn(drawn, replaying=self.collate.replaying, asked=self.collate.asked_share)
            return {task: tuple(held) for task, held in drawn.items()}
        counts = self.collate.count_histories(tasks)
        self.pending = preparation = Preparation(self.executor, lambda: self.collate.get_histories(tasks))
        return {task: ComingHistories(preparation, task, count) for task, count in counts.items()}

    def ask(self, tasks: Iterable[str], fresh: Iterable[int]) -> None:
        """Note how many rollouts of each task are to be made in this step."""
        counts: Counter[str] = Counter()
        for task, count in zip(tasks, fresh, strict=True):
            counts[task] += count
        self.asked = counts

    def learn_prompts(self, prompts: Mapping[str, Prompt]) -> None:
        """Let the pool know what rollouts of these tasks were asked."""
        for task, prompt in prompts.items():
            self.manager.tell_prompt(task, prompt)

    def settle(self) -> None:
        """Wait for histories that are under way; raises what drawing them raised."""
        pending = self.pending
        if pending is None or pending.is_here:  # the trainer's function that scores may look at the hook
            return
        try:
            with self.figures.times.measure("waited_for_histories"):
                drawn = pending.wait()
        finally:
            if pending.done:  # not so if Ctrl-C came
                self.pending = None
        self.figures.times.add("histories_in_background", pending.seconds)
        self.figures.note_drawn(drawn, replaying=self.collate.replaying, asked=self.collate.asked_share)

    def close(self) -> None:
        """End the thread; say what waits at the end of the run."""
        pending, self.pending = self.pending, None
        if self.executor is not None:
            self.executor.shutdown()
        if pending is not None:
            try:
                pending.wait()
            except Exception as error:  # of the trainer's function or the store; nobody waits for the histories
                logger.warning("experience replay: histories that were under way at the end failed: %r", error)
        self.watch.closed()
