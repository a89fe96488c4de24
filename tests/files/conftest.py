"""An S3 server for tests of remote directories."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Start an S3 server on the loopback interface; return the storage options that lead to it."""
    pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
    }
    server.stop()


@pytest.fixture
def s3_url(s3_options: dict[str, Any]) -> str:
    """Return the URL of a folder in a new bucket."""
    import s3fs

    bucket = f"bucket-{uuid.uuid4()}"
    s3fs.S3FileSystem(**s3_options).mkdir(bucket)
    return f"s3://{bucket}/runs/run1"


@pytest.fixture
def memory_url() -> str:
    """Return the URL of a folder in memory that no other test has."""
    return f"memory://bucket-{uuid.uuid4()}/run1"
