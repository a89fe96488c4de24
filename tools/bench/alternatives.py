"""A database or another file format in place of the store: SQLite, Arrow, safetensors.

Draws: processor time of one batch of the state workload, uniform over all samples, from files in the page cache, torch
at one thread; processor time, for a peer must not look slow because something else ran just then.
SQLite has a row for each sample, Arrow a memory-mapped IPC file of fixed-size columns, safetensors one mapped file of
the columns. Durable adds: time of the agent workload in lists of 16, SQLite in a transaction each (WAL,
``synchronous=FULL``), ours flushed at the end. Arrow and safetensors are left out where they are not installed.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, processor_ratio, ratio, torch_threads
from tools.bench.workloads import LIST, add_all, agents, filled, nbytes, opened, raw_columns, state
from trajstore._core.columns.conversion import flatten

Columns = dict[str, torch.Tensor]


def figures(options: Options) -> Iterator[Figure]:
    """Yield one figure per peer: theirs over ours."""
    workload = state(options)
    columns = raw_columns(workload.trajectories)
    peers: dict[str, Callable[[], object]] = {"SQLite": _sqlite(columns, workload.batch, options.folder / "rows.db")}
    for name, make in (("Arrow IPC", _arrow), ("safetensors", _safetensors)):
        try:
            peers[name] = make(columns, workload.batch, options.folder / name)
        except ImportError:
            continue
    with filled(options.folder / "ours", workload.trajectories, seed=0) as buffer, torch_threads(1):
        ours, *others = in_turn([partial(buffer.sample, workload.batch), *peers.values()], options.repeats * 8)
    for name, theirs in zip(peers, others, strict=True):
        value = processor_ratio(theirs, ours)
        yield Figure("ALTERNATIVES", f"a batch, {name}, over ours", value, None, at_least=True)
    yield _adds(options)


def _drawn(rows: int, batch: int) -> Callable[[], np.ndarray[Any, np.dtype[np.int64]]]:
    generator = np.random.default_rng(2)
    return lambda: generator.integers(0, rows, min(rows, batch))


def _rows(columns: Columns) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return each column as bytes, ``[samples, bytes of a row]``."""
    return {
        name: column.contiguous().reshape(len(column), -1).view(torch.uint8).numpy() for name, column in columns.items()
    }


def _sqlite(columns: Columns, batch: int, file: Path) -> Callable[[], object]:
    rows = _rows(columns)
    widths = [array.shape[1] for array in rows.values()]
    whole = np.concatenate(list(rows.values()), axis=1)
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE samples (number INTEGER PRIMARY KEY, data BLOB)")
    with database:
        database.executemany("INSERT INTO samples VALUES (?, ?)", ((i, row.tobytes()) for i, row in enumerate(whole)))
    draw = _drawn(len(whole), batch)

    def sample() -> object:
        found = (database.execute("SELECT data FROM samples WHERE number = ?", (i,)) for i in draw().tolist())
        data = np.frombuffer(b"".join([cursor.fetchone()[0] for cursor in found]), np.uint8)
        return [np.ascontiguousarray(part) for part in np.split(data.reshape(-1, sum(widths)), np.cumsum(widths), 1)]

    return sample


def _arrow(columns: Columns, batch: int, file: Path) -> Callable[[], object]:
    import pyarrow as arrow

    rows = _rows(columns)
    arrays = [
        arrow.FixedSizeBinaryArray.from_buffers(
            arrow.binary(array.shape[1]), len(array), [None, arrow.py_buffer(array)]
        )
        for array in rows.values()
    ]
    table = arrow.table(arrays, names=list(rows))
    with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    mapped = arrow.ipc.open_file(arrow.memory_map(str(file))).read_all()
    draw = _drawn(len(mapped), batch)
    return lambda: mapped.take(arrow.array(draw()))


def _safetensors(columns: Columns, batch: int, file: Path) -> Callable[[], object]:
    from safetensors.torch import load_file, save_file

    save_file({name: column.contiguous() for name, column in columns.items()}, file)
    mapped = load_file(file)
    draw = _drawn(len(next(iter(mapped.values()))), batch)

    def sample() -> object:
        at = torch.from_numpy(draw())
        return {name: column.index_select(0, at) for name, column in mapped.items()}

    return sample


def _adds(options: Options) -> Figure:
    pool, total = agents(), options.count(2048, LIST)
    paths = (options.folder / f"adds_{number}" for number in itertools.count())

    def ours() -> None:
        with opened(next(paths)) as buffer:
            add_all(buffer, pool, total)

    def theirs() -> None:
        database = sqlite3.connect(next(paths))
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE trajectories (number INTEGER PRIMARY KEY, task TEXT, names TEXT, data BLOB)")
        for first in range(0, total, LIST):
            with database:
                for at in range(first, first + LIST):
                    flat = flatten(pool[at % len(pool)])
                    columns = range(len(flat.schema.columns))
                    data = b"".join([flat.column_bytes(column) for column in columns])
                    names = orjson.dumps([column.name for column in flat.schema.columns]).decode()
                    row = (pool[at % len(pool)].task_id, names, data)
                    database.execute("INSERT INTO trajectories (task, names, data) VALUES (?, ?, ?)", row)
        database.close()

    mine, peer = in_turn([ours, theirs], options.repeats, warmup=1)
    name = "durable adds, agent workload, SQLite's time over ours"
    details = {"bytes_each": nbytes(pool) / len(pool), "ours_per_s": total / mine.seconds}
    return Figure("ALTERNATIVES", name, ratio(peer, mine), None, at_least=True, details=details)
