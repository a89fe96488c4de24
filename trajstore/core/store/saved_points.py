"""Pins: files that each keep the trajectories of one moment readable. Saved points, and what a rollback set aside.

Guarded as the catalog that they belong to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.core.columns.limits import MAX_GENERATION
from trajstore.core.files.base import Buffer, Directory, EncodedFile, check_name
from trajstore.core.formats.base import crc32_of
from trajstore.core.store.log_records import id_ranges, lie_in, natural, parse_ranges
from trajstore.core.store.pin_names import ASIDE, IN_UTF8, STEP, aside_name
from trajstore.core.store.sealed import seal, unseal
from trajstore.core.store.states import decode_state
from trajstore.errors import CorruptStoreError, StoreNotFoundError

PINS_FOLDER = "pins"


@dataclass(frozen=True, slots=True)
class StateFile:
    """Where the state of a saved point lies.

    Attributes:
        name: of the file.
        size: in bytes.
        crc32: of all its bytes.
    """

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class PinHead:
    """What a pin says of itself.

    Attributes:
        name: of the pin.
        ids: of its trajectories, as inclusive ranges ``[n, 2]``.
        generation: of the store when it was made; of what a rollback set aside, that of the rollback.
        step: of a saved point; None for other pins.
        state: of a saved point that has one.
        back_to: step to which the rollback went that set this aside; None for other pins.
        ranks: of a saved point of a run, how many ranks save it together; None for one of a store by itself.
        deleted: of what a rollback set aside, whether it was told to delete that; then it is there only after a crash.
        crc32: of all bytes of its file.
    """

    name: str
    ids: npt.NDArray[np.int64]
    generation: int
    step: int | None = None
    state: StateFile | None = None
    back_to: int | None = None
    ranks: int | None = None
    deleted: bool = False
    crc32: int = 0

    @property
    def count(self) -> int:
        """Number of trajectories."""
        return int((self.ids[:, 1] - self.ids[:, 0] + 1).sum())

    @property
    def is_point(self) -> bool:
        """Whether it is a saved point, and no rollback has set it aside."""
        return self.step is not None and STEP.fullmatch(self.name) is not None

    @property
    def aside(self) -> str | None:
        """Of a saved point that a rollback has set aside, the name of what else it set aside."""
        match = ASIDE.fullmatch(self.name)
        return None if match is None or match[2] is None else aside_name(int(match[1]))


@dataclass(frozen=True, slots=True)
class SavedPoint:
    """A saved point of a store.

    Attributes:
        step: of the model.
        generation: of the store.
        trajectories: how many it names.
        state_bytes: of its state's file; 0 without one.
        ranks: how many ranks of a run save it together; None for one of a store by itself.
    """

    step: int
    generation: int
    trajectories: int
    state_bytes: int
    ranks: int | None = None

    @staticmethod
    def of(head: PinHead) -> SavedPoint:
        """Return what users see of a pin that is a saved point."""
        size = 0 if head.state is None else head.state.size
        return SavedPoint(head.step or 0, head.generation, head.count, size, head.ranks)


class Pins:
    """The pins of one directory, as they were when :meth:`load` read them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._heads: dict[str, PinHead] = {}
        self._coming: dict[str, tuple[npt.NDArray[np.int64], int]] = {}

    def load(self, damaged: Callable[[CorruptStoreError], None] | None = None) -> None:
        """Read all pins anew.

        Args:
            damaged: told of each that is damaged, which is left out then.

        Raises:
            CorruptStoreError: one is damaged, and nobody is to be told.
        """
        found: dict[str, PinHead] = {}
        files, folders = self._directory.listing(PINS_FOLDER)
        for file in sorted([*files, *folders]):  # a folder in place of a file is refused when it is read
            if not file.endswith(".json"):
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
            found[head.name] = replace(head, crc32=zlib.crc32(data))
        self._heads = found

    def _parsed(self, file: str, data: bytes) -> dict[str, Any]:
        source = f"{self._directory.url}/{file}"
        value = unseal("pin", data, source)
        if not isinstance(value, dict) or "ids" not in value:
            raise CorruptStoreError(f"{source}: does not name any trajectories; restore it from a copy")
        if any("\udc80" <= character <= "\udcff" for character in file):  # how Python says bytes that it cannot decode
            raise CorruptStoreError(f"{source!a}: this name cannot be read here; {IN_UTF8}")
        if value.get("name") != _name_in(file):
            raise CorruptStoreError(f"{source}: is the pin {value.get('name')!r}; restore it from a copy")
        return value

    @property
    def url(self) -> str:
        """Of the directory, for messages."""
        return self._directory.url

    @property
    def names(self) -> list[str]:
        """Names of all pins."""
        return list(self._heads)

    @property
    def heads(self) -> Mapping[str, PinHead]:
        """What each pin says of itself, by name."""
        return self._heads

    def named(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, per id, whether any pin names it."""
        named = np.zeros(len(ids), np.bool_)
        coming = (ranges for ranges, _ in self._coming.values())
        for ranges in (*(head.ids for head in self._heads.values()), *coming):
            named |= lie_in(ids, ranges)
        return named

    def generations(self) -> list[int]:
        """Return the generations to which the store can go back: those that pins show."""
        # What a rollback set aside is the state before it: that has the values which the rollback took back.
        shown = [head.generation - (head.back_to is not None) for head in self._heads.values()]
        return shown + [generation for _, generation in self._coming.values()]

    def expect(self, name: str, ids: npt.NDArray[np.int64], generation: int) -> None:
        """Count a pin that is about to be written as one that is there, until :meth:`arrived`."""
        self._coming[name] = id_ranges(ids), generation

    def arrived(self, name: str) -> None:
        """A pin was written, or will not be."""
        self._coming.pop(name, None)

    def ranges(self, name: str) -> npt.NDArray[np.int64]:
        """Return the ids that a pin names, as inclusive ranges ``[n, 2]``.

        Raises:
            StoreNotFoundError: there is no such pin.
        """
        if name not in self._heads:
            raise StoreNotFoundError(
                f"{self._directory.url}: no pin is called {name!r}; there are {sorted(self._heads)}"
            )
        return self._heads[name].ids

    def state(self, name: str) -> dict[str, Any]:
        """Return what the file of a pin says.

        Raises:
            StoreNotFoundError: there is no such pin.
        """
        try:
            return self._parsed(pin_name(name), self._directory.read(pin_name(name)))
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"{self._directory.url}: no pin is called {name!r}") from error

    # -- saved points -----------------------------------------------------------------------------

    def state_of(self, head: PinHead) -> dict[str, Any]:
        """Return the state that was saved with a point; empty if none was.

        Raises:
            CorruptStoreError: its file is missing or damaged.
        """
        return {} if head.state is None else decode_state(self.read_state(head.state), self._source(head.state))

    def read_state(self, state: StateFile) -> bytes:
        """Return the bytes of a state's file, compared with their checksum.

        Raises:
            CorruptStoreError: it is missing or damaged.
        """
        source = self._source(state)
        try:
            data = self._directory.read(state.name)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"{source}: the state of a saved point is missing; restore it from a copy"
            ) from error
        if len(data) != state.size or zlib.crc32(data) != state.crc32:
            raise CorruptStoreError(f"{source}: the checksum does not fit the content; restore it from a copy")
        return data

    def _source(self, state: StateFile) -> str:
        return f"{self._directory.url}/{state.name}"

    def unnamed_states(self) -> list[str]:
        """Return the state files that no pin names; an interrupted writer left them."""
        named = {head.state.name for head in self._heads.values() if head.state is not None}
        files, _ = self._directory.listing(PINS_FOLDER)
        return [file for file in files if file.endswith(STATE_SUFFIX) and file not in named]


STATE_SUFFIX = ".state"


def _head_of(value: Mapping[str, Any], name: str, source: str) -> PinHead:
    """Return what the file of a pin says, checked.

    Raises:
        CorruptStoreError: it makes no sense.
    """
    ids = parse_ranges(value["ids"])
    try:
        step = None if value.get("step") is None else natural(value["step"])
        back_to = None if value.get("back_to") is None else natural(value["back_to"])
        ranks = None if value.get("ranks") is None else natural(value["ranks"])
        generation = natural(value.get("generation", 0), MAX_GENERATION)
        state = None
        if value.get("state") is not None:
            file, size, crc = (value["state"][key] for key in ("file", "size", "crc32"))
            if not isinstance(file, str) or check_name(file).split("/")[0] != PINS_FOLDER:
                raise ValueError(f"state: {file!r} is not in {PINS_FOLDER}/")
            state = StateFile(file, natural(size), natural(crc, 0xFFFFFFFF))
        if step is None and back_to is None:
            return PinHead(name, ids, generation)
        deleted = value.get("deleted", False)
        if not isinstance(deleted, bool):
            raise ValueError(f"deleted: {deleted!r} is neither true nor false")
        return PinHead(name, ids, generation, step, state, back_to, ranks, deleted and back_to is not None)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{source}: {error}; restore it from a copy") from error


def _name_in(file: str) -> str:
    return file.removeprefix(PINS_FOLDER + "/").removesuffix(".json")


def pin_name(name: str) -> str:
    """Return the name of a pin's file.

    Raises:
        UnsafeContentError: it would lie elsewhere.
    """
    return check_name(f"{PINS_FOLDER}/{name}.json")


def pin_file(name: str, ids: npt.NDArray[np.int64], generation: int, **state: Any) -> EncodedFile:
    """Return the file that pins trajectories under a name.

    Args:
        name: of the pin.
        ids: of the trajectories, ascending.
        generation: of the store.
        state: saved with it.
    """
    return _file(name, {**state, "name": name, "generation": generation, "ids": id_ranges(ids).tolist()})


def renamed_pin(value: Mapping[str, Any], name: str) -> EncodedFile:
    """Return the file of a pin under another name.

    Args:
        value: what its file says.
        name: the other name.
    """
    return _file(name, {**value, "name": name})


def _file(name: str, value: Mapping[str, Any]) -> EncodedFile:
    return EncodedFile(pin_name(name), [seal("pin", orjson.dumps(value))])


def state_file(name: str, unique: str, pieces: Sequence[Buffer]) -> tuple[EncodedFile, dict[str, Any]]:
    """Return the file of a saved point's state, and what the pin says of it.

    Args:
        name: of the pin.
        unique: part of the file's name; a point that is saved again must not touch the state of the earlier one.
        pieces: of the file.
    """
    file = EncodedFile(check_name(f"{PINS_FOLDER}/{name}.{unique}{STATE_SUFFIX}"), pieces)
    return file, {"file": file.name, "size": file.nbytes, "crc32": crc32_of(pieces)}
