"""Conformance suite of shard formats: subclass :class:`FormatConformance` and define the fixture ``format``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import pytest
import torch

from tests.support.equality import same
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectory, raw_bytes
from trajstore._core.columns.schema import dtypes
from trajstore._core.files.base import Buffer, check_name
from trajstore._core.formats.base import EncodedShard, ShardContent, ShardManifest, TrajectoryFormat, rows_from_bytes
from trajstore._core.formats.checksums import ENVELOPE, check_file, column_region, manifest_of
from trajstore._core.formats.frames import folded
from trajstore._core.formats.packed import is_packed, packed
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.trajectory import AgentTrajectory, Reward, Trajectory

SHARD = "shard_00000001"

_AWKWARD_KEYS = ("", ".", "..", "a.b", "a/b", "back\\slash", "zarr.json", "__data", "Ünïcode ", "c", "C", "k" * 300)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of random bytes (NaN payloads and negative zeros included); bool gets 0 and 1."""
    count = prod(shape) * dtype.itemsize
    data = torch.randint(2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def step_record(steps: int, batch: int, epochs: int, generator: torch.Generator) -> FlatTrajectory:
    """Return a step trajectory with extra rows, every dtype, nested and oddly named columns, and a document.

    Args:
        steps: T, divisible by ``epochs``.
        batch: B.
        epochs: E, at least 1.
        generator: source of the values.
    """

    def tensor(rows: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_tensor((rows, batch, *shape), dtype, generator)

    return flatten(
        Trajectory(
            max_episode_length=7,
            model_weights_id=f"weights-{steps}",
            actions=tensor(steps, (5,)),
            rewards=tensor(steps, (2,)),
            terminations=tensor(steps + epochs, (2,), torch.bool),
            dones=tensor(steps + epochs, (2,), torch.bool),
            prev_values=tensor(steps + epochs, (1,), torch.bfloat16),
            valid=tensor(steps, (), torch.bool),
            curr_obs={
                "images": {"main": tensor(steps, (6, 5, 3), torch.uint8), "empty": tensor(steps, (0,))},
                "instruction": "pick up the \N{TEACUP WITHOUT HANDLE}" * steps,
            },
            next_obs={"empty": tensor(steps, (3, 0), torch.int64), "scalar": tensor(steps, ())},
            forward_inputs={
                "dtypes": {name: tensor(steps, (3,), dtype) for name, dtype in dtypes().items()},
                "keys": {key: tensor(steps, (), torch.int16) for key in _AWKWARD_KEYS},
            },
        )
    )


def agent_record(prompt: int, response: int, generator: torch.Generator) -> FlatTrajectory:
    """Return an agent trajectory of ``prompt + response`` tokens; both may be 0."""
    length = prompt + response
    return flatten(
        AgentTrajectory(
            messages=[
                {"role": "user", "content": "q" * prompt},
                {"role": "assistant", "content": "a", "author": "llm"},
            ],
            input_ids=random_tensor((length,), torch.int64, generator),
            attention_mask=torch.ones(length, dtype=torch.int64),
            loss_mask=torch.arange(length) >= prompt,
            response_start=prompt,
            old_log_probs=random_tensor((response,), torch.float32, generator),
            entropys=random_tensor((response,), torch.float16, generator),
            response_mask=torch.ones(response, dtype=torch.int8),
            reward=Reward(outcome=1.0),
            task_id="task",
        )
    )


def _step_shard() -> list[FlatTrajectory]:
    generator = torch.Generator().manual_seed(1)
    return [step_record(*sizes, generator) for sizes in ((4, 3, 2), (6, 1, 1), (1, 2, 1))]


def _one_step() -> list[FlatTrajectory]:
    return [step_record(3, 2, 1, torch.Generator().manual_seed(2))]


def _frames() -> list[FlatTrajectory]:
    """Return trajectories whose images are stored once."""
    generator = torch.Generator().manual_seed(5)
    images = [random_tensor((5, 2, 5, 5), torch.float32, generator) for _ in range(3)]
    return [
        flatten(Trajectory(rewards=torch.zeros(4, 2, 1), curr_obs={"x": rows[:-1]}, next_obs={"x": rows[1:]}))
        for rows in images
    ]


def _agent_shard() -> list[FlatTrajectory]:
    generator = torch.Generator().manual_seed(3)
    return [agent_record(*sizes, generator) for sizes in ((5, 9), (0, 0), (3, 0), (0, 17), (30, 1))]


def _no_response() -> list[FlatTrajectory]:
    return [agent_record(4, 0, torch.Generator().manual_seed(4))]


SHARDS: Mapping[str, Callable[[], list[FlatTrajectory]]] = {
    "step": _step_shard,
    "one_step": _one_step,
    "frames": _frames,
    "agent": _agent_shard,
    "agent_without_response": _no_response,
}
"""Makers of one shard's trajectories, by the name of the case."""


@dataclass(frozen=True)
class StoredShard:
    """A shard, as stored in a directory.

    Attributes:
        flats: the encoded trajectories.
        columns: the bytes of each column that were encoded.
        manifest: of the shard, as in the log.
        files: content by name. Tests may replace it by damaged content of the same size.
    """

    flats: Sequence[FlatTrajectory]
    columns: Sequence[bytes]
    manifest: ShardManifest
    files: dict[str, bytes]

    def fetch(self, name: str) -> Buffer:
        """Return a file; the ``Fetch`` passed to formats.

        Raises:
            CorruptStoreError: it is absent, or its size differs from the manifest's.
        """
        size = next(file.size for file in self.manifest.files if file.name == name)
        if len(self.files.get(name, b"")) != size or name not in self.files:
            raise CorruptStoreError(f"{name}: missing or truncated")
        return self.files[name]

    def column(self, column: int) -> torch.Tensor:
        """Return all stored rows of a column, ``[rows, *row_shape]``; bytes of a packed one."""
        spec, rows = self.manifest.stored[column]
        return rows_from_bytes(bytearray(self.columns[column]), spec.torch_dtype, (rows, *spec.row_shape))

    def ranges(self, column: int) -> Iterator[tuple[int, int]]:
        """Yield row ranges of a column: all that begin and end at, or next to, the bounds of a trajectory."""
        (spec, rows), plain = self.manifest.stored[column], self.manifest.rows[column]
        counts = [flat.extent.rows(spec.axis) for flat in self.flats] if rows == plain else [rows]
        bounds = list(accumulate(counts, initial=0))
        near = {bound + step for bound in bounds for step in (-1, 0, 1)}
        points = sorted(point for point in near if 0 <= point <= bounds[-1])
        return ((start, stop) for start in points for stop in points if start <= stop)


def store_shard(shard_format: TrajectoryFormat, flats: Sequence[FlatTrajectory]) -> StoredShard:
    """Encode trajectories with a format, as stored in a directory; equal observations once."""
    content = _content(flats)
    encoded = shard_format.encode(SHARD, content)
    columns = [b"".join(bytes(memoryview(piece)) for piece in pieces) for pieces in content.pieces]
    return StoredShard(flats, columns, manifest_of(encoded, shard_format.name, SHARD, content), contents(encoded))


def _content(flats: Sequence[FlatTrajectory]) -> ShardContent:
    content = ShardContent.of(flats)
    return packed(content) if is_packed(content.schema) else folded(content, search=True)


def contents(encoded: EncodedShard) -> dict[str, bytes]:
    """Return the content of each encoded file, by name."""
    return {file.name: b"".join(bytes(memoryview(piece)) for piece in file.pieces) for file in encoded.files}


def _flip(data: bytes, position: int, mask: int) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


class FormatConformance:
    """Subclass this and define the fixture ``format``; every test must pass."""

    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        """The format under test."""
        raise NotImplementedError("define the fixture 'format' in the subclass")

    @pytest.fixture(params=sorted(SHARDS))
    def shard(self, request: pytest.FixtureRequest, format: TrajectoryFormat) -> StoredShard:  # noqa: A002
        """Each of :data:`SHARDS`, stored by the format."""
        return store_shard(format, SHARDS[request.param]())

    @pytest.fixture
    def steps(self, format: TrajectoryFormat) -> StoredShard:  # noqa: A002
        """One shard of step trajectories, for tests that damage it."""
        return store_shard(format, _step_shard())

    def test_rows_are_those_that_were_encoded(self, format: TrajectoryFormat, shard: StoredShard) -> None:  # noqa: A002
        reader = format.open(shard.fetch, shard.manifest)
        for column, spec in enumerate(shard.manifest.schema.columns):
            expected = shard.column(column)
            for start, stop in shard.ranges(column):
                rows = reader.rows(column, start, stop)
                assert rows.is_contiguous(), spec.name
                assert same(rows, expected[start:stop]), (spec.name, start, stop)

    def test_places_are_where_the_raw_rows_begin(self, shard: StoredShard) -> None:
        manifest = shard.manifest
        for column, place in enumerate(manifest.places):
            if place is not None:
                start, stop = column_region(manifest, column)
                stored = shard.files[manifest.files[place.file].name][start:stop]
                assert stored == raw_bytes(shard.column(column)), manifest.schema.columns[column].name

    def test_mapped_rows_are_aligned_to_their_dtype(self, shard: StoredShard) -> None:
        for spec, place in zip(shard.manifest.schema.columns, shard.manifest.places, strict=True):
            if place is not None:
                assert place.offset % spec.torch_dtype.itemsize == 0, spec.name

    def test_file_names_stay_in_the_directory(self, shard: StoredShard) -> None:
        names = [file.name for file in shard.manifest.files]
        assert len(set(names)) == len(names)
        for name in names:
            assert check_name(name).startswith(f"shards/{SHARD}.")
            assert max(len(part.encode()) for part in name.split("/")) <= 200, (
                "a file system allows 255 and we add .tmp"
            )

    @pytest.mark.parametrize("case", sorted(SHARDS))
    def test_encoding_again_gives_the_same_bytes(self, format: TrajectoryFormat, case: str) -> None:  # noqa: A002
        flats = SHARDS[case]()
        before = copy.deepcopy([flat.tensors for flat in flats])
        first, second = (format.encode(SHARD, _content(flats)) for _ in range(2))
        assert contents(first) == contents(second)
        assert first.places == second.places
        for flat, tensors in zip(flats, before, strict=True):
            assert all(same(a, b) for a, b in zip(flat.tensors, tensors, strict=True))

    def test_every_flipped_bit_is_found_and_attributed(self, steps: StoredShard) -> None:
        manifest = steps.manifest
        for number, position, mask in _sampled_bytes(steps, per_file=40):
            name = manifest.files[number].name
            damage = check_file(_flip(steps.files[name], position, mask), manifest, number)
            assert len(damage) == 1, (name, position)
            assert name in damage[0]
            assert _part_at(manifest, number, position) in damage[0]

    def test_truncation_and_growth_are_found(self, steps: StoredShard) -> None:
        for number, file in enumerate(steps.manifest.files):
            data = steps.files[file.name]
            for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
                if changed != data:
                    assert check_file(changed, steps.manifest, number), (file.name, len(changed))

    def test_damage_gives_documented_errors_only(self, format: TrajectoryFormat, steps: StoredShard) -> None:  # noqa: A002
        for number, position, mask in _sampled_bytes(steps, per_file=1, files=8):
            name = steps.manifest.files[number].name
            damaged = replace(steps, files=dict(steps.files))
            damaged.files[name] = _flip(steps.files[name], position, mask)
            _read_all(format, damaged)  # changed raw values cannot be detected; other damage must be

    def test_missing_files_are_named(self, format: TrajectoryFormat, steps: StoredShard) -> None:  # noqa: A002
        for number in _sampled_files(steps, 8):
            name = steps.manifest.files[number].name
            lacking = replace(steps, files=dict(steps.files))
            del lacking.files[name]
            message = _read_all(format, lacking)
            assert message is not None, name
            assert name in message

    def test_format_is_a_value(self, format: TrajectoryFormat) -> None:  # noqa: A002
        again = pickle.loads(pickle.dumps(format))
        assert again == format
        assert hash(again) == hash(format)
        assert format.name.isidentifier()


def _sampled_files(shard: StoredShard, count: int) -> list[int]:
    """Return the shard's first and last file, and others drawn at random, ``count`` at most."""
    total = len(shard.manifest.files)
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(6)).tolist()
    return sorted({0, total - 1, *drawn[: count - 2]})


def _sampled_bytes(shard: StoredShard, per_file: int, files: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (file, position, mask of one bit): the first and last byte of files, and others drawn at random."""
    generator = torch.Generator().manual_seed(5)
    numbers = range(len(shard.manifest.files)) if files is None else _sampled_files(shard, files)
    for number in numbers:
        size = shard.manifest.files[number].size
        if size:
            drawn = torch.randint(size, (per_file,), generator=generator).tolist()
            for position in sorted({0, size - 1, *drawn}):
                yield number, position, 1 << int(torch.randint(8, (), generator=generator))


def _part_at(manifest: ShardManifest, number: int, position: int) -> str:
    """Return the part at a byte of a file: ``column <name>`` or the envelope."""
    for column, place in enumerate(manifest.places):
        if place is not None and place.file == number:
            start, stop = column_region(manifest, column)
            if start <= position < stop:
                return f"column {manifest.schema.columns[column].name}:"
    return ENVELOPE


def _read_all(shard_format: TrajectoryFormat, shard: StoredShard) -> str | None:
    """Read all rows; return the message of the error if one of the documented ones is raised."""
    try:
        reader = shard_format.open(shard.fetch, shard.manifest)
        for column, (_, rows) in enumerate(shard.manifest.stored):
            reader.rows(column, 0, rows)
    except (CorruptStoreError, UnsafeContentError) as error:
        return str(error)
    return None
