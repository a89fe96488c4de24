"""Workers of a DataLoader: each batch once, or an error; copies of a reader draw differently."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.feeding.test_loader import fill
from tests.feeding.test_tokens import rollout
from tests.stores import refused, stored
from trajstore import Reader, TrajectoryReplayBuffer
from trajstore._core.formats import FORMATS
from trajstore.loader import PreloadReplayBufferDataset, ReplayBufferDataset, ReplayLoader, TokenLoader
from trajstore.samplers import EpochSampler, Priorities, Sampler, UseLimit, WeightedSampler

campaign = pytest.mark.campaign


class OfSamples(Dataset[list[float]]):
    """A user's dataset: each item is a batch; the reader is opened here, or in each worker."""

    def __init__(self, path: Path, sampler: Sampler | None = None, *, late: bool = False) -> None:
        self.path, self.sampler = path, sampler
        self.reader: Reader | None = None if late else TrajectoryReplayBuffer.open(path)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> list[float]:
        if self.reader is None:
            self.reader = TrajectoryReplayBuffer.open(self.path)
        values: list[float] = self.reader.sample(8, sampler=self.sampler)["rewards"].reshape(-1).tolist()
        return values


class OfTrajectories(IterableDataset[list[float]]):
    """A user's iterable dataset, whose length is divided over the workers."""

    def __init__(self, path: Path) -> None:
        self.reader = TrajectoryReplayBuffer.open(path, seed=3)

    def __iter__(self) -> Iterator[list[float]]:
        worker = get_worker_info()
        for _ in range(6 if worker is None else 6 // worker.num_workers):
            yield [float(item.rewards[0, 0, 0]) for item in self.reader.sample_trajectories(9)]


def dataset_of(kind: str, path: Path) -> Any:
    if kind == "samples":
        return OfSamples(path)
    if kind == "samples of a late reader":
        return OfSamples(path, late=True)
    if kind == "trajectories":
        return OfTrajectories(path)
    reader = TrajectoryReplayBuffer.open(path, seed=3)
    if kind == "TokenLoader":
        return TokenLoader(reader, 60, batch_size=8)
    if kind == "ReplayLoader":
        return ReplayLoader(reader, 8)
    return {"RLinf": ReplayBufferDataset, "RLinf preload": PreloadReplayBufferDataset}[kind](reader, None, 8, 1, 0)


def values(batch: Any) -> tuple[float, ...]:
    if isinstance(batch, dict):
        return tuple(batch["rewards"].reshape(-1).tolist())
    if isinstance(batch[0], dict):
        return tuple(itertools.chain(*(pack["input_ids"].tolist() for pack in batch)))
    return tuple(map(float, batch))


OURS = ("ReplayLoader", "TokenLoader", "RLinf", "RLinf preload")
USERS = ("samples", "samples of a late reader", "trajectories")
BY_DEFAULT = {*((kind, 2, "fork", "pt") for kind in (*OURS, *USERS)), ("samples", 0, "fork", "pt")}
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else campaign)
    for case in itertools.product((*OURS, *USERS), (0, 2, 4), ("fork", "spawn"), FORMATS)
]


@pytest.mark.parametrize(("kind", "workers", "how", "form"), CASES)
def test_each_batch_comes_once_or_there_is_an_error(
    tmp_path: Path, kind: str, workers: int, how: str, form: str
) -> None:
    path = tmp_path / "store"
    if kind == "TokenLoader":
        stored(path, [rollout(key, 2 + 7 * key % 23, 1) for key in range(60)])
    else:
        fill(path, range(20), trajectory_format=form).close()
    dataset = dataset_of(kind, path)
    context = how if workers else None

    def epoch(loader: Any) -> list[tuple[float, ...]]:
        return [values(batch) for batch in itertools.islice(loader, 6)]

    more = dict[str, Any](batch_size=None, num_workers=workers, multiprocessing_context=context)
    seen = epoch(DataLoader(dataset, **more))
    if kind in OURS:
        assert seen == epoch(dataset_of(kind, path))
    if kind in OURS and workers:
        one = DataLoader(dataset, **(more | {"num_workers": 1}))  # a second one would still start when it is dropped
        for again in (one, dataset):
            refused(again, "an earlier epoch have drawn from this loader")
        dataset.load_state_dict(dataset.state_dict())
        assert epoch(DataLoader(dataset, **more)) == seen
        dataset = dataset_of(kind, path)
        seen.clear()
    else:
        seen += epoch(DataLoader(dataset, **more))
    persistent = DataLoader(dataset, **more, persistent_workers=bool(workers))
    for _ in range(2):
        seen += epoch(persistent)
    assert len(seen) == len(set(seen)) >= 12


@pytest.mark.parametrize(
    "sampler",
    [EpochSampler(epochs=1), WeightedSampler([UseLimit(max_uses=1)]), WeightedSampler(priorities=Priorities())],
)
def test_samplers_that_remember_draws_are_refused_in_workers_but_for_loaders(tmp_path: Path, sampler: Any) -> None:
    fill(tmp_path / "store", range(20)).close()
    workers = dict[str, Any](batch_size=None, num_workers=2, multiprocessing_context="fork")
    with_workers = DataLoader(OfSamples(tmp_path / "store", sampler), **workers)
    refused(with_workers, "each of the 2 DataLoader workers has a copy")
    if isinstance(sampler, EpochSampler):
        loader = ReplayLoader(TrajectoryReplayBuffer.open(tmp_path / "store"), 8, sampler=EpochSampler(epochs=1))
        rows = list(itertools.chain(*(values(batch) for batch in DataLoader(loader, **workers))))
        assert len(rows) == len(set(rows)) == 160


def test_a_copy_of_a_reader_draws_differently_unless_it_is_given_the_state(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(20)).close()
    context = multiprocessing.get_context("fork")
    heard, sender = context.Pipe(duplex=False)
    with TrajectoryReplayBuffer.open(tmp_path / "store", seed=5) as reader:
        copy, state = pickle.loads(pickle.dumps(reader)), reader.state_dict()

        def draw(given: bool) -> None:
            if given:
                reader.load_state_dict(state)
            sender.send(reader.draw(8).samples.tolist())

        children = [context.Process(target=draw, args=(given,)) for given in (False, False, True)]
        for child in children:
            child.start()
            child.join()
        first, second, given = (heard.recv() for _ in children)
        mine = reader.draw(8).samples.tolist()
        assert given == mine
        assert len({tuple(drawn) for drawn in (mine, first, second, copy.draw(8).samples.tolist())}) == 4
        copy.load_state_dict(state)
        assert copy.draw(8).samples.tolist() == mine
        copy.close()


def test_the_draws_of_workers_follow_torchs_seed(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(20)).close()

    def batches(seed: int) -> list[list[float]]:
        made = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            OfSamples(tmp_path / "store"), None, num_workers=2, multiprocessing_context="fork", generator=made
        )
        return list(loader)

    assert batches(1) == batches(1) != batches(2)
