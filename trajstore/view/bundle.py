"""A bundle: the page and what it would ask, written ahead into a folder that any server of files shows.

Names of files are numbers, so that nothing that was recorded becomes part of a path. ``bundle.json`` has what tells of
many, ``data/N.bin`` the answer about the trajectory of row ``N``, ``data/N/C-E-P.bin`` pictures of its column ``C`` and
environment ``E``, some steps at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from trajstore.core.files.base import EncodedFile
from trajstore.core.files.folders import publish_folder
from trajstore.core.files.local import LocalDirectory
from trajstore.errors import ConfigurationError, TrajstoreError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory
from trajstore.view.answers import columns_of, named_rows, plain
from trajstore.view.living import Living
from trajstore.view.page import STATIC, bundled_index
from trajstore.view.rollout import pictures_of

Progress = Callable[[int, int], None]
"""Called with the trajectories that are written and their number."""

MOST = 20_000
"""Trajectories of a bundle: the page has the facts of all in memory."""

MOST_BYTES = 4 << 30
"""Of a bundle."""

_PART_BYTES = 1 << 20
"""Of the pictures in one file; larger pictures have one each."""

_NAMES = {"bundle.json", "data", "index.html", "static"}

_BEGINNING = b'{"trajstore_bundle":'


@dataclass(slots=True)
class Bundled:
    """What was written.

    Attributes:
        target: the folder.
        trajectories: whose content it has.
        bytes: of its files.
        trouble: what of the store cannot be shown at all; None if nothing.
        problems: by id, why a trajectory could not be read. Its facts are there, and the page says why.
    """

    target: str
    trajectories: int = 0
    bytes: int = 0
    trouble: str | None = None
    problems: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def write_bundle(
    living: Living, target: str | Path, *, where: str = "", progress: Progress = lambda done, total: None
) -> Bundled:
    """Write the page over the trajectories of which a condition holds.

    The folder appears when it is whole; an earlier bundle there is exchanged for it at one stroke.

    Args:
        living: what is shown. It is not refreshed, so that all is of one state.
        target: folder; absent, empty or a bundle.
        where: condition on facts, in SQL; empty = all.
        progress: told how far it is.

    Raises:
        ConfigurationError: something else is there, the condition is wrong, or it would be too much.
        MissingDependencyError: Polars is not installed (extra ``query``).
        OSError: the target cannot be written.
    """
    target = Path(target)
    _check_replaceable(target)
    table = living.table(where)
    if len(table) > MOST:
        raise ConfigurationError(
            f"bundle: {len(table):,} trajectories, more than the {MOST:,} that a bundle takes; choose some with --where"
        )
    about = {**living.about(), "columns": columns_of(table), "state": "bundle", "trajectories": len(table)}
    rows = named_rows(table)
    shown = [row["trajectory_id"] for row in rows]
    done = Bundled(str(target), trouble=living.state.trouble)
    pictures: dict[str, Any] = {}
    late: dict[str, Any] = {}
    with publish_folder(target) as folder:
        for path in sorted(STATIC.rglob("*")):
            if path.is_file() and path.name != "index.html":
                _write(folder, done, [(f"static/{path.relative_to(STATIC)}", path.read_bytes())])
        for number, name in enumerate(shown):
            try:
                trajectory = living.get(name)
                body, drawn = living.body(trajectory), _drawn(trajectory)
            except (TrajstoreError, OSError) as error:
                done.problems[name] = str(error)
                progress(number + 1, len(shown))
                continue
            _write(folder, done, [(f"data/{number}.bin", body)])
            if (given := living.notes_shown(name))["values"]:
                late[name] = given
            if drawn:
                pictures[name] = [_write_pictures(folder, done, f"data/{number}/{n}", *one) for n, one in drawn]
            done.trajectories += 1
            progress(number + 1, len(shown))
        told = {"trajstore_bundle": 1, "about": about, "where": where, "written": round(time.time() * 1000)}
        told |= {
            "rows": [list(row.values()) for row in rows],
            "overview": living.overview(where),
            "problems": done.problems,
            "pictures": pictures,
        }
        told["late"] = late
        told["log_probs"] = {over: _log_probs(living, where, over) for over in ("version", "time")}
        _write(folder, done, [("bundle.json", orjson.dumps(told)), ("index.html", bundled_index().encode())])
        _check_replaceable(target)
    return done


def _log_probs(living: Living, where: str, over: str) -> dict[str, Any]:
    told, samples = living.sampled(where, over)
    found = [living.log_prob(some) for some in samples]
    return told | {"log_prob": [plain(value) for value, _ in found], "unread": sum(unread for _, unread in found)}


def _check_replaceable(target: Path) -> None:
    """Refuse a target that would be replaced though it is no bundle, or has more in it than one.

    Raises:
        ConfigurationError: it is so.
    """
    if not target.exists():
        return
    names = set(os.listdir(target)) if target.is_dir() else {target.name}
    if target.is_dir() and not names:
        return
    told = target / "bundle.json"
    if told.is_file():
        with told.open("rb") as file:
            if file.read(len(_BEGINNING)) == _BEGINNING and names <= _NAMES:
                return
    other = sorted(names - _NAMES)[:3] or ["bundle.json of something else"]
    raise ConfigurationError(
        f"bundle: {target} has what is of no bundle ({', '.join(other)}) and would be replaced; name a folder that is "
        "absent, empty or a bundle"
    )


def _write(folder: LocalDirectory, done: Bundled, files: list[tuple[str, bytes]]) -> None:
    done.bytes += sum(len(data) for _, data in files)
    if done.bytes > MOST_BYTES:
        raise ConfigurationError(
            f"bundle: more than {MOST_BYTES:,} bytes after {done.trajectories:,} trajectories; choose some with --where"
        )
    folder.publish([EncodedFile(name, [data]) for name, data in files])


def _drawn(trajectory: AnyTrajectory) -> list[tuple[int, tuple[str, torch.Tensor]]]:
    """Return the numbered columns of pictures of a block; a rollout has none."""
    return [] if isinstance(trajectory, AgentTrajectory) else list(enumerate(pictures_of(trajectory).items()))


def _write_pictures(
    folder: LocalDirectory, done: Bundled, place: str, column: str, pictures: torch.Tensor
) -> dict[str, Any]:
    """Write the pictures ``[T, B, height, width, channels]`` of a column, and return where they are."""
    steps, batch = pictures.shape[:2]
    size = pictures[0, 0].numel()
    each = max(1, _PART_BYTES // size)

    def parts(environment: int) -> Iterator[tuple[str, bytes]]:
        for part, first in enumerate(range(0, steps, each)):
            yield f"{place}-{environment}-{part}.bin", pictures[first : first + each, environment].numpy().tobytes()

    for environment in range(batch):
        for one in parts(environment):
            _write(folder, done, [one])
    return {"name": column, "place": place, "each": each, "size": size}
