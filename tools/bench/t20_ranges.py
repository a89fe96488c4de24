"""T20: shuffled draws from an S3 server by range reads, over obstore alone, which fetches the same ranges.

The server is moto's, a process of its own; time is measured by the clock and by the processor of the client. ``warm``
has every row fetched before, and is compared with a store on the local disk: single batches in turn, by the clock and
by processor time, which other work on the machine lengthens less.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import Times, in_turn, processor_ratio, ratio
from tools.bench.workloads import Workload, filled, image, state
from tools.campaigns import at_work, s3_server
from tools.crash.forked import forking
from trajstore import TrajectoryReplayBuffer
from trajstore._core.columns.fields import walk
from trajstore.remote.object_store import ObjectStore

BUCKET = "bench"
_CALLS = 4


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures.

    Raises:
        SkippedError: s3fs, obstore or moto is not installed.
    """
    needs("moto", "flask", "obstore", "s3fs")
    import s3fs  # optional

    workload = image(options)
    filled(options.folder / "local", workload.trajectories).close()
    ours, theirs = forking().Pipe()
    with at_work(_serve, theirs):
        storage = ours.recv()
        s3fs.S3FileSystem(**storage).mkdir(BUCKET)
        yield from _of_workload(workload, storage, options)
        yield from _of_workload(state(options), storage, options)
        url = f"s3://{BUCKET}/{workload.name}"
        yield _warm(url, {**storage, "range_reads": True}, workload, options)


def _of_workload(workload: Workload, storage: dict[str, Any], options: Options) -> Iterator[Figure]:
    """Yield what cold batches cost, over the same ranges by obstore alone."""
    url = f"s3://{BUCKET}/{workload.name}"
    filled(url, workload.trajectories, storage_options=storage).close()
    ours, theirs = Times(warmup=1), Times(warmup=1)
    fetched, wanted, requests = [], [], []
    with ThreadPoolExecutor(_CALLS) as pool:
        for repeat in range(options.repeats + 1):
            with _open(url, {**storage, "range_reads": True}, seed=repeat) as reader, _recorded() as asked:
                ours.take(partial(reader.sample, workload.batch))
                wanted.append(sum(tensor.nbytes for _, tensor in walk(reader.sample(1))) * workload.batch)
            theirs.take(_bare(storage, url, asked[0], pool))
            fetched.append(sum(stop - start for _, start, stop in asked[0]))
            requests.append(len(asked[0]))
    yield Figure(
        "T20",
        f"sample by ranges, cold, over obstore's bare ranges, {workload.name}",
        ratio(ours, theirs),
        1.3,
        details={
            "by_processor_time": processor_ratio(ours, theirs),
            "cold_ms": ours.ms,
            "bare_ms": theirs.ms,
            "cold_processor_ms": ours.processor_ms,
            "bare_processor_ms": theirs.processor_ms,
            "requests": median(requests),
        },
    )
    yield Figure("T20", f"bytes fetched over the batch's, {workload.name}", median(fetched) / median(wanted), 2.0)


def _bare(
    storage: dict[str, Any], url: str, asked: Sequence[tuple[str, int, int]], pool: ThreadPoolExecutor
) -> Callable[[], object]:
    """Return what fetches ranges by obstore and does nothing with them, an object in each of some threads."""
    import obstore
    from obstore.store import S3Store

    store = S3Store.from_url(
        url,
        endpoint=storage["endpoint_url"],
        access_key_id=storage["key"],
        secret_access_key=storage["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )
    pieces: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in asked:
        pieces.setdefault(name, []).append((start, stop))

    def of(name: str) -> int:
        starts, stops = (list(ends) for ends in zip(*pieces[name], strict=True))
        answers = obstore.get_ranges(store, name, starts=starts, ends=stops, coalesce=0)
        if [len(answer) for answer in answers] != [stop - start for start, stop in pieces[name]]:
            raise RuntimeError(f"{name}: obstore got other bytes than it was asked for")
        return len(answers)

    return lambda: list(pool.map(of, pieces))


def _warm(url: str, storage: dict[str, Any], workload: Workload, options: Options) -> Figure:
    """Return the time of a batch with all rows fetched before, relative to a local store."""
    with _open(url, storage, seed=1) as reader, _open(options.folder / "local", {}, seed=1) as local:
        for buffer in (reader, local):  # fault the pages in, so that neither pays for them
            for number in buffer.trajectory_ids.tolist():
                buffer.get(number)
        with _recorded() as asked:
            draws = [partial(reader.sample, workload.batch), partial(local.sample, workload.batch)]
            ours, theirs = in_turn(draws, options.count(60 * options.repeats), warmup=5)
    if asked:
        raise RuntimeError("rows were fetched that were there")
    details = {"by_processor_time": processor_ratio(ours, theirs), "warm_ms": ours.ms, "local_ms": theirs.ms}
    return Figure("T20", "sample by ranges, warm, over local, image", ratio(ours, theirs), 1.25, details=details)


def _open(url: str | Path, storage: dict[str, Any], seed: int) -> TrajectoryReplayBuffer:
    reader = TrajectoryReplayBuffer(seed=seed, enable_cache=False, sample_window_size=0, storage_options=storage)
    reader.load_checkpoint(url)
    return reader


@contextmanager
def _recorded() -> Iterator[list[list[tuple[str, int, int]]]]:
    """Yield the ranges of each call: name, start, stop."""
    asked: list[list[tuple[str, int, int]]] = []
    real = ObjectStore.ranges

    def recording(self: ObjectStore, pieces: Any) -> Any:
        asked.append(list(pieces))
        return real(self, pieces)

    with mock.patch.object(ObjectStore, "ranges", recording):
        yield asked


def _serve(pipe: Connection) -> None:
    with s3_server() as options:
        pipe.send(options)
        signal.pause()
