"""Reads of a handle beside a local store: rows come from the mapped directory and equal the drawn rows."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_server import ids_of, request_of, server
from tests.support.equality import same
from tests.support.witness import check_batch, witness
from trajstore import WriterOptions
from trajstore._core.columns.fields import nest
from trajstore._core.sampling.base import Drawn
from trajstore._core.sampling.draws import Draws
from trajstore.distributed.read_request import Part, failure, pack, packed_error, request, requested, united
from trajstore.distributed.reads import Reads
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import ServedStore, StoreServer
from trajstore.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StoreError,
    StoreUnreachableError,
    TrajectoryUnavailableError,
)


class Here:
    """Local stores queried without Ray; rows over TCP. Counts the requested rows."""

    name, deadline = "here", 60.0

    def __init__(self, *servers: StoreServer) -> None:
        self.servers = [*servers]
        self.asked = 0
        self.path = ""
        for store in servers:
            store._rows._read = partial(self._read, store)

    def _read(self, store: StoreServer, drawn: Drawn, columns: Sequence[str] | None) -> Any:
        self.asked += len(drawn)
        return store.read(drawn, columns)

    def describe(self, rank: int, deadline: float | None = None) -> ServedStore:
        about = self.servers[rank].describe()
        return replace(about, host=socket.gethostname(), path=self.path or about.path)

    def ask(self, arguments: Any, method: str, seconds: float) -> tuple[dict[int, Any], dict[int, Exception]]:
        return {rank: getattr(self.servers[rank], method)(*given) for rank, given in arguments.items()}, {}

    def answered(self, rank: int) -> None:
        """Do nothing."""

    def silent(self, rank: int, error: Exception) -> None:
        """Do nothing."""

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        return StoreUnreachableError(f"rank_{rank}: {error}")


def look(index: RunIndex, *servers: StoreServer) -> RunIndex:
    for clock in (0, index.clock):
        for rank, store in enumerate(servers):
            index.take(rank, store.changes(*index.received(rank), clock))
    index.show(lambda ids: np.zeros(len(ids), np.int64))
    return index


def check(reads: Reads, index: RunIndex, draws: Draws, count: int = 32) -> None:
    """Compare rows read by place with rows read by id."""
    places = index.places(count, 0, draws)
    placement = reads.placed(index.table, places, None, None, 60.0)
    check_batch(placement)
    out = {"curr_obs.tag": torch.zeros(count, dtype=torch.int64)}
    assert reads.placed(index.table, places, ["curr_obs.tag"], out, 60.0).keys() == {"curr_obs"}
    assert torch.equal(out["curr_obs.tag"][: len(places)], placement["curr_obs"]["tag"])
    assert same(placement, nest(reads.rows(index.table.drawn(places), None, None, 60.0)))


@pytest.mark.parametrize("stores", [1, 2])
def test_samples_by_place_are_those_by_id(tmp_path: Path, stores: int) -> None:
    servers = [server(tmp_path, rank) for rank in range(stores)]
    here, index, draws = Here(*servers), RunIndex(), Draws(3)
    reads = Reads(here)  # type: ignore[arg-type]
    ids: list[int] = []
    for step in range(4):  # evictions and additions between reads: at the front and in the middle
        for store in servers:
            ids += ids_of(store.add(request_of([witness(10 * step + key) for key in range(5)]), 5))
            store.flush()
        look(index, *servers)
        check(reads, index, draws)
        gone = [ids[1], ids[-2]] if step % 2 else ids[:1]
        for number in gone:
            servers[number % 1024].evict([number])
            ids.remove(number)
        check(reads, index, draws) if step == 3 else look(index, *servers)
        check(reads, look(index, *servers), draws)
    assert index.ids.tolist() == sorted(ids)
    assert not here.asked
    reads.close()
    for store in servers:
        store.close()


def test_what_is_not_committed_is_asked_for_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.distributed.server._ANSWERS_WITHIN", 0.0)
    store = server(tmp_path, writer=WriterOptions(commit_interval=3600.0))
    here, index, draws = Here(store), RunIndex(), Draws(3)
    reads = Reads(here)  # type: ignore[arg-type]
    store.add(request_of([witness(key) for key in range(5)]), 5)
    store.flush()
    store.add(request_of([witness(key) for key in range(5, 8)]), 3)
    look(index, store)
    reads.placed(index.table, index.places(32, 0, draws), None, None, 60.0)
    assert here.asked == 32
    store.flush()
    monkeypatch.setattr("trajstore.distributed.reads.time", SimpleNamespace(monotonic=lambda: 1e12))  # later
    here.asked = 0
    check(reads, index, draws)
    assert not here.asked
    reads.close()
    store.close()


def test_a_mended_batch_asks_only_for_the_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.distributed.reads._open", lambda about: None)
    store = server(tmp_path)
    here, index = Here(store), RunIndex()
    reads = Reads(here)  # type: ignore[arg-type]
    ids = ids_of(store.add(request_of([witness(key) for key in range(6)]), 6))
    look(index, store)
    drawn = index.samples(64, 0, Draws(3))
    store.evict(ids[:2])
    gone = np.isin(drawn.ids, ids[:2])
    with pytest.raises(TrajectoryUnavailableError, match=f"trajectories {ids[0]}, {ids[1]} were evicted since"):
        reads.rows(drawn, None, None, 60.0)
    assert np.array_equal(reads.keeps(drawn), ~gone)
    store.evict(ids[2:5])  # these rows are there already
    look(index, store)
    here.asked = 0
    new = index.samples(int(gone.sum()), 0, Draws(4))
    lacking = np.count_nonzero(~reads.keeps(new))
    assert lacking
    check_batch(nest(reads.rows(Drawn.joined(drawn.at(~gone), new), None, None, 60.0)))
    assert here.asked == lacking
    assert not reads.keeps(drawn).any()
    store.clear()
    with pytest.raises(TrajectoryUnavailableError):
        reads.rows(new, None, None, 60.0)
    reads.close()
    store.close()


def test_another_machine_of_the_same_name_is_asked(tmp_path: Path) -> None:
    store, other = server(tmp_path / "there"), server(tmp_path / "here")
    here = Here(store)
    here.path = str(tmp_path / "here")
    for number, each in enumerate((store, other)):
        each.add(request_of([witness(key) for key in range(10 * number, 10 * number + 5)]), 5)
        each.flush()
    index = look(RunIndex(), store)
    reads = Reads(here)  # type: ignore[arg-type]
    batch = reads.placed(index.table, index.places(16, 0, Draws(3)), None, None, 60.0)
    assert {int(tag) >> 20 for tag in batch["curr_obs"]["tag"]} <= {*range(5)}
    assert here.asked == 16
    for each in (store, other):
        each.close()


# -- Requests, and transfer of rows to a learner: every dtype and shape, any cuts, several stores --


def rows(count: int, salt: int = 0) -> dict[str, torch.Tensor]:
    def numbers(width: int) -> torch.Tensor:
        return (torch.arange(count * width) * 37 + salt).remainder(251).reshape(count, width)

    return {
        "flag": numbers(1)[:, 0] > 100,
        "half": numbers(3).to(torch.bfloat16),
        "eighth": numbers(2).to(torch.float8_e4m3fn),
        "wave": torch.complex(numbers(2).float(), -numbers(2).float()),
        "é.nothing": torch.zeros(count, 3, 0),
        "picture": numbers(5 * 7).to(torch.uint8).reshape(count, 5, 7),
        "number": numbers(1)[:, 0].long() << 40,
    }


@pytest.mark.parametrize("count", [1, 29, 1000])
def test_rows_of_three_stores_are_put_where_they_belong(count: int) -> None:
    order = np.random.default_rng(count).permutation(3 * count)
    places = [np.sort(order[number * count : (number + 1) * count]) for number in range(3)]
    given = [rows(count, salt) for salt in range(3)]
    expected = {
        name: torch.empty((3 * count, *values.shape[1:]), dtype=values.dtype) for name, values in given[0].items()
    }
    for at, part in zip(places, given, strict=True):
        for name, values in part.items():
            if values.numel():
                wide = expected[name].reshape(3 * count, -1).view(torch.uint8)
                wide[torch.from_numpy(at)] = values.reshape(count, -1).view(torch.uint8)
    turned = dict(reversed(given[1].items()))
    parts = [Part.unpacked(pack(given[0])), Part.unpacked(pack(turned)), Part.of(given[2])]
    assert same(united(parts, places, None), expected)
    out = {name: torch.ones_like(values).repeat(2, *[1] * (values.dim() - 1)) for name, values in expected.items()}
    batch = united(parts, places, out)
    assert same(batch, expected)
    assert all(batch[name].data_ptr() == out[name].data_ptr() for name in out)


def test_what_does_not_fit_is_refused() -> None:
    at = [np.arange(4), np.arange(4, 8)]
    first, less = Part.of(rows(4)), rows(4)
    del less["flag"]
    with pytest.raises(SchemaMismatchError, match="differ in flag; name the columns"):
        united([first, Part.of(less)], at, None)
    with pytest.raises(SchemaMismatchError, match="dtype or shape of picture"):
        united([first, Part.of({**rows(4), "picture": torch.zeros(4, 7, 5, dtype=torch.uint8)})], at, None)
    with pytest.raises(ConfigurationError, match=r"out\['half'\]"):
        united([first, first], at, {**rows(8), "half": torch.zeros(8, 3)})
    with pytest.raises(StoreError, match=r"3 of 4 rows.*same trajstore"):
        united([Part.unpacked(pack(rows(3))), first], at, None)
    with pytest.raises(StoreError, match="an answer has"):
        Part.unpacked(pack(rows(3))[:-1])


def test_a_request_says_what_was_drawn() -> None:
    ids, samples = np.arange(10, dtype=np.int32)[::2], np.arange(5)[::-1] + 2**40
    drawn, columns, seconds = requested(request(Drawn(ids, samples, names=-samples), ["é.b", "c"], 7.0))
    assert (drawn.ids.tolist(), drawn.samples.tolist()) == (ids.tolist(), samples.tolist())
    assert drawn.names is not None
    assert drawn.names.tolist() == (-samples).tolist()
    assert (columns, seconds) == (["é.b", "c"], 7.0)
    whole = request(Drawn(ids, samples), None, 1.0)
    assert requested(whole)[0].names is None
    for damaged in (b"", whole[:20], whole[:-1], whole[:-8], whole + bytes(8), whole.replace(b"null", b"1234")):
        with pytest.raises(ConfigurationError, match="no request of this version"):
            requested(damaged)


def test_too_large_a_request_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.distributed.read_request.MOST_REQUEST", 320)
    with pytest.raises(ConfigurationError, match="11 rows of one store: read at most 10 at once"):
        request(Drawn(np.arange(11), np.arange(11)), None, 1.0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TrajectoryUnavailableError("gone"), TrajectoryUnavailableError, "gone"),
        (SchemaMismatchError("é"), SchemaMismatchError, "é"),
        (KeyError("x"), StoreError, "KeyError: 'x'"),
    ],
)
def test_an_error_of_the_store_is_raised_by_its_name(error: Exception, kind: type[Exception], message: str) -> None:
    raised = failure(np.frombuffer(packed_error(error), np.uint8))
    assert (type(raised), str(raised)) == (kind, message)
    assert failure(pack(rows(3))) is None
