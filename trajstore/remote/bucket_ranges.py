"""Reads byte ranges of S3 objects through obstore with s3fs's settings, at less than half of s3fs's CPU time."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from trajstore._core.files.base import Buffer
from trajstore.errors import MissingDependencyError

_IN_ONE_CALL = 10
"""Concurrent requests within one call of obstore."""

_THREADS = 3
"""Concurrent calls."""

_RETRIES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=0.1), timedelta(seconds=5)

_RENEWED = timedelta(minutes=10)
"""How long obstore caches credentials; the S3 client renews them."""


class _Inherited:
    """Records whether this process was forked after loading obstore, whose threads a child lacks."""

    by_fork = False

    @classmethod
    def look(cls) -> None:
        """Check in a forked child."""
        cls.by_fork = "obstore" in sys.modules


os.register_at_fork(after_in_child=_Inherited.look)


def lost_by_fork() -> bool:
    """Return whether obstore would hang in this process."""
    return _Inherited.by_fork


class BucketRanges:
    """Fetches ranges of one bucket's objects. Belongs to one process; a forked child needs its own, if it can have one.

    Address, region, credentials, certificates, proxies and timeouts come from s3fs's client, which reads its options,
    the environment and ``~/.aws``.

    Attributes:
        has_worked: whether a range has arrived; set by the caller.

    Args:
        filesystem: of s3fs.
        bucket: its name.

    Raises:
        MissingDependencyError: obstore is not installed.
        OSError: a file of certificates cannot be read.
    """

    def __init__(self, filesystem: Any, bucket: str) -> None:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise MissingDependencyError("obstore", "s3") from error
        self.has_worked = False
        client = filesystem.connect()
        address = (
            filesystem.sign(f"{bucket}/x").partition("?")[0].removesuffix("/x")
        )  # the bucket's region, from the client
        region = client.meta.region_name
        self._store = S3Store(
            bucket,
            endpoint=address,
            virtual_hosted_style_request=True,  # obstore does not add the bucket to the address
            region="us-east-1" if region in (None, "aws-global") else region,
            skip_signature=bool(filesystem.anon),
            request_payer="RequestPayer" in filesystem.req_kw,
            client_options=_connection(filesystem, client.meta.config, address),
            retry_config={
                "max_retries": _RETRIES,
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
            },
            credential_provider=None if filesystem.anon else lambda: _credentials(filesystem),
        )

    def fetch(self, pieces: Sequence[tuple[str, int, int]]) -> Generator[tuple[int, Buffer | OSError], None, None]:
        """Yield the bytes ``[start, stop)`` of objects, ``(path, start, stop)`` each, or the error.

        Each comes with its index in ``pieces``, in order of arrival. Failures are retried five times, with growing
        pauses. When one range fails, others of the same object may be missing too.
        """
        order = sorted(range(len(pieces)), key=lambda at: pieces[at])
        most = max(_IN_ONE_CALL, -(-len(pieces) // _THREADS))
        calls = [
            same[first : first + most]
            for same in (list(group) for _, group in groupby(order, key=lambda at: pieces[at][0]))
            for first in range(0, len(same), most)
        ]
        pool = ThreadPoolExecutor(_THREADS, "trajstore-ranges")
        try:
            asked = {pool.submit(self._ask, [pieces[at] for at in call]): call for call in calls}
            for answer in as_completed(asked):
                yield from zip(asked.pop(answer), answer.result(), strict=True)
                del answer  # frees its bytes before the next
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, pieces: Sequence[tuple[str, int, int]]) -> Sequence[Buffer | OSError]:
        """Fetch ranges of one object; return bytes, or an error for each."""
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        starts, stops = [start for _, start, _ in pieces], [stop for _, _, stop in pieces]
        key = pieces[0][0].partition("/")[2]
        try:
            found: Sequence[Buffer] = obstore.get_ranges(self._store, key, starts=starts, ends=stops, coalesce=0)
            return found
        except FileNotFoundError:
            return [FileNotFoundError(errno.ENOENT, "there is no such object")] * len(pieces)
        except BaseError as error:
            number = errno.EACCES if isinstance(error, PermissionDeniedError | UnauthenticatedError) else errno.EIO
            return [OSError(number, str(error).partition("\n")[0])] * len(pieces)


def _connection(filesystem: Any, config: Any, address: str) -> dict[str, Any]:
    """Return the S3 client's connection settings as obstore options."""
    verify = (filesystem.client_kwargs or {}).get("verify")
    if verify is None:
        verify = filesystem.session.get_config_variable("ca_bundle")
    scheme = address.partition("://")[0]
    found: dict[str, Any] = {
        "allow_http": scheme == "http",
        "allow_invalid_certificates": verify is False,
        "timeout": timedelta(hours=1),  # of a whole response; read_timeout ends a silent one
        "connect_timeout": _seconds(config.connect_timeout),
        "read_timeout": _seconds(config.read_timeout),
        "proxy_url": (config.proxies or {}).get(scheme),
        "root_certificate": Path(verify).read_bytes() if isinstance(verify, str) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def _credentials(filesystem: Any) -> dict[str, Any]:
    """Return the S3 client's current credentials."""
    from fsspec.asyn import sync

    if filesystem.key and filesystem.secret:
        key, secret, token = filesystem.key, filesystem.secret, filesystem.token
    else:
        credentials = sync(filesystem.loop, filesystem.session.get_credentials)
        if credentials is None:
            raise PermissionError(errno.EACCES, "the S3 client has found no credentials")
        key, secret, token = sync(filesystem.loop, credentials.get_frozen_credentials)[:3]
    expires = datetime.now(UTC) + _RENEWED
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}
