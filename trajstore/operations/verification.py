"""What checking a directory found. Values; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trajstore.core.files.base import Directory
from trajstore.core.store.lost_records import Damage

Progress = Callable[[int, int], None]
"""Told (done, total): shards, files or trajectories."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of damage.

    Attributes:
        file: the file or directory; within a run, below the run directory.
        message: what is wrong with it.
        lost: ids of the trajectories that cannot be read any more because of it, as inclusive ranges. Empty
            where none is lost, or nobody can tell which. Of a damaged log, those between two records that can be read;
            some of these may never have been given.
        uncounted: whether more may be lost by it than ``lost`` says.
    """

    file: str
    message: str
    lost: tuple[tuple[int, int], ...] = ()
    uncounted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        lost = [list(pair) for pair in self.lost]
        return {"file": self.file, "message": self.message, "lost": lost, "uncounted": self.uncounted}


def problem_of(damage: Damage, directory: Directory) -> Problem:
    """Return damage that is told in a sentence as a problem of the file that its sentence begins with.

    A sentence that begins with none is on the directory, which stands by its name then.
    """
    text = damage.message.removeprefix(f"{directory.url}/")
    if text == damage.message:
        name = directory.url.rstrip("/").rsplit("/", 1)[-1]
        return Problem(name, text.removeprefix(f"{directory.url}: "), damage.lost, damage.uncounted)
    file = text.split(":")[0].split()[0]
    return Problem(file, text.removeprefix(f"{file}: "), damage.lost, damage.uncounted)


@dataclass
class Verification:
    """What checking found.

    Attributes:
        path: what was checked.
        kind: ``"store"``, ``"rlinf"``, ``"experience_pool"`` or ``"run"``.
        problems: damage; of a run, also that of its parts.
        notes: things that are no damage: what an interrupted writer left, files of others.
        trajectories: trajectories whose data was checked.
        pinned: how many of them were evicted or set aside, and are kept by pins.
        files: files read.
        nbytes: bytes read.
        parts: of a run, one each.
    """

    path: str
    kind: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trajectories: int = 0
    pinned: int = 0
    files: int = 0
    nbytes: int = 0
    parts: list[Verification] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether no damage was found, here and in all parts."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        result: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "sound": self.sound,
            "trajectories": self.trajectories,
            "pinned": self.pinned,
            "files": self.files,
            "bytes": self.nbytes,
            "problems": [problem.to_json() for problem in self.problems],
            "notes": self.notes,
        }
        return result | ({"parts": [part.to_json() for part in self.parts]} if self.parts else {})
