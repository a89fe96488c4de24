"""Recording and replay for TRL: a rollout worker of ``AsyncGRPOTrainer``, and a ``rollout_func`` of ``GRPOTrainer``.

Written for TRL 1.16, whose interfaces for both are experimental.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_hooks.integrations.rollouts import (
    Recording,
    agent_trajectory,
    check_corrects,
    known,
    lacking,
    prompt_key,
    row_of,
    with_replayed,
)
from trainer_hooks.plain import kept
from trainer_hooks.wrapper import Wrapper
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.base.arguments import finite, whole
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

TRL = "trl"
"""Key of ``metadata`` with what TRL needs to train a rollout again, and author of late values."""

IDS = "trajectory_ids"
"""Name under which TRL passes the ids of recorded rollouts to reward functions; None for replayed ones."""


_COLUMNS = (*("prompt", "completion", "input_ids", "completion_mask", "old_log_probs"), *("model_version", "metrics"))
"""Fields of a sample that are fields of a rollout."""

_OUTPUTS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
"""Lists of a ``rollout_func`` that are fields of a rollout."""

_OF_PLACE = ("group_id", "enqueued_at", "prompt_messages")
"""Entries of the metadata that a replayed sample does not take over."""


RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]
"""A ``rollout_func`` of TRL's ``GRPOTrainer``: called with prompts and the trainer."""


class RecordingWorker(Wrapper, wraps="worker"):
    """Wraps a rollout worker: records the samples that the trainer takes, and mixes in recorded ones.

    Pass it as ``rollout_worker`` of ``AsyncGRPOTrainer``. Each training row is recorded when the trainer takes it, also
    if the trainer then drops it as stale. A replayed sample has its recorded log-probs, advantage and version, and
    its group is that of the newest fresh sample, because TRL counts the groups of a process to stop and to resume.
    Its metrics begin with ``replay/``, so that TRL's ``reward`` covers fresh samples only.

    Args:
        worker: the worker to wrap, with the methods of TRL's ``RolloutWorkerProtocol``.
        buffer: the store.
        replay: part of the samples that are recorded ones, at least 0 and less than 1; fewer while none is recent.
        max_staleness: ``max_staleness`` of the trainer's configuration, which drops older samples.

    Raises:
        ConfigurationError: an argument is out of range, or ``replay`` is above 0 with ``max_staleness`` 0.
    """

    def __init__(
        self, worker: Any, buffer: TrajectoryReplayBuffer, *, replay: float = 0.0, max_staleness: int = 3
    ) -> None:
        share = finite("replay", replay, 0)
        if share >= 1:
            raise ConfigurationError(f"replay: {replay}, must be less than 1: fresh samples are needed too")
        if share and max_staleness == 0:
            raise ConfigurationError("max_staleness: 0, but a recorded sample is at least one version old; raise it")
        self.worker = worker
        self.rollout_buffer = _MixedQueue(
            worker.rollout_buffer, Recording(buffer, max_staleness=max_staleness), share / (1 - share)
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the wrapped worker: TRL keeps the place in the data set only for its own class."""
        return type(self.worker)

    def update_model_version(self, model_version: int) -> None:
        """Take over the version of the trainer's weights, and pass it on."""
        self.rollout_buffer.version = model_version
        self.worker.update_model_version(model_version)

    def stop(self) -> None:
        """Stop the worker, also if it failed, and flush the store.

        Raises:
            StoreWriteError: it could not be written.
        """
        try:
            self.worker.stop()
        finally:
            self.rollout_buffer.recording.buffer.flush()


class _MixedQueue(Wrapper, wraps="_samples"):
    """The worker's queue, for the trainer that takes samples from it."""

    def __init__(self, samples: Any, recording: Recording, per_fresh: float) -> None:
        self.version = 0
        self.recording = recording
        self._samples, self._per_fresh, self._due = samples, per_fresh, 0.0
        self._newest: Any = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return a recorded sample if one is due, else the worker's next one.

        Raises:
            queue.Empty: the worker has produced none in time.
            InvalidTrajectoryError, StoreWriteError, StoreClosedError: it cannot be recorded.
            ConfigurationError: a recorded sample of another version of TRL has other fields.
        """
        if self._newest is None and self.version <= 1:  # TRL counts the versions of each process from 0
            self.recording.count_on(self.version)
        before = self.recording.before
        if self._due >= 1 and (rollouts := self.recording.draw(before + self.version)):
            self._due -= 1
            return self._replayed(rollouts[0])
        sample = self._newest = self._samples.get(block, timeout)
        self.recording.record([_recorded(sample, before)])
        self._due = min(self._due + self._per_fresh, 1 + self._per_fresh)
        return sample

    def _replayed(self, rollout: AgentTrajectory) -> Any:
        own, prompt = rollout.metadata[TRL], rollout.response_start or 0
        further = {name: value for name, value in own.items() if name not in _OF_PLACE}
        version = (rollout.policy_version or 0) - self.recording.before
        reward = None if rollout.reward is None else rollout.reward.outcome
        metrics = {
            "replay/reward": math.nan if reward is None else reward,
            "replay/staleness": float(self.version - version),
        }
        try:
            return type(self._newest)(
                prompt=rollout.messages[: own["prompt_messages"]],
                completion=rollout.messages[own["prompt_messages"] :],
                input_ids=np.asarray(rollout.input_ids),
                completion_mask=np.asarray(rollout.loss_mask),
                old_log_probs=np.pad(np.asarray(rollout.rollout_log_probs), (prompt, 0)),
                model_version=version,
                group_id=self._newest.group_id,
                metrics=metrics,
                **further,
            )
        except TypeError as error:
            raise ConfigurationError(
                f"replay: a recorded sample has other fields than TRL's: {error}; use a new store with this version"
            ) from error


class RecordingRollouts:
    """Wraps a ``rollout_func`` of ``GRPOTrainer``: records its rollouts, and puts recorded ones into their groups.

    A group is the rollouts of one prompt in a call. ``rollout_func`` gets the prompts of fresh rollouts only, and the
    trainer's reward functions score replayed ones again. Evaluation is neither recorded nor replayed.

    Args:
        rollout_func: makes the rollouts.
        buffer: the store; each process of the trainer has its own.
        run: run directory of the stores of all processes, from which each draws; None = each draws its own rollouts.
        replay: rollouts of a group that are recorded ones of the same prompt; at least one of a group is fresh.
        max_staleness: how many optimizer steps a replayed rollout may be old; None = any number.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        rollout_func: RolloutFunction,
        buffer: TrajectoryReplayBuffer,
        *,
        replay: int = 0,
        max_staleness: int | None = None,
        run: str | Path | None = None,
    ) -> None:
        self.rollout_func = rollout_func
        self.replay = whole("replay", replay, 0)
        self.recording = Recording(buffer, max_staleness=max_staleness, by_task=True, run=run)
        self._scored: dict[str, Any] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the rollouts of the prompts, in order.

        Raises:
            ConfigurationError: rollouts are to be replayed, but the trainer would take them for its own, or
                ``rollout_func`` returns no log-probs, or rollouts of other prompts than it was given.
            InvalidTrajectoryError, StoreWriteError, StoreClosedError: rollouts cannot be recorded.
        """
        if not trainer.model.training:
            return dict(self.rollout_func(prompts, trainer))
        if self.replay:
            check_corrects(
                "GRPOTrainer",
                trainer.off_policy_mask_threshold is not None
                or (trainer.use_vllm and trainer.vllm_importance_sampling_correction),
                "use_vllm with vllm_importance_sampling_correction, or off_policy_mask_threshold",
            )
            _check_groups(trainer, len(prompts))
        version, keys = int(trainer.state.global_step), [prompt_key(prompt) for prompt in prompts]
        size = getattr(trainer, "num_generations", None) or len(prompts)
        groups = [at // size for at in range(len(prompts))]
        replayed = self.recording.draw_into_groups(keys, version, self.replay, groups)
        fresh = [at for at in range(len(prompts)) if at not in replayed]
        output = dict(self.rollout_func([prompts[at] for at in fresh], trainer))
        if self.replay and output["logprobs"] is None:
            raise ConfigurationError(
                "replay: rollout_func returns logprobs=None, but only rollouts with them can be used"
            )
        if replayed:
            _check_prompts([keys[at] for at in fresh], output["prompt_ids"])
        made = [_of_output(output, place, keys[at], prompts[at], version) for place, at in enumerate(fresh)]
        ids = dict(zip(fresh, self.recording.record(made), strict=True))
        return _joined(output, replayed, fresh) | {IDS: [ids.get(at) for at in range(len(prompts))]}

    def scored(self, reward_func: Callable[..., Any], name: str = "outcome") -> Callable[..., Any]:
        """Wrap a reward function to record its rewards as late values; None and NaN are not recorded.

        Args:
            reward_func: one of the trainer's ``reward_funcs``.
            name: of the value. ``outcome`` is the reward of the rollout; name the other functions of several.
        """
        if isinstance(reward_func, torch.nn.Module) or not callable(reward_func):
            raise ConfigurationError(
                "scored: a reward model cannot be wrapped, because TRL would not find it; wrap a function that calls it"
            )

        if self._scored.setdefault(name, reward_func) is not reward_func:
            raise ConfigurationError(
                f"scored: two functions for {name!r}, of which one would be lost; name one of them"
            )

        def record(ids: Any, rewards: Any) -> Any:
            if ids is not None:
                pairs = zip(ids, map(known, rewards), strict=True)
                scores = {number: reward for number, reward in pairs if None not in (number, reward)}
                if scores:
                    annotate(self.recording.buffer, list(scores), {name: list(scores.values())}, who=TRL)
            return rewards

        @functools.wraps(reward_func)
        def score(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.pop(IDS, None)
            return record(ids, reward_func(*args, **kwargs))

        @functools.wraps(reward_func)
        async def score_later(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.pop(IDS, None)
            return record(ids, await reward_func(*args, **kwargs))

        return score_later if inspect.iscoroutinefunction(reward_func) else score


def _check_groups(trainer: Any, count: int) -> None:
    """Refuse replay if groups are spread over processes, of which each would count its own places.

    Raises:
        ConfigurationError: they are; says what to set.
    """
    processes = getattr(getattr(trainer, "accelerator", None), "num_processes", 1)
    generations = getattr(trainer, "num_generations", 1)
    if processes > 1 and count % generations:
        raise ConfigurationError(
            f"replay: {count} prompts in a process, but groups have {generations} generations, so they are spread over "
            "processes; make per_device_train_batch_size * steps_per_generation a multiple of num_generations"
        )


def _check_prompts(keys: Sequence[str], prompt_ids: Sequence[Any]) -> None:
    """Refuse rollouts of other prompts than those that were given, which need not be whole groups in replay.

    Raises:
        ConfigurationError: two prompts have the same token ids.
    """
    owners: dict[tuple[int, ...], str] = {}
    for key, ids in zip(keys, prompt_ids, strict=False):
        if owners.setdefault(tuple(_list(torch.as_tensor(ids))), key) != key:
            raise ConfigurationError(
                "replay: rollout_func returns the same prompt_ids for two prompts. With vllm_mode='server', TRL's "
                "vllm_generation takes each num_generations-th prompt and returns num_generations of it, but a group "
                "has fewer fresh ones: call it with num_generations=1, or set replay to 0"
            )


def _of_output(output: Mapping[str, Any], place: int, key: str, prompt: Any, version: int) -> AgentTrajectory:
    """Return one rollout of the output of a ``rollout_func``."""
    count, others = len(output["prompt_ids"]), {name: output[name] for name in output if name not in _OUTPUTS}
    metadata, changed = kept(TRL, {name: row_of(value, place, count) for name, value in others.items()})
    return agent_trajectory(
        prompt_ids=output["prompt_ids"][place],
        response_ids=output["completion_ids"][place],
        loss_mask=output["env_mask"][place] if "env_mask" in output else None,
        log_probs=None if output["logprobs"] is None else output["logprobs"][place],
        version=version,
        task_id=key,
        messages=_messages(prompt, "user"),
        metadata=metadata | lacking("TRL: a rollout", [name for name in changed if isinstance(output[name], list)]),
    )


def _joined(output: Mapping[str, Any], replayed: Mapping[int, AgentTrajectory], fresh: Sequence[int]) -> dict[str, Any]:
    """Return the output of a ``rollout_func``, which has the rollouts at the places ``fresh``, with replayed ones.

    Raises:
        ConfigurationError: a list has another length, so nothing says whose values it has.
    """
    joined = dict(output)
    if not all(all(_list(rollout.response_mask)) for rollout in replayed.values()) and "env_mask" not in joined:
        joined["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]

    def of_replayed(name: str, at: int) -> Any:
        rollout = replayed[at]
        ids, start = _list(rollout.input_ids), rollout.response_start
        own = {"prompt_ids": ids[:start], "completion_ids": ids[start:]}
        own |= {"logprobs": _list(rollout.rollout_log_probs), "env_mask": _list(rollout.response_mask)}
        return own[name] if name in own else rollout.metadata[TRL].get(name)

    for name, values in joined.items():
        if not replayed or values is None or not (name in _OUTPUTS or isinstance(values, list)):
            continue
        count = len(fresh) + len(replayed)
        joined[name] = with_replayed(name, values, fresh, count, functools.partial(of_replayed, name))
    return joined


def _list(column: torch.Tensor | None) -> list[Any]:
    return [] if column is None else column.tolist()


def _messages(part: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": part}] if isinstance(part, str) else list(part)


def _recorded(sample: Any, before: int) -> AgentTrajectory:
    """Return a ``RolloutSample`` as an agent trajectory, with the versions of earlier processes before its own."""
    mask = np.asarray(sample.completion_mask)
    start = int(mask.argmax()) if mask.any() else len(mask)
    prompt = _messages(sample.prompt, "user")
    names = [item.name for item in fields(sample)] if is_dataclass(sample) else [*vars(sample)]
    others = {name: getattr(sample, name) for name in names if name not in _COLUMNS}
    metadata, changed = kept(TRL, others, _OF_PLACE)
    metadata[TRL] |= {"prompt_messages": len(prompt)}
    return agent_trajectory(
        prompt_ids=sample.input_ids[:start],
        response_ids=sample.input_ids[start:],
        loss_mask=mask[start:],
        log_probs=sample.old_log_probs[start:],
        reward=sample.metrics.get("reward"),
        scores=sample.metrics,
        version=before + sample.model_version,
        task_id=prompt_key(sample.prompt),
        messages=prompt + _messages(sample.completion, "assistant"),
        metadata=metadata | lacking("TRL: a sample", changed),
    )
