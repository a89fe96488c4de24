"""Packed columns of rollouts: every bit comes back, rows take few bytes, and damaged tables are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.schema import Extent, intern_schema
from trajstore._core.formats import get_format, open_shard
from trajstore._core.formats.base import ShardContent, ShardReader, rows_from_bytes
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.formats.packed import HEAD_BYTES, PackedReader
from trajstore.errors import CorruptStoreError

DTYPES = [
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
    *(torch.float32, torch.float64, torch.bfloat16, torch.complex64),
]

HIGHEST = [1, 2, 200, 60_000, 150_000, 1 << 24, 1 << 31, 1 << 40, (1 << 63) - 1]


Bytes = npt.NDArray[np.uint8]
"""Rows as bytes, ``[rows, bytes of a row]``."""


def rows_of(numbers: np.random.Generator, dtype: torch.dtype, count: int, before: Sequence[Bytes]) -> Bytes:
    """Return rows that repeat: values in sequence, and the beginning of rows before them."""
    size = dtype.itemsize
    rows = numbers.integers(0, 2 if dtype is torch.bool else 256, (count, size), np.uint8)
    if dtype in (torch.int64, torch.int32, torch.int16):
        high = min(int(numbers.choice(HIGHEST)), torch.iinfo(dtype).max)
        drawn = numbers.integers(numbers.choice([0, 0, -1, -high]), high, count, endpoint=True)
        rows = drawn.astype(f"<i{size}").view(np.uint8).reshape(count, size)
    for _ in range(numbers.integers(4) if count else 0):
        start = numbers.integers(count)
        rows[start : start + numbers.integers(300)] = rows[start].copy()
    if before and numbers.random() < 0.7:
        other = before[numbers.integers(len(before))]
        shared = int(numbers.integers(min(len(other), count) + 1))
        rows[:shared] = other[:shared]
    return rows


def content_of(numbers: np.random.Generator, dtypes: Sequence[torch.dtype]) -> tuple[ShardContent, list[torch.Tensor]]:
    """Return the content of a shard of rollouts, and all rows of each column."""
    axes = [Axis.SAMPLES, Axis.RESPONSE, Axis.DOCUMENT]
    columns: list[list[Bytes]] = [[], [], []]
    for _ in range(numbers.integers(1, 9)):
        for rows, dtype in zip(columns, dtypes, strict=True):
            rows.append(rows_of(numbers, dtype, int(numbers.integers(500)), rows))
    extents = [Extent(len(ids), 1, len(mask), len(text)) for ids, mask, text in zip(*columns, strict=True)]
    names = ["input_ids", "response_mask", "_document"]
    schema = intern_schema("agent", [(name, *kind) for name, *kind in zip(names, dtypes, [()] * 3, axes, strict=True)])
    pieces: Any = [[rows.tobytes() for rows in each] for each in columns]
    joined = [bytearray(b"".join(each)) for each in pieces]
    whole = [
        rows_from_bytes(data, dtype, (len(data) // dtype.itemsize,)) for data, dtype in zip(joined, dtypes, strict=True)
    ]
    return ShardContent(schema, np.array(extents, np.int64), pieces), whole


@pytest.mark.parametrize("form", ["pt", "pkl", "zarr"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 40), dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
def test_every_bit_of_any_rows_comes_back(form: str, seed: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    numbers = np.random.default_rng(seed)
    content, columns = content_of(numbers, [*dtypes, torch.uint8])
    files, manifest = encoded_shard(get_format(form), "shard_00000000", content)
    data = {file.name: b"".join(map(bytes, map(memoryview, file.pieces))) for file in files}
    reader = open_shard(data.__getitem__, manifest)
    for number, rows in enumerate(columns):
        start, stop = sorted(numbers.integers(0, len(rows) + 1, 2).tolist())
        for first, last in ((0, len(rows)), (start, stop)):
            found = reader.rows(number, first, last)
            assert found.dtype == rows.dtype
            assert raw_bytes(found) == raw_bytes(rows[first:last].contiguous())


def nbytes_of(*rollouts: torch.Tensor) -> int:
    """Return the bytes of a column with the tokens of rollouts, without head and runs of a single one."""
    schema = intern_schema("agent", [("input_ids", rollouts[0].dtype, (), Axis.SAMPLES)])
    extents = np.array([Extent(len(ids), 1) for ids in rollouts], np.int64)
    content = ShardContent(schema, extents, [[raw_bytes(ids) for ids in rollouts]])
    return encoded_shard(get_format("pt"), "shard_00000000", content)[1].nbytes[0] - HEAD_BYTES - 8


def test_rows_take_the_fewest_bytes() -> None:
    numbers = np.random.default_rng(0)

    def drawn(low: int, high: int, count: int = 1000) -> torch.Tensor:
        return torch.from_numpy(numbers.integers(low, high, count))

    assert nbytes_of(drawn(0, 150_000)) == 3000
    assert nbytes_of(drawn(-1, 150_000)) == 3000
    assert nbytes_of(drawn(0, 2)) == 125
    assert nbytes_of(drawn(0, 1 << 40)) == 8000
    assert nbytes_of(torch.cat([torch.zeros(500, dtype=torch.int64), torch.ones(500, dtype=torch.int64)])) == 9
    assert nbytes_of(torch.zeros(1000)) == 4, "log-probs of tokens that the model did not write"
    prompt = drawn(0, 150_000)
    group = [torch.cat([prompt, drawn(0, 150_000, 500)]) for _ in range(8)]
    assert nbytes_of(*group) <= 3 * (1000 + 8 * 500) + 16 * 8, "the prompt once, and two runs for each rollout"
    session = [torch.cat(group)[: 1000 * call] for call in range(1, 12)]
    mixed = [session[call] for call in numbers.permutation(len(session))]
    assert nbytes_of(*mixed) <= 3 * 12_000 + 16 * 11, "each token once, in any order of the calls"


class _Block(ShardReader):
    """A shard with one block of bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.data[start:stop]), dtype=torch.uint8)


def test_no_damaged_block_is_read_beyond_its_rows() -> None:
    numbers = np.random.default_rng(0)
    content, columns = content_of(numbers, [torch.int64, torch.int64, torch.uint8])
    files, manifest = encoded_shard(get_format("pkl"), "shard_00000000", content)
    data = {file.name: b"".join(map(bytes, map(memoryview, file.pieces))) for file in files}
    shard = get_format("pkl").open(data.__getitem__, manifest)
    refused = 0
    for number, rows in enumerate(columns):
        block = bytes(raw_bytes(shard.rows(number, 0, manifest.nbytes[number])))
        runs, _, _, size = np.frombuffer(block, "<i8", 4).tolist()
        for at in range(0, HEAD_BYTES + 2 * runs * size, 4):
            for value in (b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x01\0\0\0"):
                changed = block[:at] + value + block[at + 4 :]
                try:
                    found = PackedReader(_Block(changed), manifest).rows(number, 0, len(rows))
                except CorruptStoreError as error:
                    assert f"column {manifest.schema.columns[number].name}" in str(error)  # noqa: PT017
                    refused += 1
                else:
                    assert len(found) == len(rows)
    assert refused > 100


def test_an_index_that_claims_too_many_rows_takes_no_memory() -> None:
    content, _ = content_of(np.random.default_rng(1), [torch.int64, torch.int64, torch.uint8])
    files, manifest = encoded_shard(get_format("pt"), "shard_00000000", content)
    data = {file.name: b"".join(map(bytes, map(memoryview, file.pieces))) for file in files}
    claimed = replace(manifest, rows=(1 << 53, *manifest.rows[1:]))
    with pytest.raises(CorruptStoreError, match="column input_ids: its table names rows that do not exist"):
        open_shard(data.__getitem__, claimed).rows(0, 0, 1 << 53)


def test_a_single_element_of_any_stride_has_bytes() -> None:
    assert bytes(raw_bytes(torch.arange(200)[5:6].as_strided((1,), (127,)))) == (5).to_bytes(8, "little")
