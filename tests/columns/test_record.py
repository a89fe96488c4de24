"""From a trajectory to its columns: what is taken for a tensor, and what is told of the versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trajstore import Trajectory, TrajectoryReplayBuffer, errors
from trajstore.columns.conversion import flatten
from trajstore.trajectory import get_model_weights_id


def test_numpy_arrays_are_taken_as_tensors() -> None:
    versions = np.array([[[3.0]], [[5.0]]], np.float32)
    rollout = Trajectory(rewards=np.ones((2, 1, 1), np.float32), versions=versions)  # type: ignore[arg-type]
    buffer = TrajectoryReplayBuffer()
    (number,) = buffer.add_trajectories([rollout])
    found = buffer.get(number)
    assert isinstance(found, Trajectory)
    assert found.versions is not None
    assert found.versions.tolist() == versions.tolist()
    assert found.model_weights_id == get_model_weights_id(torch.from_numpy(versions))


@pytest.mark.parametrize("view", ["transposed", "grad", "conjugated", "negated", "parameter"])
def test_tensors_that_are_not_plain_memory(view: str) -> None:
    plain = torch.arange(6.0).reshape(2, 3, 1)
    made = {
        "transposed": lambda: plain.transpose(0, 1).contiguous().transpose(0, 1),
        "grad": lambda: plain.clone().requires_grad_(),
        "conjugated": lambda: torch.complex(plain, plain).conj(),
        "negated": lambda: torch.complex(plain, -plain).conj().imag,
        "parameter": lambda: torch.nn.Parameter(plain.clone()),
    }[view]()
    (stored,) = flatten(Trajectory(rewards=made)).tensors
    assert stored.is_contiguous()
    assert not stored.requires_grad
    assert not stored.is_conj()
    assert not stored.is_neg()
    assert torch.equal(stored, made.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8])
def test_versions_of_any_real_dtype(dtype: torch.dtype) -> None:
    rollout = Trajectory(rewards=torch.ones(3, 1, 1), versions=torch.tensor([4, 2, 3]).reshape(3, 1, 1).to(dtype))
    assert flatten(rollout).versions == (2, 4)


def test_nested_tensors_are_refused_by_name() -> None:
    parts = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for fields in ({"rewards": parts}, {"rewards": torch.zeros(2, 1, 1), "actions": parts}):
        with pytest.raises(errors.InvalidTrajectoryError, match=rf"field {list(fields)[-1]}: sparse, nested"):
            TrajectoryReplayBuffer().add_trajectories([Trajectory(**fields)])
