"""Contents of an RLinf directory: from its two JSON files or, if damaged, from its trajectory files.

RLinf writes both files in place, so a killed process may leave either torn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore._core.files.base import Directory
from trajstore._core.reading.rlinf_file import RLinfFile
from trajstore._core.store.lost_records import Damage
from trajstore._core.store.rlinf_layout import INDEX_NAMES, SUFFIXES, RLinfEntry, parse_index, parse_metadata
from trajstore._core.store.sealed import FROM_A_COPY, METADATA_NAME, without_advice
from trajstore.errors import CorruptStoreError, StoreError, StoreNotFoundError, UnsafeContentError

_FILE = re.compile(rf"trajectory_(\d{{1,18}})_(.*)\.({'|'.join(SUFFIXES)})", re.DOTALL)

_OTHERWISE = "; strict=False, and `trajstore repair`, work {} out again from {}"


@dataclass
class RLinfContents:
    """Contents of an RLinf directory.

    Attributes:
        metadata: RLinf's ``metadata.json``, or a reconstruction if it is damaged.
        entries: the trajectories, in index order.
        damage: damaged JSON files, and the trajectory files that are unusable as a result.
    """

    metadata: Mapping[str, Any]
    entries: list[RLinfEntry]
    damage: list[Damage] = field(default_factory=list)


def read_contents(directory: Directory, *, lenient: bool) -> RLinfContents:
    """Read metadata and index; ``lenient`` reconstructs damaged or missing ones.

    Raises:
        StoreNotFoundError: metadata or index is absent (``lenient``: and all trajectory files too).
        CorruptStoreError: one of them is torn, or not RLinf's (``lenient``: the same).
        UnsafeContentError: a file name points outside the directory.
    """
    contents = RLinfContents({}, [])
    try:
        contents.entries = _read_index(directory)
    except (CorruptStoreError, StoreNotFoundError) as error:
        names = sorted(name for name in directory.names() if _FILE.fullmatch(name))
        if not lenient or not names:
            raise _with_advice(error, "it", "the trajectory files") if names else error from None
        source = f"{directory.url}/{INDEX_NAMES[0]}"
        contents.damage.append(_damage(error, source, "worked out again from the trajectory files"))
        _take_files(directory, names, contents)
    try:
        contents.metadata = _read_metadata(directory)
    except (CorruptStoreError, StoreNotFoundError) as error:
        if not lenient:
            raise _with_advice(error, "all of it but the seed", "the rest") from None
        source = f"{directory.url}/{METADATA_NAME}"
        contents.damage.append(_damage(error, source, "worked out again from the rest; the seed is lost"))
        contents.metadata = _metadata_of(contents.entries, directory)
    return contents


def _read_metadata(directory: Directory) -> dict[str, Any]:
    source = f"{directory.url}/{METADATA_NAME}"
    try:
        data = directory.read(METADATA_NAME)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"Metadata not found at {source}") from error
    return parse_metadata(data, source)


def _read_index(directory: Directory) -> list[RLinfEntry]:
    for name in INDEX_NAMES:
        try:
            data = directory.read(name)
        except FileNotFoundError:
            continue
        return parse_index(data, f"{directory.url}/{name}")
    raise StoreNotFoundError(f"Trajectory index not found at {directory.url}/{INDEX_NAMES[0]}")


def _with_advice(error: StoreError, what: str, source: str) -> StoreError:
    text = str(error)
    return type(error)(f"{text}{'' if text.endswith(FROM_A_COPY) else FROM_A_COPY}{_OTHERWISE.format(what, source)}")


def _damage(error: StoreError, source: str, outcome: str) -> Damage:
    absent = isinstance(error, StoreNotFoundError)
    return Damage(f"{f'{source}: missing' if absent else without_advice(str(error))} ({outcome})")


def _take_files(directory: Directory, names: list[str], found: RLinfContents) -> None:
    """Build the entries from the trajectory files; report unreadable ones with their ids."""
    seen: dict[int, str] = {}
    for name in sorted(names, key=_id_of):
        number = _id_of(name)
        try:
            extent, header = _described(directory, name)
            length, weights = int(header.get("max_episode_length") or 0), _parts(name)[1]
            entry = RLinfEntry(number, extent[0] * extent[1], extent, length, weights)
        except (CorruptStoreError, UnsafeContentError) as error:
            found.damage.append(Damage(str(error), ((number, number),)))
            continue
        except (TypeError, ValueError, OverflowError) as error:
            found.damage.append(Damage(f"{directory.url}/{name}: {error}", ((number, number),)))
            continue
        if number in seen:  # RLinf numbers from 0 again after a restart
            text = f"left out: {seen[number]} has the id {number} too, and it is unknown which is the later one"
            found.damage.append(Damage(f"{directory.url}/{name}: {text}"))
            continue
        seen[number] = name
        found.entries.append(entry)


def _described(directory: Directory, name: str) -> tuple[tuple[int, int], dict[str, Any]]:
    file = RLinfFile(directory, name)
    return (file.content.extent.steps, file.content.extent.batch), file.fields


def _metadata_of(entries: list[RLinfEntry], directory: Directory) -> dict[str, Any]:
    suffixes = Counter(_parts(name)[2] for name in directory.names() if _FILE.fullmatch(name))
    return {
        "trajectory_format": suffixes.most_common(1)[0][0] if suffixes else SUFFIXES[0],
        "trajectory_counter": max((entry.trajectory_id for entry in entries), default=-1) + 1,
    }


def _parts(name: str) -> tuple[str, str, str]:
    match = _FILE.fullmatch(name)
    return ("", "", "") if match is None else (match[1], match[2], match[3])


def _id_of(name: str) -> int:
    return int(_parts(name)[0])
