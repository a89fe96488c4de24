"""``store_frames_once``: equal observations are stored once, and everything reads as without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import files_of, stored, writer_to
from tests.support.equality import same
from tests.support.formats import random_tensor
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sequences import sample_n_step, sample_sequences
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import Axis, walk
from trajstore._core.columns.schema import Schema
from trajstore._core.formats import FORMATS, checksums, get_format, open_shard
from trajstore._core.formats.base import ShardContent, ShardManifest
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.formats.frames import folded
from trajstore.cli import main
from trajstore.errors import CorruptStoreError
from trajstore.loader import ReplayLoader
from trajstore.operations.conversion import convert
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify

KINDS = [*((form, {}) for form in FORMATS), ("zarr", {"codec": "zstd"})]
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64]
SHAPES = [(6, 5, 3), (17,), (64,), (3,), ()]


def rollout(kinds: Sequence[Any], numbers: random.Random, steps: int, batch: int, repeated: float) -> Trajectory:
    """Return a trajectory of random bytes; a share of the rows of ``next_obs`` is that of the next ``curr_obs``."""
    generator = torch.Generator().manual_seed(numbers.randrange(1 << 30))
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for name, (dtype, shape) in zip(("image", "small", "state"), kinds, strict=True):
        rows = random_tensor((steps, batch, *shape), dtype, generator)
        others = random_tensor((steps, batch, *shape), dtype, generator)
        for step in range(steps - 1):
            for environment in range(batch):
                if numbers.random() < repeated:
                    others[step, environment] = rows[step + 1, environment]
        before[name], after[name] = rows, {"x": others} if name == "state" else others
    before["state"] = {"x": before["state"]}
    return Trajectory(
        max_episode_length=steps,
        rewards=random_tensor((steps, batch, 1), torch.float32, generator),
        dones=random_tensor((steps + 1, batch, 1), torch.bool, generator),
        curr_obs=before,
        next_obs=after | {"alone": random_tensor((steps, batch, 70), torch.uint8, generator)},
    )


def shards(numbers: random.Random, sizes: list[tuple[int, int]], repeated: float) -> ShardContent:
    """Return the content of a shard of trajectories of these sizes."""
    kinds = [(numbers.choice(DTYPES), numbers.choice(SHAPES)) for _ in range(3)]
    return ShardContent.of([flatten(rollout(kinds, numbers, *size, repeated)) for size in sizes])


def stored_rows(form: str, options: dict[str, Any], content: ShardContent) -> tuple[ShardManifest, list[torch.Tensor]]:
    """Encode a shard, decode it, and return all rows."""
    files, manifest = encoded_shard(get_format(form, **options), "shard_00000000", content, search=True)
    data = {file.name: b"".join(map(bytes, map(memoryview, file.pieces))) for file in files}
    reader = open_shard(data.__getitem__, manifest)
    return manifest, [reader.rows(column, 0, rows) for column, rows in enumerate(content.rows)]


@pytest.mark.parametrize(("form", "options"), [KINDS[0], KINDS[1], KINDS[3]], ids=str)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    repeated=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_a_shard_returns_every_bit(
    form: str, options: dict[str, Any], seed: int, sizes: list[tuple[int, int]], repeated: float
) -> None:
    content = shards(random.Random(seed), sizes, repeated)
    manifest, found = stored_rows(form, options, content)
    for column, rows in enumerate(found):
        spec = content.schema.columns[column]
        expected = b"".join(bytes(memoryview(piece)) for piece in content.pieces[column])
        assert rows.reshape(-1).view(torch.uint8).numpy().tobytes() == expected, spec.name
        once = manifest.schema.columns[column].axis is Axis.NEXT
        assert not once or manifest.nbytes[column] < content.nbytes[column]
        assert not once or (spec.name.startswith("next_obs.") and spec.row_nbytes >= 64 and spec.dtype != "bool")


# -- stores -------------------------------------------------------------------------------------------


def episodes(key: int, steps: int = 6, batch: int = 2) -> Trajectory:
    """Return a trajectory with an episode that ends at step ``key % steps`` in environment 0."""
    generator = torch.Generator().manual_seed(key)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_tensor(shape, dtype, generator)

    frames = {"image": tensor(steps + 1, batch, 6, 5, 3, dtype=torch.uint8), "state": tensor(steps + 1, batch, 20)}
    after = {name: rows[1:].clone() for name, rows in frames.items()}
    dones = torch.zeros(steps, batch, 1, dtype=torch.bool)
    dones[key % steps, 0] = True
    for rows in after.values():
        rows[key % steps, 0].reshape(-1).view(torch.uint8)[-1] ^= 1  # one bit, in the last byte
    return Trajectory(
        rewards=torch.rand(steps, batch, 1, generator=generator),
        dones=dones,
        terminations=dones,
        curr_obs={name: rows[:-1] for name, rows in frames.items()},
        next_obs=after,
    )


ADDED = [episodes(key, *size) for key, size in enumerate([(12, 2), (1, 3), (20, 1), (9, 2)])]


def leaves(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a trajectory or a batch by dotted name."""
    fields = value if isinstance(value, dict) else vars(value)
    return {".".join(path): leaf for path, leaf in walk(fields) if isinstance(leaf, torch.Tensor)}


def reads(buffer: TrajectoryReplayBuffer) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield what each way to read returns."""
    for number in buffer.trajectory_ids.tolist():
        trajectory = leaves(buffer.get(number))
        yield f"get {number}", trajectory
        trajectory["next_obs.image"].zero_()  # a copy of its own
    yield "sample", leaves(buffer.sample(40))
    yield "sample of columns", leaves(buffer.sample(40, columns=["next_obs.state", "rewards"]))
    yield "sequences", leaves(sample_sequences(buffer, 20, 3, pad=True))
    yield "n steps", leaves(sample_n_step(buffer, 20, 3, 0.9))
    with ReplayLoader(buffer, 16, prefetch=1) as loader:
        yield "loader", leaves(next(loader))


def check_same(found: TrajectoryReplayBuffer, expected: TrajectoryReplayBuffer) -> None:
    """Fail unless two buffers return the same tensors."""
    with found, expected:
        for (name, ours), (_, theirs) in zip(reads(found), reads(expected), strict=True):
            assert ours.keys() == theirs.keys(), name
            assert all(same(ours[field], theirs[field]) for field in theirs), name


def opened(path: Path | str, **options: Any) -> Any:
    return TrajectoryReplayBuffer.open(path, seed=3, **options)


@pytest.mark.parametrize(("form", "options"), KINDS, ids=str)
def test_a_store_reads_as_without_the_option(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    kinds = {"trajectory_format": form, "format_options": options}
    stored(tmp_path / "twice", ADDED, **kinds)
    live = writer_to(tmp_path / "once", seed=3, sample_window_size=0, store_frames_once=True, **kinds)
    live.add_trajectories(ADDED)
    check_same(live, opened(tmp_path / "twice"))  # some of them not written yet
    for number, added in enumerate(ADDED):
        with opened(tmp_path / "once") as reader:
            found = leaves(reader.get(number))
        assert all(same(rows, found[name]) for name, rows in leaves(added).items())
    check_same(opened(tmp_path / "once"), opened(tmp_path / "twice"))
    check_same(opened(tmp_path / "once", verify_shards=True), opened(tmp_path / "twice"))
    assert inspect(tmp_path / "once")["shard_bytes"] < inspect(tmp_path / "twice")["shard_bytes"]
    assert inspect(tmp_path / "once")["columns"] == inspect(tmp_path / "twice")["columns"]
    assert verify(tmp_path / "once").problems == []


def _mirrored(once: Path, target: Path) -> None:
    with writer_to(once, mirror=target, store_frames_once=True) as buffer:
        assert buffer.mirror.wait(timeout=None)


def _checkpoint(once: Path, target: Path, layout: Any = "trajstore") -> None:
    with opened(once) as reader:
        reader.save_checkpoint(target, layout=layout)


MOVES: dict[str, Callable[[Path, Path], object]] = {
    "copy": copy_store,
    "checkpoint": _checkpoint,
    "rlinf": lambda once, target: _checkpoint(once, target, "rlinf"),
    "pkl": lambda once, target: convert(once, target, "pkl"),
    "zarr": lambda once, target: convert(once, target, "zarr"),
    "part": lambda once, target: convert(once, target, "pt", where="trajectory_id % 2 = 0"),
    "mirror": _mirrored,
}


@pytest.mark.parametrize("move", MOVES)
def test_copies_read_as_without_the_option(move: str, tmp_path: Path) -> None:
    once, twice = (
        stored(tmp_path / f"{option}", ADDED, each=True, store_frames_once=option) for option in (True, False)
    )
    copies = tmp_path / "copy", tmp_path / "other"
    for source, target in zip((once, twice), copies, strict=True):
        MOVES[move](source, target)
    check_same(opened(copies[0]), opened(copies[1]))
    sizes = [sum(map(len, files_of(path).values())) for path in copies]
    assert (sizes[0] < sizes[1]) is (move != "rlinf")


def test_a_store_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice, once = (stored(tmp_path / f"{option}", ADDED, store_frames_once=option) for option in (False, True))
    for source in (twice, once):
        arguments = ["convert", str(source), f"{source}-pt", "--to", "pt", "--store-frames-once"]
        assert main(arguments) == 0
        check_same(opened(f"{source}-pt"), opened(twice))
        assert inspect(f"{source}-pt")["shard_bytes"] == inspect(once)["shard_bytes"]
    assert main(["convert", str(twice), str(tmp_path / "x"), "--to", "jsonl", "--store-frames-once"]) == 2
    assert "--store-frames-once is for stores" in capsys.readouterr().err


def test_compacting_keeps_rows_and_stores_them_once(tmp_path: Path) -> None:
    for option in (True, False):
        with writer_to(tmp_path / f"{option}", store_frames_once=option) as buffer:
            buffer.add_trajectories([episodes(key, 40) for key in range(6)])
            buffer.flush()
            buffer.evict([0, 2, 3])
            full = buffer.get_stats()["shard_bytes"]
            buffer.compact()
            stats = buffer.get_stats()
            assert stats["shard_bytes"] < 0.7 * full
            assert (stats["shard_bytes"] < 0.7 * stats["live_bytes"]) is option
    check_same(opened(tmp_path / "True"), opened(tmp_path / "False"))


@pytest.mark.parametrize("range_reads", [True, False])
def test_object_stores(range_reads: bool, memory_url: str, tmp_path: Path) -> None:
    twice = stored(tmp_path / "twice", ADDED)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, store_frames_once=True) as buffer:
        buffer.add_trajectories(ADDED)
    check_same(opened(memory_url, storage_options={"range_reads": range_reads}), opened(twice))


def test_images_take_the_bytes_of_their_distinct_frames(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (33, 4, 48, 48, 3), dtype=torch.uint8)
    added = Trajectory(rewards=torch.rand(32, 4, 1), curr_obs={"x": images[:-1]}, next_obs={"x": images[1:]})
    sizes = {}
    for option in (False, True):
        with writer_to(tmp_path / f"{option}", store_frames_once=option) as buffer:
            buffer.add_trajectories([added, added, added])
            buffer.flush()
            sizes[option] = buffer.get_stats()["shard_bytes"] / (3 * images.nbytes)
    assert sizes[False] > 1.9
    assert sizes[True] < 1.05


def test_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = Trajectory(
        rewards=torch.zeros(4, 2, 1), curr_obs={"x": torch.zeros(4, 2, 99)}, next_obs={"x": torch.ones(4, 2, 99)}
    )
    stored(tmp_path, [alone], store_frames_once=True)
    (warning,) = [message for message in caplog.messages if "store_frames_once" in message]
    assert "store_frames_once has no effect on next_obs.x in shard_00000000" in warning
    with pytest.warns(UserWarning, match="store_frames_once has no effect without auto_save=True"):
        TrajectoryReplayBuffer(store_frames_once=True)


def test_a_store_goes_on_as_it_began(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", stored(tmp_path / "twice", [episodes(1, 40)] * 3, each=True)
    for option in (True, None, False):
        stored(once, [episodes(1, 40)], store_frames_once=option)
    sizes = [file.stat().st_size for file in sorted((once / "shards").iterdir())]
    assert sizes[0] == sizes[1]
    assert sizes[2] > 1.3 * sizes[0]
    check_same(opened(once), opened(twice))


def test_a_damaged_frame_is_reported_for_both_fields(tmp_path: Path) -> None:
    stored(tmp_path, [episodes(1)], store_frames_once=True)
    with opened(tmp_path) as reader:
        image = leaves(reader.get(0))["curr_obs.image"][2, 1].numpy().tobytes()
    file = tmp_path / "shards" / "shard_00000000.pt"
    data = bytearray(file.read_bytes())
    data[data.index(image)] ^= 1
    file.write_bytes(data)
    problems = [problem.message for problem in verify(tmp_path).problems]
    assert problems == [
        "column curr_obs.image: checksum does not fit the content; restore it from a copy",
        "column next_obs.image: has rows in the damaged column curr_obs.image; restore it from a copy",
    ]
    with (
        opened(tmp_path, verify_shards=True) as reader,
        pytest.raises(CorruptStoreError, match=r"column next_obs\.image"),
    ):
        reader.get(0)


@pytest.mark.parametrize(
    "columns",
    [
        [["next_obs.x", "uint8", [70], 5]],
        [["curr_obs.x", "int8", [70], 0], ["next_obs.x", "uint8", [70], 5]],
        [["curr_obs.x", "uint8", [70], 5], ["next_obs.x", "uint8", [70], 5]],
        [["curr_obs.x", "uint8", [70], 0], ["next_obs.x", "uint8", [70], 6]],  # an axis of later programs
    ],
)
def test_schemas_that_no_program_can_read_are_refused(columns: list[list[Any]]) -> None:
    with pytest.raises(CorruptStoreError, match="not a trajectory schema"):
        Schema.from_json({"kind": "step", "columns": columns})


@pytest.mark.parametrize(("number", "value"), [(0, 1 << 40), (3, 12), (5, -9), (1, -(1 << 63))])
@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_a_table_that_names_other_rows_is_refused(
    form: str, number: int, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(content: ShardContent, *, search: bool) -> ShardContent:
        result = folded(content, search=search)
        for column in result.schema.stored_once:
            memoryview(result.pieces[column][0])[8 * number : 8 * number + 8] = value.to_bytes(8, "little", signed=True)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "folded", damaged)
        stored(tmp_path, [episodes(1)], store_frames_once=True, trajectory_format=form)
    with opened(tmp_path) as reader:
        for read in (lambda: reader.get(0), lambda: reader.sample(4)):
            with pytest.raises(
                CorruptStoreError, match=r"column next_obs\.\w+: its table names rows that do not exist"
            ):
                read()
