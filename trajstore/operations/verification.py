"""Results of verification. Values; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trajstore._core.files.base import Directory
from trajstore._core.store.lost_records import Damage

Progress = Callable[[int, int], None]
"""Called with (done, total) shards, files or trajectories."""


VERDICTS = {"damage": "DAMAGED", "absent rank": "INCOMPLETE", "surplus rank": "TOO MANY RANKS"}
"""Verdict by kind of problem, the worst first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of damage, or a wrong number of ranks.

    Attributes:
        file: the file or directory; relative to the run directory in a run.
        message: description of the damage.
        lost: ids of the trajectories that it makes unreadable, as inclusive ranges. Empty if there are none or they are
            unknown. For a damaged log, the ids between two readable records; some may never have been assigned.
        uncounted: whether more may be lost than ``lost`` lists.
        kind: of the problem, see :data:`VERDICTS`.
    """

    file: str
    message: str
    lost: tuple[tuple[int, int], ...] = ()
    uncounted: bool = False
    kind: Literal["damage", "absent rank", "surplus rank"] = "damage"


def problem_of(damage: Damage, directory: Directory) -> Problem:
    """Return damage as a problem of the file at the start of its message.

    If the message starts with no file, the problem belongs to the directory.
    """
    text = damage.message.removeprefix(f"{directory.url}/")
    if text == damage.message:
        name = directory.url.rstrip("/").rsplit("/", 1)[-1]
        return Problem(name, text.removeprefix(f"{directory.url}: "), damage.lost, damage.uncounted)
    file = text.split(":")[0].split()[0]
    return Problem(file, text.removeprefix(f"{file}: "), damage.lost, damage.uncounted)


@dataclass
class Verification:
    """The result of verification.

    Attributes:
        path: the verified path.
        kind: ``"store"``, ``"rlinf"`` or ``"run"``.
        problems: damage, missing ranks; for a run, including that of its parts.
        notes: remarks other than damage: leftovers of an interrupted writer, foreign files.
        trajectories: number of trajectories whose data was checked.
        pinned: number of these that were evicted or set aside, and are kept by pins.
        files: number of files read.
        nbytes: number of bytes read.
        parts: one result per part of a run.
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
        """Whether neither the directory nor any part has damage, and no rank is missing or too many."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The verdict on the worst problem, see :data:`VERDICTS`; ``"sound"`` if there is none."""
        kinds = {problem.kind for problem in self.problems}
        return next((verdict for kind, verdict in VERDICTS.items() if kind in kinds), "sound")

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
            "problems": [asdict(problem) for problem in self.problems],
            "notes": self.notes,
        }
        return result | ({"parts": [part.to_json() for part in self.parts]} if self.parts else {})
