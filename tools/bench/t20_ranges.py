"""T20: shuffled draws from an S3 server by range reads, over a bare client that fetches the same ranges.

The servers are processes of their own: moto's, and ``rclone serve s3`` where the command ``rclone`` is found. The bare
client is a pool of threads with plain HTTP connections that are kept open, and URLs that were signed before. ``warm``
has every row fetched before, and is compared with a store on the local disk: single batches in turn, by the clock and
by processor time, which other work on the machine lengthens less. Where ``pylance`` is installed, Lance's ``take``
fetches the same rows of the same data from the same server, and from the local disk.
"""

from __future__ import annotations

import http.client
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from tools.bench import lance_take
from tools.bench.report import Figure, Options, needs
from tools.bench.timing import percentile, ratio, seconds
from tools.bench.workloads import Workload, image, raw_columns
from trajstore import TrajectoryReplayBuffer
from trajstore.columns.fields import join_name, walk
from trajstore.files.object_store import ObjectStore

BUCKET = "bench"
_THREADS = 32
_PATIENCE = 60.0
_SAMPLES = 32 * 4  # of each trajectory of the workload


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of each server.

    Raises:
        SkippedError: s3fs or moto is not installed.
    """
    needs("moto.server", "s3fs")
    logging.getLogger("trajstore.files.remote_lock").setLevel(logging.ERROR)  # rclone keeps no conditions
    workload = image(options)
    _write(options.folder / "local", workload, {})
    for name in ("moto", "rclone"):
        if name == "rclone" and shutil.which("rclone") is None:
            continue
        with _server(name, options.folder) as port:
            yield from _of_server(name, port, workload, options)


def _of_server(name: str, port: int, workload: Workload, options: Options) -> Iterator[Figure]:
    import s3fs

    storage: dict[str, Any] = {
        "key": "bench",
        "secret": "benchbench",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "config_kwargs": {"response_checksum_validation": "when_required", "max_pool_connections": 64},
    }
    filesystem = s3fs.S3FileSystem(**storage)
    filesystem.mkdir(BUCKET)
    url = f"s3://{BUCKET}/{name}"
    _write(url, workload, storage)
    storage["range_reads"] = True
    cold, bare, fetched, wanted, requests = [], [], [], [], []
    with _BareClient(port) as client:
        for repeat in range(options.repeats + 1):
            with _open(url, storage, seed=repeat) as reader, _recorded() as asked:
                took = seconds(lambda reader=reader: reader.sample(workload.batch))
                batch_bytes = sum(tensor.nbytes for _, tensor in walk(reader.sample(1))) * workload.batch
            signed = {piece: _path(filesystem.sign(f"{BUCKET}/{name}/{piece}")) for piece, _, _ in asked[0]}
            ranges = [(signed[piece], start, stop) for piece, start, stop in asked[0]]
            if repeat:  # the first one warms up
                cold.append(took)
                bare.append(seconds(lambda ranges=ranges: client.fetch(ranges)))
                fetched.append(sum(stop - start for _, start, stop in ranges))
                wanted.append(batch_bytes)
                requests.append(len(ranges))
    yield Figure(
        "T20",
        f"sample by ranges, cold, over bare range GETs, image, {name}",
        median(cold) / median(bare),
        1.3,
        details={"cold_ms": 1e3 * median(cold), "bare_ms": 1e3 * median(bare), "requests": median(requests)},
    )
    yield Figure("T20", f"bytes fetched over the batch's, image, {name}", median(fetched) / median(wanted), 2.0)
    yield _warm(url, storage, workload, options, name)
    if name != "moto":
        return  # Lance refuses the answers of rclone, whose status for a range is 200
    if lance_take.installed():
        yield from _lance(url, storage, port, workload, options, name)


def _warm(url: str, storage: dict[str, Any], workload: Workload, options: Options, name: str) -> Figure:
    """Return what a batch costs whose rows were all fetched before, over one of a local store."""
    with _open(url, storage, seed=1) as reader, _open(options.folder / "local", {}, seed=1) as local:
        for one in (reader, local):  # pages that the process has not seen cost both the same then: nothing
            for number in one.trajectory_ids.tolist():
                one.get(number)
        with _recorded() as asked:
            draws = [lambda: reader.sample(workload.batch), lambda: local.sample(workload.batch)]
            times, processor = _in_turn(draws, options.count(60 * options.repeats))
    if asked:
        raise RuntimeError("rows were fetched that were there")
    ratios = [mine / peer for mine, peer in zip(*times, strict=True)]
    return Figure(
        "T20",
        f"sample by ranges, warm, over local, image, {name}",
        ratio(*times),
        1.25,
        details={
            "by_processor_time": ratio(*processor),
            "quarter_below": percentile(ratios, 0.25),
            "quarter_above": percentile(ratios, 0.75),
            "warm_ms": 1e3 * median(times[0]),
            "local_ms": 1e3 * median(times[1]),
            "batches": len(ratios),
        },
    )


def _in_turn(works: Sequence[Callable[[], object]], repeats: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each call, and its processor seconds, both ``[len(works)][repeats]``; works take turns."""
    times: list[list[float]] = [[] for _ in works]
    processor: list[list[float]] = [[] for _ in works]
    for repeat in range(-5, repeats):
        for place, work in enumerate(works):
            began = time.process_time()
            took = seconds(work)
            if repeat >= 0:
                times[place].append(took)
                processor[place].append(time.process_time() - began)
    return times, processor


def _lance(
    url: str, storage: dict[str, Any], port: int, workload: Workload, options: Options, name: str
) -> Iterator[Figure]:
    """Yield our time over Lance's for the same rows, cold from the server and from the local disk."""
    columns = raw_columns(workload.trajectories)
    there = {
        "aws_access_key_id": storage["key"],
        "aws_secret_access_key": storage["secret"],
        "aws_endpoint": storage["endpoint_url"],
        "aws_region": "us-east-1",
        "allow_http": "true",
        "aws_virtual_hosted_style_request": "false",
    }
    places = {f"s3://{BUCKET}/{name}.lance": there, str(options.folder / f"{name}.lance"): {}}
    for place, given in places.items():
        lance_take.write(columns, place, given)
    remote, local = places  # files of about the size of our shards
    mine, peer = [], []
    for repeat in range(options.repeats + 1):
        with _open(url, storage, seed=repeat) as reader:
            drawn = reader.draw(workload.batch)
            rows = drawn.ids * _SAMPLES + drawn.samples
            lance = lance_take.LanceRows(remote, there, columns)
            theirs: list[dict[str, torch.Tensor]] = []
            took = seconds(lambda reader=reader, drawn=drawn: reader.read(drawn))
            peer_took = seconds(lambda lance=lance, rows=rows, theirs=theirs: theirs.append(lance.take(rows)))
            _compare(reader.read(drawn), theirs[0])
        if repeat:
            mine.append(took)
            peer.append(peer_took)
    yield Figure(
        "T20",
        f"sample by ranges, cold, over Lance's take, image, {name}",
        median(mine) / median(peer),
        None,
        details={"ours_ms": 1e3 * median(mine), "lance_ms": 1e3 * median(peer)},
    )
    with _open(options.folder / "local", {}, seed=1) as reader:
        lance = lance_take.LanceRows(local, {}, columns)
        drawn = reader.draw(workload.batch)
        rows = drawn.ids * _SAMPLES + drawn.samples
        times, processor = _in_turn([lambda: reader.read(drawn), lambda: lance.take(rows)], 10 * options.repeats)
    yield Figure(
        "T20",
        "read of local rows, over Lance's take, image",
        ratio(*times),
        None,
        details={
            "by_processor_time": ratio(*processor),
            "ours_ms": 1e3 * median(times[0]),
            "lance_ms": 1e3 * median(times[1]),
        },
    )


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, torch.Tensor]) -> None:
    for path, tensor in walk(mine):
        if not torch.equal(tensor, theirs[join_name(path)]):
            raise RuntimeError(f"{join_name(path)}: the two batches are not the same")


def _write(url: str | Path, workload: Workload, storage: dict[str, Any]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=url, storage_options=storage) as buffer:
        for trajectory in workload.trajectories:
            buffer.add_trajectories([trajectory])


def _open(url: str | Path, storage: dict[str, Any], seed: int) -> TrajectoryReplayBuffer:
    reader = TrajectoryReplayBuffer(seed=seed, enable_cache=False, sample_window_size=0, storage_options=storage)
    reader.load_checkpoint(url)
    return reader


@contextmanager
def _recorded() -> Iterator[list[list[tuple[str, int, int]]]]:
    """Yield a list of what is asked for with each call, name, start and stop of each range."""
    asked: list[list[tuple[str, int, int]]] = []
    real = ObjectStore.ranges

    def recording(self: ObjectStore, pieces: Any, at_once: int) -> Any:
        asked.append(list(pieces))
        return real(self, pieces, at_once)

    with mock.patch.object(ObjectStore, "ranges", recording):
        yield asked


def _path(url: str) -> str:
    return url.partition("//")[2].partition("/")[1] + url.partition("//")[2].partition("/")[2]


class _BareClient:
    """Fetches ranges with plain HTTP, by the paths of signed URLs."""

    def __init__(self, port: int) -> None:
        self._pool = ThreadPoolExecutor(_THREADS)
        self._port = port

    def __enter__(self) -> _BareClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Fetch ranges, shared out among the threads."""
        list(self._pool.map(self._fetch_some, [ranges[first::_THREADS] for first in range(_THREADS)]))

    def _fetch_some(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            for path, start, stop in ranges:
                connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
                answer = connection.getresponse()
                if len(answer.read()) != stop - start:
                    raise RuntimeError(f"{path}: the bare client got {answer.status}")


@contextmanager
def _server(name: str, folder: Path) -> Iterator[int]:
    """Start a server; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if name == "moto":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        (folder / "rclone").mkdir()
        command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", str(folder / "rclone")]
    with ExitStack() as ending:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ending.callback(process.wait)
        ending.callback(process.terminate)
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
