"""T22: batches of 1,024 transitions from stores on another node over those of plain actors, and of TorchRL's.

Two nodes of Ray on this machine, each with its own object store; stores and peers are on the second, the learner is on
the first and, in its own UTS namespace, has another host name: it can but ask. The peers hold the same transitions in
memory: a plain actor of ten lines with a list of transitions, and TorchRL's ``RayReplayBuffer``, where it is installed.
One call of each, now this one first and now that, medians of all calls. Needs the right to change the host name (root).
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.report import Figure, Options, SkippedError, needs
from tools.bench.timing import Times, in_child, in_turn, ratio
from tools.bench.workloads import raw_columns, states
from trajstore.errors import counted

BATCH = 1024
CALLS = 30  # of each, for every repeat
_CLONE_NEWUTS = 0x04000000
_THERE = {"there": 0.001}  # a resource of the second node
_STORES = (1, 2, 4)


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures.

    Raises:
        SkippedError: Ray is not installed, or this process may not change its host name.
    """
    needs("ray", extra="ray")
    if os.geteuid():
        raise SkippedError("needs root, for a host name of its own")
    took = in_child(_measure, options.folder, options.repeats, options.count(16, 4))
    details = {f"us_{name}": one.ms * 1e3 for name, one in took.items()}
    details |= {f"us_thread_{name}": one.processor_ms * 1e3 for name, one in took.items()}
    for stores in _STORES:
        name, mine = f"a batch from {counted(stores, 'store')} on another node", took[f"stores_{stores}"]
        yield Figure("T22", f"{name} over a plain list", ratio(mine, took["list"]), 0.5, details=details)
        if "torchrl" in took:
            yield Figure("T22", f"{name} over TorchRL's RayReplayBuffer", ratio(mine, took["torchrl"]), 0.5)
    yield Figure("T22", "four stores over one", ratio(took["stores_4"], took["stores_1"]), 1.2)


class _List:
    """A list of transitions, each its bytes: lists of tensors and of arrays are slower."""

    def add(self, columns: dict[str, Any]) -> None:
        """Take the transitions."""
        self._record = np.dtype([(name, v.numpy().dtype, v.shape[1:]) for name, v in columns.items()])
        rows = zip(*columns.values(), strict=True)
        self._rows = [b"".join(value.numpy().tobytes() for value in row) for row in rows]

    def sample(self, count: int) -> dict[str, Any]:
        """Return a batch of arrays."""
        batch = np.frombuffer(b"".join(random.choices(self._rows, k=count)), self._record)
        return {name: np.ascontiguousarray(batch[name]) for name in self._record.names or ()}


def _measure(folder: Path, repeats: int, trajectories: int) -> dict[str, Times]:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "no host name of its own")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=8, resources={"there": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        added = states(trajectories)
        columns = raw_columns(added)
        actor: Any = ray.remote(num_cpus=0, resources=_THERE)(_List).remote()
        ray.get(actor.add.remote(columns))
        works: dict[str, Callable[[], object]] = {"list": lambda: ray.get(actor.sample.remote(BATCH))}
        torchrl = _torchrl(columns)
        if torchrl is not None:
            works["torchrl"] = torchrl.sample
        from trajstore.distributed import DistributedReplayBuffer
        from trajstore.distributed.server import MOST_STORES

        for stores in _STORES:
            handle = DistributedReplayBuffer.create(
                f"stores-{stores}",
                folder / str(stores),
                stores=stores,
                refresh_interval=3600.0,
                actor_options={"num_cpus": 0, "resources": _THERE},
            )
            for trajectory in added:  # a request each, so that all stores get some
                handle.add_trajectories([trajectory]).committed()
            handle.refresh()
            if len(set((handle.trajectory_ids % MOST_STORES).tolist())) < stores:
                raise RuntimeError(f"of {stores} stores some are empty")
            works[f"stores_{stores}"] = partial(handle.sample, BATCH)
        # The learner is on another node and cannot map rows that it has not requested yet.
        socket.sethostname("elsewhere")
        for work in works.values():
            work()
        times = in_turn(list(works.values()), CALLS * repeats, warmup=CALLS, used=time.thread_time)
        return dict(zip(works, times, strict=True))
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _torchrl(columns: dict[str, torch.Tensor]) -> Any:
    """Return TorchRL's buffer; None where it is not installed."""
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, RayReplayBuffer
    except ImportError:
        return None
    count = len(next(iter(columns.values())))
    found = RayReplayBuffer(
        storage=partial(LazyTensorStorage, count), batch_size=BATCH, remote_config={"num_cpus": 0, "resources": _THERE}
    )
    found.extend(TensorDict(columns, batch_size=[count]))
    return found
