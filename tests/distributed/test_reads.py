"""Reads of a handle beside a store: which rows come from the mapped directory, and that they are the rows drawn."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_server import equal, ids_of, parcel_of, server
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.columns.fields import nest
from trajstore.distributed.census import Census
from trajstore.distributed.packed import requested
from trajstore.distributed.reads import Reads
from trajstore.distributed.server import ServedStore, StoreServer
from trajstore.sampling.draws import Draws
from trajstore.testing.witness import check_batch, witness


class Here:
    """Stores on this machine, asked without Ray; counts the rows that they are asked for."""

    def __init__(self, *servers: StoreServer) -> None:
        self.servers = servers
        self.asked = 0

    def describe(self, rank: int, deadline: float | None = None) -> ServedStore:
        return replace(self.servers[rank].describe(), host=socket.gethostname())

    def ask(
        self, arguments: Any, method: str, seconds: float, pieces: Any = None
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        self.asked += sum(len(requested(given[0])[0]) for given in arguments.values())
        return {rank: getattr(self.servers[rank], method)(*given) for rank, given in arguments.items()}, {}


def look(census: Census, *servers: StoreServer) -> Census:
    for clock in (0, census.clock):
        for rank, one in enumerate(servers):
            census.take(rank, one.news(*census.heard(rank), False, clock))
    return census


def check(reads: Reads, census: Census, draws: Draws, count: int = 32) -> None:
    """Compare what comes by place with what comes by id."""
    places = census.places(count, 0, draws)
    found = reads.placed(census.listing, places, None, None, 60.0)
    check_batch(found)
    assert equal(found, nest(reads.rows(census.listing.drawn(places), None, None, 60.0)))


@pytest.mark.parametrize("stores", [1, 2])
def test_samples_by_place_are_those_by_id(tmp_path: Path, stores: int) -> None:
    servers = [server(tmp_path, rank) for rank in range(stores)]
    here, census, draws = Here(*servers), Census(), Draws(3)
    reads = Reads(here)  # type: ignore[arg-type]
    ids: list[int] = []
    for step in range(4):  # evicted and added between reads: at the front, in the midst
        for one in servers:
            ids += ids_of(one.add(parcel_of([witness(10 * step + key) for key in range(5)]), 5))
            one.flush()
        look(census, *servers)
        check(reads, census, draws)
        gone = [ids[1], ids[-2]] if step % 2 else ids[:1]
        for number in gone:
            servers[number % 1024].evict([number])
            ids.remove(number)
        check(reads, census, draws) if step == 3 else look(census, *servers)
        check(reads, look(census, *servers), draws)
    assert census.ids.tolist() == sorted(ids)
    assert not here.asked
    reads.close()
    for one in servers:
        one.close()


def test_what_is_not_committed_is_asked_for_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = server(tmp_path, writer=WriterOptions(commit_interval=3600.0))
    here, census, draws = Here(one), Census(), Draws(3)
    reads = Reads(here)  # type: ignore[arg-type]
    one.add(parcel_of([witness(key) for key in range(5)]), 5)
    one.flush()
    one.add(parcel_of([witness(key) for key in range(5, 8)]), 3)
    look(census, one)
    reads.placed(census.listing, census.places(32, 0, draws), None, None, 60.0)
    assert here.asked == 32
    one.flush()
    monkeypatch.setattr("trajstore.distributed.reads.time.monotonic", lambda: 1e12)  # later
    here.asked = 0
    check(reads, census, draws)
    assert not here.asked
    reads.close()
    one.close()


def test_the_draws_are_those_of_a_buffer(tmp_path: Path) -> None:
    one, census = server(tmp_path), Census()
    one.add(parcel_of([witness(key) for key in range(6)]), 6)
    one.flush()
    look(census, one)
    reads = Reads(Here(one))  # type: ignore[arg-type]
    mine, out = Draws(7), {"curr_obs.tag": torch.zeros(20, dtype=torch.int64)}
    with TrajectoryReplayBuffer.open(tmp_path / "rank_0", seed=7) as reader:
        for count in (20, 13):
            expected = reader.sample(count, columns=["curr_obs.tag"])
            places = census.places(count, 0, mine)
            assert equal(reads.placed(census.listing, places, ["curr_obs.tag"], out, 60.0), expected)
            assert torch.equal(out["curr_obs.tag"][:count], expected["curr_obs"]["tag"])
    reads.close()
    one.close()
