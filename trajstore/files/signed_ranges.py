"""Ranges of S3 objects by signed URLs and plain HTTP: a tenth of the work that an S3 client has with each request."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)

_VALID = 3600
"""Seconds for which a URL is signed; it is used for half of them."""

_CONNECT, _READ = 5.0, 60.0
"""Seconds until a server that says nothing is given up."""


class SignedRanges:
    """Fetches ranges of objects whose URLs were signed once. What does not come this way comes another.

    Credentials that expire, servers that want more than a signature, and certificates that only the S3 client knows are
    such cases; so nothing here is an error.

    Args:
        filesystem: of s3fs; signs.
        at_once: requests under way.
    """

    def __init__(self, filesystem: Any, at_once: int) -> None:
        import urllib3

        self._filesystem = filesystem
        self._at_once = at_once
        self._urls: dict[str, tuple[str, float]] = {}
        verify = (filesystem.client_kwargs or {}).get("verify", True)
        self._pool = urllib3.PoolManager(
            maxsize=at_once,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT, read=_READ),
            cert_reqs="CERT_REQUIRED" if verify else "CERT_NONE",
            ca_certs=verify if isinstance(verify, str) else None,
        )
        self._works = not urllib.request.getproxies()  # which the S3 client knows how to use

    def fetch(self, pieces: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Return the bytes ``[start, stop)`` of objects, ``(path, start, stop)`` each; None where they did not come."""
        found: list[bytes | None] = [None] * len(pieces)
        if not self._works or not pieces:
            return found
        try:
            urls = {path: self._url(path) for path in dict.fromkeys(path for path, _, _ in pieces)}
        except Exception as error:  # whatever keeps a client from signing
            self._give_up(error)
            return found
        waiting = deque(range(len(pieces)))
        errors: list[Exception] = []

        def work() -> None:
            while waiting:
                try:
                    at = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                path, start, stop = pieces[at]
                try:
                    answer = self._pool.request("GET", urls[path], headers={"Range": f"bytes={start}-{stop - 1}"})
                except Exception as error:  # as above
                    errors.append(error)
                    return
                said = answer.headers.get("Content-Range", "")  # some servers say 200 to a range
                is_range = answer.status == 206 or (answer.status == 200 and said.startswith(f"bytes {start}-"))
                if is_range and len(answer.data) == stop - start:
                    found[at] = answer.data
                else:
                    self._urls.pop(path, None)
                    errors.append(ValueError(f"status {answer.status}"))

        with ThreadPoolExecutor(min(self._at_once, len(pieces)), "trajstore-ranges") as pool:
            for thread in [pool.submit(work) for _ in range(min(self._at_once, len(pieces)))]:
                thread.result()
        if errors and all(data is None for data in found):
            self._give_up(errors[0])
        return found

    def _give_up(self, error: Exception) -> None:
        self._works = False
        logger.info("ranges are fetched by the S3 client from now on, not by signed URLs: %s", error)

    def _url(self, path: str) -> str:
        known = self._urls.get(path)
        if known is None or time.monotonic() > known[1]:
            known = self._filesystem.sign(path, expiration=_VALID), time.monotonic() + _VALID / 2
            self._urls[path] = known
        return known[0]
