"""S3 range reads through obstore: client settings, failing servers and forked children."""

from __future__ import annotations

import datetime
import os
import pickle
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.certificates import certify
from tests.support.witness import check_batch, witness
from tools.crash.forked import forking
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import CorruptStoreError
from trajstore.remote import bucket_ranges
from trajstore.remote.directory import RemoteDirectory
from trajstore.remote.object_store import ObjectStore

pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
# Found without an import: forked children of a process that imported obstore do without it.
pytestmark = pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore, of the extra 's3'")

CONTENT = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
PIECES = [("shards/a b+ü%20.pt", start, start + 77) for start in range(0, 90_000, 3_000)]
WANTED = [CONTENT[start:stop] for _, start, stop in PIECES]
OWN = {"key": "mine", "secret": "hidden", "config_kwargs": {"retries": {"max_attempts": 1}}}


class Server(ThreadingHTTPServer):
    """Serves ranges of ``CONTENT`` unless ``misbehave`` answers the request.

    Attributes:
        asked: the path, headers and address of each request.
        misbehave: returns True if it answered the request itself, else False.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.misbehave: Callable[[Handler], bool] = lambda handler: False
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def by_obstore(self) -> list[dict[str, str]]:
        """Return the headers of obstore's requests."""
        return [headers for _, headers in self.asked if "boto" not in headers.get("user-agent", "").lower()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if not self.server.misbehave(self):
            self.answer(206, self.wanted())

    def wanted(self) -> bytes:
        """Return the requested bytes."""
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        return CONTENT[int(first) : int(last) + 1]

    def answer(self, status: int, body: bytes, said: int | None = None) -> bool:
        """Send an answer; ``said`` overrides its Content-Length."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if said is None else said))
        if status < 300:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)
        return True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(bucket_ranges, "_FIRST_PAUSE", datetime.timedelta(milliseconds=1))
    monkeypatch.setattr(bucket_ranges, "_LONGEST_PAUSE", datetime.timedelta(milliseconds=5))
    http_server = Server()
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    yield http_server
    http_server.shutdown()
    thread.join()
    http_server.server_close()


def objects_of(server: Server, **options: Any) -> ObjectStore:
    return ObjectStore("s3://bucket/run", {**OWN, "endpoint_url": server.url, **options})


def fetched(objects: ObjectStore, pieces: list[tuple[str, int, int]] = PIECES) -> list[bytes]:
    """Fetch every range and return the contents in order; each must arrive once."""
    came = [(place, bytes(content)) for place, content in objects.ranges(pieces)]
    assert len(came) == len(pieces)
    contents = dict(came)
    return [contents[place] for place in range(len(pieces))]


# -- settings ----------------------------------------------------------------------------------------


def test_ranges_come_in_the_order_in_which_they_were_asked_for(server: Server) -> None:
    objects = objects_of(server)
    mixed = [*PIECES[::-1], ("other", 5, 10), PIECES[3], ("other", 10, 25)]
    assert fetched(objects, mixed) == [CONTENT[start:stop] for _, start, stop in mixed]
    assert {path for path, _ in server.asked} == {"/bucket/run/shards/a%20b%2B%C3%BC%2520.pt", "/bucket/run/other"}
    assert len(server.by_obstore()) == len(server.asked) <= len(mixed)
    assert all("Credential=mine/" in headers["authorization"] for headers in server.by_obstore())


def test_tokens_regions_and_requester_pays(server: Server) -> None:
    given = {"token": "a-token", "client_kwargs": {"region_name": "eu-north-1"}, "requester_pays": True}
    assert fetched(objects_of(server, **given)) == WANTED
    for headers in server.by_obstore():
        assert headers["x-amz-security-token"] == "a-token"
        assert "/eu-north-1/s3/" in headers["authorization"]
        assert headers["x-amz-request-payer"] == "requester"


def test_anonymous(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "not to be used")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not to be used")
    assert fetched(ObjectStore("s3://bucket/run", {"anon": True, "endpoint_url": server.url})) == WANTED
    assert server.by_obstore()
    assert not any("authorization" in headers for headers in server.by_obstore())


def test_credentials_of_the_environment_and_of_a_profile(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert fetched(ObjectStore("s3://bucket/run", {"config_kwargs": {"user_agent_extra": "one"}})) == WANTED
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = of-the-profile\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert fetched(ObjectStore("s3://bucket/run", {"profile": "other"})) == WANTED
    names = [headers["authorization"].partition("Credential=")[2].partition("/")[0] for headers in server.by_obstore()]
    assert sorted(set(names)) == ["of-the-environment", "of-the-profile"]


def test_addresses_with_the_bucket_in_the_host(server: Server) -> None:
    config = {"s3": {"addressing_style": "virtual"}, "proxies": {"http": server.url}}
    objects = ObjectStore("s3://bucket/run", {**OWN, "endpoint_url": "http://s3.example.org", "config_kwargs": config})
    assert fetched(objects) == WANTED
    assert server.by_obstore()
    assert all(path.startswith("http://bucket.s3.example.org/run/shards/") for path, _ in server.asked)


@pytest.mark.parametrize("way", ["options", "environment"])
def test_proxies(server: Server, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    options: dict[str, Any] = {**OWN, "endpoint_url": "http://s3.example.org"}
    if way == "options":
        options["config_kwargs"] = {"proxies": {"http": server.url}}
    else:
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
    assert fetched(ObjectStore("s3://bucket/run", options)) == WANTED
    assert server.by_obstore()
    assert all(path.startswith("http://s3.example.org/bucket/run/shards/") for path, _ in server.asked)


@pytest.mark.parametrize(
    "way", ["a file", "not at all", "unknown", pytest.param("the environment", marks=pytest.mark.campaign)]
)
def test_certificates(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
    certificate, of_server, key = certify(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(of_server, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    verify: dict[str, Any] = {"a file": {"verify": str(certificate)}, "not at all": {"verify": False}}.get(way, {})
    if way == "the environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    if way == "unknown":
        with pytest.raises(OSError, match=r"s3://bucket/run/shards/a b"):
            fetched(objects_of(server))
        assert server.asked == []
        return
    assert fetched(objects_of(server, client_kwargs=verify)) == WANTED
    assert server.by_obstore()


# -- failing servers ---------------------------------------------------------------------------------


def test_what_fails_is_tried_again(server: Server) -> None:
    objects, failing = objects_of(server), [500, 503, 503, 502, 429]

    def fail(handler: Handler) -> bool:
        return handler.answer(failing.pop(), b"<Error/>") if failing else False

    server.misbehave = fail
    assert fetched(objects) == WANTED
    assert failing == []
    assert len(server.by_obstore()) == len(server.asked) == len(PIECES) + 5


def test_connections_that_break_off_are_tried_again(server: Server) -> None:
    broken: list[Handler] = []

    def break_off(handler: Handler) -> bool:
        if len(broken) == 4:
            return False
        broken.append(handler)
        handler.close_connection = True
        return len(broken) % 2 == 0 or handler.answer(206, handler.wanted()[:20], said=77)

    server.misbehave = break_off
    assert fetched(objects_of(server)) == WANTED
    assert len(server.by_obstore()) == len(server.asked)


@pytest.mark.parametrize("status", [500, 503, 403])
def test_in_the_end_the_error_names_the_object(server: Server, status: int, caplog: pytest.LogCaptureFixture) -> None:
    objects = objects_of(server)
    server.misbehave = lambda handler: handler.answer(status, b"<Error/>")
    for _ in range(2):
        with pytest.raises(OSError, match=r"'s3://bucket/run/shards/a b") as error:
            fetched(objects, PIECES[:2])
        assert "\n" not in str(error.value)
        assert isinstance(error.value, PermissionError) == (status == 403)
        server.misbehave = lambda handler: False
        assert fetched(objects) == WANTED
        server.misbehave = lambda handler: handler.answer(status, b"<Error/>")
    assert "more slowly than by obstore" not in caplog.text


def test_a_server_that_says_200_to_a_range_is_asked_by_s3fs(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.misbehave = lambda handler: handler.answer(200, handler.wanted())
    objects = objects_of(server)
    assert fetched(objects, PIECES[:1]) == WANTED[:1]  # of several ranges, some would still be in flight
    before = len(server.by_obstore())
    assert fetched(objects) == WANTED
    assert len(server.by_obstore()) == before, "obstore is not tried again"
    warnings = [
        record.getMessage() for record in caplog.records if "more slowly than by obstore" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "s3://bucket/run" in warnings[0]
    assert len(warnings[0].splitlines()) == 1


@pytest.mark.parametrize(
    ("misbehave", "error"),
    [
        (lambda handler: handler.answer(404, b"<Error><Code>NoSuchKey</Code></Error>"), FileNotFoundError),
        (lambda handler: handler.answer(206, b""), OSError),
        (lambda handler: handler.answer(206, handler.wanted()[:76]), OSError),
    ],
    ids=["absent", "empty", "too little"],
)
def test_what_does_not_come_is_an_error_that_names_it(
    server: Server, misbehave: Callable[[Handler], bool], error: type[OSError]
) -> None:
    server.misbehave = misbehave
    with pytest.raises(error, match=r"'s3://bucket/run/shards/a b"):
        fetched(objects_of(server))


# -- whole stores ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(s3_options: dict[str, Any]) -> str:
    """Return the URL of a store that no test changes."""
    return stored_at("s3://bucket-of-ranges/run", s3_options)


def stored_at(url: str, options: dict[str, Any]) -> str:
    """Write a store of three shards; return its URL."""
    import s3fs

    s3fs.S3FileSystem(**options).makedirs(url.rpartition("/")[0], exist_ok=True)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=url, storage_options=options) as buffer:
        for key in range(3):
            buffer.add_trajectories([witness(key, scale=40)])
            buffer.flush()
    return url


def reader_of(url: str, options: dict[str, Any]) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer.open(url, sample_window_size=0, storage_options={"range_reads": True, **options})


def test_batches_come_by_obstore(store: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.asyn.AsyncFileSystem._cat_ranges", None)
    with reader_of(store, s3_options) as reader:
        check_batch(reader.sample(32))
        again = pickle.loads(pickle.dumps(reader))
        check_batch(again.sample(32))
        again.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_process_that_used_obstore_asks_s3fs_and_says_so(
    store: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with reader_of(store, s3_options) as reader:
        check_batch(reader.sample(4))
        child = os.fork()
        if child == 0:
            try:
                check_batch(reader.sample(32))
                os._exit(0 if "'spawn' or 'forkserver'" in caplog.text else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        check_batch(reader.sample(32))
        assert "spawn" not in caplog.text


def fork_and_read(url: str, options: dict[str, Any]) -> None:
    """Read by obstore in two forked children, before the parent has read anything."""
    reader = reader_of(url, options)
    for _ in range(2):
        if not os.fork():
            with mock.patch("fsspec.asyn.AsyncFileSystem._cat_ranges", None):
                check_batch(reader.sample(32))
            os._exit(0)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]
    check_batch(reader.sample(32))


def test_children_that_are_forked_before_the_first_batch_use_obstore(store: str, s3_options: dict[str, Any]) -> None:
    process = forking().Process(target=fork_and_read, args=(store, s3_options))
    process.start()
    process.join(300)
    assert process.exitcode == 0


def test_a_shard_that_is_gone_is_said(s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = RemoteDirectory(stored_at(s3_url, s3_options), **s3_options)
    with reader_of(s3_url, s3_options) as reader:
        directory.remove(directory.names("shards"))
        with pytest.raises(CorruptStoreError, match=rf"{s3_url}/shards/shard_\d+\.pt: is missing, but .*refresh"):
            reader.sample(8)
