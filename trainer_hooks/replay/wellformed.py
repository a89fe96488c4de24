"""Validation of a rollout's fields, the same for every store of a pool. Pure.

Pools in memory and on disk accept the same rollouts. Rollouts that a trajectory store would refuse are found here one
by one, so that the others of their step are kept.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import torch

from trainer_hooks.replay.rows import rows_of, session_problem
from trajstore._core.base.arguments import is_number
from trajstore._core.columns.agents import check_column
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.limits import MAX_STEPS, RANGES, shown, whole_number
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory

_NUMBERS = ("old_log_probs", "entropys", "rollout_log_probs")
_LARGEST = sys.float_info.max


def field_problem(trajectory: AgentTrajectory) -> str:
    """Return the problem of a rollout's first invalid field; empty if there is none.

    A column is a dense tensor of one dimension, token ids are integers, log-probs and entropies floating point, masks
    integers or bool; ``response_start`` is a token position, ``entropy`` a number. Check this first: such fields can be
    compared and counted.
    """
    try:
        for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS):
            if (column := getattr(trajectory, name)) is not None:
                _check_column(name, column)
        most = next((len(column) for name in TOKEN_COLUMNS if (column := getattr(trajectory, name)) is not None), None)
        _check_whole("response_start", trajectory.response_start, 0, MAX_STEPS if most is None else most)
        _check_whole("policy_version", trajectory.policy_version, *RANGES["version_low"])
        if (entropy := trajectory.entropy) is not None and (
            not is_number(entropy) or _LARGEST < abs(entropy) < math.inf
        ):
            raise InvalidTrajectoryError(
                f"field entropy: {shown(entropy)} is a {type(entropy).__name__}, must be a number"
            )
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
    """Check as a store does; ids and log-probs are computed with, so bools are no ids and integers no log-probs."""
    if not isinstance(value, torch.Tensor):
        raise InvalidTrajectoryError(f"field {name}: must be a tensor of one dimension, is a {type(value).__name__}")
    dtype = check_column(name, value, (1,)).dtype
    if (name == "input_ids" and dtype == torch.bool) or (name in _NUMBERS and not dtype.is_floating_point):
        wanted = "floating point" if name in _NUMBERS else "whole numbers"
        raise InvalidTrajectoryError(f"field {name}: {str(dtype).removeprefix('torch.')}, must be {wanted}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool | float | np.floating):
        raise InvalidTrajectoryError(f"field {name}: {shown(value)}, must be a whole number")
    if value is not None:
        whole_number(name, value, low, high)
