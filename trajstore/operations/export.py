"""Export rollouts to JSON lines or a folder of Parquet files.

The target is written under a hidden, locked name beside it and renamed once complete. The leftovers of a killed export
are deleted by the next export to the same target.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from trajstore.core.buffer.reader import Reader
from trajstore.core.columns.facts import SCORE
from trajstore.core.columns.portions import portions
from trajstore.core.files.base import Buffer
from trajstore.core.files.opening import local_target
from trajstore.core.store.facts import FACTS
from trajstore.core.store.run_ids import ID_LIMIT, shown_id, written_id
from trajstore.errors import ConfigurationError, TrajstoreError, written
from trajstore.operations.opening import open_readable
from trajstore.operations.rollout_rows import check_integers, parquet_schema, row_of, to_parquet
from trajstore.query.engine import polars
from trajstore.query.query import Query
from trajstore.query.relations import late_columns
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from polars import DataType

logger = logging.getLogger(__name__)

Form = Literal["jsonl", "parquet"]

Progress = Callable[[int, int], None]
"""Called with (rollouts done, total)."""

_PART_BYTES = 16 << 20
"""Size of the trajectories in one Parquet file; also the limit on those in memory."""


@dataclass(slots=True)
class Exported:
    """The result of an export.

    Attributes:
        target: file or folder.
        rollouts: number of rollouts written.
        steps: number of step trajectories, which are left out.
        problems: reason by id for each rollout left out as unreadable.
        damage: damage of the source that hides an unknown set of trajectories; None if there is none.
    """

    target: str
    rollouts: int = 0
    steps: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    damage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def export_rollouts(
    source: str | Path,
    target: str | Path,
    form: Form,
    *,
    where: str | None = None,
    pin: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the rollouts of a store, checkpoint or run directory to JSON lines or a folder of Parquet files.

    Each rollout is one line or row, oldest first: the fields of :class:`~trajstore.AgentTrajectory`,
    ``trajectory_id`` and ``committed``. Tensors are lists. Late values are in ``notes`` by name; those by row are
    lists. ``exact`` has what lists lose, for :func:`trajstore.operations.importing.import_rollouts`. In Parquet,
    ``outcome`` and ``success_rate`` are columns; each message has its texts and ``tool_calls`` as columns, and all of
    it as ``json``; each late value has a column ``notes.NAME`` (null where a rollout lacks it); ``rest`` has all other
    fields as JSON.

    Args:
        source: path or URL.
        target: must not exist; its folder must.
        form: ``"jsonl"`` or ``"parquet"``.
        where: SQL condition on facts; None exports all.
        pin: export the trajectories of this pin instead of the present ones.
        progress: called with (done, total) rollouts.

    Raises:
        ConfigurationError: the target exists or is a URL, the condition is wrong, or JSON lines cannot have an integer.
        MissingDependencyError: Polars is not installed (extra ``query``).
        TrajstoreError: the source cannot be opened.
        StoreWriteError: the target cannot be written; nothing appears there.
    """
    target = local_target("export", target)
    if form not in get_args(Form):
        raise ConfigurationError(f"export: form {form!r}, must be one of {', '.join(get_args(Form))}")
    if target.exists() or target.is_symlink():
        raise ConfigurationError(f"export: {target} exists already; name another target, or delete it")
    reader, damage = open_readable(source, pin, verify_shards=True)
    with reader:
        question = reader.query() if where is None else reader.query().where(where)
        late = _late_columns(reader, question)
        given = [name for name, kind in late.items() if not kind.is_nested()]  # those by row come with rollouts
        columns = ("trajectory_id", "kind", "committed", "bytes", *(f'"{name}"' for name in given))
        rows = question.select(*columns).rows()
        is_run = bool((reader.trajectory_ids >= ID_LIMIT).any())
        done = Exported(str(target), damage=damage, steps=sum(row["kind"] != "agent" for row in rows))
        rows = [row for row in rows if row["kind"] == "agent"]
        with written(f": the export {target} was not written"), appearing(target) as folder:
            write = _lines(folder / target.name) if form == "jsonl" else _parts(folder / target.name, late, is_run)
            for portion, _ in portions(rows, _PART_BYTES, lambda row: row["bytes"]):
                write(list(_read(reader, portion, late, done)))
                progress(done.rollouts + len(done.problems), len(rows))
    return done


def _late_columns(reader: Reader, question: Query) -> dict[str, DataType]:
    """Return the names of the late values with the types of their Parquet columns."""
    pl = polars()
    facts = question.limit(0).table().schema
    types = {name: kind for name, kind in facts.items() if name not in FACTS and not name.startswith(SCORE)}
    by_row = late_columns(reader.live.locked, "tokens")
    types |= {name: pl.List(pl.List(pl.Float64) if several else pl.Float64) for name, several in by_row.items()}
    if both := sorted(facts.keys() & by_row.keys()):
        logger.warning(
            "export: values %s are by row in one rank and one for each trajectory in another, so they are left out; "
            "export each rank by itself to include them",
            ", ".join(both),
        )
    return {name: kind for name, kind in types.items() if name not in both}


def _read(
    reader: Reader, rows: Sequence[Mapping[str, Any]], late: Collection[str], done: Exported
) -> Iterator[dict[str, Any]]:
    """Yield the fields of rollouts; record unreadable ones in ``done``."""
    for row in rows:
        name = shown_id(row["trajectory_id"])
        try:
            rollout = reader.get(row["trajectory_id"])
        except (TrajstoreError, OSError) as error:
            done.problems[name] = str(error)
            continue
        if not isinstance(rollout, AgentTrajectory):
            done.problems[name] = "it is a step trajectory by now"
            continue
        done.rollouts += 1
        given = {late_name: row[late_name] for late_name in late if row.get(late_name) is not None}
        rollout.notes = {name: rows for name, rows in rollout.notes.items() if name in late}
        yield {
            "trajectory_id": written_id(row["trajectory_id"]),
            "committed": row["committed"],
            **row_of(rollout, given),
        }


def _lines(path: Path) -> Callable[[Sequence[dict[str, Any]]], None]:
    """Return a function that appends rollouts to a file of JSON lines."""
    path.touch()

    def write(rollouts: Sequence[dict[str, Any]]) -> None:
        for rollout in rollouts:
            check_integers(rollout)
        _append(path, (orjson.dumps(rollout) + b"\n" for rollout in rollouts))

    return write


def _parts(path: Path, late: Mapping[str, DataType], is_run: bool) -> Callable[[Sequence[dict[str, Any]]], None]:
    """Return a function that writes rollouts to the next file of a folder."""
    pl = polars()
    path.mkdir()
    schema = parquet_schema(late, is_run)

    def write(rollouts: Sequence[dict[str, Any]]) -> None:
        part = BytesIO()  # Polars reports a full disk as one of its own errors
        pl.DataFrame([to_parquet(rollout) for rollout in rollouts], schema=schema).write_parquet(part)
        _append(path / f"part-{sum(1 for _ in path.iterdir()):05d}.parquet", [part.getbuffer()])

    return write


def _append(path: Path, pieces: Iterable[Buffer]) -> None:
    with path.open("ab") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a hidden folder for building the target, then rename the target into place."""
    prefix = f".{target.name}.exporting."
    for left in target.parent.glob(f"{prefix}*"):
        with _locked(left) as mine:
            if mine:
                logger.warning("%s: deleting the leftovers of a killed command", left)
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        with _locked(folder):
            yield folder
            made = folder / target.name
            if made.is_dir():
                _sync(made)
            # Never replaces a file or a folder with content.
            if target.exists():
                raise ConfigurationError(f"{target} was created meanwhile; nothing was replaced")
            made.rename(target)
            _sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Try to lock a folder; yield whether that succeeded."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
