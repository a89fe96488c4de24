"""Forks Ray's workers from one process that has imported their modules, as imports take seconds per worker.

Ray starts a worker with the ``py_executable`` of its runtime environment. Here this is a client that passes arguments,
environment and output to the server, which forks. The client ends with the fork. It imports little: it runs often.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

OUTPUTS = (1, 2)


def request(address: str, arguments: Sequence[str]) -> None:
    """Run a Python program in a fork of the server, with this process's environment, until it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        message = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], OUTPUTS)
        connection.sendall(message)
        connection.recv(1)


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Fork for each request until standard input ends; modules are imported at the first one."""
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ready = False
    with socket.socket(fileno=descriptor) as listener:
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            requested = _received(connection)
            if not ready:
                _prepare(requested[1][2], modules)
                ready = True
            if os.fork() == 0:
                os.setpgid(0, 0)  # Ray kills the groups of workers
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _become(*requested)
                return
            for output in requested[0]:
                os.close(output)
            connection.close()


def _received(connection: socket.socket) -> tuple[list[int], Any]:
    """Return the outputs of a client, and its arguments, folder and environment."""
    size, outputs, _, _ = socket.recv_fds(connection, 8, len(OUTPUTS))
    with connection.makefile("rb") as stream:
        return outputs, json.loads(stream.read(int.from_bytes(size, "big")))


def _prepare(environment: dict[str, str], modules: Sequence[str]) -> None:
    """Import modules with the environment of a worker: Ray reads the ids of its job and node when it is imported."""
    import gc
    import importlib

    if "ray" in modules:
        os.environ.update(environment)
    for name in modules:
        importlib.import_module(name)
    if "ray" in modules:
        importlib.import_module("ray._raylet").setproctitle("ray::forking")  # first call before environment changes
    gc.collect()
    gc.freeze()


def _become(outputs: Sequence[int], requested: Any) -> None:
    """Run the requested program in this process."""
    import runpy

    import numpy as np

    arguments, folder, environment = requested
    for given, own in zip(outputs, OUTPUTS, strict=True):
        os.dup2(given, own)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    np.random.seed()  # forks would draw the same numbers
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3:])
    else:
        request(sys.argv[1], sys.argv[2:])
