"""Nodes of a Ray cluster on one Linux machine, each with a network and a disk of its own; needs root.

A node is a network namespace, joined to the head's bridge by a pair of interfaces, and a mount namespace, in which the
node's folder lies at the path that all nodes call the run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BRIDGE = "trajstore0"
_SUBNET = "10.77.0"
HEAD = f"{_SUBNET}.1"
PORT = 26_379
ADDRESS = f"{HEAD}:{PORT}"
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}
"""Of all processes of the cluster, its driver included: a token of the user's is for other clusters."""
_MEMORY = "--object-store-memory=150000000"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _ray(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", _MEMORY, "--num-cpus=2", *arguments]


def _forget() -> None:
    """Remove what a killed campaign left."""
    for line in _ip("netns", "list").splitlines():
        if line.startswith(BRIDGE):
            Node.ended(line.split()[0])
    for line in _ip("-brief", "link").splitlines():
        if line.startswith(BRIDGE):
            with suppress(subprocess.CalledProcessError):  # it went with its namespace
                _ip("link", "del", line.split()[0].partition("@")[0])


@dataclass
class Node:
    """A node: ``disk`` is its folder, seen at ``run`` by its processes alone."""

    number: int
    disk: Path
    run: Path
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its network namespace."""
        return f"{BRIDGE}-{self.number}"

    def plug(self) -> None:
        """Make its network and join the head's."""
        outer, inner = f"{BRIDGE}v{self.number}", f"{BRIDGE}p{self.number}"
        _ip("netns", "add", self.name)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self.name)
        _ip("link", "set", outer, "master", BRIDGE, "up")
        _ip("-n", self.name, "addr", "add", f"{_SUBNET}.{10 + self.number}/24", "dev", inner)
        for device in ("lo", inner):
            _ip("-n", self.name, "link", "set", device, "up")

    def start(self) -> None:
        """Start Ray on it."""
        start = _ray(
            f"--address={ADDRESS}", f"--node-ip-address={_SUBNET}.{10 + self.number}", '--resources={"disk": 1}'
        )
        mounted = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount --bind "$0" "$1" && shift && exec "$@"',
            str(self.disk),
            str(self.run),
        ]
        with self.log.open("ab") as log:
            command = ["ip", "netns", "exec", self.name, *mounted, *start]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)

    @property
    def runs(self) -> bool:
        """Whether Ray runs on it."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def link(self, state: str) -> None:
        """Cut its network (``down``), or join it again (``up``)."""
        _ip("link", "set", f"{BRIDGE}v{self.number}", state)

    def kill(self) -> None:
        """End all its processes, as a loss of power does, but for the disk's cache."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    @staticmethod
    def ended(name: str) -> None:
        """End a namespace's processes, and remove it."""
        while pids := _ip("netns", "pids", name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        _ip("netns", "del", name)


@contextmanager
def machines(folder: Path, count: int) -> Iterator[list[Node]]:
    """Start a head without a disk, and nodes; end all of them.

    Raises:
        OSError: the machine is not Linux, or the process not root.
    """
    if not shutil.which("ip") or os.geteuid() != 0:
        raise OSError("needs Linux, root and the command ip")
    _forget()
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    run, nodes = folder / "run", list[Node]()
    run.mkdir()
    options = [f"--node-ip-address={HEAD}", f"--port={PORT}", "--include-dashboard=false"]
    with (folder / "head.log").open("wb") as log:
        command = _ray("--head", *options, '--resources={"client": 100}')
        head = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True)
    try:
        for number in range(count):
            disk = folder / f"disk_{number}"
            disk.mkdir()
            nodes.append(Node(number, disk, run, folder / f"node_{number}.log"))
            nodes[-1].plug()
            nodes[-1].start()
        yield nodes
    finally:
        for node in nodes:
            node.ended(node.name)
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        _forget()
