"""Rows over TCP, without Ray: secrets, damaged requests, learners and stores that end or fall silent, TLS."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.certificates import certify
from tests.distributed.test_reads import Here, look
from tests.distributed.test_server import request_of, server
from tests.support.equality import same
from tests.support.waiting import wait_until
from tests.support.witness import witness
from trajstore._core.columns.fields import unnest
from trajstore._core.sampling.base import Drawn
from trajstore._core.sampling.draws import Draws
from trajstore.distributed import row_server
from trajstore.distributed.actors import SilentStoresError
from trajstore.distributed.frames import FRAME
from trajstore.distributed.read_request import READ, request
from trajstore.distributed.reads import Reads
from trajstore.distributed.row_server import RowAddress, RowServer
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import StoreServer
from trajstore.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StoreClosedError,
    StoreError,
    StoreUnreachableError,
)

SECONDS = 300.0
MOMENT = 4.0
"""Seconds that tests wait for a silent store, in which the others answer on a busy machine too."""


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StoreServer]]:
    """Return two stores whose directories cannot be mapped."""
    monkeypatch.setattr("trajstore.distributed.reads._open", lambda about: None)
    made = [server(tmp_path, rank) for rank in range(2)]
    for rank, store in enumerate(made):
        store.add(request_of([witness(10 * rank + key) for key in range(5)]), 5)
        store.flush()
    yield made
    for store in made:
        store.close()


def drawn_of(*stores: StoreServer, count: int = 64) -> Drawn:
    few = look(RunIndex(), *stores).samples(16, 0, Draws(3))
    return few.at(np.arange(count) % len(few))


def reads_of(*stores: StoreServer) -> Reads:
    return Reads(Here(*stores))  # type: ignore[arg-type]


def connections(store: StoreServer) -> int:
    return len(store._rows._connections)


def connected(address: RowAddress, secret: bytes | None = None) -> socket.socket:
    """Return a connection as a learner makes it."""
    connection = socket.create_connection((address.host, address.port), timeout=SECONDS)
    connection.sendall(address.secret if secret is None else secret)
    return connection


def ended(connection: socket.socket) -> bool:
    """Wait until a connection ends or something comes; return whether it ended."""
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_rows_equal_those_of_a_local_reader(stores: list[StoreServer]) -> None:
    drawn = drawn_of(*stores, count=3001)
    with closing(reads_of(*stores)) as reads:
        for columns in (None, ["curr_obs.tag", "forward_inputs.mask"]):
            batch = reads.rows(drawn, columns, None, SECONDS)
            for rank, store in enumerate(stores):
                mine = np.flatnonzero(drawn.ids % 1024 == rank)
                local = unnest(store._buffer.read(drawn.at(mine), columns=columns))
                assert same({name: values[mine] for name, values in batch.items()}, local)
        alone = drawn.at(drawn.ids % 1024 == 1)
        assert same(reads.rows(alone, None, None, SECONDS), unnest(stores[1]._buffer.read(alone)))
        assert [connections(store) for store in stores] == [1, 1]  # kept


def test_an_error_of_the_store_is_raised_and_the_connection_kept(stores: list[StoreServer]) -> None:
    drawn = drawn_of(stores[0])
    with closing(reads_of(*stores)) as reads:
        with pytest.raises(SchemaMismatchError, match="no trajectory has absent"):
            reads.rows(drawn, ["absent"], None, SECONDS)
        (kept,) = reads._rows._idle[0]
        assert reads.rows(drawn, None, None, SECONDS)
        assert reads._rows._idle[0] == [kept]


def test_an_address_that_the_node_lacks_is_named() -> None:
    with pytest.raises(StoreError, match=r"cannot be served at this node's address 203\.0\.113\.1: "):
        RowServer(lambda drawn, columns: np.empty(0, np.uint8), "203.0.113.1").address()


def test_a_wrong_secret_is_refused(stores: list[StoreServer], caplog: pytest.LogCaptureFixture) -> None:
    address, asked = stores[0].rows_at(), request(drawn_of(stores[0]), None, 1.0)
    assert address.secret != stores[1].rows_at().secret
    assert repr(address.secret) not in repr(address)
    for wrong in (bytes(32), stores[1].rows_at().secret, asked):
        with connected(address, wrong) as connection:
            assert ended(connection)
    assert caplog.text.count("is refused: it does not know the secret") == 3


def test_damaged_requests_are_refused(
    stores: list[StoreServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_server, "MOST_REQUEST", 1 << 20)
    for head in (b"GET / HTTP/1.1\r\n", FRAME.pack(READ, (1 << 20) + 1), FRAME.pack(READ, 15)):
        with connected(stores[0].rows_at()) as connection:
            connection.sendall(head)
            assert ended(connection)
    assert caplog.text.count("no frame of this version of trajstore") == 3
    drawn = drawn_of(stores[0])
    with connected(stores[0].rows_at()) as connection:
        for damaged in (Drawn(drawn.ids, -1 - drawn.samples), Drawn(drawn.ids, drawn.samples, names=drawn.ids)):
            asked = bytearray(request(damaged, None, 1.0))
            if damaged.names is not None:
                asked[40:44] = b"\xff" * 4
            connection.sendall(asked)
            answer = connection.recv(1 << 16)
            assert b"ConfigurationError" in answer
            assert FRAME.unpack_from(answer)[1] == len(answer)
    assert caplog.text.count("fails: ") == 2


def test_no_more_connections_than_a_store_has_room_for(
    stores: list[StoreServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_server, "MOST_CONNECTIONS", 1)
    address = stores[0].rows_at()
    first = connected(address)
    wait_until(lambda: connections(stores[0]) == 1)
    with connected(address) as second:
        assert ended(second)
    assert "or 1 connections" in caplog.text
    first.close()
    wait_until(lambda: connections(stores[0]) == 0)
    with closing(reads_of(*stores)) as reads:
        assert reads.rows(drawn_of(stores[0]), None, None, SECONDS)


def test_peers_that_send_nothing_are_closed(stores: list[StoreServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_server, "_SECRET_WITHIN", 0.1)
    monkeypatch.setattr(row_server, "_IDLE", 0.1)
    address = stores[0].rows_at()
    with closing(reads_of(*stores)) as reads, connected(address, b"short") as silent, connected(address) as idle:
        for _ in range(3):  # closed between these, noticed by the next
            assert reads.rows(drawn_of(stores[0]), None, None, SECONDS)
            wait_until(lambda: connections(stores[0]) == 0)
        assert ended(silent)
        assert ended(idle)


def test_threads_read_at_the_same_time(stores: list[StoreServer]) -> None:
    drawn = drawn_of(*stores, count=500)
    with closing(reads_of(*stores)) as reads, ThreadPoolExecutor(4) as pool:
        expected = reads.rows(drawn, None, None, SECONDS)
        for batch in [pool.submit(reads.rows, drawn, None, None, SECONDS) for _ in range(40)]:
            assert same(batch.result(), expected)
        assert max(connections(store) for store in stores) <= 5


def _ask(address: RowAddress, asked: bytes, stops: bool) -> None:
    connection = connected(address)
    connection.sendall(asked)
    connection.recv(FRAME.size, socket.MSG_WAITALL)
    os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


@pytest.mark.parametrize("stops", [False, True])
def test_a_learner_that_ends_in_the_middle_of_an_answer(
    stores: list[StoreServer], caplog: pytest.LogCaptureFixture, stops: bool
) -> None:
    """It is killed, or stopped for longer than it waits."""
    asked = request(drawn_of(stores[0], count=100_000), None, 0.5)
    learner = multiprocessing.get_context("spawn").Process(target=_ask, args=(stores[0].rows_at(), asked, stops))
    learner.start()
    with closing(reads_of(*stores)) as reads:
        wait_until(lambda: "the connection of" in caplog.text)
        assert reads.rows(drawn_of(stores[0]), None, None, SECONDS)
        wait_until(lambda: connections(stores[0]) == 1)
    learner.kill()
    learner.join()


def test_a_store_that_starts_again_is_asked_at_its_new_address(stores: list[StoreServer], tmp_path: Path) -> None:
    here = Here(*stores)
    drawn = drawn_of(*stores)
    with closing(Reads(here)) as reads:  # type: ignore[arg-type]
        expected = reads.rows(drawn, None, None, SECONDS)
        stores[0].close()
        with pytest.raises(StoreClosedError):
            stores[0].rows_at()
        here.servers[0] = stores[0] = server(tmp_path, 0)
        assert same(reads.rows(drawn, None, None, SECONDS), expected)


@pytest.mark.parametrize("how", ["when connected", "later", "refused"])
def test_a_store_that_does_not_answer_costs_only_itself(
    stores: list[StoreServer], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A stopped process's system still accepts connections; an ended one's refuses them."""
    drawn = drawn_of(*stores)
    with closing(reads_of(*stores)) as reads, socket.create_server(("127.0.0.1", 0)) as silent:
        address = RowAddress("127.0.0.1", silent.getsockname()[1], bytes(32))
        monkeypatch.setattr(stores[1], "rows_at", lambda: address)
        if how == "later":
            reads.rows(drawn.at(drawn.ids % 1024 == 0), None, None, SECONDS)
            (ends,) = stores[0]._rows._connections.values()
            ends.shutdown(socket.SHUT_RDWR)  # and the other store's kept connection has ended
            reads._rows._idle[1] = [kept := connected(address)]
            reads._rows._addresses[1] = address
            kept.setblocking(False)
        elif how == "refused":
            silent.close()
        why = "Connection refused" if how == "refused" else "no answer"
        with pytest.raises(SilentStoresError, match=rf"rank_1: 127.0.0.1:{address.port}: .*{why}") as raised:
            reads.rows(drawn, None, None, MOMENT)
        assert [*raised.value.failed] == [1]
        assert {rank: len(kept) for rank, kept in reads._rows._idle.items() if kept} == {0: 1}


def test_a_store_that_ray_does_not_reach_costs_only_itself(
    stores: list[StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(*stores)

    def ask(arguments: Any, method: str, seconds: float) -> Any:
        time.sleep(seconds)
        return {0: stores[0].rows_at()}, {1: StoreUnreachableError("rank_1")}

    monkeypatch.setattr(here, "ask", ask)
    with closing(Reads(here)) as reads:  # type: ignore[arg-type]
        with pytest.raises(SilentStoresError) as raised:
            reads.rows(drawn_of(*stores), None, None, MOMENT)
        assert [*raised.value.failed] == [1]


def test_a_forked_child_has_its_own_connections(stores: list[StoreServer]) -> None:
    drawn = drawn_of(*stores)
    with closing(reads_of(*stores)) as reads:
        expected = reads.rows(drawn, None, None, SECONDS)
        child = os.fork()
        if not child:
            os._exit(0 if same(reads.rows(drawn, None, None, SECONDS), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(reads.rows(drawn, None, None, SECONDS), expected)
        wait_until(lambda: [connections(store) for store in stores] == [1, 1])


# -- TLS -----------------------------------------------------------------------------------------------


def variables(folder: Path, name: str, address: str = "127.0.0.1") -> dict[str, str]:
    """Return Ray's variables for a new authority and its certificate for an address."""
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
    return {"RAY_USE_TLS": "1", **dict(zip(names, map(str, certify(folder, name, address)), strict=True))}


def test_with_tls_both_sides_show_their_certificates(
    stores: list[StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = variables(tmp_path, "mine"), variables(tmp_path, "other")
    drawn = drawn_of(*stores, count=3001)
    with closing(reads_of(*stores)) as reads, ThreadPoolExecutor(2) as pool:
        expected = reads.rows(drawn, None, None, SECONDS)
        reads.close()
        for name, value in mine.items():
            monkeypatch.setenv(name, value)
        for batch in [pool.submit(reads.rows, drawn, None, None, SECONDS) for _ in range(8)]:
            assert same(batch.result(), expected)
        assert {type(each).__name__ for idle in reads._rows._idle.values() for each in idle} == {"SSLSocket"}
        reads.close()
        with connected(stores[0].rows_at()) as plain:
            while not ended(plain):  # after an alert
                pass
        context = ssl.create_default_context(cafile=mine["RAY_TLS_CA_CERT"])
        context.load_cert_chain(other["RAY_TLS_SERVER_CERT"], other["RAY_TLS_SERVER_KEY"])
        address = stores[0].rows_at()
        with socket.create_connection((address.host, address.port), timeout=SECONDS) as stranger:
            encrypted = context.wrap_socket(stranger, server_hostname=address.host)
            with pytest.raises(OSError, match="alert"):
                encrypted.recv(1)
        wait_until(lambda: caplog.text.count("is closed: [SSL") == 2)
        monkeypatch.setenv("RAY_TLS_CA_CERT", other["RAY_TLS_CA_CERT"])
        with pytest.raises(ConfigurationError, match=r"certificate verify failed: .*authority RAY_TLS_CA_CERT"):
            reads.rows(drawn, None, None, 600)
        for name, value in variables(tmp_path, "elsewhere", "127.0.0.9").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigurationError, match=r"store rank_. of .*not valid for '127.0.0.1'.*node's address"):
            reads.rows(drawn, None, None, 600)
