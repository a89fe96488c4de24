"""One JSON call over HTTP, and what its failures are called. Standard library only."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from trajstore.guidance.maker import MakerError

_MOST_BYTES = 16 * 1024 * 1024
"""Of an answer."""

_SHOWN = 200


def post_json(url: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON that a POST of JSON is answered with.

    Args:
        url: http or https.
        body: sent as JSON.
        timeout: seconds for the whole call, a server that sends byte by byte included.
        headers: beside the content type.

    Raises:
        MakerError: ``timeout``; ``connection`` (refused, reset, no such host); ``server`` (status 5xx); ``refused``
            (any other status than 200, with the beginning of its text); ``garbage`` (no JSON, or too much).
    """
    return request_json("POST", url, json.dumps(body).encode(), timeout, headers)


def get_json(url: str, timeout: float) -> Any:
    """Return the JSON that a GET is answered with; raises as :func:`post_json`."""
    return request_json("GET", url, None, timeout)


def request_json(
    method: str, url: str, data: bytes | None, timeout: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Do what :func:`post_json` and :func:`get_json` do, for any method."""
    end = time.monotonic() + timeout
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request(method, path or "/", data, {"Content-Type": "application/json", **(headers or {})})
            sock = connection.sock  # the answer may close the connection's own
            response = connection.getresponse()
            text = _read(response, sock, end)
        finally:
            connection.close()
    except TimeoutError as error:
        raise MakerError("timeout", f"{url}: no whole answer within {timeout:g} s") from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise MakerError("connection", f"{url}: {error!r}") from error
    if response.status != 200:
        said = text[:_SHOWN].decode("utf-8", "replace")
        kind_of = "server" if response.status >= 500 else "refused"
        raise MakerError(kind_of, f"{url}: HTTP {response.status}: {said}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise MakerError("garbage", f"{url}: the answer is no JSON: {text[:_SHOWN]!r}") from error


def _read(response: http.client.HTTPResponse, sock: socket.socket | None, end: float) -> bytes:
    """Return the body, unless it takes longer than until ``end``, or is too much."""
    parts: list[bytes] = []
    size = 0
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if sock is not None and sock.fileno() >= 0:
            sock.settimeout(left)
        part = response.read1(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise http.client.HTTPException(f"the answer has more than {_MOST_BYTES} bytes")
