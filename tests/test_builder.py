"""The rollout builder's output equals a plain stack; parts add up to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import ChunkStepResult, EmbodiedRolloutResult, Trajectory, TrajectoryReplayBuffer
from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS, walk
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import get_model_weights_id


def step(batch: int, generator: torch.Generator, *, actions: bool = True) -> ChunkStepResult:
    def values(width: int) -> torch.Tensor:
        return torch.randn(batch, width, generator=generator)

    return ChunkStepResult(
        actions=values(4) if actions else None,
        prev_logprobs=values(4) if actions else None,
        prev_values=values(1),
        rewards=values(2) if actions else None,
        dones=values(2) > 0,
        versions=values(1) if actions else None,
        forward_inputs={"action": values(4), "model_action": values(4)} if actions else {},
    )


def collected(steps: int, batch: int, seed: int = 0) -> tuple[EmbodiedRolloutResult, list[ChunkStepResult]]:
    generator = torch.Generator().manual_seed(seed)
    result = EmbodiedRolloutResult(max_episode_length=9)
    first = step(batch, generator, actions=False)
    first.prev_values = None
    given = [first, *(step(batch, generator) for _ in range(steps))]
    for item in given:
        result.append_step_result(item)
        if item.actions is not None:
            seen = {"states": torch.randn(batch, 3, generator=generator), "deep": {"x": torch.ones(batch, 1)}}
            result.append_transitions(seen, seen)
    return result, given


def leaves(trajectory: Trajectory) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(trajectory, name) for name in TENSOR_FIELDS if getattr(trajectory, name) is not None}
    for name in DICT_FIELDS:
        tensors |= {".".join(path): leaf for path, leaf in walk(getattr(trajectory, name), (name,))}
    return tensors


def test_arrays_give_the_trajectory_that_tensors_give() -> None:
    results = [EmbodiedRolloutResult(), EmbodiedRolloutResult()]
    for given_step in (step(3, torch.Generator().manual_seed(1)), step(3, torch.Generator().manual_seed(2))):
        for result, change in zip(results, (lambda tensor: tensor, torch.Tensor.numpy), strict=True):
            values = {
                name: change(value) for name, value in vars(given_step).items() if isinstance(value, torch.Tensor)
            }
            inputs = {name: change(value) for name, value in given_step.forward_inputs.items()}
            result.append_step_result(ChunkStepResult(**values, forward_inputs=inputs))
            seen = {"deep": {"x": change(given_step.rewards)}}
            result.append_transitions(seen, seen)
    expected, got = (leaves(result.to_trajectory()) for result in results)
    assert got.keys() == expected.keys() >= {"actions", "intervene_flags", "forward_inputs.action", "curr_obs.deep.x"}
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_observations_without_a_time_axis_are_left_out_by_name() -> None:
    result, ones = EmbodiedRolloutResult(), torch.ones(2, 1)
    with pytest.warns(UserWarning, match=r"curr_obs\.deep\.task is left out: .* this is list"):
        result.append_transitions({"x": ones, "deep": {"y": ones, "task": ["t"] * 2}}, {"x": ones})
    result.append_step_result(ChunkStepResult(rewards=torch.ones(2, 1)))
    assert leaves(result.to_trajectory()).keys() == {"rewards", "curr_obs.x", "curr_obs.deep.y", "next_obs.x"}
    with pytest.raises(InvalidTrajectoryError, match=r"next_obs\.x: numpy's dtype object cannot be stored"):
        result.append_transitions({}, {"x": np.array(["a", None])})


def test_a_trajectory_is_the_stack_of_its_steps() -> None:
    result, given = collected(5, 3)
    trajectory = result.to_trajectory()
    for name in ("actions", "rewards", "prev_logprobs", "prev_values", "versions", "dones"):
        plain = torch.stack([getattr(item, name) for item in given if getattr(item, name) is not None])
        assert torch.equal(getattr(trajectory, name), plain), name
    assert trajectory.dones is not None
    assert trajectory.dones.shape == (6, 3, 2)
    assert trajectory.intervene_flags is not None
    assert not trajectory.intervene_flags.any()
    assert trajectory.curr_obs["deep"]["x"].shape == (5, 3, 1)
    assert "task_descriptions" not in trajectory.curr_obs
    assert trajectory.versions is not None
    assert trajectory.model_weights_id == get_model_weights_id(trajectory.versions)
    assert len(result) == 5
    assert TrajectoryReplayBuffer().add_trajectories([trajectory]) == [0]
    result.clear()
    assert len(result) == 0


@settings(max_examples=15, deadline=None)
@given(steps=st.integers(1, 4), batch=st.integers(1, 9), data=st.data())
def test_parts_add_up_to_the_whole(steps: int, batch: int, data: st.DataObject) -> None:
    result, _ = collected(steps, batch)
    whole = leaves(result.to_trajectory())
    parts = data.draw(st.integers(1, batch))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch - 1), max_size=batch))) if batch > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True)]
    for pieces in (result.to_splited_trajectories(parts), result.to_splited_trajectories_by_sizes(sizes)):
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([leaves(piece)[name] for piece in pieces], dim=1), tensor), name
        assert all(piece.max_episode_length == 9 for piece in pieces)
        assert len({piece.model_weights_id for piece in pieces}) == 1
    assert len(result.to_splited_trajectories(parts)) == parts
    assert [leaves(p)["actions"].shape[1] for p in result.to_splited_trajectories_by_sizes(sizes)] == sizes


def test_interventions_are_marked_and_replace_actions() -> None:
    result, given = collected(2, 3)
    before = result.to_trajectory()
    human = torch.full((3, 4), 7.0)
    flags = torch.tensor([[True, False], [False, False], [True, True]])
    result.update_last_actions(human, flags)
    after = result.to_trajectory()
    expected = flags.repeat_interleave(2, dim=1)
    assert before.actions is not None
    assert after.actions is not None
    assert after.intervene_flags is not None
    assert torch.equal(after.intervene_flags[-1], expected)
    assert torch.equal(after.actions[-1], torch.where(expected, human, before.actions[-1]))
    assert torch.equal(after.actions[0], before.actions[0])
    assert torch.equal(after.forward_inputs["action"][-1], after.actions[-1])
    assert "model_action" in before.forward_inputs
    assert "model_action" not in after.forward_inputs
    assert "model_action" in given[-1].forward_inputs  # the caller's dict is not modified
    result.mark_last_step_with_intervene_flags(torch.tensor([False, True, False]))
    marked = result.to_trajectory().intervene_flags
    assert marked is not None
    assert marked[-1].tolist() == [[False] * 4, [True] * 4, [False] * 4]


def bad_flags(result: EmbodiedRolloutResult) -> Any:
    return result.mark_last_step_with_intervene_flags(torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (bad_flags, "intervene_flags"),
        (lambda r: r.update_last_actions(torch.zeros(3, 5), torch.zeros(3)), "intervene_actions"),
        (lambda r: r.to_splited_trajectories(4), "split_size"),
        (lambda r: r.to_splited_trajectories_by_sizes([1, 1]), "split_sizes"),
    ],
)
def test_wrong_shapes_are_named(act: Any, message: str) -> None:
    result, _ = collected(2, 3)
    with pytest.raises(InvalidTrajectoryError, match=message):
        act(result)


def test_before_the_first_step_there_is_nothing_to_mark() -> None:
    result = EmbodiedRolloutResult()
    result.mark_last_step_with_intervene_flags(torch.ones(3))
    result.update_last_actions(torch.zeros(3, 4), torch.ones(3))
    assert len(result) == 0
    assert result.to_trajectory().intervene_flags is None


def test_steps_of_different_shape_are_named() -> None:
    result, _ = collected(2, 3)
    result.append_step_result(ChunkStepResult(rewards=torch.zeros(4, 2)))
    with pytest.raises(InvalidTrajectoryError, match=r"rewards: step 2"):
        result.to_trajectory()
    other, _ = collected(1, 3)
    other.append_transitions({"other": torch.zeros(3, 1)}, {})
    with pytest.raises(InvalidTrajectoryError, match=r"curr_obs: step 1 has keys"):
        other.to_trajectory()


@pytest.mark.parametrize("early", [False, True], ids=["results kept", "results added at once"])
def test_environments_may_reuse_their_memory(early: bool) -> None:
    """Every array is overwritten by each step, as by ``SyncVectorEnv(copy=False)``."""
    memory = {name: np.zeros((2, 3), np.float32) for name in ("actions", "rewards", "states", "image", "action")}
    tensors = {name: torch.from_numpy(array) for name, array in memory.items()}
    flags, human = torch.zeros(2, dtype=torch.bool), torch.zeros(2, 3)
    result, given = EmbodiedRolloutResult(), []

    def take(number: int) -> None:
        for array in memory.values():
            array[:] = number
        inputs = {"action": tensors["action"], "deep": {"image": tensors["image"], "raw": [memory["image"]]}}
        given.append(
            ChunkStepResult(actions=tensors["actions"], rewards=tensors["rewards"].T[:2], forward_inputs=inputs)
        )

    for number in range(4):
        take(number)
        if early:
            result.append_step_result(given.pop())
        result.append_transitions({"deep": {"states": tensors["states"]}}, {"states": tensors["states"]})
        if early and number == 1:
            flags[0], human[:] = True, 7.0
            result.update_last_actions(human, flags)
            flags[:], human[:] = False, -1.0
    for step_result in given:
        result.append_step_result(step_result)
    for array in memory.values():
        array[:] = -1
    trajectory = result.to_trajectory()
    steps = torch.arange(4.0)
    assert trajectory.actions is not None
    assert trajectory.rewards is not None
    assert trajectory.intervene_flags is not None
    assert torch.equal(trajectory.actions[:, 1, 0], steps)
    assert torch.equal(trajectory.rewards[:, 1, 0], steps)
    assert trajectory.actions[1, 0].tolist() == ([7.0] * 3 if early else [1.0] * 3)
    assert trajectory.intervene_flags.any(-1).tolist() == [[early and step == 1, False] for step in range(4)]
    assert torch.equal(trajectory.curr_obs["deep"]["states"][:, 0, 0], steps)
    assert torch.equal(trajectory.next_obs["states"][:, 0, 0], steps)
    assert torch.equal(trajectory.forward_inputs["deep"]["image"][:, 0, 0], steps)
    assert [array[0][0, 0] for array in trajectory.forward_inputs["deep"]["raw"]] == [0, 1, 2, 3]
