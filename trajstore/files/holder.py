"""What the lock of a directory says about the process that holds it."""

from __future__ import annotations

import os
import socket
import time

import orjson

LOCK_NAME = "writer.lock"


def holder_document() -> dict[str, object]:
    """Return what a lock says about its holder: process id, host and the Unix time of taking it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}


def may_live(holder: bytes) -> bool:
    """Return whether the process that the lock of a local directory names may live; an empty text names none."""
    if not holder:
        return False
    try:
        value = orjson.loads(holder)
        if value["host"] != socket.gethostname():
            return True
        os.kill(int(value["pid"]), 0)
    except ProcessLookupError:
        return False
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError, PermissionError):
        return True
    return True


def describe_holder(holder: bytes) -> str:
    """Return what a lock's text says about its holder, for people."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(orjson.loads(holder)["since"]))
        return f"{process_of(holder)} since {since}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "another process"


def process_of(holder: bytes) -> str:
    """Return which process a lock's text names."""
    try:
        value = orjson.loads(holder)
        return f"process {value['pid']} on {value['host']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "another process"
