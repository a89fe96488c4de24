"""RLinf's buffer, datasets, workers and tools against ours, from the checkout ``TRAJSTORE_RLINF``."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.equality import same
from trajstore.interop import rlinf as ours

from .test_extra_rows import leaves
from .test_members import BATCH, STEPS, collect

CHECKOUT = os.environ.get("TRAJSTORE_RLINF", "")

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not CHECKOUT, reason="needs TRAJSTORE_RLINF, the path of a checkout of RLinf (commit a3816b5)"),
]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT)


def theirs(module: str) -> Any:
    return importlib.import_module(f"rlinf.{module}")


def rollout(seed: int, steps: int = STEPS) -> Any:
    """Return a rollout of RLinf's class."""
    chance = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=chance)

    return theirs("data.schema.embodied_types").Trajectory(
        max_episode_length=9,
        model_weights_id=f"w{seed}",
        actions=numbers(steps, BATCH, 4),
        intervene_flags=numbers(steps, BATCH, 4) > 0.6,
        rewards=numbers(steps, BATCH, 1),
        dones=numbers(steps + 1, BATCH, 1) > 0.5,
        terminations=numbers(steps + 1, BATCH, 1) > 0.5,
        truncations=numbers(steps + 1, BATCH, 1) > 0.5,
        versions=torch.full((steps, BATCH, 1), float(seed)),
        forward_inputs={"action": numbers(steps, BATCH, 4), "record_transition": numbers(steps, BATCH, 1) > 0.3},
        curr_obs={"states": numbers(steps, BATCH, 5)},
        next_obs={"states": numbers(steps, BATCH, 5)},
    )


def assert_same(got: Any, wanted: Any) -> None:
    a, b = (
        {name: leaf for name, leaf in leaves(tensor).items() if leaf is not None and name != "notes"}
        for tensor in (got, wanted)
    )
    assert a.keys() == b.keys()
    assert not [name for name, value in b.items() if not same(a[name], value)]


def our(trajectory: Any) -> ours.Trajectory:
    return ours.Trajectory(**vars(trajectory))


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize(("saved", "cached"), [(False, True), (True, False), (True, True)])
def test_same_calls_same_samples(tmp_path: Path, window: int, saved: bool, cached: bool) -> None:
    if not saved and window == 0:
        pytest.skip("RLinf's cache in memory is as large as the window, and fails with none")
    buffers = []
    for name, cls in zip(("theirs", "ours"), (theirs("data.storage.replay"), ours), strict=True):
        options = {"auto_save": saved, "auto_save_path": str(tmp_path / name) if saved else ""}
        buffers.append(
            cls.TrajectoryReplayBuffer(seed=3, enable_cache=cached, cache_size=2, sample_window_size=window, **options)
        )
    a, b = buffers
    for start in range(0, 8, 2):
        items = [rollout(seed, STEPS + seed % 3) for seed in range(start, start + 2)]
        a.add_trajectories(items)
        b.add_trajectories(items)
        if saved:
            a._save_executor.shutdown(wait=True)
            a._save_executor = type(a._save_executor)(max_workers=2)
        for count in (1, 5, 200):
            assert_same(b.sample(count), a.sample(count))
    assert (len(a), a.total_samples, a.is_ready(8)) == (len(b), b.total_samples, b.is_ready(8))
    a.close()
    b.close()


@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_rlinf_reads_what_is_saved_for_it(tmp_path: Path, form: str) -> None:
    b = ours.TrajectoryReplayBuffer(sample_window_size=0, trajectory_format=form)
    b.add_trajectories([rollout(seed) for seed in range(5)])
    b.save_checkpoint(tmp_path, layout="rlinf")
    a = theirs("data.storage.replay").TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=str(tmp_path / "own"), sample_window_size=0, cache_size=9
    )
    a.load_checkpoint(str(tmp_path))
    again = ours.TrajectoryReplayBuffer(sample_window_size=0)
    again.load_checkpoint(tmp_path)
    assert_same(again.sample(30), a.sample(30))


def test_rlinf_refuses_our_directories(tmp_path: Path) -> None:
    b = ours.TrajectoryReplayBuffer()
    b.add_trajectories([rollout(0)])
    b.save_checkpoint(tmp_path / "rank_0")
    a = theirs("data.storage.replay").TrajectoryReplayBuffer()
    with pytest.raises(ValueError, match="written by trajstore"):
        a.load_checkpoint(str(tmp_path / "rank_0"))
    done = merge(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert "written by trajstore" in done.stderr


def merge(source: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    tool = Path(CHECKOUT) / "toolkits" / "replay_buffer" / "merge_or_split_replay_buffer.py"
    words = [sys.executable, str(tool), "--source-path", str(source), "--save-path", str(target), "--copy", *options]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_rlinfs_tool_merges_and_splits_what_is_saved_for_it(tmp_path: Path) -> None:
    for rank in range(2):
        b = ours.TrajectoryReplayBuffer()
        b.add_trajectories([rollout(10 * rank + seed) for seed in range(3)])
        b.save_checkpoint(tmp_path / "ranks" / f"rank_{rank}", layout="rlinf")
    assert merge(tmp_path / "ranks", tmp_path / "merged").returncode == 0
    assert merge(tmp_path / "merged", tmp_path / "split", "--split-count", "4").returncode == 0
    for name, count in (("merged", 6), ("split", 4)):
        b = ours.TrajectoryReplayBuffer()
        b.load_checkpoint(tmp_path / name)
        assert len(b) == count


@pytest.mark.parametrize("demo", [False, True])
@pytest.mark.parametrize("preload", [False, True])
def test_rlinfs_datasets_draw_from_ours(demo: bool, preload: bool) -> None:
    replay = theirs("data.storage.replay")
    batches = []
    for cls in (replay.TrajectoryReplayBuffer, ours.TrajectoryReplayBuffer):
        buffers = [cls(seed=seed) for seed in (1, 2)]
        for number, buffer in enumerate(buffers):
            buffer.add_trajectories([rollout(10 * number + seed) for seed in range(3)])
        kind = replay.PreloadReplayBufferDataset if preload else replay.ReplayBufferDataset
        dataset = kind(
            replay_buffer=buffers[0],
            demo_buffer=buffers[1] if demo else None,
            batch_size=8,
            min_replay_buffer_size=2,
            min_demo_buffer_size=1,
        )
        drawn = iter(dataset)
        batches.append([next(drawn) for _ in range(3)])
        if preload:
            dataset.close()
    for got, wanted in zip(batches[1], batches[0], strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("seed", range(10))
def test_members_give_what_rlinfs_give(seed: int) -> None:
    item = rollout(seed)
    if seed % 2:
        item.curr_obs = {}
    a = theirs("data.storage.replay").TrajectoryReplayBuffer()
    assert_same(ours.TrajectoryReplayBuffer()._flatten_trajectory(item), a._flatten_trajectory(item))
    for mode in ("any", "all"):
        wanted, got = item.extract_intervene_traj(mode=mode), our(item).extract_intervene_traj(mode=mode)  # type: ignore[arg-type]
        assert (wanted is None) == (got is None)
        for x, y in zip(got or [], wanted or [], strict=True):
            assert_same(x, y)
    items = [rollout(seed + more) for more in range(3)]
    convert = theirs("data.schema.embodied_types").convert_trajectories_to_batch
    assert_same(ours.convert_trajectories_to_batch([our(i) for i in items]), convert(items))


def test_priority_stores_agree() -> None:
    chance = random.Random(4)
    a, b = theirs("data.storage.replay").PriorityStore(4), ours.PriorityStore(4)
    for number in range(300):
        item = our(rollout(0))
        item.max_episode_length, item.versions = number, torch.full((2, 1, 1), float(chance.randrange(5)))
        priority = (float(chance.randrange(6)), float(chance.randrange(3)))
        assert a.add(priority, item) == b.add(priority, item)
        if number % 7 == 0:
            assert [x is y for x, y in zip(a.topn(2), b.topn(2), strict=True)].count(False) == 0
        if number % 31 == 0:
            threshold = chance.randrange(6)
            a.remove_below(threshold)
            b.remove_below(threshold)
        assert (len(a), a.get_metric()) == (len(b), b.get_metric())


@pytest.mark.parametrize("ending", [False, True])
def test_builders_agree(monkeypatch: pytest.MonkeyPatch, ending: bool) -> None:
    got = collect(ending=ending)
    builder = theirs("data.schema.embodied_trajectory_builder").EmbodiedTrajectoryBuilder
    monkeypatch.setitem(collect.__globals__, "EmbodiedTrajectoryBuilder", builder)
    for x, y in zip(got, collect(ending=ending), strict=True):
        assert type(y).__module__.startswith("rlinf.")
        assert_same(x, y)


class Channel:
    """Replaces RLinf's channel; returns items immediately."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def get(self, async_op: bool = False) -> Any:
        item = self.items.pop(0)

        async def wait() -> Any:
            return item

        return SimpleNamespace(async_wait=wait) if async_op else item


def worker(cls: Any, **values: Any) -> Any:
    """Return a worker without its models, GPUs and peers."""
    made = object.__new__(cls)
    placement = SimpleNamespace(get_world_size=lambda name: 1)
    for name, value in {"_component_placement": placement, "stage_num": 2, "demo_buffer": None, **values}.items():
        object.__setattr__(made, name, value)
    return made


def unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def draw_alike(feed: Callable[[Any, Callable[[Any], Any]], Sequence[Any]]) -> None:
    """Compare draws of RLinf's buffer, fed by a worker, and of ours, fed with our class."""
    theirs_drawn = feed(theirs("data.storage.replay").TrajectoryReplayBuffer, lambda item: item)
    for got, wanted in zip(feed(ours.TrajectoryReplayBuffer, our), theirs_drawn, strict=True):
        assert_same(got, wanted)


def test_the_sac_worker_feeds_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = theirs("workers.actor.fsdp_sac_policy_worker")
    monkeypatch.setattr(module, "clear_memory", lambda **_: None)

    def feed(cls: Any, change: Callable[[Any], Any]) -> Sequence[Any]:
        made = worker(module.EmbodiedSACFSDPPolicy, replay_buffer=cls(seed=1), demo_buffer=cls(seed=2))
        monkeypatch.setattr(module, "Trajectory", type(change(rollout(0))))
        receive = unwrapped(module.EmbodiedSACFSDPPolicy.recv_rollout_trajectories)
        asyncio.run(receive(made, Channel([change(rollout(seed)) for seed in range(2)])))
        assert len(made.replay_buffer) == 2
        return made.replay_buffer.sample(9), made.demo_buffer.sample(9)

    draw_alike(feed)


def test_the_dagger_worker_feeds_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = theirs("workers.actor.fsdp_dagger_policy_worker")

    def feed(cls: Any, change: Callable[[Any], Any]) -> Sequence[Any]:
        items = [rollout(seed) for seed in range(3)]
        for item in items:
            item.intervene_flags[1:4, :2] = True
        made = worker(module.EmbodiedDAGGERFSDPPolicy, replay_buffer=cls(seed=1))
        monkeypatch.setattr(module, "Trajectory", type(change(rollout(0))))
        made.recv_buffer_rollout_trajectories([change(item) for item in items])
        return [made.replay_buffer.sample(9)]

    draw_alike(feed)


@pytest.mark.parametrize("simulator", [False, True])
@pytest.mark.parametrize(("algorithm", "name"), [("ac", "RLTACFSDPPolicy"), ("td3", "RLTTD3FSDPPolicy")])
def test_the_rlt_workers_feed_ours(monkeypatch: pytest.MonkeyPatch, simulator: bool, algorithm: str, name: str) -> None:
    policy = getattr(theirs(f"workers.actor.fsdp_rlt_{algorithm}_policy_worker"), name)
    base = theirs("workers.actor.fsdp_rlt_ac_policy_worker")
    monkeypatch.setattr(base, "use_simulator_transition_replay", lambda cfg: simulator)
    monkeypatch.setattr(base, "collect_trajectory_replay_metrics", lambda items, reducer: {})

    def feed(cls: Any, change: Callable[[Any], Any]) -> Sequence[Any]:
        monkeypatch.setattr(base, "Trajectory", type(change(rollout(0))))
        cfg = SimpleNamespace(env=SimpleNamespace(train={"auto_reset": True}))
        made = worker(policy, replay_buffer=cls(seed=1, sample_window_size=200), demo_buffer=cls(seed=2), cfg=cfg)
        counts = made._ingest_rollout_trajectories([change(rollout(seed)) for seed in range(3)])
        return {"counts": counts}, made.replay_buffer.sample(20), made.demo_buffer.sample(20)

    draw_alike(feed)


def test_the_visualizer_shows_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    with ours.TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path)) as buffer:
        items = [our(rollout(seed)) for seed in range(2)]
        for item in items:
            item.curr_obs["main_images"] = torch.zeros(STEPS, BATCH, 8, 8, 3, dtype=torch.uint8)
        buffer.add_trajectories(items)
    monkeypatch.syspath_prepend(str(Path(CHECKOUT) / "toolkits" / "replay_buffer"))
    module = importlib.import_module("visualize")
    monkeypatch.setattr(module, "TrajectoryReplayBuffer", ours.TrajectoryReplayBuffer)
    view = module.MultiTrajectoryVisualizer(str(tmp_path))
    view._next_trajectory()
    assert (view.current_traj_id, tuple(view.current_traj_shape[:2])) == (1, (STEPS, BATCH))
    view.buffer.close()
