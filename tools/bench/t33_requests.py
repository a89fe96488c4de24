"""T33: requests to object storage, by kind, of a commit, an idle refresh and a whole shard.

The server is moto's; every call of the client to it is counted. Details have the count of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

from tools.bench.report import Figure, Options, needs
from tools.bench.workloads import agents
from tools.campaigns import s3_server
from trajstore import Retention, TrajectoryReplayBuffer

_RANKS = (8, 64)


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures.

    Raises:
        SkippedError: s3fs or moto is not installed.
    """
    needs("moto", "flask", "s3fs")
    import s3fs  # optional
    from aiobotocore.client import AioBaseClient

    count, rollouts = options.count(100, 4), agents()[:4]
    requests: Counter[str] = Counter()
    send = AioBaseClient._make_api_call

    def counted(client: object, kind: str, given: object) -> object:
        requests[kind] += 1
        return send(client, kind, given)

    def of_each(name: str, target: float | None, call: Callable[[], object], calls: int) -> Figure:
        requests.clear()
        for _ in range(calls):
            call()
        each = {kind: requests[kind] / calls for kind in sorted(requests)}
        return Figure("T33", name, sum(each.values()), target, "requests", details=each)

    seldom = mock.patch("trajstore._core.writing.inbox._SECONDS_REMOTE", 86_400.0)
    with s3_server() as server, seldom, mock.patch.object(AioBaseClient, "_make_api_call", counted):
        s3fs.S3FileSystem(**server).mkdir("bench")
        storage = server | {"lock_ttl": 86_400.0, "lease_ttl": 86_400.0}  # heartbeats come with time, not with calls

        def written(url: str, retention: Retention) -> TrajectoryReplayBuffer:
            return TrajectoryReplayBuffer(
                auto_save=True, auto_save_path=url, storage_options=storage, retention=retention, sample_window_size=0
            )

        for name, retention in (("", Retention()), (", with retention", Retention(max_trajectories=10))):
            with written(f"s3://bench/one{bool(name):d}", retention) as buffer:

                def commit(buffer: TrajectoryReplayBuffer = buffer) -> None:
                    buffer.add_trajectories(rollouts[:1])
                    buffer.flush()

                for _ in range(12):
                    commit()
                yield of_each(f"a commit{name}", 2, commit, count)
                if name:
                    continue
                with TrajectoryReplayBuffer.open("s3://bench/one0", storage_options=storage) as reader:
                    reader.refresh()
                    yield of_each("an idle refresh of a store", 1, reader.refresh, count)
                    ids = iter(reader.trajectory_ids.tolist())
                    yield of_each("reading a whole shard", 1, lambda: reader.get(next(ids)), 4)  # noqa: B023
        for ranks in _RANKS:
            for rank in range(ranks):
                with written(f"s3://bench/run_{ranks}/rank_{rank}", Retention()) as buffer:
                    buffer.add_trajectories(rollouts)
            with TrajectoryReplayBuffer.open(f"s3://bench/run_{ranks}", storage_options=storage) as reader:
                reader.refresh()
                yield of_each(f"an idle refresh of a run of {ranks} ranks", 1, reader.refresh, count)
