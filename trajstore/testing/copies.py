"""Copies of a directory that somebody is writing, as a crash would leave it."""

from __future__ import annotations

import shutil
from pathlib import Path

from trajstore.files.local import TEMPORARY_SUFFIX


def copy_live(live: Path, copy: Path, *leave_out: str) -> Path:
    """Copy a directory that is open for writing; nothing may be added or removed meanwhile.

    The writer renews ``metadata.json`` in the background: a file that is being written has a temporary name, may be
    gone at any moment, and is left out.

    Args:
        live: the directory.
        copy: where it is copied to; must not exist.
        leave_out: patterns of further names that are left out.

    Returns:
        ``copy``.
    """
    shutil.copytree(live, copy, ignore=shutil.ignore_patterns(f"*{TEMPORARY_SUFFIX}", *leave_out))
    return copy
