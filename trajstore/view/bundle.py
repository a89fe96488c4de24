"""Bundles: the page and all its answers, written to a folder that any file server can serve.

File names are numbers, so that no recorded text becomes part of a path. ``bundle.json`` has the answers about many
trajectories, ``data/N.bin`` the answer about the trajectory of row ``N``, ``data/N/C-E-P.bin`` pictures of its column
``C`` and environment ``E``, several steps per file, ``data/session-N.json`` the tree of an agent session.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trajstore._core.files.base import EncodedFile
from trajstore._core.files.folders import publish_folder
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import local_target, nested, open_directory
from trajstore.errors import ConfigurationError, TrajstoreError, trajectories, written
from trajstore.operations.verification import Progress
from trajstore.trajectory import Trajectory
from trajstore.view.answers import columns_of, named_rows
from trajstore.view.living import Living
from trajstore.view.page import STATIC, bundled_index
from trajstore.view.rollout import Pictures, pictures_of

MOST = 20_000
"""Maximum number of trajectories in a bundle; the page holds their facts in memory."""

MOST_BYTES = 4 << 30
"""Maximum size of a bundle."""

_PART_BYTES = 1 << 20
"""Maximum size of the pictures in one file; a larger picture has its own file."""

_NAMES = {"bundle.json", "data", "index.html", "static"}

_BEGINNING = b'{"trajstore_bundle":'


@dataclass(slots=True)
class Bundled:
    """The result of writing a bundle.

    Attributes:
        target: the folder.
        trajectories: number of trajectories whose contents were written.
        bytes: size of its files.
        trouble: reason why a part of the store cannot be shown; None if there is none.
        problems: reason by id for each unreadable trajectory. Its facts are in the bundle, and the page shows the
            reason.
    """

    target: str
    trajectories: int = 0
    bytes: int = 0
    trouble: str | None = None
    problems: dict[str, str] = field(default_factory=dict)


def write_bundle(
    living: Living, target: str | Path, *, where: str = "", progress: Progress = lambda done, total: None
) -> Bundled:
    """Write a bundle of the trajectories that match a condition.

    The folder appears once complete; an earlier bundle there is replaced atomically.

    Args:
        living: the contents. It is not refreshed, so that the bundle shows one state.
        target: folder; absent, empty or a bundle.
        where: SQL condition on facts; empty = all.
        progress: called with (done, total) trajectories.

    Raises:
        ConfigurationError: the target is a URL, has other contents or is within the store, the condition is invalid,
            or the bundle would be too large.
        MissingDependencyError: Polars is not installed (extra ``query``).
        StoreWriteError: the target cannot be written; an earlier bundle is still there.
    """
    target = local_target("bundle", target)
    _check_replaceable(target)
    if nested(LocalDirectory(target), open_directory(living.path)):
        raise ConfigurationError(f"bundle: {target} is within {living.path}, or contains it; write to another folder")
    table = living.table(where)
    if len(table) > MOST:
        raise ConfigurationError(
            f"bundle: {trajectories(len(table))}, must be at most {MOST:,}; select fewer with --where"
        )
    about = {"columns": columns_of(table), "state": "bundle", "trajectories": len(table)}
    rows = named_rows(table)
    shown = [row["trajectory_id"] for row in rows]
    done = Bundled(str(target), trouble=living.state.trouble)
    pictures: dict[str, Any] = {}
    late: dict[str, Any] = {}
    with written(f": the bundle {target} was not written"), publish_folder(target) as folder:
        for path in sorted(STATIC.rglob("*")):
            if path.is_file() and path.name != "index.html":
                _write(folder, done, f"static/{path.relative_to(STATIC)}", path.read_bytes())
        for number, name in enumerate(shown):
            progress(number, len(shown))
            try:
                trajectory = living.get(name)
                body = living.body(trajectory)
                drawn = pictures_of(trajectory) if isinstance(trajectory, Trajectory) else {}
            except (TrajstoreError, OSError) as error:
                done.problems[name] = str(error)
                continue
            _write(folder, done, f"data/{number}.bin", body)
            if (given := living.notes(name))["values"]:
                late[name] = given
            if drawn:
                columns = enumerate(drawn.items())
                pictures[name] = [_write_pictures(folder, done, f"data/{number}/{n}", *column) for n, column in columns]
            done.trajectories += 1
        progress(len(shown), len(shown))
        sessions = {name: place for place, name in enumerate(table["session"].drop_nulls().unique(maintain_order=True))}
        for name, place in sessions.items():
            tree = orjson.dumps(living.session(name, among=set(shown)))
            _write(folder, done, f"data/session-{place}.json", tree)
        contents = {
            "trajstore_bundle": 1,
            "about": living.about() | about,
            "where": where,
            "written": round(time.time() * 1000),
            "rows": [list(row.values()) for row in rows],
            "overview": living.overview(where),
            "problems": done.problems,
            "pictures": pictures,
            "sessions": sessions,
            "late": late,
        }
        _write(folder, done, "bundle.json", orjson.dumps(contents))
        _write(folder, done, "index.html", bundled_index().encode())
        _check_replaceable(target)
    return done


def _check_replaceable(target: Path) -> None:
    """Refuse a target that is not a bundle, or has additional files.

    Raises:
        ConfigurationError: replacing the target would delete other files.
    """
    names = set(os.listdir(target)) if target.is_dir() else {target.name} if target.exists() else set()
    manifest = target / "bundle.json"
    is_bundle = names <= _NAMES and manifest.is_file() and manifest.read_bytes().startswith(_BEGINNING)
    if not names or is_bundle:
        return
    other = sorted(names - _NAMES)[:3] or ["bundle.json of something else"]
    raise ConfigurationError(
        f"bundle: {target} has files that no bundle has ({', '.join(other)}) and would be replaced; name a folder that "
        "is absent, empty or a bundle"
    )


def _write(folder: LocalDirectory, done: Bundled, name: str, data: bytes) -> None:
    done.bytes += len(data)
    if done.bytes > MOST_BYTES:
        raise ConfigurationError(
            f"bundle: more than {MOST_BYTES:,} bytes after {trajectories(done.trajectories)}; select fewer with --where"
        )
    folder.publish([EncodedFile(name, [data])])


def _write_pictures(
    folder: LocalDirectory, done: Bundled, place: str, column: str, pictures: Pictures
) -> dict[str, Any]:
    """Write the pictures of a column; return their location."""
    steps, batch = pictures.rows.shape[:2]
    size = pictures.rows[0, 0].numel()
    each = max(1, _PART_BYTES // size)
    for environment in range(batch):
        for part, first in enumerate(range(0, steps, each)):
            data = pictures.frames(environment, range(first, min(first + each, steps)))
            _write(folder, done, f"{place}-{environment}-{part}.bin", data)
    return {"name": column, "place": place, "each": each, "size": size}
