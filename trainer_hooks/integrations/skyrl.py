"""Recording and replay for SkyRL: a wrapped generator, and a callback. Written for SkyRL 0.3.0 and main."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from trainer_hooks.integrations.rollouts import (
    Recording,
    agent_trajectory,
    check_corrects,
    known,
    prompt_key,
    row_of,
    with_replayed,
)
from trainer_hooks.plain import kept
from trainer_hooks.wrapper import Wrapper
from trajstore import TrajectoryReplayBuffer
from trajstore._core.base.arguments import whole
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

SKYRL = "skyrl"
"""Key of ``metadata`` with what SkyRL needs to train a rollout again."""

_CORRECTIONS = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
)
_OWN = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs"),
    "trajectory_ids",
)
"""Outputs that are fields of a rollout."""

_JOINED = (*_OWN, "trajectory_generation_times", "trajectory_time_splits", "env_metrics")
"""Outputs that have a value for a replayed rollout; rows that have others cannot be replayed."""


class RecordingGenerator(Wrapper, wraps="generator"):
    """Wraps a generator: records its rollouts, and puts recorded ones into their groups.

    The wrapped generator gets the prompts of fresh rollouts only. Evaluation is neither recorded nor replayed. With
    step-wise training each row is a trajectory, and nothing can be replayed.

    Args:
        generator: the generator to wrap.
        buffer: the store.
        algorithm: ``cfg.trainer.algorithm``; needed to replay.
        replay: rollouts of a group that are recorded ones of the same prompt; at least one of a group is fresh.
        max_staleness: how many steps a replayed rollout may be old; None = any number.

    Raises:
        ConfigurationError: an argument is out of range, or ``replay`` is not 0 without an off-policy correction.
    """

    def __init__(
        self,
        generator: Any,
        buffer: TrajectoryReplayBuffer,
        *,
        algorithm: Any = None,
        replay: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        self.generator = generator
        self.replay = whole("replay", replay, 0)
        self.recording = Recording(buffer, max_staleness=max_staleness, by_task=True, needs_reward=True)
        if self.replay:
            options = getattr(algorithm, "off_policy_correction", None)
            corrects = any(getattr(options, name, None) is not None for name in _CORRECTIONS)
            check_corrects("trainer", corrects, "algorithm=cfg.trainer.algorithm with an off_policy_correction")

    async def generate(self, input_batch: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Return the rollouts of the prompts, in order.

        Raises:
            ConfigurationError: rollouts are to be replayed, but these have no log-probs or more than is recorded.
            InvalidTrajectoryError, StoreWriteError, StoreClosedError: rollouts cannot be recorded.
        """
        batch = input_batch.get("batch_metadata")
        if batch is None or batch.training_phase != "train":
            return dict(await self.generator.generate(input_batch, **options))
        count = len(input_batch["prompts"])
        keys = [prompt_key(prompt) for prompt in input_batch["prompts"]]
        ids = input_batch.get("trajectory_ids")
        groups = ids and [one.instance_id for one in ids]
        replayed = self.recording.draw_into_groups(keys, batch.global_step, self.replay, groups)
        fresh = [at for at in range(count) if at not in replayed]
        given = {name: _at(values, fresh, count) for name, values in input_batch.items()}
        output = dict(await self.generator.generate(given, **options))
        if self.replay:
            _check_can_be_replayed(output)
        rows = len(output["response_ids"])
        of_row = [keys[at] for at in fresh] if rows == len(fresh) else None
        made = [
            _recorded(output, row, of_row[row] if of_row else _task(output, row), batch.global_step)
            for row in range(rows)
        ]
        self.recording.record(made)
        return _joined(output, replayed, fresh, input_batch) if replayed else output


def _at(values: Any, places: list[int], count: int) -> Any:
    """Return the values at places, if there is one for each of ``count``."""
    return [values[at] for at in places] if isinstance(values, list) and len(values) == count else values


def _check_can_be_replayed(output: Mapping[str, Any]) -> None:
    if output.get("rollout_logprobs") is None:
        raise ConfigurationError(
            "replay: the generator returns no rollout_logprobs; set generator.sampling_params.logprobs"
        )
    for name, values in output.items():
        if values is not None and name not in (*_JOINED, "rollout_metrics"):
            raise ConfigurationError(
                f"replay: the generator returns {name}, which a replayed rollout does not have; set replay to 0"
            )


def _task(output: Mapping[str, Any], row: int) -> str:
    """Return the task of a row of step-wise training."""
    ids = output.get("trajectory_ids")
    return str(ids[row].instance_id) if ids else prompt_key(output["prompt_token_ids"][row])


def _recorded(output: Mapping[str, Any], row: int, task: str, version: int) -> AgentTrajectory:
    reward, reason, log_probs = output["rewards"][row], output.get("stop_reasons"), output.get("rollout_logprobs")
    ids, rows = output.get("trajectory_ids"), len(output["response_ids"])
    reward = reward.tolist() if hasattr(reward, "tolist") else reward
    json = [known(value) for value in reward] if isinstance(reward, list) else known(reward)  # without NaN
    ended = reason[row] if reason else None
    others = {
        name: row_of(values, row, rows)
        for name, values in output.items()
        if values is not None and name not in (*_OWN, "rollout_metrics")
    }
    return agent_trajectory(
        prompt_ids=output["prompt_token_ids"][row],
        response_ids=output["response_ids"][row],
        loss_mask=output["loss_masks"][row],
        log_probs=log_probs[row] if log_probs else None,
        reward=sum(reward) if isinstance(reward, list) else reward,
        version=version,
        task_id=task,
        rollout_id=ids[row].to_string() if ids else "",
        is_terminated=None if ended is None else ended != "length",
        metadata=kept(SKYRL, others | {"reward": json, "stop_reason": ended})[0],
    )


def _joined(
    output: dict[str, Any], replayed: Mapping[int, AgentTrajectory], fresh: list[int], input_batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the output with the replayed rollouts at their places."""

    def of_replayed(name: str, at: int) -> Any:
        rollout = replayed[at]
        start, ids = rollout.response_start, [] if rollout.input_ids is None else rollout.input_ids.tolist()
        own = rollout.metadata[SKYRL]
        fields = {"prompt_token_ids": ids[:start], "response_ids": ids[start:], "rewards": own["reward"]}
        fields |= {"loss_masks": rollout.response_mask, "rollout_logprobs": rollout.rollout_log_probs}
        fields |= {"stop_reasons": own["stop_reason"], "trajectory_generation_times": 0.0, "env_metrics": {}}
        if name == "trajectory_ids":
            return input_batch["trajectory_ids"][at]
        if name.startswith("trajectory_time_splits."):
            return 0.0
        value = fields.get(name)
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def joined(name: str, values: Any) -> Any:
        if name == "trajectory_time_splits" and values is not None:
            return {part: joined(f"{name}.{part}", rows) for part, rows in values.items()}
        if name == "rollout_metrics" or values is None:
            return values
        return with_replayed(name, values, fresh, len(fresh) + len(replayed), partial(of_replayed, name))

    return {name: joined(name, values) for name, values in output.items()}
