"""Shared by the adapters: a trainer's rollout as an agent trajectory, recording, and draws by policy version."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import torch

from trajstore import TrajectoryReplayBuffer
from trajstore._core.base.arguments import check_instance, path_or_url, whole_or_none
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.facts import session_of
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler
from trajstore.errors import ConfigurationError, EmptyBufferError, InvalidTrajectoryError, StoreNotFoundError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward

logger = logging.getLogger(__name__)


LACKS = "lacks"
"""Key of ``metadata``: fields without which a rollout is recorded, so that it cannot be replayed."""


def prompt_key(prompt: Any) -> str:
    """Return a name of a prompt, the same in every process: equal for equal text, token ids or messages.

    Raises:
        InvalidTrajectoryError: it is not JSON.
    """
    try:
        document = orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidTrajectoryError(f"prompt: {error}; pass text, token ids or messages") from error
    return hashlib.sha256(document).hexdigest()[:16]


def agent_trajectory(
    *,
    prompt_ids: Any,
    response_ids: Any,
    loss_mask: Any = None,
    log_probs: Any = None,
    reward: float | None = None,
    scores: Mapping[str, float | None] | None = None,
    version: int | None,
    task_id: str,
    metadata: Mapping[str, Any] | None = None,
    **fields: Any,
) -> AgentTrajectory:
    """Return a trainer's rollout as an agent trajectory. P = tokens of the prompt, R = tokens of the response.

    Args:
        prompt_ids: ``[P]``, a list, array or tensor.
        response_ids: ``[R]``; may be empty.
        loss_mask: ``[R]``, 1 on tokens to train, 0 on those of tools; None = all are trained.
        log_probs: ``[R]``, under the policy that sampled, as the engine reported them; None in the list is NaN.
        reward: NaN and None = unknown.
        scores: parts of the reward, kept as ``reward.metadata``; NaN and None are left out.
        version: of the policy that sampled.
        task_id: key of the prompt; rollouts of one prompt are a group.
        metadata: any JSON.
        **fields: further fields of :class:`~trajstore.AgentTrajectory`.

    Raises:
        InvalidTrajectoryError: mask or log-probs have another length than the response; names the rollout.
    """
    prompt, response = _tensor(prompt_ids, torch.int64), _tensor(response_ids, torch.int64)
    mask = torch.ones_like(response) if loss_mask is None else _tensor(loss_mask, torch.int64)
    columns = {"loss_mask": mask}
    if log_probs is not None:
        columns["rollout_log_probs"] = _tensor(log_probs, torch.float32)
    for name, column in columns.items():
        if len(column) != len(response):
            raise InvalidTrajectoryError(
                f"rollout {fields.get('rollout_id', '')!r} of task {task_id!r}: {name} has {len(column)} values for"
                f" {len(response)} tokens of the response"
            )
    return AgentTrajectory(
        input_ids=torch.cat([prompt, response]),
        loss_mask=torch.cat([torch.zeros_like(prompt), mask]),
        response_mask=mask,
        rollout_log_probs=columns.get("rollout_log_probs"),
        response_start=len(prompt),
        reward=Reward(
            outcome=known(reward), metadata={k: v for k, v in (scores or {}).items() if known(v) is not None}
        ),
        policy_version=version,
        task_id=task_id,
        metadata=dict(metadata or {}),
        **fields,
    )


def lacking(rollout: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of a rollout whose fields are not all exact, so that it is not replayed, and warn of them."""
    if names:
        logger.warning("%s is recorded without %s, and is not replayed", rollout, ", ".join(names))
    return {LACKS: list(names)} if names else {}


def row_of(value: Any, row: int, rows: int) -> Any:
    """Return a row of a value with one for each of ``rows``, or with such parts by name; another value whole."""
    if isinstance(value, Mapping):
        return {name: row_of(part, row, rows) for name, part in value.items()}
    has_rows = hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 and not isinstance(value, str | bytes)
    return value[row] if has_rows and len(value) == rows else value


def _tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(values, Sequence):
        values = [math.nan if value is None else value for value in values]
    return torch.as_tensor(values, dtype=dtype, device="cpu").reshape(-1)


def known(value: float | None) -> float | None:
    """Return a number; None for None and NaN."""
    return None if value is None or math.isnan(value) else float(value)


class _Earlier(Sampler):
    """Draws rollouts of earlier policy versions that are not too old."""

    unit = "trajectory"
    needs_tasks = True

    def __init__(self, max_staleness: int | None, *, by_task: bool) -> None:
        self.version = 0
        self.task = ""
        self.drawn: list[int] = []
        self._max_staleness, self._by_task = max_staleness, by_task
        self._newest, self._told = 0, False
        self._groups: dict[str | int, dict[int, int]] = {}
        """Versions by id; by task, or by version."""
        self._group_of: dict[int, str | int] = {}

    @property
    def ids(self) -> IntArray:
        return np.array(list(self._group_of), np.int64)

    @property
    def following(self) -> int:
        """The version after the newest one; 0 without rollouts."""
        return self._newest + 1 if self._group_of else 0

    def added(self, additions: Additions) -> None:
        tasks = additions.tasks or [""] * len(additions)
        known = additions.versions[additions.versions != UNKNOWN_VERSION]
        self._warn(int(known.min(initial=self._newest)))
        self._newest = int(known.max(initial=self._newest))
        for number, version, task in zip(additions.ids.tolist(), additions.versions.tolist(), tasks, strict=True):
            key = self._group_of[number] = task if self._by_task else version
            self._groups.setdefault(key, {})[number] = version

    def _warn(self, version: int) -> None:
        """Warn once of rollouts that are too old to be drawn when they are added."""
        if self._group_of and not self._told and self._max_staleness is not None:
            self._told = version < self._newest - self._max_staleness
            if self._told:
                logger.warning(
                    "max_staleness: a rollout of version %d is recorded after one of %d; if versions began again with "
                    "this process, ages are wrong: let the trainer continue its count",
                    *(version, self._newest),
                )

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        for number in np.asarray(ids).tolist():
            if (key := self._group_of.pop(number, None)) is not None:
                del self._groups[key][number]
                if not self._groups[key]:
                    del self._groups[key]

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        oldest = 0 if self._max_staleness is None else max(0, self.version - self._max_staleness)
        keys = [self.task] if self._by_task else [key for key in self._groups if oldest <= int(key) < self.version]
        ids = [
            number
            for key in keys
            for number, version in self._groups.get(key, {}).items()
            if oldest <= version < self.version
        ]
        if not ids:
            raise EmptyBufferError(f"cannot sample: no rollout of versions {oldest} to {self.version - 1}")
        self.drawn = [ids[at] for at in torch.randperm(len(ids), generator=generator)[:count].tolist()]
        return Drawn(np.array(self.drawn), np.zeros(len(self.drawn), np.int64))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: everything follows from the trajectories in the buffer."""


class Recording:
    """Records rollouts in a buffer, and draws recorded ones of earlier policy versions.

    Rollouts that cannot be trained are not drawn: without a trained token, or without a finite log-prob of each. Agent
    sessions of several rows are not drawn either, with one warning, because a place of a group takes one row. The
    window of the buffer (``sample_window_size``) does not limit draws.

    Args:
        buffer: the store; the rollouts of an earlier process are drawn too.
        max_staleness: how many versions a drawn rollout may be behind the current one; None = any number.
        by_task: draw rollouts of one task at a time.
        needs_reward: draw only rollouts with a known reward.
        run: run directory of the stores of all processes, ``buffer``'s included, to draw from; None = from ``buffer``.

    Raises:
        ConfigurationError: an argument is out of range, or the buffer was opened for reading.
    """

    def __init__(
        self,
        buffer: TrajectoryReplayBuffer,
        *,
        max_staleness: int | None = None,
        by_task: bool = False,
        needs_reward: bool = False,
        run: str | Path | None = None,
    ) -> None:
        self._run = run if run is None else path_or_url("run", run)
        self._source: Reader | None = None if run else buffer
        check_instance("buffer", buffer, TrajectoryReplayBuffer, "a TrajectoryReplayBuffer, which can add rollouts")
        self.buffer, self._needs_reward = buffer, needs_reward
        self.before = 0
        """Policy versions of earlier processes, for trainers that count those of each process from 0."""
        self.newest = 0
        """The newest policy version that was recorded in this process."""
        self._told = False
        self._sampler = _Earlier(whole_or_none("max_staleness", max_staleness, 0), by_task=by_task)

    def count_from(self, steps: int, first: int) -> None:
        """Make versions continue in a process whose trainer has done ``steps``, but counts from ``first`` again."""
        self.before = max(0, steps - first)
        self.newest = self.before + first

    def count_on(self, first: int = 0) -> None:
        """Make versions continue after the newest stored one, for a trainer that counts from ``first`` again."""
        self._sampler.follow(self.buffer)
        self.count_from(self._sampler.following, first)

    def record(self, rollouts: Sequence[AgentTrajectory]) -> list[int]:
        """Add rollouts and return their ids. Writing continues in the background.

        Raises:
            InvalidTrajectoryError: one cannot be stored; nothing was added.
            StoreWriteError: the store cannot be written, for example because its disk is full; nothing was added.
            StoreClosedError: the buffer is closed.
        """
        ids = self.buffer.add_trajectories(rollouts)
        self.newest = max([self.newest, *(rollout.policy_version or 0 for rollout in rollouts)])
        return ids

    def draw(self, version: int, count: int = 1, task_id: str = "") -> list[AgentTrajectory]:
        """Return up to ``count`` different recorded rollouts of earlier versions.

        Args:
            version: the current policy version.
            count: how many, at least 1.
            task_id: the task to draw from, if draws are by task.

        Raises:
            CorruptStoreError: a file is missing or damaged.
        """
        self._sampler.version, self._sampler.task = version, task_id
        while self._source is not None:
            try:
                rollouts = self._source.sample_trajectories(count, sampler=self._sampler)
            except EmptyBufferError:
                return []
            pairs = zip(self._sampler.drawn, rollouts, strict=True)
            if not (refused := [number for number, rollout in pairs if not self._can_be_trained(rollout)]):
                return cast(list[AgentTrajectory], rollouts)
            self._sampler.evicted(refused)
        return []

    def draw_into_groups(
        self, keys: Sequence[str], version: int, count: int, groups: Sequence[Hashable] | None = None
    ) -> dict[int, AgentTrajectory]:
        """Return recorded rollouts for the last ``count`` places of each group, by place; one place stays free.

        Args:
            keys: task of each place.
            version: the current policy version.
            count: places of a group; 0 = none.
            groups: group of each place, of one task; None = each task is one.
        """
        of_group: dict[Hashable, list[int]] = {}
        for at, group in enumerate(zip(keys, groups or keys, strict=True)):
            of_group.setdefault(group, []).append(at)
        free: dict[str, list[int]] = {}
        for places in of_group.values():
            free.setdefault(keys[places[0]], []).extend(places[max(1, len(places) - count) :] if count else ())
        if self._run is not None and count:
            self._look(self._run)
        drawn: dict[int, AgentTrajectory] = {}
        for key, places in free.items():
            if places:  # at once, so that two groups of a task get different ones
                drawn |= zip(places, self.draw(version, len(places), key), strict=False)
        return drawn

    def _look(self, run: str | Path) -> None:
        """Show what all processes have committed."""
        if self._source is not None:
            self._source.refresh()
            return
        with contextlib.suppress(StoreNotFoundError):  # nothing is recorded yet
            self._source = Reader.open(run)

    def _can_be_trained(self, rollout: AnyTrajectory) -> bool:
        if not isinstance(rollout, AgentTrajectory) or rollout.response_mask is None or rollout.metadata.get(LACKS):
            return False
        if (session := session_of(rollout.metadata)) and session[2] > 1:
            if not self._told:
                self._told = True
                logger.warning("session %s is not replayed: it has %d rows, its place in a group one", *session[::2])
            return False
        if self._needs_reward and (rollout.reward is None or rollout.reward.outcome is None):
            return False
        if (log_probs := rollout.rollout_log_probs) is None:
            return False
        trained = log_probs[rollout.response_mask.bool()]
        return len(trained) > 0 and bool(trained.isfinite().all())


def with_replayed(
    name: str, values: Sequence[Any], fresh: Sequence[int], count: int, of_replayed: Callable[[int], Any]
) -> list[Any]:
    """Return a value for each place: those of fresh rollouts, and of replayed ones.

    Args:
        name: of the values.
        values: of the fresh rollouts.
        fresh: their places.
        count: number of places.
        of_replayed: returns the value of the replayed rollout at a place.

    Raises:
        ConfigurationError: there is not one value for each fresh rollout, so nothing says whose they are.
    """
    if len(values) != len(fresh):
        raise ConfigurationError(
            f"replay: the output has {len(values)} {name} for {len(fresh)} rollouts; set replay to 0"
        )
    made = dict(zip(fresh, values, strict=True))
    return [made[at] if at in made else of_replayed(at) for at in range(count)]


def check_corrects(trainer: str, corrects: Any, remedy: str) -> None:
    """Refuse replay in a trainer that ignores recorded log-probs.

    Raises:
        ConfigurationError: it does; says what to set.
    """
    if not corrects:
        raise ConfigurationError(
            f"replay: this {trainer} does not use recorded log-probs and would train replayed rollouts as its own,"
            f" with a ratio of 1; set {remedy}"
        )
