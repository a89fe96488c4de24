"""Validation of a rollout's fields, the same for every store of a pool. Pure.

Pools in memory and on disk accept the same rollouts. Rollouts that a trajectory store would refuse are found here one
by one, so that the others of their step are kept.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from trainer_hooks.replay.rows import row_count, rows_of, session_problem
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.limits import shown
from trajstore._core.columns.schema import dtypes
from trajstore._core.columns.values import as_tensor
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

_MASKS = ("attention_mask", "loss_mask", "response_mask")
_NUMBERS = ("old_log_probs", "entropys", "rollout_log_probs")
_WHOLE = "must be a whole number"
_OF_ALL_TOKENS = ("input_ids", "attention_mask", "loss_mask")


def field_problem(trajectory: AgentTrajectory) -> str:
    """Return the problem of a rollout's first invalid field; empty if there is none.

    A column is a dense tensor of one dimension, token ids are integers, log-probs and entropies floating point, masks
    real; ``response_start`` is a token position, ``entropy`` a number. Check this first: such fields can be compared
    and counted.
    """
    try:
        for name in ("input_ids", *_MASKS, *_NUMBERS):
            _check_column(name, getattr(trajectory, name))
        _check_start(trajectory)
        if trajectory.policy_version is not None and not _is_whole(trajectory.policy_version):
            raise InvalidTrajectoryError(f"field policy_version: {shown(trajectory.policy_version)}, {_WHOLE} or None")
        _check_entropy(trajectory.entropy)
    except InvalidTrajectoryError as error:
        return str(error)
    return ""


def record_problem(trajectory: AgentTrajectory) -> str:
    """Return why no store could keep a rollout, or why its rows cannot be separated; empty if neither applies.

    Reasons are columns of different lengths, numbers of more than 64 bits, metadata or messages that JSON cannot
    represent, and a row of a session that could not be joined with the others.

    Args:
        trajectory: without a :func:`field_problem`.
    """
    try:
        flatten(trajectory)
        row_count(trajectory)
        rows_of(trajectory)
    except InvalidTrajectoryError as error:
        return str(error)
    problem = session_problem([trajectory])
    return problem and f"field metadata.session: {problem}"


def as_recorded(trajectory: AgentTrajectory, entropy: float | None) -> AgentTrajectory:
    """Return a rollout with its entropy in the pool; tensors are shared.

    Args:
        trajectory: the candidate.
        entropy: its mean entropy in nats; ``None`` for a demonstration, which keeps its own finite ``entropy``.
    """
    own = trajectory.entropy
    if own == entropy or (entropy is None and own is not None and math.isfinite(own)):
        return trajectory
    return dataclasses.replace(trajectory, entropy=entropy)


def _check_column(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise InvalidTrajectoryError(f"field {name}: must be a tensor of one dimension, is a {type(value).__name__}")
    as_tensor(name, value)
    if value.dim() != 1:
        raise InvalidTrajectoryError(f"field {name}: shape {list(value.shape)}, must have one dimension")
    dtype = value.dtype
    if name == "input_ids":
        fits, wanted = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool), "whole numbers"
    elif name in _NUMBERS:
        fits, wanted = dtype.is_floating_point, "floating point"
    else:
        fits, wanted = not dtype.is_complex, "zeros and ones"
    if not fits or dtype not in dtypes().values():
        raise InvalidTrajectoryError(f"field {name}: {str(dtype).removeprefix('torch.')}, must be {wanted}")


def _check_start(trajectory: AgentTrajectory) -> None:
    start = trajectory.response_start
    if start is None:
        return
    columns = (getattr(trajectory, name) for name in _OF_ALL_TOKENS)
    most = next((len(column) for column in columns if column is not None), None)
    if not _is_whole(start) or start < 0 or (most is not None and start > most):
        bounds = "at least 0" if most is None else f"0 to L = {most}"
        raise InvalidTrajectoryError(f"field response_start: {shown(start)}, {_WHOLE}, {bounds}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_entropy(entropy: object) -> None:
    if entropy is None:
        return
    try:
        if isinstance(entropy, int | float | np.integer | np.floating):
            float(entropy)
            return
    except OverflowError:
        pass
    raise InvalidTrajectoryError(f"field entropy: {shown(entropy)} is a {type(entropy).__name__}, must be a number")
