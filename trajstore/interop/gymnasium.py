"""Steps of Gymnasium's vector environments as trajectories, in every autoreset mode. Does not import Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import one_of, text, whole_or_none
from trajstore._core.columns.limits import shown
from trajstore._core.columns.values import from_numpy
from trajstore.builder import EmbodiedRolloutResult
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, counted
from trajstore.interop.episodes import episodes_of, has_ended, joined
from trajstore.trajectory import ChunkStepResult, Trajectory, copied

MODES = ("next_step", "same_step", "disabled")
"""Autoreset modes of vector environments; see https://farama.org/Vector-Autoreset-Mode."""

Flags = npt.NDArray[np.bool_]


class VectorSteps:
    """Collects the steps of a vector environment, and makes trajectories ``[T, B, ...]`` of them.

    Call :meth:`reset` with the result of every ``env.reset``, :meth:`add` with that of every ``env.step``, and
    :meth:`take` for the steps collected since the last one, or :meth:`take_episodes` for each episode by itself.
    Everything is copied.

    ========== =====================================================================================
    mode       stored
    ========== =====================================================================================
    next_step  the step after an episode's end, which only resets the environment, is not ``valid``
    same_step  the last ``next_obs`` of an episode is ``info["final_obs"]``; a step without it is refused
    disabled   environments that ended must be reset before the next step
    ========== =====================================================================================

    Args:
        environment: the vector environment; its mode is ``metadata["autoreset_mode"]``.
        autoreset: the mode, for environments that do not give it: one of :data:`MODES`.
        name: key of observations that are arrays, in ``curr_obs`` and ``next_obs``; dicts keep their keys.
        max_episode_length: longest possible episode, in steps; None takes that of ``environment.spec``.

    Raises:
        ConfigurationError: the mode is unknown, or not the one of the environment.
    """

    def __init__(
        self,
        environment: Any,
        *,
        autoreset: str | None = None,
        name: str = "states",
        max_episode_length: int | None = None,
    ) -> None:
        known = getattr(environment, "metadata", {}).get("autoreset_mode")
        own = None if known is None else str(getattr(known, "name", known)).lower()
        if own is None and autoreset is None:
            raise ConfigurationError(
                'autoreset: the environment does not give its mode (metadata["autoreset_mode"]); say autoreset= one of '
                f"{', '.join(MODES)}"
            )
        self.mode = one_of("autoreset", own if autoreset is None else autoreset, MODES)
        if own is not None and own != self.mode:
            raise ConfigurationError(f"autoreset: {self.mode}, but the environment's mode is {own}")
        limit = getattr(getattr(environment, "spec", None), "max_episode_steps", None)
        longest = whole_or_none("max_episode_length", max_episode_length, 0)
        self._name = text("name", name)
        self._result = EmbodiedRolloutResult(int(limit or 0) if longest is None else longest)
        self._current: dict[str, Any] | None = None
        self._ended: Flags = np.zeros(0, np.bool_)
        self._open: dict[int, Trajectory] = {}
        """Steps that ``take_episodes`` keeps, by environment."""
        self._by_episode: bool | None = None

    @property
    def ended(self) -> Flags:
        """Whether each environment's episode has ended and it was not reset since, ``[B]``."""
        return self._ended.copy()

    def __len__(self) -> int:
        """Number of steps collected since the last :meth:`take`."""
        return len(self._result)

    def reset(self, observations: Any, mask: npt.ArrayLike | None = None) -> None:
        """Take the observations of ``env.reset``.

        An episode that had not ended is truncated: its last step, if not taken yet, is marked in ``truncations`` and
        ``dones``.

        Args:
            observations: of all environments.
            mask: which were reset, ``[B]`` (``options={"reset_mask": mask}``); None: all.
        """
        current = copied(self._tensors(observations))
        count = _count_of(current)
        which = np.ones(count, np.bool_) if mask is None else np.asarray(mask, np.bool_)
        if which.shape != (count,):
            raise InvalidTrajectoryError(f"mask: shape {list(which.shape)}, must be [{count}]")
        if len(self) and count != len(self._ended):
            there = counted(len(self._ended), "environment")
            raise InvalidTrajectoryError(f"observations: of {counted(count, 'environment')}, the steps are of {there}")
        self._result.mark_last_step_truncated(torch.from_numpy(which))
        for environment, episode in self._open.items() if not len(self) else ():
            for flags in (episode.truncations, episode.dones):
                if flags is not None and which[environment]:
                    flags[-1] = True
        ended = self._ended if len(self._ended) == count else np.zeros(count, np.bool_)
        self._current, self._ended = current, ended & ~which

    def add(self, actions: Any, step: Sequence[Any], **fields: Any) -> None:
        """Add a step.

        Args:
            actions: given to ``env.step``, ``[B]`` or ``[B, ...]``.
            step: result of ``env.step``: observations, rewards, terminations, truncations and info.
            fields: further fields of :class:`~trajstore.ChunkStepResult` (``prev_logprobs``, ``prev_values``,
                ``versions``, ``forward_inputs``), as tensors or arrays.

        Raises:
            InvalidTrajectoryError: an observation or action is no array of numbers; an episode ended in mode
                ``same_step`` without its last observation. The step was not added.
            ConfigurationError: the environment was not reset.
        """
        if self._current is None:
            raise ConfigurationError("call reset(observations) with the result of env.reset before the first step")
        if len(step) != 5:
            raise InvalidTrajectoryError(f"step: {len(step)} values, must be the 5 that env.step returns")
        if self.mode == "disabled" and self._ended.any():
            raise ConfigurationError(
                f"environments {np.flatnonzero(self._ended).tolist()} ended and were not reset: call "
                'env.reset(options={"reset_mask": steps.ended}), then reset with its observations and this mask'
            )
        returned, rewards, terminations, truncations, info = step
        observations = self._tensors(returned)
        terminated, truncated = (_column(value).bool() for value in (terminations, truncations))
        done = terminated | truncated
        count = _count_of(observations)
        if len(done) != count or count != _count_of(self._current):
            raise InvalidTrajectoryError(
                f"step: {counted(len(done), 'termination')} and {counted(count, 'observation')} for "
                f"{counted(_count_of(self._current), 'environment')}"
            )
        after = observations
        if self.mode == "same_step" and done.any():
            after = copied(observations)
            for number in done[:, 0].nonzero()[:, 0].tolist():
                _replace(after, _final(info, number), number)
        more: dict[str, Any] = {
            key: value if isinstance(value, Mapping) else _column(value) for key, value in fields.items()
        }
        if self.mode == "next_step":
            more["valid"] = torch.from_numpy(~self._ended if len(self._ended) else np.ones(count, np.bool_))
        self._result.append_step_result(
            ChunkStepResult(
                actions=_column(actions, "actions"),
                rewards=_column(rewards),
                terminations=terminated,
                truncations=truncated,
                dones=done,
                **more,
            )
        )
        self._result.append_transitions(self._current, after)
        self._current = copied(observations)
        self._ended = np.zeros(count, np.bool_) if self.mode == "same_step" else done[:, 0].numpy().copy()

    def take(self, last_values: Any = None) -> Trajectory:
        """Return the steps collected since the last call as a trajectory.

        Args:
            last_values: values of the observations after the last step, ``[B]`` or ``[B, 1]``: the bootstrap row of
                ``prev_values``.

        Raises:
            InvalidTrajectoryError: there are no steps, or steps differ in a field.
            ConfigurationError: ``take_episodes`` was called before.
        """
        self._choose(by_episode=False)
        if not len(self):
            raise InvalidTrajectoryError("no steps were collected")
        if last_values is not None:
            self._result.append_step_result(ChunkStepResult(prev_values=_column(last_values)))
        trajectory = self._result.to_trajectory()
        self._result.clear()
        return trajectory

    def take_episodes(self, *, unfinished: bool = False) -> list[Trajectory]:
        """Return the episodes that have ended since the last call, each as a trajectory ``[n, 1, ...]``.

        Steps of other episodes are kept for a later call. The order is that of the environments, then of time.

        Args:
            unfinished: also return the steps of the episodes under way, as at the end of a training; their other steps
                become episodes of their own.

        Raises:
            InvalidTrajectoryError: steps differ in a field.
            ConfigurationError: ``take`` was called before.
        """
        self._choose(by_episode=True)
        episodes: list[Trajectory] = []
        parts, self._open = [*self._open.items()], {}
        if len(self):
            parts += episodes_of(self._result.to_trajectory())
            self._result.clear()
        for environment, part in sorted(parts, key=lambda found: found[0]):
            before = self._open.pop(environment, None)
            try:
                episode = part if before is None else joined(before, part)
            except ValueError as error:
                raise InvalidTrajectoryError(f"{error}: the steps of an episode differ in this field") from error
            if has_ended(episode):
                episodes.append(episode)
            else:
                self._open[environment] = episode
        if unfinished:
            episodes += self._open.values()
            self._open = {}
        return [replace(episode, model_weights_id="") for episode in episodes]  # set of its own versions when added

    def _choose(self, *, by_episode: bool) -> None:
        if self._by_episode not in (None, by_episode):
            raise ConfigurationError("call take or take_episodes of these steps, not both: they would share episodes")
        self._by_episode = by_episode

    def _tensors(self, observations: Any) -> dict[str, Any]:
        """Return observations as nested dicts of tensors, which share their memory."""
        found = _nested(observations, "observations")
        return found if isinstance(found, dict) else {self._name: found}


def _nested(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _nested(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return {str(at): _nested(item, f"{path}.{at}") for at, item in enumerate(value)}
    return _tensor(value, path)


def _tensor(value: Any, path: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    parts = isinstance(value, tuple) and any(map(np.ndim, value))  # of a Tuple space, which no array can hold
    array = np.asanyarray(None if parts else value)
    if array.dtype.kind not in "biufc" or not array.ndim:
        raise InvalidTrajectoryError(
            f"{path}: {shown(value)} is not an array of numbers with a row for each environment; leave it out, or "
            "encode it"
        )
    return from_numpy(path, array)


def _column(value: Any, path: str = "step") -> torch.Tensor:
    """Return values of the environments, ``[B]`` as ``[B, 1]``."""
    tensor = _tensor(value, path)
    return tensor[:, None] if tensor.dim() == 1 else tensor


def _count_of(observations: Mapping[str, Any]) -> int:
    first = next(iter(observations.values()), None)
    if isinstance(first, Mapping):
        return _count_of(first)
    if first is None:
        raise InvalidTrajectoryError("observations: there are none")
    return len(first)


def _final(info: Mapping[str, Any], number: int) -> Any:
    """Return the last observation of the episode that ended in an environment.

    Raises:
        InvalidTrajectoryError: it is not in ``info``.
    """
    finals, given = info.get("final_obs"), info.get("_final_obs")
    found = None
    if finals is not None and (given is None or given[number]):
        found = _row(finals, number)
    if found is None:
        raise InvalidTrajectoryError(
            f'environment {number} ended in mode same_step, and info["final_obs"] does not have its last observation: '
            "the one returned is already of the next episode. Use autoreset_mode=NEXT_STEP, or a wrapper that keeps it"
        )
    return found


def _row(values: Any, number: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _row(item, number) for key, item in values.items()}
    return values[number]


def _replace(target: Any, value: Any, number: int) -> None:
    """Write one environment's observation into those of all."""
    if isinstance(target, dict):
        parts = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, tuple) else None
        if parts is None and len(target) == 1:
            parts = dict.fromkeys(target, value)
        if parts is None or {str(key) for key in parts} != set(target):
            raise InvalidTrajectoryError(f"final_obs: {shown(value)}, must have {', '.join(target)}")
        for key, item in parts.items():
            _replace(target[str(key)], item, number)
        return
    row = torch.as_tensor(np.asarray(value))
    if row.shape != target[number].shape:
        raise InvalidTrajectoryError(f"final_obs: shape {list(row.shape)}, must be {list(target[number].shape)}")
    target[number] = row
