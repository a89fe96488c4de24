"""The rate limiter: ratio and bounds, order of admissions, loaders, resume, ends."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.feeding.test_loader import block
from tests.support.waiting import wait_until
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.feeding import limiter, prefetch
from trajstore._core.feeding.limiter import Rate
from trajstore.errors import ConfigurationError, StoreClosedError
from trajstore.loader import RateLimiter, ReplayLoader, TokenLoader

ROWS = 8
"""Rows of a block."""


def filled(blocks: int) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=0)
    buffer.add_trajectories([block(key) for key in range(blocks)])
    return buffer


@pytest.mark.parametrize(("ratio", "tolerance", "start"), [(8, 1, 0), (0.25, 3, 10), (1.5, 40, 7)])
def test_one_side_may_always_continue_and_the_ratio_holds(ratio: float, tolerance: float, start: int) -> None:
    rate, chance = Rate(ratio, tolerance, start), random.Random(0)
    added = drawn = 0
    for _ in range(5000):
        may_add, may_draw = rate.may_add(added, drawn), rate.may_draw(added, drawn)
        assert may_add or may_draw
        if may_add and (not may_draw or chance.random() < 0.5):
            added += chance.randint(1, 5)
        else:
            assert added >= start
            drawn += chance.randint(1, 9)
        assert -tolerance - 9 < rate.balance(added, drawn) < tolerance + 5 * ratio
    assert drawn == pytest.approx(ratio * (added - start), abs=tolerance + max(9, 5 * ratio))


def test_collecting_threads_and_a_loader_wait_for_each_other() -> None:
    limit, buffer = RateLimiter(2, tolerance=64, start=16), filled(0)
    balances = []

    def collect(first: int) -> None:
        for key in range(first, first + 12):
            with limit.admit(1) as admission:
                buffer.add_trajectories([block(key)])
                admission.rows = ROWS
            balances.append(limit.figures()["limiter_balance"])

    with ThreadPoolExecutor(2) as pool, limit, ReplayLoader(buffer, 16, limiter=limit, prefetch=2) as loader:
        collecting = [pool.submit(collect, first) for first in (0, 12)]
        last = (2 * (24 * ROWS - 16) + 64) // 16  # batches until the learner is ahead by the tolerance
        for _ in range(last):
            assert len(next(loader)["rewards"]) == 16
            balances.append(limit.figures()["limiter_balance"])
        for future in collecting:
            future.result()
        assert -64 - 16 < min(balances) <= max(balances) < 64 + 2 * 2 * ROWS  # two additions
        figures = loader.figures()
        assert (figures["limiter_added"], figures["limiter_drawn"]) == (24 * ROWS, last * 16)
        assert figures["batches_ready"] == 0
        wanted = f"until rows are added: 192 added, 0 being collected, {last * 16} drawn"
        with pytest.raises(TimeoutError, match=wanted):
            limit.draw(1, timeout=0)


def test_requests_are_admitted_in_their_order_and_rollouts_in_flight_hold_their_rows() -> None:
    limit = RateLimiter(1, tolerance=8)
    slow = limit.admit(8)
    with pytest.raises(TimeoutError, match="0 added, 8 being collected, 0 drawn"):
        limit.admit(1, timeout=0)
    admitted = []

    def ask(number: int) -> None:
        with limit.admit(8):
            admitted.append(number)

    with ThreadPoolExecutor(3) as pool, limit:
        for number in range(3):
            pool.submit(ask, number)
            wait_until(lambda: limit.figures()["limiter_waiting"] == number + 1)  # noqa: B023 - called before it changes
        for number in range(3):
            with limit._changed:  # the waiting threads cannot run yet
                limit.draw(8)
                with pytest.raises(TimeoutError):
                    limit.admit(1, timeout=0)
            wait_until(lambda: len(admitted) > number)  # noqa: B023 - called before it changes
        assert admitted == [0, 1, 2]
        with pytest.raises(RuntimeError, match="the rollout failed"), slow:
            raise RuntimeError("the rollout failed")
        assert limit.figures()["limiter_added"] == 24
        with limit.admit(8, timeout=0) as admission:
            admission.rows = 0  # nothing was added after all
        assert limit.figures()["limiter_added"] == 24
        with pytest.raises(ConfigurationError, match="used twice"), admission:
            pass


def test_a_resumed_loader_continues_with_its_counters() -> None:
    buffer, limit = filled(4), RateLimiter(1, tolerance=16)
    limit.added(4 * ROWS)
    with ReplayLoader(buffer, 16, limiter=limit) as loader:
        first = next(loader)
        wait_until(lambda: limit.reason_to_wait() is not None)
        state = loader.state_dict()
        rest = [next(loader)["rewards"] for _ in range(2)]
    assert state["limiter"] == {"added": 32, "drawn": 48, "balance": -16.0}  # with those prefetched
    assert len(state["under_way"]) == 2
    assert len(first["rewards"]) == 16
    for ratio in (1, 4):
        again = RateLimiter(ratio, tolerance=16)
        with ReplayLoader(buffer, 16, limiter=again) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict()["limiter"] == state["limiter"]
            again.added(16 // ratio)  # before the first batch: it stays
            for batch in rest:
                assert torch.equal(next(loader)["rewards"], batch)
            next(loader)
            wait_until(lambda: again.reason_to_wait() is not None)  # noqa: B023 - called before it changes
            counters = loader.state_dict()["limiter"]
        assert counters == {"added": 32 + 16 // ratio, "drawn": 64, "balance": -16.0}
    with ReplayLoader(buffer, 16) as unlimited:
        with pytest.raises(ConfigurationError, match="of a loader with limiter=, unlike this one"):
            unlimited.load_state_dict(state)
        unlimited.load_state_dict(state, changed=True)
        assert torch.equal(next(unlimited)["rewards"], rest[0])
    for name, value in (("added", -1), ("drawn", 0.5), ("balance", float("nan"))):
        with pytest.raises(ConfigurationError, match=f"state: {name}"):
            again.load_state_dict({**state["limiter"], name: value})
    assert again.state_dict() == counters


def test_token_batches_count_trajectories() -> None:
    buffer, limit = TrajectoryReplayBuffer(seed=0, sample_window_size=0), RateLimiter(1, tolerance=6)
    buffer.add_trajectories([AgentTrajectory(task_id="t", input_ids=torch.arange(10)) for _ in range(4)])
    with TokenLoader(buffer, tokens=30, limiter=limit) as loader:
        drawn = [pack["trajectory_ids"] for _ in range(2) for pack in next(loader)]
        wait_until(lambda: limit.reason_to_wait() is not None)
    assert limit.figures()["limiter_drawn"] == sum(map(len, drawn)) == 6


def test_closing_ends_all_waiting(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for module, name in ((limiter, "_WARNS_AFTER"), (prefetch, "_SAYS_AFTER")):
        monkeypatch.setattr(module, name, 0.01)
    limit = RateLimiter(1, tolerance=4)
    with ThreadPoolExecutor(4) as pool, limit, ReplayLoader(filled(1), 4, limiter=limit) as loader:
        next(loader)  # the tolerance allows one batch
        wait_until(lambda: "limiter" in loader._running._waits_for)  # type: ignore[union-attr]
        waiting = [pool.submit(next, loader), pool.submit(limit.draw, 4)]
        reason = "limiter: no more rows can be drawn until rows are added: 0 added, 0 being collected, 4 drawn"
        wait_until(lambda: caplog.text.count(reason) == 2)
        limit.close()
        for future in (*waiting, pool.submit(limit.admit, 4)):
            with pytest.raises(StoreClosedError, match="limiter: it was closed"):
                future.result()


def test_a_limiter_where_nothing_can_be_added_is_refused(tmp_path: Path) -> None:
    limit = RateLimiter(1, tolerance=4)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([block(0)])
        buffer.flush()
        buffer.points.pin("all")
    with (
        ReplayLoader(TrajectoryReplayBuffer.open(tmp_path, pin="all"), 4, limiter=limit) as loader,
        pytest.raises(ConfigurationError, match="no rows can be added here"),
    ):
        next(loader)
    with pytest.raises(ConfigurationError, match="cannot be sent to another"):
        pickle.dumps(loader)
    with pytest.raises(ConfigurationError, match="limiter= has no effect"):
        ReplayLoader(filled(1), 4, rank=(0, 2), limiter=limit)
