"""A store reader based only on ``docs/format.md``, with the standard library and numpy, without trajstore.

It shows that the page is complete and that trajstore follows it. Simple rather than fast.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

LAYOUT_VERSION = 1

_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class FormatError(Exception):
    """The directory violates the page."""


@dataclass
class Shard:
    """A shard's description, from the log or from the shard table."""

    format: str
    schema: dict[str, Any]
    files: list[tuple[str, int, int]]
    places: list[tuple[int, int] | None]
    column_crc32: list[int | None]
    rows: list[int]
    nbytes: list[int]


@dataclass
class Entry:
    """An index entry; ``starts`` are first rows by axis. Unknown values: ``committed`` -1, others None."""

    number: int
    uuid: str
    extent: tuple[int, int, int, int]
    max_episode_length: int
    weights: str
    versions: tuple[int, int] | None
    shard: Shard
    starts: dict[int, int]
    committed: int
    facts: dict[str, Any] | None
    samples: int


@dataclass
class Column:
    """A trajectory's column: torch dtype name, shape of all rows, raw bytes."""

    axis: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Rows:
    """Location of a trajectory's values by row: shard, column, first row."""

    shard: Shard
    column: str
    start: int


@dataclass
class Store:
    """The newest state of a directory."""

    path: Path
    metadata: dict[str, Any]
    generation: int = 0
    next_id: int = 0
    schemas: list[dict[str, Any]] = field(default_factory=list)
    live: dict[int, Entry] = field(default_factory=dict)
    pinned: dict[int, Entry] = field(default_factory=dict)
    pins: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)


# -- JSON files ---------------------------------------------------------------------------------------


def read_metadata(data: bytes) -> dict[str, Any]:
    """Return the values of ``metadata.json``."""
    values: dict[str, Any] = json.loads(data)
    if values.get("layout") != "trajstore":
        raise FormatError("not a trajstore directory")
    if values["layout_version"] != LAYOUT_VERSION:
        raise FormatError(f"layout version {values['layout_version']}")
    crc32 = values.pop("crc32")
    compact = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    _compare(crc32, compact, "metadata.json")
    return values


def unseal(name: str, data: bytes) -> dict[str, Any]:
    """Return the body of a sealed file."""
    marker = b'"%b":' % name.encode()
    begin = data.find(marker) + len(marker)
    if not data.startswith(b'{"crc32":"') or begin < len(marker) or not data.endswith(b"}"):
        raise FormatError(f"not a sealed {name}")
    body = data[begin:-1]
    _compare(data[10:18].decode(), body, name)
    value: dict[str, Any] = json.loads(body)
    return value


def _compare(checksum: str, data: bytes, what: str) -> None:
    if checksum != f"{zlib.crc32(data):08x}":
        raise FormatError(f"{what}: checksum {checksum}, found {zlib.crc32(data):08x}")


def unpack(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return a packed array."""
    dtype, (count, *row) = np.dtype(value["dtype"]), value["shape"]
    streams = value["data"] if isinstance(value["data"], list) else [value["data"]]
    counts = [65536] * (len(streams) - 1)
    counts.append(count - sum(counts))
    return np.concatenate([_unpack_stream(*each, row, dtype) for each in zip(streams, counts, strict=True)])


def _unpack_stream(stream: str, count: int, row: list[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    data = zlib.decompress(base64.b64decode(stream))
    if dtype.kind in "Vf" or not count * math.prod(row):
        return np.frombuffer(data, dtype).reshape(count, *row)
    begin = 8 * math.prod(row)
    rows = np.frombuffer(data[:begin], "<i8").reshape(1, *row)
    if count > 1:
        width = (len(data) - begin) // ((count - 1) * math.prod(row))
        steps = np.frombuffer(data[begin:], f"<i{width}").reshape(count - 1, *row)
        rows = np.cumsum(np.concatenate([rows, steps], dtype=np.int64), axis=0)
    return rows.astype(dtype)


def unpack_texts(value: dict[str, Any]) -> list[str]:
    """Return the texts of a string table."""
    data, ends = unpack(value["bytes"]).tobytes(), unpack(value["ends"]).tolist()
    return [data[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]


# -- the log ------------------------------------------------------------------------------------------


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line (without line feed); None if invalid."""
    if line[8:9] != b" " or line[:8] != b"%08x" % zlib.crc32(line[9:]):
        return None
    record: dict[str, Any] = json.loads(line[9:])
    return record


def read_log(path: Path, generation: int) -> list[dict[str, Any]]:
    """Return the records after a generation."""
    segments = sorted(
        (int(file.stem), file)
        for file in (path / "log").glob("*.log")
        if len(file.stem) == 16 and file.stem.isascii() and file.stem.isdigit()
    )
    left = [
        file
        for place, (_, file) in enumerate(segments)
        if place + 1 == len(segments) or segments[place + 1][0] > generation + 1
    ]
    if left and int(left[0].stem) > generation + 1:
        raise FormatError("records are missing: begin again")
    lines = [line for file in left for line in _lines(file.read_bytes())]
    decoded = [decode_line(line) for line in lines]
    while decoded and decoded[-1] is None:
        decoded.pop()  # torn
    records = []
    for record in decoded:
        if record is None:
            raise FormatError("a damaged record")
        following = generation + len(records) + 1
        if record["generation"] <= generation or record in records:
            continue
        if record["generation"] != following:
            raise FormatError(f"generation {record['generation']} where {following} follows")
        records.append(record)
    return records


def _lines(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [*whole, rest + b"?"] if rest else whole  # a line without line feed is invalid


# -- opening ------------------------------------------------------------------------------------------


def open_store(path: Path) -> Store:
    """Return the state of a directory without an active writer (skips steps 1 and 6)."""
    store = Store(path, read_metadata((path / "metadata.json").read_bytes()))
    snapshot = unseal("snapshot", (path / "trajectory_index.json").read_bytes())
    store.generation, store.next_id = snapshot["generation"], snapshot["next_id"]
    for file in sorted((path / "pins").glob("[!.]*.json")):
        store.pins[file.stem] = unseal("pin", file.read_bytes())
    store.schemas = list(snapshot["shards"]["schemas"])
    table = _shard_table(snapshot["shards"])
    store.live = _entries(snapshot["live"], table)
    named = _named(store)
    store.pinned = {number: entry for number, entry in _entries(snapshot["pinned"], table).items() if number in named}
    store.notes = _notes(snapshot["notes"], table)
    for record in read_log(path, store.generation):
        _apply(store, record, named)
    return store


def _notes(value: dict[str, Any], table: list[Shard]) -> dict[int, dict[str, Any]]:
    """Return the latest values by id."""
    columns = {name: unpack(column).tolist() for name, column in value["columns"].items()}
    words, notes = unpack_texts(value["words"]), dict[int, dict[str, Any]]()
    for at, number in enumerate(columns["ids"]):
        name, kind = value["names"][columns["names"][at]]
        text, value_number = columns["texts"][at], columns["numbers"][at]
        given = (None if text < 0 else words[text]) if kind == "text" else None if isnan(value_number) else value_number
        if kind.startswith("rows "):
            row = columns["shards"][at]
            given = None if row < 0 else Rows(table[row], name, columns["starts"][at])
        notes.setdefault(number, {})[name] = given
    return notes


def _named(store: Store) -> set[int]:
    return {number for pin in store.pins.values() for number in ids_of(pin["ids"])}


def ids_of(ranges: list[list[int]]) -> list[int]:
    """Return the ids of ranges."""
    return [number for first, last in ranges for number in range(first, last + 1)]


def _shard_table(value: dict[str, Any]) -> list[Shard]:
    families = [
        {name: unpack(family[name]) for name in ("sizes", "crc32", "offsets", "column_crc32", "rows", "nbytes")}
        for family in value["families"]
    ]
    numbers, family_of, row_of = (unpack(value[name]).tolist() for name in ("numbers", "family", "row"))
    table = []
    for number, at, row in zip(numbers, family_of, row_of, strict=True):
        family = value["families"][at]
        of_row = {name: array[row].tolist() for name, array in families[at].items()}
        names = [name.replace("{name}", f"shard_{number:08d}") for name in family["file_names"]]
        table.append(
            Shard(
                family["format"],
                value["schemas"][family["schema"]],
                list(zip(names, of_row["sizes"], of_row["crc32"], strict=True)),
                [
                    None if offset == -1 else (file, offset)
                    for file, offset in zip(family["column_files"], of_row["offsets"], strict=True)
                ],
                [None if crc == -1 else crc for crc in of_row["column_crc32"]],
                of_row["rows"],
                of_row["nbytes"],
            )
        )
    return table


def _entries(value: dict[str, Any], table: list[Shard]) -> dict[int, Entry]:
    weights = unpack_texts(value["weights"])
    unpacked = {name: unpack(array) for name, array in value["columns"].items()}
    facts = {name: unpack(array).tolist() for name, array in value["facts"].items()}
    entries = {}
    for at, number in enumerate(unpacked["trajectory_id"].tolist()):
        low, high = (int(unpacked[name][at]) for name in ("version_low", "version_high"))
        fields = {name: int(array[at]) for name, array in unpacked.items() if name != "uuid"}
        extra = fields["start_extra"]
        entries[number] = Entry(
            number,
            unpacked["uuid"][at].tobytes().hex(),
            (fields["steps"], fields["batch"], fields["extra"], fields["document"]),
            fields["max_episode_length"],
            weights[fields["weights"]],
            None if low == -(1 << 63) else (low, high),
            table[fields["shard"]],
            {
                0: fields["start_samples"],
                1: extra,
                2: extra,
                3: extra,
                4: fields["start_document"],
                5: fields["start_samples"],
            },
            fields["committed"],
            _facts({name: column[at] for name, column in facts.items()}, weights),
            fields["num_samples"],
        )
    return entries


def _facts(of_one: dict[str, Any], texts: list[str]) -> dict[str, Any] | None:
    """Return a rollout's facts from the snapshot's numbers."""
    if not of_one.pop("agent", 0):
        return None
    known = {name: number for name, number in of_one.items() if number not in (-1, None) or name.startswith("reward_")}
    known = {name: number for name, number in known.items() if number == number}  # drops NaN
    known |= {name: texts[known[name]] for name in ("task", "data_id", "rollout_id", "session") if name in known}
    return known | ({"terminated": bool(known["terminated"])} if "terminated" in known else {})


def rows_on(axis: int, extent: tuple[int, int, int, int]) -> int:
    """Return a trajectory's number of rows on an axis."""
    first, batch, extra, document = extent
    return (first * batch, (first + extra) * batch, (first + extra) * batch, extra, document, first * batch)[axis]


def _starts(extents: list[tuple[int, int, int, int]]) -> list[dict[int, int]]:
    total = dict.fromkeys(range(6), 0)
    starts = []
    for extent in extents:
        starts.append(dict(total))
        for axis in total:
            total[axis] += rows_on(axis, extent)
    return starts


def _apply(store: Store, record: dict[str, Any], named: set[int]) -> None:
    store.generation = record["generation"]
    operation = record["operation"]
    if operation == "evict":
        for number in ids_of(record["ids"]):
            entry = store.live.pop(number, None)
            if entry is not None and number in named:
                store.pinned[number] = entry
        return
    if operation == "annotate":
        for name, values in record["values"].items():
            for number, value in zip(record["ids"], values, strict=True):
                store.notes.setdefault(number, {})[name] = value
        if "rows" in record:
            store.schemas += record["rows"]["schemas"]
            shard = _manifest(record["rows"]["shard"], store.schemas)
            starts = _starts([(*extent, 0) for extent in record["rows"]["extents"]])
            for number, start in zip(record["ids"], starts, strict=True):
                for name, _, _, axis in shard.schema["columns"]:
                    store.notes.setdefault(number, {})[name] = Rows(shard, name, start[axis])
        return
    if operation not in ("add", "rewrite"):
        raise FormatError(f"operation {operation!r}")
    store.schemas += record["schemas"]
    if operation == "rewrite":
        shard = _manifest(record["shard"], store.schemas)
        ids, extents = ids_of(record["ids"]), [tuple(extent) for extent in record["extents"]]
        for number, extent, starts in zip(ids, extents, _starts(extents), strict=True):
            for entries in (store.live, store.pinned):
                entry = entries.get(number)
                if entry is None:
                    continue
                if entry.extent != extent or entry.shard.schema != shard.schema:
                    raise FormatError("a trajectory is moved to where it is not")
                entry.shard, entry.starts = shard, starts
        return
    added: dict[int, Entry] = {}
    for addition in record["shards"]:
        entries = _added(addition["entries"], _manifest(addition["shard"], store.schemas), record["time"])
        if list(entries) != sorted(entries) or added.keys() & entries.keys():
            raise FormatError("the ids of a shard do not ascend, or two shards have the same")
        added |= entries
    if min(added) < store.next_id:
        raise FormatError(f"id {min(added)} was given before")
    store.live |= {number: added[number] for number in sorted(added)}
    store.next_id = max(added) + 1


def _added(record: dict[str, Any], shard: Shard, committed: int) -> dict[int, Entry]:
    """Return an added shard's trajectories by id."""
    ids, extents = ids_of(record["ids"]), [tuple(extent) for extent in record["extents"]]
    lists = record.get("facts")
    facts = [
        lists and {name: fact_values[at] for name, fact_values in lists.items() if fact_values[at] is not None}
        for at in range(len(ids))
    ]
    return {
        number: Entry(
            number,
            record["uuids"][32 * at : 32 * at + 32],
            extent,
            record["max_episode_length"][at],
            record["weights"][at],
            None if record["versions"][at] is None else (record["versions"][at][0], record["versions"][at][1]),
            shard,
            starts,
            committed,
            facts[at],
            record["valid"][at]
            if "valid" in record
            else extent[0] * extent[1]
            if shard.schema["kind"] == "step"
            else 1,
        )
        for at, (number, extent, starts) in enumerate(zip(ids, extents, _starts(extents), strict=True))
    }


def _manifest(value: dict[str, Any], schemas: list[dict[str, Any]]) -> Shard:
    schema = schemas[value["schema"]]
    plain = [count * row_bytes(column) for count, column in zip(value["rows"], schema["columns"], strict=True)]
    return Shard(
        value["format"],
        schema,
        [(name, size, crc) for name, size, crc in value["files"]],
        [None if place is None else (place[0], place[1]) for place in value["places"]],
        value["column_crc32"],
        value["rows"],
        value.get("nbytes", plain),
    )


# -- shards -------------------------------------------------------------------------------------------


def row_bytes(column: list[Any]) -> int:
    """Return the bytes per row of a schema's column."""
    _, dtype, row_shape, _ = column
    return int(np.prod(row_shape, dtype=np.int64)) * _SIZES[dtype]


def check_shard(path: Path, shard: Shard) -> None:
    """Check the sizes and all checksums of a shard."""
    for number, (name, size, checksum) in enumerate(shard.files):
        data = (path / checked_name(name)).read_bytes()
        if len(data) != size:
            raise FormatError(f"{name}: {len(data)} bytes, not {size}")
        outside = bytearray()
        position = 0
        for begin, column in sorted(_placed(shard, number)):
            end = begin + shard.nbytes[column]
            if zlib.crc32(data[begin:end]) != shard.column_crc32[column]:
                raise FormatError(f"{name}: column {column}")
            outside += data[position:begin]
            position = max(position, end)
        if zlib.crc32(bytes(outside + data[position:])) != checksum:
            raise FormatError(f"{name}: outside of the columns")


def _placed(shard: Shard, file: int) -> list[tuple[int, int]]:
    return [(place[1], at) for at, place in enumerate(shard.places) if place is not None and place[0] == file]


def checked_name(name: str) -> str:
    """Return a file's name if it stays within the directory."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable():
        raise FormatError(f"name {name!r}")
    return name


class _Label(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return lambda *_values: None

    def persistent_load(self, _identity: Any) -> None:
        return None


def read_label(path: Path, shard: Shard) -> dict[str, Any]:
    """Return the label of a shard, whose checksum fits."""
    file = path / checked_name(shard.files[0][0])
    if shard.format == "zarr":
        described = json.loads(file.read_bytes())["attributes"]
    elif shard.format == "pkl":
        described = _Plain(io.BytesIO(file.read_bytes())).load()
    else:
        with zipfile.ZipFile(file) as archive:
            described = _Label(io.BytesIO(archive.read("archive/data.pkl"))).load()
    label: dict[str, Any] | None = decode_line(described["label"].encode())
    if label is None:
        raise FormatError(f"{file}: the label's checksum does not fit")
    return label | {"extents": list(zip(*[iter(described["trajectories"])] * 4, strict=True))}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise FormatError(f"a pickle names {module}.{name}")


def read_columns(store: Store, entry: Entry, only: str | None = None) -> dict[str, Column]:
    """Return all columns of a trajectory, or a single one."""
    shard = entry.shard
    content = {}
    if shard.format == "pkl":
        content = _Plain(io.BytesIO((store.path / checked_name(shard.files[0][0])).read_bytes())).load()["columns"]
    columns = {}
    for at, column in enumerate(shard.schema["columns"]):
        name, dtype, row_shape, axis = column
        if only not in (None, name):
            continue
        width, rows, start = row_bytes(column), rows_on(axis, entry.extent), entry.starts[axis]
        packed = shard.schema["kind"] == "agent"
        read = _packed_rows if packed else _rows_once if axis == 5 else _stored_rows
        data = read(store.path, shard, content, at, start, rows)
        if len(data) != rows * width:
            raise FormatError(f"column {name}: {len(data)} bytes, not {rows * width}")
        columns[name] = Column(axis, dtype, (rows, *row_shape), data)
    return columns


def _stored_rows(path: Path, shard: Shard, content: dict[str, Any], at: int, start: int, rows: int) -> bytes:
    """Return rows that a shard has of its column ``at``; ``content`` has the columns of a pickle."""
    column, place = shard.schema["columns"][at], shard.places[at]
    width = 1 if shard.schema["kind"] == "agent" else row_bytes(column)
    if place is not None:
        with open(path / checked_name(shard.files[place[0]][0]), "rb") as file:
            file.seek(place[1] + start * width)
            return file.read(rows * width)
    if shard.format == "pkl":
        stored: bytes = content[column[0]]["data"][start * width : (start + rows) * width]
        return stored
    return _zarr_rows(path, shard, column[0], start, rows)


def _packed_rows(path: Path, shard: Shard, content: dict[str, Any], at: int, start: int, rows: int) -> bytes:
    """Return rows of a packed column."""
    name, dtype, _, _ = column = shard.schema["columns"][at]
    block = _stored_rows(path, shard, content, at, 0, shard.nbytes[at])
    runs, stored, width, number = np.frombuffer(block, "<i8", 4).tolist()
    ends = [0, *np.frombuffer(block, f"<u{number}", runs, 32).tolist()]
    sources = np.frombuffer(block, f"<i{number}", runs, 32 + runs * number).tolist()
    data = block[32 + 2 * runs * number :]
    if width == 0:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:stored].tolist()
        values = [bit.to_bytes(row_bytes(column), "little") for bit in bits]
    else:
        each = [data[row * abs(width) : (row + 1) * abs(width)] for row in range(stored)]
        values = [_widened(value, row_bytes(column), width < 0) for value in each]
    if ends[-1] != shard.rows[at]:
        raise FormatError(f"column {name} ({dtype}): its runs end at {ends[-1]}")
    result = []
    for begin, end, source in zip(ends, ends[1:], sources, strict=False):
        for row in range(max(begin, start), min(end, start + rows)):
            result.append(values[source + row - begin] if source >= 0 else values[-1 - source])
    return b"".join(result)


def _widened(value: bytes, nbytes: int, signed: bool) -> bytes:
    fill = b"\xff" if signed and value[-1] & 0x80 else b"\0"
    return value + fill * (nbytes - len(value))


def _rows_once(path: Path, shard: Shard, content: dict[str, Any], at: int, start: int, rows: int) -> bytes:
    """Return rows of a column that is stored once."""
    names = [name for name, *_ in shard.schema["columns"]]
    before = names.index(names[at].replace("next_obs.", "curr_obs.", 1))
    count, width = shard.rows[before], row_bytes(shard.schema["columns"][at])
    head = -(-8 * count // width)
    table = np.frombuffer(_stored_rows(path, shard, content, at, 0, head), "<i8", count)
    data = b""
    for number in table[start : start + rows].tolist():
        column, row = (before, number) if number >= 0 else (at, head - 1 - number)
        if row >= (count if number >= 0 else shard.nbytes[at] // width):
            raise FormatError(f"column {names[at]}: row {number}")
        data += _stored_rows(path, shard, content, column, row, 1)
    return data


def _zarr_rows(path: Path, shard: Shard, name: str, start: int, rows: int) -> bytes:
    import zarr

    group = zarr.open_group(path / shard.files[0][0].removesuffix("/zarr.json"), mode="r")
    array = next(array for _, array in group.arrays() if array.attrs["name"] == name)
    if "rotated" not in array.attrs:
        return np.ascontiguousarray(array[start : start + rows]).tobytes()
    width, data = array.attrs["rotated"], bytes(array[:])
    words = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data) - width + 1, width)]
    turned = b"".join((word >> 1 | (word & 1) << 8 * width - 1).to_bytes(width, "little") for word in words)
    return (turned + data[len(turned) :])[start : start + rows]


def read_rows(store: Store, entry: Entry, name: str) -> Column:
    """Return a trajectory's values by row."""
    rows = store.notes[entry.number][name]
    starts = dict.fromkeys(range(5), rows.start)
    columns = read_columns(store, replace(entry, shard=rows.shard, starts=starts, extent=(*entry.extent[:3], 0)), name)
    return columns[name]


def read_document(columns: dict[str, Column]) -> dict[str, Any]:
    """Return the document in a trajectory's columns; empty if absent."""
    return json.loads(columns["_document"].data) if "_document" in columns else {}


def read_sessions(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sessions of a store that are not over: their ``open`` record, calls and end, by UUID.

    A call has its ``tokens``, ``start``, ``log_probs``, and the other keys of its record.
    """
    newest: dict[str, dict[str, Any]] = {}
    over: set[str] = set()
    for file in sorted(path.glob("calls/*.calls")):
        here: dict[int, dict[str, Any]] = {}
        for record, arrays in _journal(file.read_bytes()):
            if "open" in record:
                here[record["s"]] = {**record, "is_whole": not record["turn"], "calls": [], "state": "open"}
            elif "k" in record:
                calls = here[record["s"]]["calls"]
                assert record["k"] == len(calls)
                calls.append(record | ({} if "gap" in record else _tokens(record, arrays, calls)))
            elif "over" in record:
                over.add(record["over"])
            elif "whole" in record:
                here[record["s"]]["is_whole"] = True
            elif "s" in record:
                here[record["s"]] |= {"state": record.get("state", "finished"), "finish": record.get("finish")}
        for session in here.values():
            if session["is_whole"] and session["turn"] >= newest.get(session["open"], {"turn": 0})["turn"]:
                newest[session["open"]] = session
    return {
        name: session
        for name, session in newest.items()
        if name not in over and session["state"] not in ("moved", "discarded")
    }


def _journal(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    records, at = [], 0
    while data[at : at + 2] == b"\xcc\xa1" and at + 18 <= len(data):
        size, crc = struct.unpack_from("<II", data, at + 10)
        payload = data[at + 18 : at + 18 + size]
        if len(payload) < size or zlib.crc32(payload + data[at + 2 : at + 10]) != crc:
            break
        head, _, arrays = payload.partition(b"\n")
        records.append((json.loads(head), arrays))
        at += 18 + size
    return records


def _tokens(record: dict[str, Any], arrays: bytes, calls: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled, width = record["n"]
    base, taken = record.get("b", (None, 0))
    end = (prompt + sampled) * width
    own = [int.from_bytes(arrays[at : at + width], "little") for at in range(0, end, width)]
    log_probs = np.frombuffer(arrays[end:], "<f4").tolist() if record.get("l") else None
    before = [] if base is None else calls[base]["tokens"][:taken]
    return {"tokens": before + own, "start": taken + prompt, "log_probs": log_probs}
