"""The text in a directory's lock or lease: the process that holds it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trajstore._core.base.version import VERSION

LOCK_NAME = "writer.lock"


def holder_document(*, brief: bool = False) -> dict[str, object]:
    """Return the text's fields: process, host, Unix time of locking, version, and whether it is for a moment only."""
    document = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), "version": VERSION}
    return document | {"brief": True} if brief else document


def parse_holder(holder: bytes) -> dict[str, Any]:
    """Parse the text of a lock or lease; empty if it is not a JSON object."""
    try:
        document = orjson.loads(holder)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def may_live(holder: bytes) -> bool:
    """Return whether the process named by a local directory's lock may be alive; False for an empty text."""
    fields = parse_holder(holder)
    return bool(holder) and (fields.get("host") != socket.gethostname() or process_may_live(fields))


def may_be_brief(holder: bytes) -> bool:
    """Return whether a lock that is held, with this text, may soon be free.

    The text is the previous holder's, which a power loss may have torn, or empty, until the new one has written.
    """
    fields = parse_holder(holder)
    return "host" not in fields or not may_live(holder) or fields.get("brief") is True


def process_may_live(said: Mapping[str, Any]) -> bool:
    """Return whether a process of this machine may be alive; True if the text names no process."""
    try:
        os.kill(int(said["pid"]), 0)
    except ProcessLookupError:
        return False
    except (KeyError, TypeError, ValueError, OverflowError, PermissionError):
        return True
    return True


def state_of(fields: Mapping[str, Any]) -> str | None:
    """Return whether a lock's process is ``"running"``, ``"stopped"`` or ``"gone"``; None on another machine."""
    if fields.get("host") != socket.gethostname():
        return None
    if not process_may_live(fields):
        return "gone"
    try:
        letter = Path(f"/proc/{int(fields['pid'])}/stat").read_bytes().rpartition(b") ")[2][:1]
    except (OSError, KeyError, TypeError, ValueError):
        return "running"  # as far as known
    return {b"T": "stopped", b"t": "stopped", b"Z": "gone", b"X": "gone"}.get(letter, "running")


def describe_holder(holder: bytes) -> str:
    """Describe the holder of a lock, for messages."""
    fields = parse_holder(holder)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["since"]))
    except (KeyError, TypeError):
        return "another process"
    other = f" (trajstore {fields['version']})" if fields.get("version", VERSION) != VERSION else ""
    stopped = f", which is stopped (`kill -CONT {fields['pid']}` continues it)" if state_of(fields) == "stopped" else ""
    return f"{process_of(holder)} since {since}{other}{stopped}"


def process_of(holder: bytes) -> str:
    """Return the process and host in a lock's text."""
    fields = parse_holder(holder)
    return f"process {fields['pid']} on {fields['host']}" if {"pid", "host"} <= fields.keys() else "another process"
