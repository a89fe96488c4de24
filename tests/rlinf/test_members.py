"""Calls of RLinf's workers and tools on ``trajstore.interop.rlinf``, in their order."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trajstore.errors import ConfigurationError
from trajstore.interop.rlinf import (
    ChunkStepResult,
    EmbodiedTrajectoryBuilder,
    PriorityStore,
    Trajectory,
    TrajectoryReplayBuffer,
    convert_trajectories_to_batch,
)

STEPS, BATCH, WIDTH = 6, 3, 4


def collect(epochs: int = 1, *, human: bool = True, ending: bool = False, batch: int = BATCH) -> list[Trajectory]:
    """Roll out like RLinf's environment worker; return one trajectory for each of two learners."""
    builder = EmbodiedTrajectoryBuilder(max_episode_length=20)
    generator = torch.Generator().manual_seed(3)
    each = STEPS // epochs
    for epoch in range(epochs):
        for step in range(each + 1):
            last = step == each
            acting = not last or ending
            actions = torch.rand(batch, WIDTH, generator=generator)
            builder.append_step_result(
                ChunkStepResult(
                    actions=actions if acting else None,
                    forward_inputs={"action": actions, "record_transition": torch.ones(batch, 1)} if acting else {},
                    rewards=None if step == 0 else torch.rand(batch, 1, generator=generator),
                    dones=torch.full((batch, 1), last),
                    terminations=torch.full((batch, 1), last),
                    truncations=torch.zeros(batch, 1, dtype=torch.bool),
                    versions=None if last else torch.full((batch, 1), float(epoch)),
                )
            )
            if human and step in (1, 3) and not last:
                flags = torch.arange(batch) < batch - 1
                builder.update_last_actions(torch.ones(batch, WIDTH), flags)
            if not last:
                obs = {"states": torch.rand(batch, 5, generator=generator), "task_descriptions": ["pick"] * batch}
                builder.append_transitions(curr_obs=obs, next_obs=obs)
    return builder.to_splited_trajectories_by_sizes([batch - 1, 1])  # type: ignore[return-value]


@pytest.mark.filterwarnings("error:auto_save_path")
@pytest.mark.parametrize("saved", [False, True])
def test_sac_with_demonstrations(tmp_path: Path, saved: bool) -> None:
    def buffer_of(name: str) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            seed=7,
            enable_cache=True,
            cache_size=4,
            sample_window_size=10,
            auto_save=saved,
            auto_save_path=str(tmp_path / name / "rank_0"),  # always, as its workers do
            trajectory_format="pt",
        )

    replay, demo = buffer_of("replay"), buffer_of("demo")
    assert (replay.is_ready(1), asyncio.run(replay.is_ready_async(1)), replay.enable_cache) == (False, False, True)
    received = collect()
    replay.add_trajectories(received)
    human = [part for item in received for part in item.extract_intervene_traj() or []]
    assert len(human) == 2  # the third environment, in a separate trajectory, had no intervention
    demo.add_trajectories(human)
    assert (demo.total_samples, len(demo), replay.total_samples) == (4, 2, 18)
    batches = replay.sample(8), demo.sample(4)
    for name in ("actions", "rewards", "dones", "terminations", "truncations", "intervene_flags"):
        assert [batch[name].shape[0] for batch in batches] == [8, 4]
    assert bool(batches[1]["intervene_flags"].all())
    assert torch.equal(batches[1]["actions"], torch.ones(4, WIDTH))
    assert {"num_trajectories", "total_samples", "cache_size"} <= replay.get_stats().keys()

    replay.save_checkpoint(str(tmp_path / "checkpoint" / "rank_0"))
    drawn = replay.sample(8)["actions"]
    again = buffer_of("again")
    again.load_checkpoint(str(tmp_path / "checkpoint" / "rank_0"))
    assert torch.equal(again.sample(8)["actions"], drawn)
    again.close()
    replay.close(wait=True)
    demo.close()


def test_dagger_keeps_only_steps_that_are_all_a_humans() -> None:
    buffer = TrajectoryReplayBuffer()
    received = collect()
    flags = received[0].intervene_flags
    assert flags is not None
    flags[1, 0, 0] = False  # step 1 of the first environment is only partly human
    parts = [part for item in received for part in item.extract_intervene_traj(mode="all") or []]
    buffer.add_trajectories(parts)
    assert [tuple(part.rewards.shape[:2]) for part in parts if part.rewards is not None] == [(1, 1), (2, 1)]
    assert buffer.sample(num_chunks=3)["forward_inputs"]["action"].shape == (3, WIDTH)
    assert collect(human=False)[0].extract_intervene_traj() is None
    with pytest.raises(ConfigurationError, match="'some'"):
        received[0].extract_intervene_traj(mode="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_humans_steps_are_those_of_the_rollout(epochs: int, ending: bool) -> None:
    whole = collect(epochs, ending=ending)[0]
    parts = whole.extract_intervene_traj()
    assert parts is not None
    flat = TrajectoryReplayBuffer()._flatten_trajectory(whole)
    theirs: Any = SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != "valid"})
    assert TrajectoryReplayBuffer()._flatten_trajectory(theirs).keys() == flat.keys()
    assert flat["actions"].shape[0] == (STEPS + (epochs if ending else 0)) * (BATCH - 1)
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.add_trajectories([whole])
    rewards = {row.item(): at for at, row in enumerate(flat["rewards"])}
    for part in parts:
        demo = TrajectoryReplayBuffer()
        demo.add_trajectories([part])
        batch = demo.sample(20)
        at = [rewards[row.item()] for row in batch["rewards"]]
        for name in ("dones", "terminations"):
            assert torch.equal(batch[name], flat[name][at])
        assert torch.equal(batch["curr_obs"]["states"], flat["curr_obs"]["states"][at])
        assert torch.equal(batch["actions"], torch.ones(len(at), WIDTH))
        assert part.versions is None


@pytest.mark.parametrize("ending", [False, True])
def test_rlt_makes_transitions_of_flattened_trajectories(tmp_path: Path, ending: bool) -> None:
    """In both RLT workers, each recorded row becomes a trajectory of one step and one environment."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path), sample_window_size=0) as buffer:
        for whole in collect(ending=ending):
            assert whole.rewards is not None
            assert whole.dones is not None
            flat = buffer._flatten_trajectory(whole)
            environments = whole.rewards.shape[1]
            transitions = []
            for at in range(flat["rewards"].shape[0]):
                step, environment = divmod(at, environments)
                transition = Trajectory(max_episode_length=1, model_weights_id=whole.model_weights_id)
                for name in ("actions", "intervene_flags", "rewards", "versions"):
                    setattr(transition, name, flat[name][at][None, None])
                for name in ("forward_inputs", "curr_obs", "next_obs"):
                    setattr(transition, name, {key: value[at][None, None] for key, value in flat[name].items()})
                transition.dones = whole.dones[step + 1, environment][None, None]
                transitions.append(transition)
            assert buffer.add_trajectories(transitions)
        assert (len(buffer), float(buffer.total_samples)) == (18, 18.0)
        batch = buffer.sample(64)
        assert torch.equal(batch["actions"], batch["forward_inputs"]["action"])
        assert set(buffer._trajectory_index) == set(range(18))


def test_asynchronous_ppo_joins_the_newest_rollouts() -> None:
    store = PriorityStore(maxsize=2)
    rollouts = []
    for version in (3.0, 1.0, 2.0):
        part = collect()[0]
        part.versions = torch.full((STEPS, BATCH - 1, 1), version)
        rollouts.append(part)
        assert store.add((version, version), part) is True
    assert store.add((0.0, 0.0), rollouts[0]) is False
    assert store.topn(2) == [rollouts[0], rollouts[2]]
    assert store.get_metric() == {3: {"ratio": 0.5}, 2: {"ratio": 0.5}, "discarded_unused": 2}
    batch = convert_trajectories_to_batch(store.topn(2))
    assert batch["rewards"].shape == (STEPS, 2 * (BATCH - 1), 1)
    assert batch["dones"].shape[0] == STEPS + 1
    assert batch["curr_obs"]["states"].shape == (STEPS, 2 * (BATCH - 1), 5)
    store.remove_below(3.0)
    assert (len(store), store.get_metric()["discarded_unused"]) == (1, 2)
    assert convert_trajectories_to_batch([]) == {}
    with pytest.raises(ConfigurationError, match="maxsize"):
        PriorityStore(0)


def test_the_visualizer_walks_index_and_files(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path)) as writer:
        writer.add_trajectories(collect())
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path), enable_cache=True, cache_size=5)
    buffer.load_checkpoint(str(tmp_path))
    assert buffer._trajectory_id_list == [0, 1]
    for number, environments in ((0, 2), (1, 1)):
        entry = buffer._trajectory_index[number]
        assert (entry["shape"][:2], entry["num_samples"]) == ((STEPS, environments), STEPS * environments)
        loaded = buffer._load_trajectory(number, entry["model_weights_id"])
        assert isinstance(loaded, Trajectory)
        assert loaded.curr_obs["states"].shape == (STEPS, environments, 5)
    buffer.close()


def test_the_generator_can_be_seeded_and_rows_drawn_by_their_older_name() -> None:
    buffer = TrajectoryReplayBuffer(seed=5)
    buffer.add_trajectories(collect())
    first = buffer.sample(6)["actions"]
    buffer.random_generator.manual_seed(5)
    assert torch.equal(buffer.sample_chunks(6)["actions"], first)
    buffer.logger.info("has a logger")


def test_a_builders_fields_are_lists_with_an_entry_for_each_step() -> None:
    builder = EmbodiedTrajectoryBuilder()
    builder.append_step_result(ChunkStepResult(rewards=torch.zeros(2, 1)))
    builder.rewards[-1] = torch.ones(2, 1)
    rewards = builder.to_trajectory().rewards
    assert rewards is not None
    assert bool(rewards.all())
    builder.rewards.clear()
    assert len(builder) == 0
    with pytest.raises(AttributeError, match="no_such"):
        _ = builder.no_such


def test_a_full_store_of_priorities_keeps_the_highest() -> None:
    chance = random.Random(1)
    store = PriorityStore(5)
    model: list[tuple[Any, int]] = []
    for number in range(200):
        priority = (float(chance.randrange(6)), float(chance.randrange(3)))
        if store.add(priority, Trajectory(max_episode_length=number)):
            model.append((priority, number))
        model = sorted(model)[-5:]
        assert [item.max_episode_length for item in store.topn(5)] == [number for _, number in reversed(model)]
