"""Copies of a directory in use, as a crash would leave it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.waiting import wait_until
from trajstore._core.files.local import TEMPORARY_SUFFIX
from trajstore._core.store.sealed import METADATA_NAME, metadata_json, parse_metadata


def copy_live(live: Path, copy: Path, *leave_out: str) -> Path:
    """Copy a directory that is open for writing; nothing may be added or removed meanwhile.

    The writer renews ``metadata.json`` in the background: a file being written has a temporary name, may
    vanish at any moment, and is left out. If a file was replaced meanwhile, the copy is repeated: listing a folder
    during a rename may show neither the old file nor the new one.

    Args:
        live: the directory.
        copy: the destination; must not exist.
        leave_out: patterns of further names to leave out.

    Returns:
        ``copy``.
    """
    ignored = shutil.ignore_patterns(f"*{TEMPORARY_SUFFIX}", *leave_out)

    def copied_at_rest() -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        before = _files(live)
        try:
            shutil.copytree(live, copy, ignore=ignored)
        except (FileNotFoundError, shutil.Error):
            return False
        return _files(live) == before

    wait_until(copied_at_rest)
    return copy


def _files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of every file."""
    files = {}
    for above, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            files[path] = status.st_ino, status.st_size, status.st_mtime_ns
    return files


def tell_ids(path: Path, next_id: int) -> None:
    """Write the next id to ``metadata.json`` of a store; a live writer renews it once a second, at most."""
    file = path / METADATA_NAME
    values = parse_metadata(file.read_bytes(), str(file)) | {"trajectory_counter": next_id}
    file.write_bytes(metadata_json(values))
