"""Ray for tests: one cluster per process, and workers that are forked."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from tests import forking

_clusters: list[Any] = []


def executable(*modules: str) -> str:
    """Start a process from which workers are forked; return their ``py_executable``, for one ``ray.init``."""
    folder = tempfile.TemporaryDirectory(prefix="forking-")
    address = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        command = [sys.executable, forking.__file__, "serve", str(listener.fileno()), *modules]
        root = os.path.dirname(os.path.dirname(forking.__file__))  # other packages install modules named tests too
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], process_group=0, env=os.environ | paths
        )

    @atexit.register
    def stop() -> None:
        server.communicate()  # it ends with its input
        folder.cleanup()

    return f"{sys.executable} -S -E {forking.__file__} {address}"


def cluster() -> Any:
    """Return the running cluster; without one, start a head with two CPUs and join it."""
    import ray
    from ray.cluster_utils import Cluster

    if not _clusters:
        # A lost node refuses the checks of its health; Ray gives it up after five, slow answers are still waited for.
        system = {"health_check_period_ms": 500}
        head = {"num_cpus": 2, "include_dashboard": False, "_system_config": system}
        _clusters.append(Cluster(initialize_head=True, head_node_args=head))
        runtime_env = {"py_executable": executable("trajstore.distributed.server", "tests.support.witness")}
        ray.init(address=_clusters[0].address, log_to_driver=False, runtime_env=runtime_env)
        atexit.register(stop)  # registered last, so that it runs before Ray's own handlers
    return _clusters[0]


def stop() -> None:
    """Stop the cluster, for tests that start Ray in another way."""
    import ray

    if _clusters:
        ray.shutdown()
        _clusters.pop().shutdown()
