"""Convert stores to files of other programs, and such files to stores.

A source yields items with stable keys, a writer writes them in portions, and each durable portion is noted in a
journal. All of it is made in a hidden, locked folder beside the target and renamed once complete. A killed conversion
continues from its journal when it is run again.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore._core.base.arguments import one_of, text
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.facts import GIVEN, RECORDED
from trajstore._core.columns.portions import portions
from trajstore._core.columns.steps import NothingToStoreError
from trajstore._core.files.folders import hidden
from trajstore._core.files.held import check_path
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import local_target, nested, open_directory
from trajstore._core.formats import FORMATS as SHARD_FORMATS
from trajstore._core.store.run_ids import shown_id, written_id
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    InvalidTrajectoryError,
    MissingDependencyError,
    StoreNotFoundError,
    TrajstoreError,
    listed,
    written,
)
from trajstore.interop.episodes import episodes_of
from trajstore.interop.formats import (
    UNREADABLE,
    Format,
    Item,
    Kind,
    Second,
    Selection,
    Source,
    Writer,
    append_durably,
    damaged,
)
from trajstore.operations.opening import open_readable
from trajstore.trajectory import AnyTrajectory, Trajectory

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done, total), in units of the source."""

_MODULES = {
    **{"jsonl": "rollouts", "parquet": "rollouts", "chat": "chats", "trl": "chats", "verl": "chats"},
    **{"minari": "minari", "lerobot": "lerobot", "atif": "atif", "robomimic": "robomimic", "verifiers": "verifiers"},
}

FORMATS = tuple(_MODULES)
"""Names of the formats."""

_BEGINNING = 1 << 16
"""Bytes of a source's file that its digest covers, beside its size and time."""

_PORTION_BYTES = 16 << 20
_PORTION_ITEMS = 256

LATE = "late values"
"""Name of late values among the fields that a format cannot carry."""


def format_named(name: str) -> Format:
    """Return a format by its name, with the fields that it cannot carry.

    Raises:
        ConfigurationError: there is no such format.
    """
    module = importlib.import_module(f"trajstore.interop.{_MODULES[one_of('format', name, FORMATS)]}")
    forms: Sequence[Format] = module.FORMATS
    return next(form for form in forms if form.name == name)


@dataclass(slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        target: file or folder.
        cannot_carry: fields that the format loses, as it declares them.
        lost: those of them that a converted trajectory had.
        written: number of rollouts or episodes written.
        continued: how many of them an interrupted conversion had written.
        left_out: number of trajectories of the other kind.
        problems: reason by key for each item that was not written.
        checked: how many were read back and compared; None without ``check``.
        checked_by: programs other than trajstore that read the files for this too.
        damage: damage of a store that hides an unknown set of trajectories; None if there is none.
    """

    target: str
    cannot_carry: tuple[str, ...]
    written: int = 0
    lost: list[str] = field(default_factory=list)
    continued: int = 0
    left_out: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    checked: int | None = None
    checked_by: tuple[str, ...] = ()
    damage: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out because of damage."""
        return not self.problems and self.damage is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


@contextmanager
def _saying_once() -> Iterator[None]:
    """Drop warnings that repeat an earlier one: a check reads files again."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    readers = [logging.getLogger(f"trajstore.interop.{module}") for module in {*_MODULES.values(), "formats"}]
    for reader in readers:
        reader.addFilter(is_new)
    try:
        yield
    finally:
        for reader in readers:
            reader.removeFilter(is_new)


@_saying_once()
def convert_to(
    source: str | Path,
    target: str | Path,
    format_name: str,
    *,
    where: str | None = None,
    pin: str | None = None,
    check: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write the rollouts or episodes of a store, checkpoint or run directory as files of another program.

    They are written oldest first. Unreadable ones are named and left out. The target appears once complete; an
    interrupted conversion continues when it is called again with the same arguments.

    Args:
        source: path or URL.
        target: must not exist; its folder must.
        format_name: one of :data:`FORMATS`.
        where: SQL condition on facts; None converts all.
        pin: convert the trajectories of this pin instead of the present ones.
        check: read the files back and compare them with the store before they appear.
        progress: called with (done, total) trajectories.

    Raises:
        ConfigurationError: the target exists, is a URL, or is in the source; the format is unknown or cannot be
            written; or the condition is wrong.
        MissingDependencyError: an optional package is not installed.
        CorruptStoreError: the check found a difference; names the item and the fields.
        TrajstoreError: the source cannot be opened.
        StoreWriteError: the target cannot be written; call again to continue.
    """
    for name, value in (("where", where), ("pin", pin)):
        if value is not None:
            text(name, value)
    form = format_named(format_name)
    write = form.write
    if write is None:
        raise ConfigurationError(f"convert: {form.name} can only be read, not written")
    path = local_target("convert", target)
    if nested(LocalDirectory(path), open_directory(source)):
        raise ConfigurationError(f"convert: {path} is in the source; name another target")
    result = Converted(str(path), form.cannot_carry)
    identity = {"source": str(source), "to": form.name, "where": where, "pin": pin}
    reader, result.damage = open_readable(source, pin, verify_shards=True)
    with reader, _staging(path, identity | {"content": _content_of(reader)}) as staging:
        query = reader.query() if where is None else reader.query().where(where)
        selection = Selection(reader, query)
        rows = query.select("trajectory_id", "kind", "committed").rows()
        wanted = [row for row in rows if (row["kind"] == "agent") == (form.kind == "rollouts")]
        result.left_out = len(rows) - len(wanted)
        if rows and not wanted:
            other = "rollouts" if form.kind == "episodes" else "blocks of steps"
            raise ConfigurationError(f"convert: {source}: {form.name} takes {form.kind}; there are only {other}")
        items = Source(_stored(reader, wanted, form.kind), len(wanted))
        with closing(write(staging.made, staging.mark, selection)) as writer:
            _write(items, writer, staging, result, progress)
        if check and form.read is not None:
            with staging.begun_again_if_damaged():
                _check(lambda: _stored(reader, wanted, form.kind), form, staging.made, result, True)
        staging.publish()
    return result


@_saying_once()
def convert_from(
    source: str | Path,
    target: str | Path,
    format_name: str,
    *,
    trajectory_format: str = "pt",
    store_frames_once: bool = False,
    check: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Make a store of files of another program.

    Damaged items are named and left out. Ids and commit times are new. The store appears once complete; an interrupted
    conversion continues when it is called again with the same arguments.

    Args:
        source: file or folder.
        target: folder; must not exist.
        format_name: one of :data:`FORMATS`.
        trajectory_format: format of the shards.
        store_frames_once: as for :class:`~trajstore.TrajectoryReplayBuffer`.
        check: read the store back and compare it with the files before it appears.
        progress: called with (done, total) bytes or items of the source.

    Raises:
        StoreNotFoundError: there is no such file or folder.
        ConfigurationError: the target exists or is a URL, the format is unknown or cannot be read, the source is
            empty, or no item could be converted; names the first.
        MissingDependencyError: an optional package is not installed.
        CorruptStoreError: the check found a difference; names the item and the fields.
        StoreWriteError: the target cannot be written; call again to continue.
    """
    form = format_named(format_name)
    if form.read is None:
        raise ConfigurationError(f"convert: {form.name} can only be written, not read")
    one_of("trajectory_format", trajectory_format, list(SHARD_FORMATS))
    path, origin = local_target("convert", target), check_path(Path(source))
    if not origin.exists():
        raise StoreNotFoundError(f"{origin}: no such file or folder")
    result = Converted(str(path), form.not_read)
    items = form.read(origin)
    identity = {"source": str(origin), "from": form.name, "format": trajectory_format, "content": _digest_of(origin)}
    with _staging(path, identity) as staging:
        with closing(_StoreWriter(staging.made, staging.mark, trajectory_format, store_frames_once)) as writer:
            _write(items, writer, staging, result, progress)
        if not result.written:
            reasons = [f"{key}: {why}" for key, why in result.problems.items()]
            found = f"nothing could be converted: {listed(reasons, 3)}" if reasons else f"has no {form.kind}"
            raise ConfigurationError(f"{origin}: {found}")
        if check:
            with TrajectoryReplayBuffer.open(staging.made, verify_shards=True) as reader:
                rows = [{"trajectory_id": number} for number in reader.trajectory_ids.tolist()]
                with staging.begun_again_if_damaged():  # episodes are whole trajectories here
                    _check(lambda: _stored(reader, rows, "rollouts"), form, origin, result, False)
        staging.publish()
    return result


def _content_of(reader: Reader) -> Any:
    """Return what changes when stored trajectories are corrected, evicted or replaced, but not when some are added."""
    catalogs = reader._live.catalogs_by_rank().items()
    return {
        str(rank): [catalog.store_id, catalog.notes.newest_generation, catalog.next_id - len(catalog.index)]
        for rank, catalog in catalogs
    } or blake2b(np.sort(reader._uuids).tobytes(), digest_size=16).hexdigest()


def _digest_of(path: Path) -> str:
    """Return a digest of the names, sizes, times and beginnings of a file, or of the files in a folder."""
    digest = blake2b(digest_size=16)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_BEGINNING))
    return digest.hexdigest()


def _stored(reader: Reader, rows: Sequence[Mapping[str, Any]], kind: Kind) -> Iterator[Item]:
    """Yield the rollouts of a store, or the episodes of its step trajectories."""
    for done, row in enumerate(rows, start=1):
        number, key = row["trajectory_id"], f"trajectory {shown_id(row['trajectory_id'])}"
        facts = {"trajectory_id": written_id(number), "committed": row.get("committed")}
        if kind == "rollouts":
            yield Item(key, lambda number=number: reader.get(number), done, facts)  # type: ignore[misc]
            continue
        try:
            whole = reader.get(number)
            parts = list(episodes_of(whole)) if isinstance(whole, Trajectory) else []
        except (TrajstoreError, OSError) as error:
            yield damaged(key, str(error), done)
            continue
        for at, part in enumerate(parts):
            yield Item(f"{key}, episode {at}", lambda part=part: part, done, facts)  # type: ignore[misc]


# -- writing ------------------------------------------------------------------------------------------


def _write(source: Source, writer: Writer, staging: _Staging, result: Converted, progress: Progress) -> None:
    """Write the items that the journal does not have, in portions; record those that cannot be written."""
    result.problems = dict(staging.problems)
    result.written = result.continued = staging.written
    fresh: dict[str, str] = {}
    lost = staging.lost

    def encoded() -> Iterator[tuple[str, Any, int, int]]:
        for item in source.items:
            if _digest(item.key) in staging.seen:
                continue
            try:
                trajectory = item.load()
                lost.update(filter(None, (_field_of(name, result.cannot_carry) for name, _ in _leaves(trajectory))))
                yield item.key, writer.encode(trajectory, item.facts), _nbytes(trajectory), item.done
            except (TrajstoreError, OSError) as error:
                fresh[item.key] = str(error)

    for portion, _ in portions(encoded(), _PORTION_BYTES, lambda entry: entry[2], most=_PORTION_ITEMS):
        keys = [key for key, *_ in portion]
        mark = writer.append([content for _, content, *_ in portion])
        staging.note(keys, mark, fresh)
        result.problems |= fresh
        fresh.clear()
        result.written += len(keys)
        progress(portion[-1][3], source.total)
    result.problems |= fresh
    result.lost = [name for name in result.cannot_carry if name in lost]
    writer.finish()


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=8).digest()


def _nbytes(value: Any) -> int:
    """Return the approximate size of a trajectory in memory."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if is_dataclass(value):
        return sum(_nbytes(getattr(value, item.name)) for item in fields(value))
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 8


class _StoreWriter:
    """Writes a store; the mark is the step of a saved point, which is the number of trajectories."""

    def __init__(self, path: Path, mark: int | None, trajectory_format: str, once: bool) -> None:
        if mark is None:
            shutil.rmtree(path, ignore_errors=True)
        self._buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=path,
            trajectory_format=trajectory_format,
            enable_cache=False,
            store_frames_once=once,
        )
        self._count = mark or 0
        if mark is not None and self._buffer.points.saved:  # finish, which removes the points, may have been killed
            self._buffer.points.rollback(mark, aside=False)

    def encode(self, trajectory: AnyTrajectory, facts: Mapping[str, Any]) -> AnyTrajectory:
        try:
            flatten(replace(trajectory, notes={}))
        except NothingToStoreError as error:
            raise InvalidTrajectoryError(str(error)) from error
        return trajectory

    def append(self, encoded: Sequence[AnyTrajectory]) -> int:
        self._buffer.add_trajectories(encoded)
        self._count += len(encoded)
        self._buffer.points.save(self._count, keep=2)  # a kill before the journal's line goes back to the one before
        return self._count

    def finish(self) -> None:
        for point in self._buffer.points.saved:
            self._buffer.points.remove(point.step)
        self._buffer.flush()

    def close(self) -> None:
        self._buffer.close()


class _Staging:
    """The folder in which a target is made, with the journal of its durable portions.

    Attributes:
        made: path of the target while it is made.
        mark: of the last durable portion; None if there is none.
        written: number of items written.
        seen: digests of the keys written and of those that cannot be.
        lost: names of the fields lost so far.
        problems: reasons by key.
    """

    def __init__(self, folder: Path, target: Path, identity: Mapping[str, Any]) -> None:
        self.made = folder / target.name
        self.mark: Any = None
        self.written = 0
        self.seen: set[bytes] = set()
        self.lost: set[str] = set()
        self.problems: dict[str, str] = {}
        self._target = target
        self._journal = folder / ".journal"
        lines = self._lines()
        if lines and lines[0] != identity:
            same = lines[0] | {"content": None} == {**identity, "content": None}
            what = "an interrupted conversion, whose source changed since" if same else "another conversion"
            logger.warning("%s: deleting the leftovers of %s; it begins again", folder, what)
            self.clear()
            lines = []
        if not lines:
            append_durably(self._journal, [json.dumps(identity).encode() + b"\n"])
        for line in lines[1:]:
            self.mark = line["mark"]
            self.written += len(line["keys"])
            self.problems |= line["problems"]
            self.lost.update(line["lost"])
            self.seen.update(map(_digest, [*line["keys"], *line["problems"]]))

    def _lines(self) -> list[Any]:
        """Return the whole lines of the journal; cut off a torn one."""
        lines: list[Any] = []
        if self._journal.exists():
            with self._journal.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        file.seek(-len(line), os.SEEK_END)
                        file.truncate()
                        break
                    lines.append(json.loads(line))
        return lines

    def note(self, keys: Sequence[str], mark: Any, problems: Mapping[str, str]) -> None:
        """Record a durable portion; marks may have NaN."""
        line = {"keys": keys, "mark": mark, "problems": problems, "lost": sorted(self.lost)}
        append_durably(self._journal, [json.dumps(line).encode() + b"\n"])
        self.mark = mark

    @contextmanager
    def begun_again_if_damaged(self) -> Iterator[None]:
        """Keep nothing for a repeated conversion if the check within finds a difference."""
        try:
            yield
        except CorruptStoreError:
            self.mark = None
            raise

    def clear(self) -> None:
        """Delete everything in the folder."""
        for path in self._journal.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def publish(self) -> None:
        """Rename the target into place; never replace anything."""
        if self.made.is_dir():
            _sync(self.made)
        _check_absent(self._target)
        self.made.rename(self._target)
        _sync(self._target.parent)
        self.clear()


def _check_absent(target: Path) -> None:
    if target.is_symlink() or target.exists():
        raise ConfigurationError(f"convert: {target} exists already; name another target, or delete it")


@contextmanager
def _staging(target: Path, identity: Mapping[str, Any]) -> Iterator[_Staging]:
    """Yield the locked folder for a target. It stays if a portion was written and the target was not published."""
    folder = target.parent / hidden(target.name, ".converting")
    with ExitStack() as stack, written(f": {target} was not written; run the same conversion again to continue"):
        if not target.parent.is_dir():
            raise ConfigurationError(f"convert: {target.parent} is not a folder")
        exists = target.is_symlink() or target.exists()
        if not (exists and not folder.exists()):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(f"convert: another process is writing {target}") from error
        if exists:  # a kill after the rename leaves an empty folder
            shutil.rmtree(folder, ignore_errors=True)
            _check_absent(target)
        staging = _Staging(folder, target, identity)
        try:
            yield staging
        except KeyboardInterrupt as error:
            if target.exists():
                raise KeyboardInterrupt(f"interrupted, but {target} is complete") from error
            raise
        finally:
            if staging.mark is None or target.exists():
                shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- checking -----------------------------------------------------------------------------------------


def _second(form: Format, path: Path) -> Second | None:
    """Return what another program reads of files, if it is installed and can."""
    try:
        second = form.second(path) if form.second else None
        if second is not None and second.partly and form.read:
            ours, theirs = ([item.key for item in items] for items in (form.read(path).items, second.items))
            if ours != theirs:  # such as an episode that the metadata of the data set do not count
                raise CorruptStoreError(f"it sees {len(theirs):,} items, and trajstore {len(ours):,}")
        return second
    except (ImportError, MissingDependencyError):
        return None
    except (TrajstoreError, *UNREADABLE) as error:
        logger.warning("convert: %s: checked by trajstore alone, for another program cannot: %r", path, error)
        return None


def _check(stored: Callable[[], Iterable[Item]], form: Format, path: Path, result: Converted, written: bool) -> None:
    """Compare the items of a store with those of files, as the format's reader and then another program read them.

    Args:
        stored: returns the items of the store.
        form: the format of the files.
        path: of the files.
        result: gets the number of items, and the program.
        written: the files were made of the store, so they lack what the format cannot carry.

    Raises:
        CorruptStoreError: there is a difference, or the other program cannot read what was written; names the item.
    """
    lost = form.cannot_carry if written else ()
    seconds = [Second("", form.read(path).items) if form.read else None, _second(form, path)]
    unread: dict[str, str] = {}
    for second in filter(None, seconds):
        pairs = zip_longest(
            *((item for item in items if item.key not in result.problems) for items in (stored(), second.items))
        )
        by = f" by {second.by}" if second.by else ""
        compared = 0
        for item, copy in pairs:
            if item is None or copy is None:
                more = "more" if item is None else "fewer"
                raise CorruptStoreError(f"{result.target}: the check{by} found {more} items")
            try:
                theirs = copy.load()
            except TrajstoreError as error:
                if written or not second.partly:
                    raise
                unread[copy.key] = str(error)  # a program may be unable to read what it wrote
                continue
            if names := differences(item.load(), theirs, lost, partly=second.partly):
                raise CorruptStoreError(
                    f"{result.target}: {copy.key}: the check{by} found other values, or none, of {listed(names)}"
                )
            compared += 1
        if unread:
            logger.warning(
                "convert: %s: %d of %d items checked by trajstore alone, because %s cannot read them: %s",
                *(path, len(unread), result.written, second.by, listed([*unread.values()], 1)),
            )
        result.checked = max(result.checked or 0, compared)
        result.checked_by += (second.by,) if second.by and compared else ()


def differences(
    one: AnyTrajectory, other: AnyTrajectory, lost: Sequence[str] = (), *, partly: bool = False
) -> list[str]:
    """Return the names of the fields in which two trajectories differ, without those that a format loses.

    NaN equals itself; dtypes must be equal.

    Args:
        one: a trajectory.
        other: another one.
        lost: names of fields, as ``Format.cannot_carry`` has them.
        partly: the other has only some of the fields, and dtypes to which those of the first are converted.
    """
    first, second = dict(_leaves(one)), dict(_leaves(other))
    if partly:
        first = {name: _as(first[name], value) for name, value in second.items() if name in first}
    return sorted(
        name
        for name in first.keys() | second.keys()
        if _field_of(name, lost) is None
        and not (name in first and name in second and _equal(first[name], second[name]))
    )


def _field_of(name: str, fields_lost: Sequence[str]) -> str | None:
    """Return the lost field that a leaf is or is in."""
    return next((field for field in fields_lost if name == field or name.startswith(f"{field}.")), None)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            is_late = path == "metadata" and name in (GIVEN, RECORDED)
            yield from _leaves(item, LATE if is_late or inner == "notes" else inner)
    elif value is not None and value != "" and value != []:
        yield path, value


def _as(value: Any, like: Any) -> Any:
    return value.to(like.dtype) if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    known = ~one.isnan()
    return torch.equal(known, ~other.isnan()) and torch.equal(one[known], other[known])
