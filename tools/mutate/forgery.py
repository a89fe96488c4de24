"""Deliberate damage: misleading values, names, pickles and archives, with corrected checksums."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson

from tools.mutate import pickles
from tools.mutate.damage import Files
from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.files.opening import open_directory
from trajstore._core.formats.checksums import column_region
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.json_arrays import array_from_json, array_to_json
from trajstore._core.store.sealed import INDEX_NAME, LAYOUT, METADATA_NAME, metadata_json, seal, unseal
from trajstore.errors import TrajstoreError

NUMBERS = (-1, 0, 1, 2, 7, 255, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63))
NAMES = (
    *("../x", "../../x", "/etc/passwd", "shards/../../x", "shards//x", "shards/./x", "a\0b", "", ".", "..", "x" * 300),
    *("C:\\x", "..\\x", "shards", "~/x", "metadata.json", "trajectory_index.json", "writer.lock", "\ud7ff", "a\nb"),
)
_NAMED = {"file_names", "files", "name", "format", "model_weights_id", "weights", "trajectory_format", "store_id"}
"""Keys of values that name something."""
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, 1.5, -0.0, 1e308, "", "x", "AAAA", "x" * 5000),
    *([], {}, [[]], [None], {"": {}}),
)
_TEXTS = (
    b"[" * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"generation":NaN}',
    b'{"generation":1e999,"next_id":-0}',
    b'{"generation":' + b"9" * 400 + b"}",
    b'{"generation":1,"generation":2}',
    b'{"\\u0000":"\\ud800"}',
    b"[" + b"0," * 50_000 + b"0]",
    b'"' + b"x" * 100_000 + b'"',
    b"\xef\xbb\xbf{}",
    b"-",
    b"true",
)
_SPOILT = (TrajstoreError, ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, BadZipFile)
"""Errors of a second forgery that cannot parse the result of the first; it is skipped then."""


@dataclass(frozen=True)
class Document:
    """A JSON value in a file.

    Attributes:
        name: of the value; ends with that of the file.
        value: as it is stored, without its checksum.
        frame: returns the file with another body, JSON or not, under a correct checksum.
        encode: returns a body.
    """

    name: str
    value: Any
    frame: Callable[[bytes], bytes] = bytes
    encode: Callable[[Any], bytes] = orjson.dumps

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.name.rsplit(" ", 1)[-1]

    def write(self, root: Path, body: bytes | None = None) -> None:
        """Write the changed value, or another body, into the file."""
        (root / self.file).write_bytes(self.frame(self.encode(self.value) if body is None else body))


def forge(root: Path, files: Files, canary: Path, chance: random.Random) -> str:
    """Forge one or two parts of a directory with knowledge of the layout; return a description.

    Args:
        root: the directory of a store, or of another program.
        files: its contents.
        canary: a file that hostile pickles create if they run.
        chance: source of randomness.
    """
    ways = [_values, _values, _values, _values, _texts]
    if INDEX_NAME in files and _is_ours(files):
        ways += [_packed, _packed]
    if any(name.endswith((".pkl", ".pt", "zarr.json")) for name in files):
        ways += [_payload] * (3 if _is_ours(files) else 8)
    done = [chance.choice(ways)(root, files, canary, chance)]
    if chance.random() < 0.15:
        with suppress(*_SPOILT):
            done.append(chance.choice(ways)(root, _read(root, files), canary, chance))
    return ", ".join(done)


def _read(root: Path, files: Files) -> Files:
    return {name: (root / name).read_bytes() for name in files}


def _is_ours(files: Files) -> bool:
    try:
        values = orjson.loads(files[METADATA_NAME])
    except (KeyError, orjson.JSONDecodeError):
        return False
    return isinstance(values, dict) and values.get("layout") == LAYOUT


# -- documents ---------------------------------------------------------------------------------------


def documents(files: Files) -> list[Document]:
    """Return every JSON value of a directory, except damaged ones."""
    found: list[Document] = []
    for name in files:
        with suppress(*_SPOILT):
            found += _documents_of(name, files[name], _is_ours(files))
    return found


def _documents_of(name: str, data: bytes, ours: bool) -> Iterator[Document]:
    if name.startswith("log/"):
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines):
            yield Document(f"line {number} of {name}", orjson.loads(line[9:]), partial(_with_line, lines, number))
    elif ours and (name == INDEX_NAME or name.startswith("pins/")):
        kind = "snapshot" if name == INDEX_NAME else "pin"
        yield Document(name, unseal(kind, data, name), partial(seal, kind))
    elif name.endswith(".json") and not name.startswith("shards/"):
        value = orjson.loads(data)
        sealed = ours and name == METADATA_NAME
        if sealed:
            value.pop("crc32")
        yield Document(name, value, encode=metadata_json if sealed else orjson.dumps)


def _with_line(lines: list[bytes], number: int, body: bytes) -> bytes:
    return b"".join([*lines[:number], b"%08x %b\n" % (zlib.crc32(body), body), *lines[number + 1 :]])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


# -- values ------------------------------------------------------------------------------------------


def _values(root: Path, files: Files, canary: Path, chance: random.Random) -> str:
    """Replace one value, remove it, or repeat it; one in four is a name that leads elsewhere."""
    document = chance.choice(documents(files))
    value = document.value
    places = list(_places(value))
    if not places:
        return f"nothing to change in {document.name}"
    names = [place for place in places if _NAMED & set(place) and isinstance(_at(value, place), str)]
    is_name = bool(names) and chance.random() < 0.25
    place = chance.choice(names if is_name else places)
    holder, key = _at(value, place[:-1]), place[-1]
    old = holder[key]
    way = 1.0 if is_name else chance.random()
    where = f"{'.'.join(map(str, place))} in {document.name}"
    if way < 0.1:
        del holder[key]
        done = f"left out {where}"
    elif way < 0.2 and isinstance(holder, list):
        holder.insert(key, old)
        done = f"repeated {where}"
    else:
        holder[key] = new = chance.choice(NAMES) if is_name else _hostile(old, chance)
        done = f"{where} = {str(new)[:40]!r}"
    document.write(root)
    return done


def _hostile(old: Any, chance: random.Random) -> Any:
    if isinstance(old, int) and not isinstance(old, bool) and chance.random() < 0.7:
        return chance.choice((*NUMBERS, old + 1, old - 1, old * 2, old * 2**20 % 2**60, float(old), str(old)))
    if isinstance(old, str) and chance.random() < 0.4:
        return chance.choice(NAMES)
    if chance.random() < 0.05:
        deep: Any = 1
        for _ in range(200):
            deep = [deep]
        return deep
    return chance.choice((*_OTHERS, *NUMBERS))


def _texts(root: Path, files: Files, canary: Path, chance: random.Random) -> str:
    """Write a text that is hard to parse, with a correct checksum."""
    document = chance.choice(documents(files))
    text = chance.choice(_TEXTS)
    if isinstance(document.value, dict) and chance.random() < 0.2:  # every expected key, and one more
        depth = chance.choice((300, 900, 5_000))
        text = orjson.dumps(document.value)[:-1] + b',"more":' + b"[" * depth + b"]" * depth + b"}"
    document.write(root, text)
    return f"{document.name} = {text[:20]!r}...{text[-3:]!r}"


def _packed(root: Path, files: Files, canary: Path, chance: random.Random) -> str:
    """Change one number within a packed array of the snapshot."""
    value = unseal("snapshot", files[INDEX_NAME], INDEX_NAME)
    arrays = [
        p
        for p in _places(value)
        if isinstance(_at(value, p), dict) and set(_at(value, p)) == {"dtype", "shape", "data"}
    ]
    place = chance.choice(arrays)
    packed = _at(value, place)
    array = array_from_json(packed, packed["dtype"], len(packed["shape"]))
    where = f"{'.'.join(map(str, place))} of {INDEX_NAME}"
    if not array.size or chance.random() < 0.15:
        fewer = array[: max(len(array) - 1, 0)] if chance.random() < 0.5 else np.concatenate([array, array])
        _at(value, place[:-1])[place[-1]] = array_to_json(fewer)
        done = f"{len(fewer)} instead of {len(array)} in {where}"
    elif array.dtype.kind == "i":
        limits = np.iinfo(array.dtype)
        flat = array.reshape(-1)
        at = chance.randrange(len(flat))
        old = int(flat[at])
        new = chance.choice((*NUMBERS, old + 1, old - 1, old * 2, int(flat[chance.randrange(len(flat))])))
        flat[at] = min(max(new, int(limits.min)), int(limits.max))
        _at(value, place[:-1])[place[-1]] = array_to_json(array)
        done = f"element {at} = {int(flat[at])} in {where}"
    else:
        raw = bytearray(array.tobytes())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        _at(value, place[:-1])[place[-1]] = array_to_json(np.frombuffer(bytes(raw), array.dtype).reshape(array.shape))
        done = f"another byte in {where}"
    (root / INDEX_NAME).write_bytes(seal("snapshot", orjson.dumps(value)))
    return done


# -- payload -----------------------------------------------------------------------------------------


def _payload(root: Path, files: Files, canary: Path, chance: random.Random) -> str:
    """Replace a shard or trajectory file by a hostile one."""
    name = chance.choice([name for name in files if name.endswith((".pkl", ".pt", "zarr.json"))])
    data = files[name]

    def attack() -> bytes:
        return pickles.bomb(chance) if chance.randrange(3) == 0 else pickles.code(canary, chance)

    def program(old: bytes) -> bytes:
        return attack() if chance.randrange(2) else pickles.wrong_shape(old, chance)

    ways: dict[str, Callable[[], bytes]] = {"pickle": attack}
    if name.endswith("zarr.json"):
        ways = {"values": lambda: _zarr_document(data, chance)}
    elif name.endswith(".pkl"):
        ways["values"] = lambda: pickles.wrong_shape(data, chance)
    else:
        ways["zip"] = lambda: pickles.lying_zip(data, chance)
        ways["program"] = lambda: pickles.with_program(data, program)
        ways["documents"] = lambda: _other_documents(root, name, data, chance)
    what = chance.choice(list(ways))
    try:
        new = ways[what]()
    except _SPOILT:
        what, new = "pickle", attack()
    if _is_ours(files) and chance.random() < 0.8:
        with suppress(*_SPOILT):
            _approve(root, files, name, new)
            what += ", checksums made right"
    elif chance.random() < 0.5:
        new = new.ljust(len(data), b"\0")
    (root / name).write_bytes(new)
    return f"hostile {what}: {name}"


def _other_documents(root: Path, name: str, data: bytes, chance: random.Random) -> bytes:
    """Change a few characters of the JSON documents in a shard, also in names of fields."""
    catalog = Catalog.open(open_directory(root))
    manifest = next(one for _, one in catalog.shards.manifests() if one.files[0].name == name)
    column = next(at for at, spec in enumerate(manifest.schema.columns) if spec.name == DOCUMENT)
    start, stop = column_region(manifest, column)
    changed = bytearray(data)
    for _ in range(chance.randint(1, 2)):
        letters = [at for at in range(start, stop) if chr(changed[at]).isalpha()]
        at = chance.choice(letters) if letters and chance.random() < 0.7 else chance.randrange(start, stop)
        changed[at] = chance.choice(b"abmnrtx" if at in letters else b'"{}[]:,0-. ')
    return bytes(changed)


def _zarr_document(data: bytes, chance: random.Random) -> bytes:
    value = orjson.loads(data)
    for place in chance.sample(list(_places(value)), 1):
        _at(value, place[:-1])[place[-1]] = _hostile(_at(value, place), chance)
    return chance.choice((orjson.dumps(value), orjson.dumps(value), chance.choice(_TEXTS)))


def _approve(root: Path, files: Files, name: str, data: bytes) -> None:
    """Make the index accept ``data`` as the content of a shard's file."""
    catalog = Catalog.open(open_directory(root))
    row, manifest, number = next(
        (row, manifest, number)
        for row, manifest in catalog.shards.manifests()
        for number, file in enumerate(manifest.files)
        if file.name == name
    )
    columns = [column for column, place in enumerate(manifest.places) if place is not None and place.file == number]
    regions = {column: column_region(manifest, column) for column in columns}
    crc, position = 0, 0
    for start, stop in sorted(regions.values()):
        crc, position = zlib.crc32(data[position:start], crc), stop
    crc = zlib.crc32(data[position:], crc)
    column_crc32 = {column: zlib.crc32(data[start:stop]) for column, (start, stop) in regions.items()}
    for document in documents(files):
        shard = document.value.get("shard") if isinstance(document.value, dict) else None
        if isinstance(shard, dict) and shard["name"] == manifest.name:
            shard["files"][number][1:] = [len(data), crc]
            for column, value in column_crc32.items():
                shard["column_crc32"][column] = value
        elif document.file == INDEX_NAME:
            _approve_in_table(
                document.value["shards"], catalog.shards.number(row), number, len(data), crc, column_crc32
            )
        else:
            continue
        document.write(root)


def _approve_in_table(
    table: Any, shard: int, file: int, size: int, crc32: int, column_crc32: Mapping[int, int]
) -> None:
    rows = np.flatnonzero(array_from_json(table["numbers"], np.int64) == shard)
    if not len(rows):
        return
    family = table["families"][int(array_from_json(table["family"], np.int32)[rows[0]])]
    row = int(array_from_json(table["row"], np.int32)[rows[0]])
    for key, changes in (("sizes", {file: size}), ("crc32", {file: crc32}), ("column_crc32", column_crc32)):
        array = array_from_json(family[key], np.int64, 2)
        for column, value in changes.items():
            array[row, column] = value
        family[key] = array_to_json(array)
