"""Loaders with a ledger: the rows of every batch are recorded once, as drawn, also after kills."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.cli.stores import Run
from tests.stores import in_memory, refused, stored
from tests.support.faults import FaultPlan, failing_disk
from tests.support.ledgers import first_unlike
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError
from trajstore.ledger import Ledger, read
from trajstore.loader import ReplayLoader, TokenLoader
from trajstore.samplers import EpochSampler, Priorities, UseLimit, WeightedSampler

LOADERS: dict[str, Callable[..., Any]] = {
    "weighted": lambda buffer, **more: ReplayLoader(
        buffer, 8, sampler=WeightedSampler([UseLimit()], Priorities()), **more
    ),
    "a rank": lambda buffer, **more: ReplayLoader(
        buffer, 8, sampler=EpochSampler(), rank=(1, 2), reuse=True, prefetch=1, **more
    ),
    "weighted tokens": lambda buffer, **more: TokenLoader(
        buffer, 40, batch_size=2, sampler=WeightedSampler([], Priorities(per="trajectory"), unit="trajectory"), **more
    ),
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def block(key: int) -> Trajectory:
    valid = torch.ones(4, 2, dtype=torch.bool)
    valid[1, key % 2] = False
    rows = 100.0 * key + torch.arange(8.0).reshape(4, 2, 1)
    return Trajectory(rewards=rows, versions=torch.full((4, 2, 1), float(key)), valid=valid)


def store_of(path: Path, name: str) -> Path:
    if "tokens" not in name:
        return stored(path, [block(key) for key in range(9)])
    return stored(
        path, [AgentTrajectory(input_ids=torch.arange(5 + key), policy_version=key or None) for key in range(9)]
    )


def rows_in(batch: Any) -> list[tuple[Any, ...]]:
    """Return trajectory, row, tokens, version, weight and probability of each row of a batch, from its contents."""
    if not isinstance(batch, list):
        values = batch["rewards"].flatten().long()
        columns = [values // 100, values % 100, torch.ones_like(values), values // 100]
        chosen = [batch.weights, batch.drawn.probabilities]
    else:
        columns = [torch.cat([pack[name] for pack in batch]) for name in ("trajectory_ids", "lengths")]
        columns = [columns[0], torch.zeros_like(columns[0]), columns[1], columns[0].where(columns[0] > 0, -1)]
        parts = [[pack[name] for pack in batch if name in pack] for name in ("weights", "probabilities")]
        chosen = [torch.cat(part) if part else None for part in parts]
    lists = [column.tolist() for column in columns]
    lists += [[None] * len(lists[0]) if column is None else column.tolist() for column in chosen]
    return list(zip(*lists, strict=True))


def lives(
    store: Path, name: str, folder: Path, plan: Sequence[tuple[int, int]]
) -> tuple[list[list[tuple[Any, ...]]], list[str]]:
    """Run a loader that is killed and resumed; return the rows of the batches that count, and the warnings.

    Each life returns ``batches`` and is resumed from the state after ``saved`` of them.
    """
    state, counted, said = None, [], []
    for batches, saved in plan:
        with warnings.catch_warnings(record=True) as caught, Ledger(folder) as ledger:
            warnings.simplefilter("always")
            loader = LOADERS[name](TrajectoryReplayBuffer.open(store, seed=7), ledger=ledger)
            if state is not None:
                loader.load_state_dict(state)
            del counted[0 if state is None else state["batches"] :]
            for number in range(batches):
                loader.policy_version = 10 + len(counted)
                counted.append(rows_in(next(loader)))
                if number + 1 == saved:
                    state = loader.state_dict()
            loader.close()
            said += [str(warning.message) for warning in caught]
    return counted, said


@pytest.mark.parametrize("name", list(LOADERS))
def test_an_interrupted_run_records_the_rows_of_an_uninterrupted_one(tmp_path: Path, name: str, run: Run) -> None:
    store = store_of(tmp_path / "store", name)
    expected, said = lives(store, name, store / "ledger", [(12, 12)])
    assert said == []
    interrupted, said = lives(store, name, tmp_path / "other", [(3, 0), (4, 4), (1, 0), (5, 3), (5, 5)])
    assert interrupted == expected
    assert [text.split(": ")[1] for text in said] == [
        "3 steps will be replaced",
        "1 step after step 4 will be replaced",
        "2 steps after step 7 will be replaced",
    ]
    assert first_unlike(read(store / "ledger"), read(tmp_path / "other")) is None
    columns = ("trajectory_id", "rollout_row", "tokens", "version", "weight", "probability")
    table = TrajectoryReplayBuffer.open(store).query("trained").table()
    recorded = table.with_columns(version=table["version"].fill_null(-1)).partition_by("step")
    assert [step.select(columns).rows() for step in recorded] == expected
    assert table["age"].fill_null(-1).to_list() == [
        -1 if row[3] < 0 else 10 + place - row[3] for place, batch in enumerate(expected) for row in batch
    ]
    assert table["advantage"].null_count() == table["group"].null_count() == len(table)


def test_a_batch_that_could_not_be_recorded_is_the_next_one(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", "a rank")
    plan = FaultPlan(at=0, kind="ENOSPC")
    with Ledger(tmp_path / "ledger") as ledger, TrajectoryReplayBuffer.open(store, seed=7) as buffer:
        loader = ReplayLoader(buffer, 8, ledger=ledger)
        expected = [rows_in(next(loader))]
        with failing_disk(plan), pytest.raises(OSError, match="No space left"):
            next(loader)
        expected += [rows_in(next(loader)) for _ in range(2)]
        loader.close()
    rows = read(tmp_path / "ledger").steps
    assert [rows[step].rows[["trajectory", "row"]].tolist() for step in rows] == [
        [row[:2] for row in batch] for batch in expected
    ]
    plain = ReplayLoader(TrajectoryReplayBuffer.open(store, seed=7), 8)
    assert [rows_in(next(plain)) for _ in range(3)] == expected
    plain.close()


def test_a_batch_of_1024_rows_takes_at_most_40_bytes_per_row(tmp_path: Path) -> None:
    buffer = in_memory([Trajectory(rewards=torch.rand(64, 8, 1)) for _ in range(200)])
    sampler = WeightedSampler([], Priorities())
    drawn = buffer.draw(4096, sampler=sampler)
    buffer.update_priorities(sampler, drawn, np.random.default_rng(0).random(4096))
    with Ledger(tmp_path) as ledger, ReplayLoader(buffer, 1024, sampler=sampler, ledger=ledger) as loader:
        batch = next(loader)
    [step] = read(tmp_path).steps.values()
    assert step.rows["probability"].tolist() == batch.drawn.probabilities.tolist()
    assert step.rows["weight"].tolist() == batch.drawn.weights.tolist()
    assert (tmp_path / "steps-000000-after-none.log").stat().st_size <= 40 * 1024


def test_ledgers_that_cannot_name_the_rows_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        store_of(tmp_path / "run" / f"rank_{rank}", "a rank")
    one = TrajectoryReplayBuffer.open(tmp_path / "run" / "rank_0", seed=7)
    with Ledger(tmp_path / "ledger") as ledger:
        with pytest.raises(ConfigurationError, match="ledger: has the ids of one store"):
            ReplayLoader(TrajectoryReplayBuffer.open(tmp_path / "run"), 8, ledger=ledger)
        with_worker = DataLoader(ReplayLoader(one, 8, ledger=ledger), None, num_workers=1)
        refused(with_worker, "ledger: a DataLoader worker does not know")
        with ReplayLoader(one, 8, ledger=ledger) as loader:
            for wrong in ("3", 1.5, 2**63):
                loader.policy_version = wrong
                with pytest.raises(ConfigurationError, match="policy_version: "):
                    next(loader)
            loader.policy_version = np.int64(3)
            next(loader)
            assert read(tmp_path / "ledger").steps[1].policy_before == 3
            state = loader.state_dict()
            next(loader)
            with pytest.warns(UserWarning, match="2 steps will be replaced"):
                ledger.continue_from(None)
            ahead = state | {"batches": 5}
            loader.load_state_dict(ahead)
            next(loader)  # an empty ledger may begin anywhere
            loader.load_state_dict(ahead | {"batches": 9})
            with pytest.raises(ConfigurationError, match="lacks step 9, from which the trainer continues"):
                next(loader)
        with pytest.raises(ConfigurationError, match="tokens has values beyond int32"):
            ledger.record_batch(7, {"trajectory": np.zeros(1, np.int64), "tokens": np.array([1 << 40])})
