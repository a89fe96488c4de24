"""Remote directories: the conformance suite in memory and on a local S3 server, and remote-only behaviour."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import torch

from tests.stores import add_each, keys_of, writer_to
from tests.support.directory import DirectoryConformance, publish
from tests.support.witness import check_batch, witness
from tools.bench import t33_requests
from tools.bench.report import Options
from tools.crash.forked import forking
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.opening import open_directory
from trajstore._core.formats.base import ShardContent
from trajstore._core.writing import maintenance
from trajstore.errors import ConfigurationError, MissingDependencyError, StoreLockedError
from trajstore.remote.directory import RemoteDirectory
from trajstore.trajectory import Trajectory


def around(url: str, **options: Any) -> MutableMapping[str, bytes]:
    """Return a mapping of the objects at a URL, listed anew on each call."""
    system = fsspec.filesystem(url.partition(":")[0], skip_instance_cache=True, use_listings_cache=False, **options)
    return cast(MutableMapping[str, bytes], fsspec.FSMap(system._strip_protocol(url), system))


class TestMemory(DirectoryConformance):
    @pytest.fixture
    def behind(self, memory_url: str) -> MutableMapping[str, bytes]:
        return around(memory_url)

    @pytest.fixture
    def open_again(self, memory_url: str) -> Callable[[], Directory]:
        return lambda: open_directory(memory_url)


class TestS3(DirectoryConformance):
    """A whole bucket, so names have no folder prefix; the memory store is a folder of a bucket."""

    @pytest.fixture
    def behind(self, s3_url: str, s3_options: dict[str, Any]) -> MutableMapping[str, bytes]:
        return around(s3_url.removesuffix("/runs/run1"), **s3_options)

    @pytest.fixture
    def open_again(self, s3_url: str, s3_options: dict[str, Any]) -> Callable[[], Directory]:
        return lambda: RemoteDirectory(s3_url.removesuffix("/runs/run1") + "/", **s3_options)


# -- opening and failing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("nosuchscheme://bucket", {}),
        ("memory://bucket", {"lock_ttl": 0}),
        ("memory://bucket", {"lock_ttl": float("nan")}),
        ("memory://bucket", {"cache_bytes": -1}),
        ("memory://bucket", {"lease_ttl": 0}),
        ("memory://bucket", {"range_reads": "yes"}),
    ],
)
def test_wrong_arguments_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        open_directory(url, **options)


def test_without_s3fs_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingDependencyError, match=r"trajstore\[s3\]"):
        open_directory("s3a://bucket/run")


def test_failures_of_the_network_are_os_errors_that_name_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    no_retries = {"retries": {"max_attempts": 0}}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        directory = RemoteDirectory(
            "s3://bucket/run", key="x", secret="y", endpoint_url=endpoint, config_kwargs=no_retries
        )
        with pytest.raises(OSError, match=r"s3://bucket/run/metadata\.json"):
            directory.read("metadata.json")
        with pytest.raises(OSError, match="s3://bucket/run/shards/one"):
            directory.publish([EncodedFile("shards/one", [b"x"]), EncodedFile("shards/two", [b"y"])])


def test_absent_bucket(s3_options: dict[str, Any]) -> None:
    directory = RemoteDirectory("s3://there-is-no-such-bucket/run", **s3_options)
    assert not directory.exists()
    assert directory.names() == []
    with pytest.raises(FileNotFoundError, match="there-is-no-such-bucket"):
        publish(directory, a=b"1")


def test_a_segment_that_the_next_writer_had_and_deleted_is_not_of_the_earlier_one(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_directory(memory_url)
    assert isinstance(directory, RemoteDirectory)
    directory.append("log/1", b"theirs\n")
    read = directory._objects.read

    def too_late(name: str) -> bytes:
        directory._objects.delete(name)  # by the next writer's snapshot
        return read(name)

    monkeypatch.setattr(directory._objects, "read", too_late)
    with pytest.raises(FileExistsError, match="another writer has written this log segment"):
        directory.append("log/1", b"ours\n")


def _read_in_child(directory: Directory) -> bytes:
    return directory.read("a") + directory.map("a").view.tobytes()


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), forking()], ids=["forked", "new"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_processes_connect_anew(context: Any, s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = open_directory(s3_url, **s3_options)
    publish(directory, a=b"1")
    assert _read_in_child(directory) == b"11"
    with context.Pool(1) as pool:
        assert pool.apply_async(_read_in_child, (directory,)).get(timeout=600) == b"11"
    assert _read_in_child(directory) == b"11"


def test_zarr_opens_a_published_shard_in_place(s3_url: str, s3_options: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr", reason="needs the extra 'zarr'")
    from trajstore._core.columns.conversion import flatten
    from trajstore._core.formats.zarr import ZarrFormat

    rewards = torch.arange(24.0).reshape(4, 2, 3)
    encoded = ZarrFormat(codec="zstd").encode("shard_00000001", ShardContent.of([flatten(Trajectory(rewards=rewards))]))
    open_directory(s3_url, **s3_options).publish(encoded.files)
    group = zarr.open_group(f"{s3_url}/shards/shard_00000001.zarr", mode="r", storage_options=s3_options)
    assert group["rewards"][:].tolist() == rewards.reshape(8, 3).tolist()


# -- whole stores -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pt", pytest.param("zarr", marks=pytest.mark.campaign)])
def test_a_buffer_lives_in_an_object_store(s3_url: str, s3_options: dict[str, Any], name: str) -> None:
    def open_buffer() -> TrajectoryReplayBuffer:
        return writer_to(s3_url, trajectory_format=name, cache_size=1, storage_options=s3_options)

    with open_buffer() as buffer:
        add_each(buffer, range(4))
        with pytest.raises(StoreLockedError):
            open_buffer()
        buffer.evict([0])
        buffer.save_checkpoint(f"{s3_url}-checkpoint")
    with open_buffer() as buffer:
        assert buffer.add_trajectories([witness(4)]) == [4]
        buffer.flush()
        assert keys_of(buffer) == {1: 1, 2: 2, 3: 3, 4: 4}
        check_batch(buffer.sample(32))
    with TrajectoryReplayBuffer.open(f"{s3_url}-checkpoint", storage_options=s3_options) as loaded:
        assert keys_of(loaded) == {1: 1, 2: 2, 3: 3}
        check_batch(loaded.sample(24))


def test_commits_refreshes_and_whole_shards_take_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server", reason="needs moto[server]")
    monkeypatch.setattr(t33_requests, "_RANKS", (2,))
    for name in ("_COLLECT_EVERY", "_REMOTE_RENEWAL"):  # requests of every minute
        monkeypatch.setattr(maintenance, name, 86_400.0)
    requests = {figure.name: figure.value for figure in t33_requests.figures(Options(tmp_path, scale=0.04))}
    assert requests == {
        "a commit": 2.0,
        "a commit, with retention": 2.0,
        "an idle refresh of a store": 1.0,
        "an idle refresh of a run of 2 ranks": 1.0,
        "reading a whole shard": 1.0,
    }


def test_the_log_stays_short_and_a_follower_keeps_up(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore._core.writing.commit_log._MOST_SEGMENTS", 4)
    with writer_to(memory_url) as writer, TrajectoryReplayBuffer.open(memory_url) as reader:
        log = open_directory(f"{memory_url}/log")
        assert not reader.refresh()
        contents = reader._live.contents
        for key in range(0, 30, 3):
            add_each(writer, range(key, key + 3))
            assert len(log.names()) <= 1 + 2 * (4 + 1)  # the fence, and those of the last two indexes
            assert reader.refresh()
            assert keys_of(reader) == keys_of(writer)
        assert reader._live.contents is contents, "not loaded again"
        add_each(writer, range(30, 50))  # too many at once: loaded again
        assert reader.refresh()
        assert keys_of(reader) == keys_of(writer)
    with TrajectoryReplayBuffer.open(memory_url) as reader:
        assert sorted(keys_of(reader).values()) == list(range(50))
