"""Checkpoints inside a store: files that each name the trajectories of one generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.errors import CorruptStoreError, StoreNotFoundError
from trajstore.files.base import Directory, EncodedFile, check_name
from trajstore.store.index import lie_in
from trajstore.store.log_records import parse_ranges
from trajstore.store.sealed import seal, unseal

PINS_FOLDER = "pins"


class Pins:
    """The pins of one directory, as they were when :meth:`load` read them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._ranges: dict[str, npt.NDArray[np.int64]] = {}

    def load(self) -> None:
        """Read all pins anew.

        Raises:
            CorruptStoreError: one is damaged.
        """
        found: dict[str, npt.NDArray[np.int64]] = {}
        files, folders = self._directory.listing(PINS_FOLDER)
        for name in sorted([*files, *folders]):  # a folder in place of a file is refused when it is read
            if not name.endswith(".json"):
                continue
            try:
                value = self._read(name)
            except FileNotFoundError:
                continue
            found[_name_in(name)] = parse_ranges(value["ids"])
        self._ranges = found

    def _read(self, file: str) -> dict[str, Any]:
        source = f"{self._directory.url}/{file}"
        value = unseal("pin", self._directory.read(file), source)
        if not isinstance(value, dict) or "ids" not in value:
            raise CorruptStoreError(f"{source}: does not name any trajectories; restore it from a copy")
        if value.get("name", _name_in(file)) != _name_in(file):  # pins of early versions do not say it
            raise CorruptStoreError(f"{source}: is the pin {value['name']!r}; restore it from a copy")
        return value

    @property
    def names(self) -> list[str]:
        """Names of all pins."""
        return list(self._ranges)

    def name(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, per id, whether any pin names it."""
        named = np.zeros(len(ids), np.bool_)
        for ranges in self._ranges.values():
            named |= lie_in(ids, ranges)
        return named

    def ranges(self, name: str) -> npt.NDArray[np.int64]:
        """Return the ids that a pin names, as inclusive ranges ``[n, 2]``.

        Raises:
            StoreNotFoundError: there is no such pin.
        """
        if name not in self._ranges:
            raise StoreNotFoundError(
                f"{self._directory.url}: no pin is called {name!r}; there are {sorted(self._ranges)}"
            )
        return self._ranges[name]

    def state(self, name: str) -> dict[str, Any]:
        """Return what was saved with a pin.

        Raises:
            StoreNotFoundError: there is no such pin.
        """
        try:
            return self._read(pin_name(name))
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"{self._directory.url}: no pin is called {name!r}") from error


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
    breaks = np.flatnonzero(np.diff(ids) != 1)
    lows, highs = (
        ids[np.append(0, breaks + 1)] if len(ids) else ids,
        ids[np.append(breaks, len(ids) - 1)] if len(ids) else ids,
    )
    body = orjson.dumps(
        {
            **state,
            "name": name,
            "generation": generation,
            "ids": [[int(a), int(b)] for a, b in zip(lows, highs, strict=True)],
        }
    )
    return EncodedFile(pin_name(name), [seal("pin", body)])
