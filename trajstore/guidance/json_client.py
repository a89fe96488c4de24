"""``JsonClient``: JSON calls over HTTP that end in time, whatever the server does; what their failures are called."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from trajstore.closing import Closing
from trajstore.errors import MissingDependencyError
from trajstore.guidance.maker import MakerError
from trajstore.interrupts import start_thread

_MOST_BYTES = 16 * 1024 * 1024
"""Of an answer."""

_SHOWN = 200


class JsonClient(Closing):
    """Calls services. Thread-safe.

    Calls run in an event loop with a thread of its own, since only there one limit holds for all of a call: finding the
    address, connecting, headers that come byte by byte, and the body.

    Raises:
        MissingDependencyError: httpx is not installed.
    """

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingDependencyError("httpx", "guided") from None
        self._httpx = httpx
        self._client = httpx.AsyncClient(timeout=None)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        start_thread(threading.Thread(target=self._loop.run_forever, name="guidance-http", daemon=True))
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False

    def post(self, url: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
        """Return the JSON that a POST of JSON is answered with.

        Args:
            url: http or https.
            body: sent as JSON.
            timeout: seconds for the whole call.
            headers: beside the content type.

        Raises:
            MakerError: ``timeout``; ``connection`` (refused, reset, no such host); ``server`` (status 5xx); ``refused``
                (any other status than 200, with the beginning of its text); ``garbage`` (no JSON, or too much);
                ``closed`` (meanwhile).
        """
        sent = {"Content-Type": "application/json", **(headers or {})}
        call = asyncio.run_coroutine_threadsafe(self._answer(url, json.dumps(body).encode(), timeout, sent), self._loop)
        try:
            status, text = call.result()
        except CancelledError:
            raise MakerError("closed", f"{url}: the client was closed") from None
        except TimeoutError as error:
            raise MakerError("timeout", f"{url}: no whole answer within {timeout:g} s") from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError, UnicodeError) as error:
            raise MakerError("connection", f"{url}: {error!r}") from error
        if status != 200:
            said = text[:_SHOWN].decode("utf-8", "replace")
            raise MakerError("server" if status >= 500 else "refused", f"{url}: HTTP {status}: {said}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MakerError("garbage", f"{url}: the answer is no JSON: {text[:_SHOWN]!r}") from error

    def close(self) -> None:
        """End calls that are under way, and refuse others. Again: nothing."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._closed = True
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _answer(self, url: str, data: bytes, timeout: float, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body; runs in the loop, as :meth:`_end` does, so that none begins after the end."""
        if self._closed:
            raise MakerError("closed", f"{url}: the client was closed")
        text = bytearray()
        async with (
            asyncio.timeout(timeout),
            self._client.stream("POST", url, content=data, headers=dict(headers)) as response,
        ):
            async for part in response.aiter_bytes():
                text += part
                if len(text) > _MOST_BYTES:
                    raise MakerError("garbage", f"{url}: the answer has more than {_MOST_BYTES} bytes")
        return response.status_code, bytes(text)
