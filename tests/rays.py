"""Ray for tests: one at a time in a process, shared by its tests, and workers that are forked."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from tests import forking

_running: dict[Callable[..., Any], tuple[Any, ExitStack]] = {}
"""What runs in this process, by what started it."""


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


@contextmanager
def cluster() -> Iterator[Any]:
    """Run a head with two CPUs, joined by this process."""
    import ray
    from ray.cluster_utils import Cluster

    # A lost node refuses the checks of its health; Ray gives it up after five, slow answers are still waited for.
    system = {"health_check_period_ms": 500}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": system}
    started = Cluster(initialize_head=True, head_node_args=head)
    runtime_env = {"py_executable": executable("trajstore.distributed.server", "tests.support.witness")}
    ray.init(address=started.address, log_to_driver=False, runtime_env=runtime_env)
    yield started
    ray.shutdown()
    started.shutdown()


def running(start: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return what ``start`` runs, until another one is asked for, or the process ends."""
    if start not in _running:
        stop()
        with ExitStack() as stack:
            started = stack.enter_context(start())
            _running[start] = started, stack.pop_all()
        atexit.register(stop)  # registered last, so that it runs before Ray's own handlers
    return _running[start][0]


def stop() -> None:
    """Stop what runs, for tests that start Ray in another way."""
    if _running:
        _running.popitem()[1][1].close()
