"""``GuidanceManager`` chooses guided rollouts and tasks that keep experience; ``UpdateQueue`` summarizes rollouts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from trainer_hooks.guidance.context import TrainMode
from trainer_hooks.guidance.maker import ExperienceMaker, MakerError, Trouble
from trainer_hooks.guidance.summary import by_task, unguided
from trainer_hooks.replay.state import generator_state, set_generator_state
from trajstore._core.base import locks
from trajstore._core.base.arguments import one_of, seconds, whole
from trajstore._core.base.background import Background
from trajstore._core.base.settings import Settings, Share
from trajstore.errors import counted
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

RolloutMode = Literal["sample", "validate"]
RolloutExpMode = Literal["woexp", "all", "mixed"]
SampleExpMode = Literal["allkeep", "alldiscard", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class AllocationRules(Settings):
    """Rules for which rollouts are guided and which experience is kept.

    Attributes:
        train_rollout_expmode: which rollouts are guided: ``all``, none (``woexp``), or a share of each task's
            (``mixed``): ``round(n * rollout_expratio)`` of n (halves to even, as in Python), drawn at random for each
            task.
        val_rollout_expmode: which validation rollouts are guided, by the same names.
        rollout_expratio: share of a task's rollouts that are guided, with ``mixed``.
        train_sample_expmode: whether guided rollouts are trained on with the experience in their prompt: no
            (``alldiscard``), yes (``allkeep``), or those of a share of the tasks (``hybrid``): ``int(tasks *
            train_sample_keepratio)``, drawn at random.
        train_sample_keepratio: share of the tasks that keep experience in training, with ``hybrid``.

    Raises:
        ConfigurationError: no such mode, or a ratio outside [0, 1].
    """

    train_rollout_expmode: RolloutExpMode = "mixed"
    val_rollout_expmode: RolloutExpMode = "woexp"
    rollout_expratio: Share = 0.0
    train_sample_expmode: SampleExpMode = "alldiscard"
    train_sample_keepratio: Share = 1.0


class UpdateQueue:
    """Sends rollouts to a maker in the background, in batches of whole tasks.

    Args:
        maker: makes experiences of them.
        capacity: steps whose rollouts may wait; further ones are dropped, counted and logged.
        batch_size: approximate rollouts in a call of the maker: a task's rollouts stay together.
        workers: concurrent calls. With 1, experiences arrive in the order of the rollouts.
    """

    def __init__(self, maker: ExperienceMaker, *, capacity: int = 4, batch_size: int = 8, workers: int = 1) -> None:
        self._maker = maker
        self._capacity = whole("capacity", capacity, 1)
        self._batch_size = whole("batch_size", batch_size, 1)
        self._steps = 0
        self._trouble = Trouble("summarizing rollouts")
        self._figures = {"submitted": 0, "dropped": 0, "summarized": 0, "made": 0}
        self._lock = locks.lock("UpdateQueue._lock")
        self._dropping = False
        self._calls = Background("guidance-updates", workers=whole("workers", workers, 1))

    def submit(self, rollouts: Sequence[AgentTrajectory]) -> bool:
        """Queue rollouts for summarizing; return False if they were dropped because the queue is full.

        The trajectories must not be changed afterwards.
        """
        with self._lock:
            if self._calls.closed:
                return False
            if len(self._calls.waiting()) >= self._capacity:
                self._figures["dropped"] += len(rollouts)
                if not self._dropping:
                    logger.warning(
                        "guidance: summaries take longer than steps, so the rollouts of this step (%d) are not"
                        " summarized, nor are later ones while the queue is full (counted in "
                        "guidance/update/dropped); more experience_maker.summary_workers may keep up",
                        len(rollouts),
                    )
                self._dropping = True
                return False
            self._dropping = False
            self._figures["submitted"] += len(rollouts)
            self._steps += 1
            for batch in self._in_batches(rollouts):
                self._calls.submit(partial(self._summarize, batch), len(batch), self._steps)
            return True

    def wait(self, timeout: float) -> bool:
        """Return whether all queued rollouts were summarized, or failed, within ``timeout`` seconds."""
        return self._calls.wait(seconds("timeout", timeout))

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new rollouts, wait up to ``timeout`` seconds for running summaries, and log unfinished ones."""
        already = self._calls.closed
        left, running = self._calls.close(seconds("timeout", timeout))
        with self._lock:
            self._figures["dropped"] += left
        if not already and (left or running):
            logger.warning(
                "guidance: closed after %.0f s; abandoned: %s not summarized, and %s under way",
                timeout,
                counted(left, "rollout"),
                counted(running, "summary"),
            )

    def metrics(self) -> dict[str, float]:
        """Return figures since the beginning: rollouts by fate, experiences made, failures by kind."""
        with self._lock:
            figures = {f"guidance/update/{name}": float(value) for name, value in self._figures.items()}
        return figures | self._trouble.metrics("guidance/update/failed/")

    def _in_batches(self, rollouts: Sequence[AgentTrajectory]) -> list[list[AgentTrajectory]]:
        plain = []
        for rollout in rollouts:
            try:
                plain.append(unguided(rollout))
            except Exception as error:  # messages are user data; other rollouts are still summarized
                self._trouble.failed(MakerError("garbage", f"rollout {rollout.rollout_id!r}: {error!r}"))
        batches: list[list[AgentTrajectory]] = []
        for held in by_task(plain):
            if batches and len(batches[-1]) + len(held) <= self._batch_size:
                batches[-1] += held
            else:
                batches.append(held)
        return batches

    def _summarize(self, batch: Sequence[AgentTrajectory]) -> None:
        made = self._trouble.outcome_of(lambda: self._maker.summarize(batch))
        if made is not None:
            with self._lock:
                self._figures["summarized"] += len(batch)
                self._figures["made"] += made


class GuidanceManager:
    """Allocates guidance by a seeded generator. For the training loop's thread only.

    Args:
        rules: for allocation.
        seed: of the generator; managers with the same seed and calls decide alike.
    """

    def __init__(self, rules: AllocationRules, *, seed: int = 1234) -> None:
        whole("seed", seed, 0)
        self._rules = rules
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def allocate_train_mode(self, tasks: Sequence[Any]) -> list[TrainMode]:
        """Return the train mode of each task."""
        mode, count = self._rules.train_sample_expmode, len(tasks)
        if mode != "hybrid":
            return ["keep" if mode == "allkeep" else "discard"] * count
        order = self._generator.permutation(count)
        keeping = set(order[: int(count * self._rules.train_sample_keepratio)].tolist())
        return ["keep" if task in keeping else "discard" for task in range(count)]

    def allocate_add_exp(self, rollouts: Sequence[int], mode: RolloutMode) -> list[tuple[bool, ...]]:
        """Return which rollouts of each task are guided.

        Args:
            rollouts: number of rollouts of each task.
            mode: ``sample`` in training, ``validate`` in validation.

        Raises:
            ConfigurationError: a negative number.
        """
        for place, count in enumerate(rollouts):
            whole(f"rollouts[{place}]", count, 0)
        one_of("mode", mode, get_args(RolloutMode))
        rules = self._rules
        chosen = rules.train_rollout_expmode if mode == "sample" else rules.val_rollout_expmode
        if chosen != "mixed":
            return [(chosen == "all",) * count for count in rollouts]
        result = []
        for count in rollouts:
            guided = set(self._generator.permutation(count)[: round(count * rules.rollout_expratio)].tolist())
            result.append(tuple(rollout in guided for rollout in range(count)))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state: plain containers."""
        return {"generator": generator_state(self._generator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned.

        Raises:
            CorruptStoreError: ``state`` is not such a state; nothing was changed.
        """
        set_generator_state(self._generator, state.get("generator", ""))
