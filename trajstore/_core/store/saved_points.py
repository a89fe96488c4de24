"""Snapshots: named states of a store. Pins, saved points and heads that were left are snapshots.

A snapshot stores its entire visible state: ids, late values, and the saved points that led to it. It never changes.
Guarded like the catalog it belongs to. See docs/design/saved-points.md.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.columns.limits import MAX_GENERATION, MAX_ID
from trajstore._core.files.base import Buffer, Directory, EncodedFile, check_name, crc32_of
from trajstore._core.store.log_records import lie_in, natural, parse_ranges
from trajstore._core.store.sealed import seal, unseal
from trajstore._core.store.states import decode_state
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError

if TYPE_CHECKING:
    from trajstore._core.store.committed import Committed

PINS_FOLDER = "pins"

STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""A saved point: its step, and the visit in which it was saved. Without a visit: the point on the current line."""

ASIDE = re.compile(r"aside-(\d+)")
"""A head that was left."""

IN_UTF8 = "start Python with PYTHONUTF8=1, or choose another locale than LC_ALL=C"
"""Remedy where file names cannot be read or written."""

_LONGEST = 200  # bytes: file systems take 255, and ".json" or a state's suffix follows
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]")

STATE, _VALUES = ".state", ".values"

Kind = Literal["pin", "point", "aside"]


@dataclass(frozen=True, slots=True)
class SideFile:
    """A snapshot's additional file: its state, or its late values.

    Attributes:
        name: of the file.
        size: in bytes.
        crc32: of all its bytes.
    """

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named state of a store, without its values.

    Attributes:
        name: of the snapshot.
        ids: of its trajectories, as inclusive ranges ``[n, 2]``.
        generation: of the store when it was taken.
        visit: number of times that the store had gone to a snapshot before it was taken.
        line: names of the saved points that led to it, lowest step first, without its own.
        values: file with the late values; None if there were none.
        shards: numbers of the shards with its late values by row.
        step: of a saved point; None for others.
        state: file with the state of a saved point; None without one.
        ranks: of a saved point of a run, the number of ranks that save it together; None for a single store.
        left_for: of a head that was left, the snapshot to which the store went; None for others.
        crc32: of all bytes of its file.
    """

    name: str
    ids: npt.NDArray[np.int64]
    generation: int
    visit: int = 0
    line: tuple[str, ...] = ()
    values: SideFile | None = None
    shards: tuple[int, ...] = ()
    step: int | None = None
    state: SideFile | None = None
    ranks: int | None = None
    left_for: str | None = None
    crc32: int = 0

    @property
    def count(self) -> int:
        """Number of trajectories."""
        return int((self.ids[:, 1] - self.ids[:, 0] + 1).sum())

    @property
    def kind(self) -> Kind:
        """Whether it is a pin, a saved point, or a head that was left."""
        return "point" if self.step is not None else "pin" if self.left_for is None else "aside"

    @property
    def whole_line(self) -> tuple[str, ...]:
        """Names of the saved points that led to it, including its own."""
        return (*self.line, self.name) if self.step is not None else self.line

    @property
    def files(self) -> tuple[SideFile, ...]:
        """The files that it names."""
        return tuple(file for file in (self.values, self.state) if file is not None)


@dataclass(frozen=True, slots=True)
class SavedPoint:
    """A snapshot of a store, or of all stores of a run, as users see it.

    Attributes:
        step: of the model; 0 for a snapshot that is not a saved point.
        generation: of the store; of a run the highest.
        trajectories: their number.
        state_bytes: size of its state's file; 0 without one.
        ranks: number of ranks of a run that save it together; None for a single store.
        name: for ``go_to``, ``remove`` and ``open(pin=)``.
        kind: ``"point"``, ``"pin"``, or ``"aside"`` for a head that was left.
        on_line: whether it is a saved point of the current line.
        lacking: numbers of the ranks of a run without it; a run cannot go back to such a point.
    """

    step: int
    generation: int
    trajectories: int
    state_bytes: int
    ranks: int | None = None
    name: str = ""
    kind: Kind = "point"
    on_line: bool = True
    lacking: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has it."""
        return not self.lacking

    @staticmethod
    def of(head: Snapshot, on_line: bool = True) -> SavedPoint:
        """Return the user's view of a snapshot."""
        size = 0 if head.state is None else head.state.size
        return SavedPoint(
            head.step or 0, head.generation, head.count, size, head.ranks, head.name, head.kind, on_line=on_line
        )


def snapshots_of(catalog: Committed) -> list[SavedPoint]:
    """Return the saved points of a store's current line, lowest step first, and its other snapshots, by name."""
    line = catalog.points()
    names = {head.name for head in line}
    others = [SavedPoint.of(head, on_line=False) for head in catalog.snapshots() if head.name not in names]
    return [*map(SavedPoint.of, line), *others]


class Pins:
    """The snapshots of one directory, as of the last :meth:`load`.

    Attributes:
        heads: all of them, by name.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.heads: Mapping[str, Snapshot] = {}
        self._coming: dict[str, Snapshot] = {}

    def load(self, damaged: Callable[[CorruptStoreError], None] | None = None) -> None:
        """Reload all snapshots, without values and states.

        Args:
            damaged: called with the error of each damaged snapshot, which is then omitted.

        Raises:
            CorruptStoreError: one is damaged, and ``damaged`` is None.
        """
        heads: dict[str, Snapshot] = {}
        files, folders = self._directory.listing(PINS_FOLDER)
        for file in sorted([*files, *folders]):  # reading a folder in place of a file raises
            if not file.endswith(".json") or _name_in(file).startswith("."):  # hidden, e.g. by macOS
                continue
            try:
                data = self._directory.read(file)
                head = _head_of(self._parsed(file, data), _name_in(file), f"{self._directory.url}/{file}")
            except FileNotFoundError:
                continue
            except CorruptStoreError as error:
                if damaged is None:
                    raise
                damaged(error)
                continue
            heads[head.name] = replace(head, crc32=zlib.crc32(data))
        self.heads = dict(sorted(heads.items()))

    def _parsed(self, file: str, data: bytes) -> dict[str, Any]:
        source = f"{self._directory.url}/{file}"
        value = unseal("pin", data, source)
        if not isinstance(value, dict) or "ids" not in value:
            raise CorruptStoreError(f"{source}: does not name any trajectories; restore it from a copy")
        if any("\udc80" <= character <= "\udcff" for character in file):  # Python's escapes for undecodable bytes
            raise CorruptStoreError(f"{source!a}: this name cannot be read here; {IN_UTF8}")
        if value.get("name") != _name_in(file):
            raise CorruptStoreError(
                f"{source}: has the name {value.get('name')!r}, not that of its file; rename it to that, or delete it "
                "if it is a copy"
            )
        return value

    @property
    def url(self) -> str:
        """URL of the directory, for messages."""
        return self._directory.url

    def named(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, per id, whether any snapshot names it."""
        named = np.zeros(len(ids), np.bool_)
        for head in (*self.heads.values(), *self._coming.values()):
            named |= lie_in(ids, head.ids)
        return named

    def shards(self) -> list[int]:
        """Return the numbers of the shards with late values by row that any snapshot names."""
        heads = (*self.heads.values(), *self._coming.values())
        return sorted({number for head in heads for number in head.shards})

    def expect(self, head: Snapshot) -> None:
        """Count a snapshot that is being written as existing, beside an earlier one, until :meth:`arrived`."""
        self._coming[head.name] = head

    def arrived(self, name: str, head: Snapshot | None = None) -> None:
        """End :meth:`expect`: the snapshot was written; None if writing failed."""
        self._coming.pop(name, None)
        if head is not None:
            self.heads = dict(sorted({**self.heads, name: head}.items()))

    def details(self, name: str) -> dict[str, Any]:
        """Return the values in a snapshot's file.

        Raises:
            StoreNotFoundError: there is no such snapshot.
        """
        try:
            return self._parsed(pin_name(name), self._directory.read(pin_name(name)))
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"{self._directory.url}: no snapshot is called {name!r}") from error

    def is_unchanged(self, head: Snapshot) -> bool:
        """Return whether a snapshot is still as loaded: neither removed nor saved again."""
        try:
            return zlib.crc32(self._directory.read(pin_name(head.name))) == head.crc32
        except FileNotFoundError:
            return False

    # -- files of snapshots -----------------------------------------------------------------------

    def state_of(self, head: Snapshot) -> dict[str, Any]:
        """Return the state of a saved point; empty if it has none.

        Raises:
            CorruptStoreError: its file is missing or damaged.
        """
        return {} if head.state is None else decode_state(self.read(head.state), self._source(head.state))

    def values_of(self, head: Snapshot) -> Any:
        """Return the late values of a snapshot as JSON values; None if there are none.

        Raises:
            CorruptStoreError: its file is missing or damaged.
        """
        return None if head.values is None else unseal("values", self.read(head.values), self._source(head.values))

    def read(self, file: SideFile) -> bytes:
        """Return the bytes of a snapshot's file, verified by checksum.

        Raises:
            CorruptStoreError: it is missing or damaged.
        """
        source = self._source(file)
        try:
            data = self._directory.read(file.name)
        except FileNotFoundError as error:
            content = "state" if file.name.endswith(STATE) else "late values"
            raise CorruptStoreError(
                f"{source}: the {content} of a snapshot: missing; restore it from a copy"
            ) from error
        if len(data) != file.size or zlib.crc32(data) != file.crc32:
            raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
        return data

    def _source(self, file: SideFile) -> str:
        return f"{self._directory.url}/{file.name}"

    def unnamed_files(self) -> list[str]:
        """Return state and value files that no snapshot names, left by an interrupted writer."""
        named = {file.name for head in self.heads.values() for file in head.files}
        files, _ = self._directory.listing(PINS_FOLDER)
        return [file for file in files if file.endswith((STATE, _VALUES)) and file not in named]


def _head_of(value: Mapping[str, Any], name: str, source: str) -> Snapshot:
    """Return the validated snapshot in a file's value.

    Raises:
        CorruptStoreError: it is invalid.
    """
    ids = parse_ranges(value["ids"])
    try:
        step, ranks = (None if value.get(key) is None else natural(value[key]) for key in ("step", "ranks"))
        left_for, line = value.get("left_for"), value.get("line", [])
        if not all(isinstance(text, str) for text in (*line, left_for or "")):
            raise ValueError("line or left_for: not names")
        if (STEP.fullmatch(name) is None) != (step is None) or (ASIDE.fullmatch(name) is None) != (left_for is None):
            raise ValueError(f"{name!r}: not the name of such a snapshot")
        return Snapshot(
            name,
            ids,
            natural(value.get("generation", 0), MAX_GENERATION),
            natural(value.get("visit", 0), MAX_GENERATION),
            tuple(line),
            _side_file(value.get("values")),
            tuple(natural(number, MAX_ID // 2) for number in value.get("shards", ())),
            step,
            _side_file(value.get("state")),
            ranks,
            left_for,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{source}: {error}; restore it from a copy") from error


def _side_file(value: Any) -> SideFile | None:
    if value is None:
        return None
    name, size, crc = (value[key] for key in ("file", "size", "crc32"))
    if not isinstance(name, str) or check_name(name).split("/")[0] != PINS_FOLDER:
        raise ValueError(f"{name!r} is not in {PINS_FOLDER}/")
    return SideFile(name, natural(size), natural(crc, 0xFFFFFFFF))


def _name_in(file: str) -> str:
    return file.removeprefix(PINS_FOLDER + "/").removesuffix(".json")


def pin_name(name: str) -> str:
    """Return the name of a snapshot's file.

    Raises:
        UnsafeContentError: it would leave the folder.
    """
    return check_name(f"{PINS_FOLDER}/{name}.json")


def pin_file(name: str, value: Mapping[str, Any]) -> EncodedFile:
    """Return the file of a snapshot.

    Args:
        name: of the snapshot.
        value: further values in the file.
    """
    return EncodedFile(pin_name(name), [seal("pin", orjson.dumps({**value, "name": name}))])


def side_file(name: str, suffix: str, pieces: Sequence[Buffer]) -> tuple[EncodedFile, dict[str, Any]]:
    """Return another file of a snapshot, and its description for the snapshot's file.

    Its name is unique: saving a point again must not change the files of the earlier one.
    """
    file = EncodedFile(check_name(f"{PINS_FOLDER}/{name}.{uuid.uuid4().hex}{suffix}"), pieces)
    return file, {"file": file.name, "size": file.nbytes, "crc32": crc32_of(file.pieces)}


def values_file(name: str, values: Mapping[str, Any]) -> tuple[EncodedFile, dict[str, Any]]:
    """Return the file of a snapshot's late values, and its description; see :func:`side_file`."""
    return side_file(name, _VALUES, [seal("values", orjson.dumps(values))])


# -- names of snapshots ---------------------------------------------------------------------------


def point_name(step: int, visit: int | None = None) -> str:
    """Return the name of the saved point of a step; without a visit, the one on the current line."""
    return f"step-{step}" + ("" if visit is None else f".{visit}")


def aside_name(generation: int) -> str:
    """Return the name of the head left by the commit of a generation."""
    return f"aside-{generation}"


def by_number(name: str) -> list[str | int]:
    """Return a key that sorts names by their text, and numbers in them by value."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split("([0-9]+)", name))]


def check_pin_name(name: str) -> None:
    """Refuse an invalid name for a user's pin.

    Raises:
        ConfigurationError: it is not a valid file name, or is reserved for saved points or heads that were left.
    """
    fits = not name.startswith(".") and not _UNFIT.search(name)
    if not fits or not 0 < len(name.encode(errors="replace")) <= _LONGEST:
        raise ConfigurationError(
            f"pin {name[:80]!r}: must be the name of a file: at most {_LONGEST} bytes, no slashes or control "
            "characters, no dot at its beginning"
        )
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"pin {name[:80]!a}: names of files are {error.encoding} here; {IN_UTF8}") from error
    if STEP.fullmatch(name) or ASIDE.fullmatch(name):
        raise ConfigurationError(f"pin {name!r}: such names are reserved for saved points; choose another")
