"""What the lock of a directory says about the process that holds it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import orjson

LOCK_NAME = "writer.lock"


def holder_document() -> dict[str, object]:
    """Return what a lock says about its holder: process id, host and the Unix time of taking it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}


def parse_holder(holder: bytes) -> dict[str, Any]:
    """Return what a lock or lease says; nothing if it is no JSON object."""
    try:
        document = orjson.loads(holder)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def may_live(holder: bytes) -> bool:
    """Return whether the process that the lock of a local directory names may live; an empty text names none."""
    said = parse_holder(holder)
    return bool(holder) and (said.get("host") != socket.gethostname() or process_may_live(said))


def process_may_live(said: Mapping[str, Any]) -> bool:
    """Return whether a process of this machine may live; what names none may be of something else that does."""
    try:
        os.kill(int(said["pid"]), 0)
    except ProcessLookupError:
        return False
    except (KeyError, TypeError, ValueError, OverflowError, PermissionError):
        return True
    return True


def describe_holder(holder: bytes) -> str:
    """Return what a lock's text says about its holder, for people."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(parse_holder(holder)["since"]))
    except (KeyError, TypeError):
        return "another process"
    return f"{process_of(holder)} since {since}"


def process_of(holder: bytes) -> str:
    """Return which process a lock's text names."""
    said = parse_holder(holder)
    return f"process {said['pid']} on {said['host']}" if {"pid", "host"} <= said.keys() else "another process"
