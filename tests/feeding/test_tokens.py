"""Token batches against plain references: content of packs, single use of trajectories, state and ranks."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.feeding.test_memory import Slow
from tests.stores import in_memory, stored
from tests.support.equality import same
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sampling import Sampling
from trajstore._core.feeding.memory import DeviceMemory
from trajstore._core.formats import FORMATS
from trajstore.errors import ConfigurationError, SchemaMismatchError
from trajstore.loader import ReplayLoader, TokenLoader
from trajstore.samplers import EpochSampler, Priorities, WeightedSampler

MOST_WAITING = "trajstore._core.feeding.tokens._MOST_WAITING"


def rollout(key: int, length: int, prompt: int, *, version: int | None = None, **more: Any) -> AgentTrajectory:
    """Return a rollout whose columns encode trajectory and token."""
    response = length - prompt
    return AgentTrajectory(
        task_id=f"task {key % 3}",
        input_ids=1000 * (key + 1) + torch.arange(length),
        loss_mask=(torch.arange(length) >= prompt).long(),
        response_start=prompt,
        old_log_probs=-(key + 1.0) - torch.arange(response) / 1000,
        response_mask=torch.ones(response, dtype=torch.bool),
        reward=None if key % 4 == 3 else Reward(outcome=key / 10),
        policy_version=version,
        **more,
    )


def shapes_of(rollouts: Sequence[AgentTrajectory]) -> list[int]:
    return [len(rollout.input_ids) for rollout in rollouts if rollout.input_ids is not None]


def plain_packs(
    order: Sequence[int], lengths: Sequence[int], tokens: int, layout: str, lookahead: int
) -> list[list[int]]:
    """Return the packs that a plain loop over the draws makes."""

    def size(pack: list[int]) -> int:
        each = [lengths[key] for key in pack]
        return sum(each) if layout == "packed" else len(each) * max(each)

    drawn, waiting, packs = list(order), list[int](), list[list[int]]()
    while drawn or waiting:
        pack: list[int] = []
        while True:
            for key in list(waiting):
                if not pack or size([*pack, key]) <= tokens:
                    pack.append(key)
                    waiting.remove(key)
            if len(waiting) >= lookahead or not drawn:
                break
            missing = lookahead - len(waiting)
            waiting += drawn[:missing]
            del drawn[:missing]
        packs.append(pack)
    return packs


def check_pack(pack: dict[str, Any], rollouts: Sequence[AgentTrajectory], layout: str, pad_id: int = 0) -> None:
    """Compare a pack with its trajectories, token by token."""
    keys = pack["trajectory_ids"].tolist()
    ends = [0, *itertools.accumulate(len(rollouts[key].input_ids) for key in keys)]  # type: ignore[arg-type]
    if layout == "packed":
        assert pack["cu_seqlens"].tolist() == ends
        assert pack["cu_seqlens"].dtype == torch.int32
        assert pack["max_seqlen"] == max(pack["lengths"].tolist())
        assert all(tuple(pack[name].shape) == (ends[-1],) for name in ("input_ids", "position_ids", "old_log_probs"))
    for at, key in enumerate(keys):
        rollout = rollouts[key]
        assert rollout.input_ids is not None
        assert rollout.old_log_probs is not None
        assert rollout.response_start is not None
        length, start = len(rollout.input_ids), rollout.response_start

        def row(name: str, at: int = at) -> list[Any]:
            value: torch.Tensor = pack[name]
            chosen = value[at] if layout == "padded" else value[ends[at] : ends[at + 1]]
            values: list[Any] = chosen.tolist()
            return values

        filled = len(row("input_ids")) - length
        assert row("input_ids") == rollout.input_ids.tolist() + [pad_id] * filled
        assert row("position_ids") == list(range(length)) + [0] * filled
        assert row("response") == [False] * start + [True] * (length - start) + [False] * filled
        assert row("old_log_probs") == [0.0] * start + rollout.old_log_probs.tolist() + [0.0] * filled
        assert row("loss_mask") == [0] * start + [1] * (length - start) + [0] * filled
        if layout == "padded":
            assert row("mask") == [True] * length + [False] * filled
        else:
            assert row("sequence_ids") == [at] * length
        outcome = pack["outcomes"][at].item()
        assert math.isnan(outcome) if rollout.reward is None else outcome == rollout.reward.outcome
        assert pack["policy_versions"][at] == (-1 if rollout.policy_version is None else rollout.policy_version)
        assert pack["task_ids"][at] == rollout.task_id
        assert pack["lengths"][at] == length


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=14),
    st.integers(12, 40),
    st.sampled_from(["packed", "padded"]),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_an_epoch_of_packs_is_what_a_plain_loop_makes(
    sizes: list[tuple[int, int]], tokens: int, layout: Any, waiting: int, seed: int
) -> None:
    rollouts = [rollout(key, length, min(length, prompt), version=key) for key, (length, prompt) in enumerate(sizes)]
    buffer = in_memory(rollouts, seed=seed)
    state = buffer.state_dict()
    order = buffer.draw(len(rollouts), sampler=EpochSampler(unit="trajectory")).ids.tolist()
    buffer.load_state_dict(state)
    sampler = EpochSampler(unit="trajectory", epochs=1)
    with patch(MOST_WAITING, waiting), TokenLoader(buffer, tokens, sampler=sampler, layout=layout) as loader:
        packs = [pack for batch in loader for pack in batch]
    assert [pack["trajectory_ids"].tolist() for pack in packs] == plain_packs(
        order, shapes_of(rollouts), tokens, layout, waiting
    )
    for pack in packs:
        check_pack(pack, rollouts, layout)
        assert pack["input_ids"].numel() <= tokens


@pytest.fixture(params=["memory", *FORMATS])
def kept(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[TrajectoryReplayBuffer, list[AgentTrajectory]]]:
    rollouts = [rollout(key, 3 + 5 * key % 17, 1 + key % 3, version=None if key % 5 else key) for key in range(20)]
    if request.param == "memory":
        yield in_memory(rollouts), rollouts
        return
    options: dict[str, Any] = {"auto_save": True, "auto_save_path": tmp_path, "trajectory_format": request.param}
    with TrajectoryReplayBuffer(**options) as writer:
        for at in range(0, 20, 5):
            writer.add_trajectories(rollouts[at : at + 5])
            writer.flush()
    with TrajectoryReplayBuffer(seed=0, enable_cache=False, sample_window_size=0) as reader:
        reader.load_checkpoint(tmp_path)
        yield reader, rollouts


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_packs_hold_what_was_stored_wherever_it_is_kept(
    kept: tuple[TrajectoryReplayBuffer, list[AgentTrajectory]], layout: Any
) -> None:
    buffer, rollouts = kept
    pad_id = 7 if layout == "padded" else 0
    with TokenLoader(buffer, 40, layout=layout, batch_size=2, pad_id=pad_id) as loader:
        for batch in itertools.islice(loader, 10):
            assert len(batch) == 2
            for pack in batch:
                check_pack(pack, rollouts, layout, pad_id)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_packs_of_a_device_are_those_of_the_cpu(layout: Any) -> None:
    """On a simulated device, whose copies arrive on demand; a batch of small packs is one copy."""
    rollouts = [rollout(key, 3 + 5 * key % 17, 1 + key % 3) for key in range(20)]
    device = Slow()
    options: dict[str, Any] = {"layout": layout, "batch_size": 2}
    with (
        TokenLoader(in_memory(rollouts, seed=1), 40, **options) as plain,
        TokenLoader(in_memory(rollouts, seed=1), 40, **options) as moved,
    ):
        moved._memory = lambda: DeviceMemory(device, 2)  # type: ignore[method-assign]
        for expected, batch in itertools.islice(zip(plain, moved, strict=True), 9):
            assert same(batch, expected)
    assert all(len(copy.used) <= 1 for copy in device.copies)
    assert device.pinned == len(device.copies)


def make_loader(path: Path, **options: Any) -> TokenLoader:
    buffer = TrajectoryReplayBuffer(seed=4, sample_window_size=0)
    buffer.load_checkpoint(path)
    return TokenLoader(buffer, 60, **{"batch_size": 8, **options})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [rollout(key, 2 + 7 * key % 23, 1) for key in range(60)])


def named(batches: Sequence[Sequence[dict[str, Any]]]) -> list[list[int]]:
    return [pack["input_ids"].tolist() for batch in batches for pack in batch]


@pytest.mark.parametrize(("world", "epochs"), [(1, False), (3, True), (8, False)])
def test_ranks_together_get_the_global_batches_and_resume_on_another_number(
    store: Path, world: int, epochs: bool
) -> None:
    def chosen() -> dict[str, Any]:
        return {"sampler": EpochSampler(unit="trajectory")} if epochs else {}

    with make_loader(store, **chosen()) as alone:
        expected = [named([next(alone)]) for _ in range(7)]
    first = [make_loader(store, rank=(r, 2), prefetch=1 + r, **chosen()) for r in range(2)]
    begun = [named([next(loader) for loader in first]) for _ in range(3)]
    file = io.BytesIO()
    torch.save(first[1].state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    later = [make_loader(store, rank=(r, world), prefetch=4, **chosen()) for r in range(world)]
    for loader in later:
        loader.load_state_dict(state)
    rest = [named([next(loader) for loader in later]) for _ in range(4)]
    for loader in first + later:
        loader.close()
    assert begun + rest == expected


def test_long_trajectories_are_refused_skipped_or_alone(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [rollout(0, 30, 2), rollout(1, 4, 2), rollout(2, 5, 2)]

    def loader(**options: Any) -> TokenLoader:
        return TokenLoader(in_memory(rollouts), 10, sampler=EpochSampler(unit="trajectory", epochs=1), **options)

    with loader() as refusing, pytest.raises(ConfigurationError, match="trajectory 0: has 30 tokens, the budget is 10"):
        list(refusing)
    with loader(long="skip") as skipping:
        assert [sorted(pack["trajectory_ids"].tolist()) for [pack] in skipping] == [[1, 2]]
        assert skipping.figures()["skipped_trajectories"] == 1
    assert sum("it is skipped" in message for message in caplog.messages) == 1
    with loader(long="alone") as alone:
        assert sorted(sorted(pack["trajectory_ids"].tolist()) for [pack] in alone) == [[0], [1, 2]]


def test_trajectories_without_tokens_are_refused_or_skipped() -> None:
    buffer = in_memory([AgentTrajectory(task_id="x", messages=[{"role": "user", "content": "?"}]), rollout(1, 4, 2)])
    refused = pytest.raises(ConfigurationError, match="0: has no tokens; evict it, or pass")
    with TokenLoader(buffer, 10, long="alone") as loader, refused:
        next(loader)
    with TokenLoader(buffer, 10, long="skip") as loader:
        assert set(next(loader)[0]["trajectory_ids"].tolist()) == {1}
    only = in_memory([AgentTrajectory(task_id="x", messages=[{"role": "user", "content": "?"}])])
    none = pytest.raises(ConfigurationError, match=r"all of 100 .*tokens")
    with patch("trajstore._core.feeding.tokens._IN_VAIN", 100), TokenLoader(only, 10, long="skip") as loader, none:
        next(loader)


def test_columns_that_some_lack_are_named_and_dtypes_widen() -> None:
    narrow, wide = rollout(0, 4, 1), rollout(1, 6, 2)
    narrow.input_ids, narrow.entropys = narrow.input_ids.int(), torch.rand(3)  # type: ignore[union-attr]
    buffer = in_memory([narrow, wide])
    with (
        TokenLoader(buffer, 100) as loader,
        pytest.raises(SchemaMismatchError, match=r"entropys \(absent from trajectory 1\); name the columns"),
    ):
        next(loader)
    once = EpochSampler(unit="trajectory", epochs=1)
    with TokenLoader(buffer, 100, columns=["input_ids"], sampler=once) as loader:
        [pack] = next(loader)
    assert pack["input_ids"].dtype == torch.int64
    assert sorted(pack["input_ids"].tolist())[:4] == [1000, 1001, 1002, 1003]
    assert "old_log_probs" not in pack
    assert pack["response"].sum() > 0


def test_blocks_of_steps_are_refused() -> None:
    buffer = in_memory([Trajectory(rewards=torch.rand(3, 2, 1))])
    with (
        TokenLoader(buffer, 100) as loader,
        pytest.raises(SchemaMismatchError, match="trajectory 0 is a block of step"),
    ):
        next(loader)


def test_importance_weights_come_with_the_batch() -> None:
    buffer = in_memory([rollout(key, 5, 2) for key in range(6)])
    sampler = WeightedSampler(priorities=Priorities(alpha=1, beta=1, eps=0, per="trajectory"), unit="trajectory")
    drawn = buffer.draw(6, sampler=sampler)
    buffer.update_priorities(sampler, drawn, np.where(drawn.ids == 2, 2.0, 1.0))
    with patch(MOST_WAITING, 6), TokenLoader(buffer, 30, sampler=sampler) as loader:
        [pack] = next(loader)
    expected = [0.5 if number == 2 else 1.0 for number in pack["trajectory_ids"].tolist()]
    assert pack["weights"].tolist() == expected


def test_a_trajectory_that_is_evicted_under_way_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = in_memory([rollout(key, 5, 2) for key in range(9)])
    evicted: list[int] = []
    genuine = buffer._sampling.token_rows

    def evict_first(_: Sampling, ids: Any, columns: Any = None) -> Any:
        if not evicted:
            evicted.append(int(ids[0]))
            buffer.evict(evicted)
        return genuine(ids, columns)

    monkeypatch.setattr(Sampling, "token_rows", evict_first)
    with TokenLoader(buffer, 15, sampler=EpochSampler(unit="trajectory", epochs=1), batch_size=2) as loader:
        seen = [number for batch in loader for pack in batch for number in pack["trajectory_ids"].tolist()]
        assert loader.figures()["batches_redrawn"] == 1
    assert sorted(seen) == sorted(set(range(9)) - set(evicted))


def test_the_last_batch_of_an_epoch_has_rows_for_every_rank_though_it_may_be_none() -> None:
    def batches(rank: int) -> list[list[float]]:
        buffer = in_memory([Trajectory(rewards=torch.arange(9.0).reshape(9, 1, 1))])
        with ReplayLoader(buffer, 8, sampler=EpochSampler(epochs=1), rank=(rank, 3)) as loader:
            return [batch["rewards"].reshape(-1).tolist() for batch in loader]

    parts = [batches(rank) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(value for part in parts for batch in part for value in batch) == list(range(9))
    assert [] in [part[1] for part in parts]


def test_a_state_of_another_loader_is_refused() -> None:
    buffer = in_memory([rollout(0, 4, 1)])
    for state, message in (
        (ReplayLoader(buffer, 4).state_dict(), "is of a loader of transitions"),
        (TokenLoader(buffer, 20).state_dict(), r"tokens 20 \(here 10\)"),
        (TokenLoader(buffer, 10, sampler=EpochSampler(unit="trajectory")).state_dict(), "other samplers or selections"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            TokenLoader(buffer, 10).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="is of a loader of token batches"):
        ReplayLoader(buffer, 10).load_state_dict(TokenLoader(buffer, 10).state_dict())
