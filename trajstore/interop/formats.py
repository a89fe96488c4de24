"""The parts that converters share: formats, items of a source, writers of JSON lines and Parquet files."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import orjson

from trajstore._core.buffer.reader import Reader
from trajstore._core.files.base import Buffer
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    MissingDependencyError,
    StoreNotFoundError,
    TrajstoreError,
    listed,
)
from trajstore.query.engine import pl
from trajstore.query.query import Query
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger("trajstore.interop")
"""The logger of all converters, whose repeated warnings a conversion drops."""

Row = dict[str, Any]

Encode = Callable[[Any, Mapping[str, Any]], Row]
"""Returns the row of a trajectory and its facts in the store."""

Kind = Literal["rollouts", "episodes"]

_ROWS = 256
"""Rows of a Parquet file that are read together."""

_PYTHONS = re.compile(rb"[0-9]{20}|NaN")
"""What may be an integer above 64 bits or NaN: Python writes both, and orjson rounds the one and refuses the other."""

_ARRAY = "; make lines of an array with: jq -c '.[]' FILE"


@dataclass(frozen=True, slots=True)
class Item:
    """One episode or rollout of a source.

    Attributes:
        key: names it in the source, e.g. ``"line 3"``.
        load: returns the trajectory, or what ``Format.choose`` makes of some; raises ``TrajstoreError`` or ``OSError``
            if it is damaged.
        done: part of the source's ``total`` that ends with this item.
        facts: of a store's trajectory: ``trajectory_id`` and ``committed``.
    """

    key: str
    load: Callable[[], Any]
    done: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """The items of a source.

    Attributes:
        items: in the order of the source; not loaded yet.
        total: size of the source, for progress.
    """

    items: Iterable[Item]
    total: int


class Writer(ABC):
    """Writes files of a format."""

    @abstractmethod
    def encode(self, trajectory: Any, facts: Mapping[str, Any]) -> Any:
        """Return the content of a trajectory as it is written.

        Args:
            trajectory: as a reader returns it.
            facts: its ``trajectory_id`` and ``committed`` in a store.

        Raises:
            InvalidTrajectoryError: the format cannot have this trajectory; says why.
        """

    @abstractmethod
    def append(self, encoded: Sequence[Any]) -> None:
        """Write a portion durably."""

    def finish(self) -> None:  # noqa: B027
        """Complete the files; by default, each portion is complete."""

    def close(self) -> None:  # noqa: B027
        """Close open files; by default, there are none."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The trajectories of a store that are converted.

    Attributes:
        reader: of the store.
        query: selects them.
    """

    reader: Reader
    query: Query


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, RuntimeError)
"""What torch, NumPy and other programs raise for files of another content than declared."""


@contextmanager
def unreadable(what: str, *more: type[Exception], kind: type[TrajstoreError] = CorruptStoreError) -> Iterator[None]:
    """Raise :data:`_UNREADABLE` and ``more`` errors of a block or, as a decorator, of a function as one of this kind.

    Args:
        what: beginning of the message, followed by the error.
        more: further errors.
        kind: of the error that is raised; those of trajstore, and a PermissionError, are raised as they are.
    """
    errors: tuple[type[Exception], ...] = (*_UNREADABLE, *more)
    try:
        yield
    except (TrajstoreError, PermissionError):
        raise
    except errors as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else repr(error)
        raise kind(f"{what}: {reason}") from error


@dataclass(frozen=True, slots=True)
class Format:
    """A format of other programs.

    Attributes:
        name: on the command line.
        kind: rollouts of agents, or episodes of steps.
        cannot_carry: fields of trajectories that are lost in these files; ``reward.description`` is a part of one, and
            ``late values`` those set by :func:`trajstore.annotate`.
        not_read: parts of these files that are lost in a store.
        write: makes a writer of (path, selection).
        read: reads a file or folder; None if the format can only be written.
        choose: returns what is written of some rollouts, a row for each item, and the numbers of rollouts that are left
            out by reason; None writes each.
        thoughts: rollouts are written in OpenAI's chat form, with what the model thought or without; None: as they are.
        carries: leaves of the fields in ``cannot_carry`` that are in these files all the same.
    """

    name: str
    kind: Kind
    cannot_carry: tuple[str, ...]
    not_read: tuple[str, ...]
    write: Callable[[Path, Selection], Writer]
    read: Callable[[Path], Source] | None = None
    choose: Callable[[Iterable[Item]], tuple[list[Item], Mapping[str, int]]] | None = None
    thoughts: bool | None = None
    carries: tuple[str, ...] = ()

    @property
    def one(self) -> str:
        """Name of an item of its files."""
        return "pair" if self.name == "dpo" else self.kind[:-1]


def optional(module: str, package: str) -> Any:
    """Return a module of a package in the extra ``convert``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(package, "convert") from error


def pyarrow_modules() -> Any:
    """Return pyarrow and its module of Parquet files, for metadata of columns, which Polars does not have."""
    return optional("pyarrow", "pyarrow"), optional("pyarrow.parquet", "pyarrow")


def append_durably(path: Path, pieces: Iterable[Buffer]) -> None:
    """Append to a file and wait until the disk has it."""
    with path.open("ab") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


class LinesWriter(Writer):
    """Writes JSON lines."""

    def __init__(self, path: Path, row_of: Encode) -> None:
        self._path = path
        self._row_of = row_of
        path.touch()

    def encode(self, trajectory: AnyTrajectory, facts: Mapping[str, Any]) -> bytes:
        return orjson.dumps(self._row_of(trajectory, facts)) + b"\n"

    def append(self, encoded: Sequence[bytes]) -> None:
        append_durably(self._path, encoded)


class PartsWriter(Writer):
    """Writes a folder of Parquet files, one for each portion."""

    def __init__(self, path: Path, row_of: Encode, schema: dict[str, Any]) -> None:
        self._path = path
        self._row_of = row_of
        self._schema = schema
        self._count = 0
        path.mkdir()

    def encode(self, trajectory: AnyTrajectory, facts: Mapping[str, Any]) -> Row:
        return self._row_of(trajectory, facts)

    def append(self, encoded: Sequence[Row]) -> None:
        part = BytesIO()  # Polars reports a full disk as one of its own errors
        pl.DataFrame(encoded, schema=self._schema).write_parquet(part)
        append_durably(self._path / f"part-{self._count:05d}.parquet", [part.getbuffer()])
        self._count += 1


def _load(trajectory_of: Callable[[Row], Any], row: Row) -> Any:
    """Return the trajectory of a row.

    Raises:
        TrajstoreError: the row has another layout.
    """
    with unreadable("has another layout", kind=ConfigurationError):
        return trajectory_of(row)


def damaged(key: str, reason: str, done: int) -> Item:
    """Return an item that cannot be loaded."""

    def load() -> AnyTrajectory:
        raise ConfigurationError(reason)

    return Item(key, load, done)


def files_below(folder: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix in a folder and below it, sorted, without hidden files and folders.

    macOS writes hidden files ``._NAME`` beside files on disks of other systems.
    """
    return [file for file in sorted(folder.rglob(f"*.{suffix}")) if not _is_hidden(file.relative_to(folder))]


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def json_of(text: str | bytes) -> Any:
    """Return the value of a JSON text; integers of any size are exact, and NaN is null.

    Raises:
        ValueError: it is not JSON.
    """
    content = text.encode() if isinstance(text, str) else text
    return orjson.loads(content) if _PYTHONS.search(content) is None else _python_json(content)


def _python_json(content: bytes) -> Any:
    def constant(name: str) -> None:
        if name != "NaN":
            raise ValueError(f"{name} is no number in JSON")

    try:
        return json.loads(content, parse_constant=constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_lines(path: Path, trajectory_of: Callable[[Row], AnyTrajectory]) -> Source:
    """Return the items of a file of JSON lines; empty lines are skipped."""

    def load(line: bytes) -> Any:
        try:
            row = json_of(line)
        except ValueError as error:
            raise ConfigurationError(f"is not JSON: {error}{_ARRAY if line[:1] == b'[' else ''}") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"is not a JSON object{_ARRAY if isinstance(row, list) else ''}")
        return _load(trajectory_of, row)

    def items() -> Iterator[Item]:
        done = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                done += len(line)
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if line:
                    yield Item(f"line {number}", lambda line=line: load(line), done)  # type: ignore[misc]

    if path.is_dir():
        raise ConfigurationError(f"{path}: is a folder, must be a file of JSON lines")
    return Source(items(), path.stat().st_size)


def _without_times(kind: Any) -> Any:
    """Return a type of Polars with dates as texts, and durations and times of day as whole numbers, all exact."""
    if kind.is_temporal():
        return pl.String() if isinstance(kind, pl.Date | pl.Datetime) else pl.Int64()
    if isinstance(kind, pl.List | pl.Array):
        inner = _without_times(kind.inner)
        return pl.List(inner) if isinstance(kind, pl.List) else pl.Array(inner, kind.size)
    if isinstance(kind, pl.Struct):
        return pl.Struct({name: _without_times(inner) for name, inner in kind.to_schema().items()})
    return type(kind)(kind.key, _without_times(kind.value)) if hasattr(kind, "key") else kind  # a map


def _plain(value: Any, kind: pl.DataType) -> Any:
    """Return a value of a Parquet column: JSON decoded, decimals as texts, structs without the keys that are null."""
    if value is None or value != value:  # pandas writes NaN for unknown numbers
        return None
    if kind.is_extension():
        return json_of(value) if kind.ext_name() == "arrow.json" else value  # type: ignore[attr-defined]
    if kind.is_decimal():
        return str(value)
    if isinstance(value, dict) and hasattr(kind, "key"):  # a map
        return {str(name): _plain(item, kind.value) for name, item in value.items()}  # type: ignore[attr-defined]
    if isinstance(value, dict):
        kinds = kind.to_schema()  # type: ignore[attr-defined]
        return {name: _plain(item, kinds[name]) for name, item in value.items() if item is not None}
    return [_plain(item, kind.inner) for item in value] if isinstance(value, list) else value  # type: ignore[attr-defined]


def _tables_in(path: Path) -> list[Path]:
    """Return a Parquet file, or the Parquet files in a folder and below it.

    Raises:
        StoreNotFoundError: there are none.
        ConfigurationError: there are Arrow files, as ``datasets`` saves.
    """
    if arrow := files_below(path, "arrow") if path.is_dir() else [path] * (path.suffix == ".arrow"):
        raise ConfigurationError(
            f"{path}: {listed(file.name for file in arrow)}: Arrow files are not read; write Parquet from the data set "
            "with Dataset.to_parquet"
        )
    files = files_below(path, "parquet") if path.is_dir() else [path]
    if not files:
        raise StoreNotFoundError(f"{path}: has no Parquet files")
    return files


def _frames(file: Path) -> Iterator[Any]:
    yield from pl.scan_parquet(file, glob=False).collect_batches(chunk_size=_ROWS, maintain_order=True)


def read_parquet(path: Path, trajectory_of: Callable[[Row], Any], plain: bool = False) -> Source:
    """Return the items of a Parquet file, or of the Parquet files in a folder and below it.

    Args:
        path: file or folder.
        trajectory_of: makes a trajectory of a row.
        plain: the values are of other programs: decode JSON, make texts of times, leave out the nulls of structs.
    """
    files = _tables_in(path)
    sizes = [file.stat().st_size for file in files]

    def load(row: Row, kinds: Mapping[str, pl.DataType]) -> Any:
        def made(row: Row) -> Any:
            return trajectory_of({name: _plain(value, kinds[name]) for name, value in row.items()} if plain else row)

        return _load(made, row)

    def items() -> Iterator[Item]:
        for at, file in enumerate(files):
            number, done = 0, sum(sizes[: at + 1])
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            try:
                for rows in _frames(file):
                    if plain:
                        rows = rows.cast({name: _without_times(kind) for name, kind in rows.schema.items()})
                    kinds = rows.schema
                    for row in rows.iter_rows(named=True):
                        yield Item(f"{name}: row {number}", lambda row=row, kinds=kinds: load(row, kinds), done)  # type: ignore[misc]
                        number += 1
            except pl.exceptions.PolarsError as error:
                yield damaged(f"{name}: rows from {number} on", f"are not Parquet: {error}", done)

    return Source(items(), sum(sizes))
