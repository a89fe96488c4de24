"""Convert stores to files of other programs, and such files to stores.

A source yields items with stable keys, and a writer writes them in portions, in a hidden, locked folder beside the
target, which is renamed once complete. A killed conversion leaves that folder, which the next one deletes.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from trajstore._core.base.arguments import one_of, text
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.facts import GIVEN, RECORDED
from trajstore._core.columns.portions import portions
from trajstore._core.columns.steps import NothingToStoreError
from trajstore._core.files.folders import claimed, hidden
from trajstore._core.files.held import HeldFolder, check_path
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import local_target, nested, open_directory
from trajstore._core.formats import FORMATS as SHARD_FORMATS
from trajstore._core.reading.contents import Contents
from trajstore._core.store.run_ids import own_id, shown_id, written_id
from trajstore.errors import (
    ConfigurationError,
    InvalidTrajectoryError,
    StoreNotFoundError,
    TrajstoreError,
    counted,
    listed,
    written,
)
from trajstore.interop.chat_form import in_chat_form
from trajstore.interop.episodes import Joiner, Part
from trajstore.interop.formats import Format, Item, Selection, Source, Writer, damaged, logger
from trajstore.operations.opening import open_readable
from trajstore.operations.verification import Progress
from trajstore.trajectory import AnyTrajectory, Trajectory

_MODULES = {
    **dict.fromkeys(("jsonl", "parquet"), "rollouts"),
    **dict.fromkeys(("chat", "trl", "verl", "dpo", "kto"), "chats"),
    "lerobot": "lerobot",
}

FORMATS = tuple(_MODULES)
"""Names of the formats."""

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
        left_out: number of trajectories of the other kind.
        not_chosen: numbers of rollouts that were left out by their outcomes, by reason.
        changed: numbers of messages that were put into OpenAI's chat form, and of what has no place there.
        problems: reason by key for each item that was not written.
        damage: damage of a store that hides an unknown set of trajectories; None if there is none.
    """

    target: str
    cannot_carry: tuple[str, ...]
    written: int = 0
    lost: list[str] = field(default_factory=list)
    left_out: int = 0
    not_chosen: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    damage: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out because of damage."""
        return not self.problems and self.damage is None

    def reasons(self) -> list[str]:
        """Return a line for each reason why items were left out, with their number and the first ones."""
        keys = defaultdict(list)
        for key, why in self.problems.items():
            keys[why].append(key)
        lines = []
        for why, of in keys.items():
            first = "; ".join(of[:3]) + "; ..." * (len(of) > 3)
            lines.append(f"{len(of):,} were left out ({first}): {why}" if of[1:] else f"{first} was left out: {why}")
        return lines


@contextmanager
def _saying_once() -> Iterator[None]:
    """Drop warnings that repeat an earlier one: many items have the same fault."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@_saying_once()
def convert_to(
    source: str | Path,
    target: str | Path,
    format_name: str,
    *,
    where: str | None = None,
    pin: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write the rollouts or episodes of a store, checkpoint or run directory as files of another program.

    They are written oldest first. Unreadable ones are named and left out. The target appears once complete.

    Args:
        source: path or URL.
        target: must not exist; its folder must.
        format_name: one of :data:`FORMATS`.
        where: SQL condition on facts; None converts all.
        pin: convert the trajectories of this pin instead of the present ones.
        progress: called with (done, total) trajectories.

    Raises:
        ConfigurationError: the target exists, is a URL, or is in the source; the format is unknown; the condition is
            wrong, or nothing matches it; or no item could be converted.
        MissingDependencyError: an optional package is not installed.
        StoreLockedError: another process makes the same target; names it.
        TrajstoreError: the source cannot be opened.
        StoreWriteError: the target cannot be written.
    """
    for name, value in (("where", where), ("pin", pin)):
        if value is not None:
            text(name, value)
    form = format_named(format_name)
    path = local_target("convert", target)
    if nested(LocalDirectory(path), open_directory(source)):
        raise ConfigurationError(f"convert: {path} is in the source; name another target")
    result = Converted(str(path), form.cannot_carry)
    reader, result.damage = open_readable(source, pin, verify_shards=True)
    with reader, _staging(path) as made:
        query = reader.query() if where is None else reader.query().where(where)
        found = query.select("trajectory_id", "kind", "committed").rows()
        if where is not None and not found:
            raise ConfigurationError(
                f"convert: {source}: of {counted(len(reader), 'trajectory')}, none match where={where!r}"
            )
        wanted = [row for row in found if (row["kind"] == "agent") == (form.kind == "rollouts")]
        result.left_out = len(found) - len(wanted)
        if found and not wanted:
            other = "rollouts" if form.kind == "episodes" else "blocks of steps"
            raise ConfigurationError(f"convert: {source}: {form.name} takes {form.kind}; there are only {other}")

        counts: dict[str, Counter[str]] = defaultdict(Counter)

        def stored() -> Iterable[Item]:
            if form.kind == "episodes":
                there = frozenset(row["trajectory_id"] for row in found)
                return _episodes(reader, [row["trajectory_id"] for row in wanted], there)
            items = _rollouts(reader, wanted)
            return items if form.thoughts is None else _in_chat_form(items, form.thoughts, counts)

        chosen = None
        if form.choose is not None:
            chosen, result.not_chosen = form.choose(stored())
            if not chosen:
                left_out = [f"{count:,} {why}" for why, count in result.not_chosen.items()]
                raise ConfigurationError(f"convert: {source}: no {form.one}s: {listed(left_out, 9) or 'no rollouts'}")
        with closing(form.write(made, Selection(reader, query))) as writer:
            counts.clear()  # of what is written alone
            _write(form, Source(stored() if chosen is None else chosen, len(wanted)), writer, result, progress)
        if form.kind == "episodes" and LATE not in result.lost and _have_late_values(reader, wanted):
            result.lost.append(LATE)
        written_counts = [count for key, count in counts.items() if key not in result.problems]
        result.changed = sum(written_counts, Counter[str]())
    return result


@_saying_once()
def convert_from(
    source: str | Path,
    target: str | Path,
    format_name: str,
    *,
    trajectory_format: str = "pt",
    store_frames_once: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Make a store of files of another program.

    Damaged items are named and left out. Ids and commit times are new. The store appears once complete.

    Args:
        source: file or folder.
        target: folder; must not exist.
        format_name: one of :data:`FORMATS`.
        trajectory_format: format of the shards.
        store_frames_once: as for :class:`~trajstore.TrajectoryReplayBuffer`.
        progress: called with (done, total) bytes or items of the source.

    Raises:
        StoreNotFoundError: there is no such file or folder.
        ConfigurationError: the target exists or is a URL, the format is unknown or cannot be read, the source is
            empty, or no item could be converted; names the first.
        MissingDependencyError: an optional package is not installed.
        StoreLockedError: another process makes the same target; names it.
        StoreWriteError: the target cannot be written.
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
    with _staging(path) as made:
        with closing(_StoreWriter(made, trajectory_format, store_frames_once)) as writer:
            _write(form, items, writer, result, progress)
        if not result.written:
            raise ConfigurationError(f"{origin}: has no {form.kind}")
    return result


def _rollouts(reader: Reader, rows: Iterable[Mapping[str, Any]]) -> Iterator[Item]:
    """Yield the rollouts with these ids and commit times."""
    for done, row in enumerate(rows, start=1):
        number = row["trajectory_id"]
        facts = {"trajectory_id": written_id(number), "committed": row["committed"]}
        yield Item(f"trajectory {shown_id(number)}", partial(reader.get, number), done, facts)


def _episodes(reader: Reader, numbers: Iterable[int], there: Collection[int]) -> Iterator[Item]:
    """Yield the episodes of blocks, joined where they cross blocks.

    Args:
        reader: of the store.
        numbers: ids of the blocks.
        there: ids that were chosen, rollouts too: a block whose predecessor is none of them may begin in an episode.
    """
    joiner, done, gaps = Joiner(), 0, 0

    def items(parts: Iterable[Part]) -> Iterator[Item]:
        for part in parts:
            yield Item(part.key, lambda part=part: part.trajectory, done)  # type: ignore[misc]

    for done, number in enumerate(numbers, start=1):
        follows = own_id(number) == 0 or number - 1 in there
        gaps += not follows
        if not follows and not joiner.crosses:
            with suppress(TrajstoreError, OSError):
                if isinstance(left_out := reader.get(number - 1), Trajectory):
                    joiner.look(left_out)
        key = f"trajectory {shown_id(number)}"
        try:
            parts = list(joiner.add(key, cast(Trajectory, reader.get(number))))
        except (TrajstoreError, OSError) as error:
            yield damaged(key, str(error), done)
        else:
            yield from items(parts)
    yield from items(joiner.rest())
    if gaps and joiner.crosses:
        logger.warning(
            "convert: %s on blocks that are not there (evicted, or not chosen), in which episodes may have begun; if "
            "so, their returns and lengths are those of the rest",
            counted(gaps, "block", "follows", "follow"),
        )


def _have_late_values(reader: Reader, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether blocks were given late values; a reader returns them with rollouts alone."""

    def given(contents: Contents) -> bool:
        index, ids = contents.index, np.array([row["trajectory_id"] for row in rows], np.int64)
        return bool(index.notes) and any(index.given(position) for position in index.find_many(ids).tolist())

    return reader._live.locked(given)


def _in_chat_form(items: Iterable[Item], thoughts: bool, counts: dict[str, Counter[str]]) -> Iterator[Item]:
    """Yield items that load rollouts in OpenAI's chat form, and put what :func:`in_chat_form` counts by their keys."""

    def load(item: Item) -> Any:
        rollout, counts[item.key] = in_chat_form(item.load(), thoughts)
        return rollout

    for item in items:
        yield replace(item, load=partial(load, item))


# -- writing ------------------------------------------------------------------------------------------


def _write(form: Format, source: Source, writer: Writer, result: Converted, progress: Progress) -> None:
    """Write the items in portions; record those that cannot be written.

    Raises:
        ConfigurationError: none can be written; says why.
    """
    lost: set[str] = set()

    def encoded() -> Iterator[tuple[Any, int, int]]:
        for item in source.items:
            try:
                trajectory = item.load()
                for part in trajectory if isinstance(trajectory, tuple) else (trajectory,):
                    lost.update(_lost(part, result.cannot_carry, form.carries))
                yield writer.encode(trajectory, item.facts), _nbytes(trajectory), item.done
            except (TrajstoreError, OSError) as error:
                result.problems[item.key] = str(error)

    for portion, _ in portions(encoded(), _PORTION_BYTES, lambda entry: entry[1], most=_PORTION_ITEMS):
        writer.append([content for content, *_ in portion])
        result.written += len(portion)
        progress(portion[-1][2], source.total)
    if result.problems and not result.written:
        raise ConfigurationError(f"{result.target}: nothing could be converted: {listed(result.reasons(), 3)}")
    result.lost = [name for name in result.cannot_carry if name in lost]
    writer.finish()


def _lost(trajectory: AnyTrajectory, cannot_carry: Sequence[str], carries: Sequence[str]) -> Iterator[str]:
    """Yield the fields that a trajectory has and a format cannot carry."""
    names = [f"{name}." for name in _leaves(trajectory) if name not in carries]
    return (field for field in cannot_carry if any(name.startswith(f"{field}.") for name in names))


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the values that are not empty; :data:`LATE` for late ones."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            is_late = path == "metadata" and name in (GIVEN, RECORDED)
            yield from _leaves(item, LATE if is_late or inner == "notes" else inner)
    elif value is not None and value != "" and value != []:
        yield path


def _nbytes(value: Any) -> int:
    """Return the approximate size of a trajectory in memory."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if is_dataclass(value):
        return sum(_nbytes(getattr(value, item.name)) for item in fields(value))
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 8


class _StoreWriter(Writer):
    """Writes a store."""

    def __init__(self, path: Path, trajectory_format: str, once: bool) -> None:
        self._buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=path,
            trajectory_format=trajectory_format,
            enable_cache=False,
            store_frames_once=once,
        )

    def encode(self, trajectory: AnyTrajectory, facts: Mapping[str, Any]) -> AnyTrajectory:
        try:
            flatten(replace(trajectory, notes={}))
        except NothingToStoreError as error:
            raise InvalidTrajectoryError(str(error)) from error
        return trajectory

    def append(self, encoded: Sequence[AnyTrajectory]) -> None:
        self._buffer.add_trajectories(encoded)
        self._buffer.flush()

    def close(self) -> None:
        self._buffer.close()


def _check_absent(target: Path) -> None:
    if target.is_symlink() or target.exists():
        raise ConfigurationError(f"convert: {target} exists already; name another target, or delete it")


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Yield the path at which a target is made, in a locked hidden folder; rename it into place at the end."""
    folder = target.parent / hidden(target.name, ".converting")
    with written(f": {target} was not written; run the same conversion again"), ExitStack() as stack:
        if not target.parent.is_dir():
            raise ConfigurationError(f"convert: {target.parent} is not a folder; make it, or name another target")
        stack.enter_context(claimed(LocalDirectory(folder), target))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # also that of a killed conversion
        _check_absent(target)
        made = folder / target.name
        if made.exists():
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        try:
            yield made
            if made.is_dir():
                HeldFolder(made).sync()
            _check_absent(target)
            made.rename(target)
            HeldFolder(target.parent).sync()
        except KeyboardInterrupt as error:
            if target.exists():
                raise KeyboardInterrupt(f"interrupted, but {target} is complete") from error
            raise
