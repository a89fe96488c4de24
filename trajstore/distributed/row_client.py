"""Requests rows of stores over TCP, of all of them in parallel."""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from trajstore._core.sampling.base import Drawn
from trajstore.distributed.actors import LONGEST_PAUSE, PAUSE, Stores
from trajstore.distributed.frames import Steps, connected, received_frame, run_all, sent
from trajstore.distributed.read_request import ERROR, MOST_ANSWER, ROWS, failure, request
from trajstore.distributed.row_server import RowAddress
from trajstore.errors import ConfigurationError

Block = npt.NDArray[np.uint8]

_OF_CERTIFICATES = re.compile("CERTIFICATE|UNKNOWN_CA")
"""In the reasons of OpenSSL for refused certificates, which trying again does not help."""


class RowClient:
    """Keeps connections to stores. Each is used by one thread at a time, in the process that made it.

    Args:
        stores: the actors, which are asked for their addresses.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._idle: dict[int, list[socket.socket]] = {}
        self._addresses: dict[int, RowAddress] = {}
        """Of the last connections, for messages."""
        self._pid = os.getpid()

    def ask(
        self, drawn: Mapping[int, Drawn], columns: Sequence[str] | None, seconds: float
    ) -> tuple[dict[int, Block], dict[int, Exception]]:
        """Request rows, with retries.

        Args:
            drawn: rows of each store, by rank.
            columns: dotted names; None = all.
            seconds: time limit for each store. The others' time does not run while all wait for one that is silent.

        Returns:
            Blocks of :func:`.read_request.pack` by rank, and errors by rank: of the stores, StoreUnreachableError, or
            ConfigurationError for a refused certificate.

        Raises:
            ConfigurationError: too many rows.
        """
        blocks: dict[int, Block] = {}
        failed: dict[int, Exception] = {}
        left, pause = seconds, PAUSE
        while missing := drawn.keys() - blocks.keys() - failed.keys():
            starts: dict[int, socket.socket | RowAddress] = {
                rank: kept for rank in missing if (kept := self._kept(rank)) is not None
            }
            if new := missing - starts.keys():
                began = time.monotonic()
                addresses, unreachable = self._stores.ask(dict.fromkeys(new, ()), "rows_at", left)
                self._addresses |= addresses
                starts |= addresses
                failed |= unreachable
                left -= 0.0 if unreachable else time.monotonic() - began
            left, again = max(left, 0.001), False
            conversations = {
                rank: self._conversation(rank, start, request(drawn[rank], columns, left))
                for rank, start in starts.items()
            }
            began = time.monotonic()
            results = run_all(conversations, began + left)
            if not any(isinstance(result, TimeoutError) for result in results.values()):
                left -= time.monotonic() - began
            for rank, result in results.items():
                if not isinstance(result, OSError):
                    self._stores.answered(rank)
                    if (error := failure(result)) is None:
                        blocks[rank] = result
                    else:
                        failed[rank] = error
                    continue
                self._drop(rank)
                address = self._addresses[rank]
                lost = OSError(f"{address.host}:{address.port}: {result}")
                if isinstance(result, ssl.SSLError) and _OF_CERTIFICATES.search(result.reason or ""):
                    failed[rank] = ConfigurationError(
                        f"store rank_{rank} of {self._stores.name!r}: {lost}; the RAY_TLS_SERVER_CERT of each node "
                        "must be valid, of the authority RAY_TLS_CA_CERT, and name the node's address (subjectAltName)"
                    )
                elif isinstance(result, TimeoutError) or left <= pause:
                    failed[rank] = self._stores.unreachable(rank, seconds, lost)
                elif rank in new:  # else only the kept connection has ended
                    self._stores.silent(rank, lost)
                    again = True
            if again:
                time.sleep(pause)
                left -= pause
                pause = min(2 * pause, LONGEST_PAUSE)
        return blocks, failed

    def _conversation(self, rank: int, start: socket.socket | RowAddress, asked: bytes) -> Steps[Block]:
        """Return the answer to a request; keep the connection."""
        if isinstance(start, RowAddress):
            connection = yield from connected(start.host, start.port, start.secret)
        else:
            connection = start
        try:
            yield from sent(connection, memoryview(asked))
            answer = yield from received_frame(connection, (ROWS, ERROR), MOST_ANSWER)
        except BaseException:
            connection.close()
            raise
        self._idle.setdefault(rank, []).append(connection)
        return answer

    def _kept(self, rank: int) -> socket.socket | None:
        if self._pid != os.getpid():  # forked: the parent uses its connections
            self.close()
            self._pid = os.getpid()
        with suppress(KeyError, IndexError):
            return self._idle[rank].pop()
        return None

    def _drop(self, rank: int) -> None:
        for connection in self._idle.pop(rank, ()):
            connection.close()

    def close(self) -> None:
        """Close the connections that no read is using."""
        for rank in list(self._idle):
            self._drop(rank)

    __del__ = close
