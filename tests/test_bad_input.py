"""Damaged, hostile and foreign directories: one clear error of the documented kind, nothing lost, no code run."""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from trajstore import TrajectoryReplayBuffer, errors
from trajstore.catalog import INDEX_NAME, METADATA_NAME
from trajstore.commits import encode_line
from trajstore.sealed import metadata_json, seal, unseal
from trajstore.testing.witness import WitnessError, check_batch, check_trajectory, witness
from trajstore.verify import verify

FORMATS = ("pt", "zarr", "pkl")
COUNT = 6


def build(path: Path, fmt: str, *, clean: bool = False) -> Path:
    """Make a store of six trajectories, four in its snapshot and two in its log; ``clean``: all in the snapshot."""
    for keys in (range(4), range(4, COUNT)):
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=fmt)
        for key in keys:
            buffer.add_trajectories([witness(key)])
            if key % 2:
                buffer.flush()
        if keys.start == 0 or clean:
            buffer.pin("kept")
            buffer.close()
        else:
            shutil.copytree(path, path.with_name("open"))
            buffer.close()
            shutil.rmtree(path)
            path.with_name("open").rename(path)
    return path


def read(path: Path) -> dict[int, int]:
    buffer = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False)
    try:
        buffer.load_checkpoint(path)
        if len(buffer):
            check_batch(buffer.sample(50))
        return {number: check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()}
    finally:
        buffer.close()


def resealed(path: Path, change: Callable[[Any], None]) -> None:
    """Change the snapshot as somebody would who knows how to compute its checksum."""
    file = path / INDEX_NAME
    value = unseal("snapshot", file.read_bytes(), "")
    change(value)
    file.write_bytes(seal("snapshot", orjson.dumps(value)))


@pytest.fixture(scope="module", params=FORMATS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build(tmp_path_factory.mktemp("pristine") / "store", request.param)
    assert read(path) == {key: key for key in range(COUNT)}
    return path


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != "writer.lock" and p.parent.name != "readers")


def mutate(path: Path, chance: random.Random) -> str:
    """Damage one file of a directory; return what was done."""
    files = files_of(path)
    file = chance.choice(files)
    name = str(file.relative_to(path))
    data = file.read_bytes()
    kind = chance.choice(["flip", "flip", "flip", "cut", "grow", "remove", "swap", "zero", "text"])
    if kind == "flip" and data:
        at = chance.randrange(len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        return f"bit of byte {at} of {len(data)} in {name}"
    if kind == "cut":
        file.write_bytes(data[: chance.randrange(len(data))] if data else b"")
    elif kind == "grow":
        file.write_bytes(data + chance.randbytes(chance.randint(1, 50)))
    elif kind == "remove":
        file.unlink()
    elif kind == "swap":
        other = chance.choice(files)
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
        name += f" and {other.relative_to(path)}"
    elif kind == "zero":
        at = chance.randrange(len(data)) if data else 0
        file.write_bytes(data[:at] + bytes(len(data[at : at + 16])) + data[at + 16 :])
    else:
        file.write_bytes(chance.choice([b"", b"{}", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 3000, b"1" * 400]))
    return f"{kind}: {name}"


@pytest.mark.parametrize("seed", range(2))
def test_random_damage_is_refused_or_reported(pristine: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(f"{pristine}/{seed}".split("/")[-1] + str(seed))
    for number in range(35 if seed else 20):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        done = mutate(path, chance)
        told = None
        try:
            found = read(path)
        except errors.TrajstoreError as error:
            told = (done, error)
        except WitnessError:  # mapped rows carry no checksum of their own: verify must find it
            assert not verify(path).sound, done
        else:
            if found != {key: key for key in range(COUNT)}:  # only the newest commit may be missing, and be reported
                assert found == {key: key for key in range(len(found))}, done
                report = verify(path)
                assert report.notes or not report.sound, done
        if told is not None:
            assert isinstance(told[1], errors.StoreError), told
            assert str(path) in str(told[1]) or "shard" in str(told[1]), told
        with contextlib.suppress(errors.StoreError):
            verify(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("seed", range(2))
def test_a_writer_on_damaged_files_loses_nothing(pristine: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(1000 + seed)
    for number in range(12):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        done = mutate(path, chance)
        before = {file: file.read_bytes() for file in files_of(path) if "shards" in file.parts}
        try:
            buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
        except errors.TrajstoreError:
            assert {file: file.read_bytes() for file in before} == before, done
        else:
            ids = set(buffer.trajectory_ids.tolist())
            (added,) = buffer.add_trajectories([witness(99)])
            buffer.close()
            assert added not in ids, done
            assert ids >= set(range(4)), done
        shutil.rmtree(path)


# -- one kind of damage at a time -------------------------------------------------------------------


@pytest.mark.parametrize("name", [METADATA_NAME, INDEX_NAME])
@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"trajectory_index": {}}', b"\x80\x04K\x01."])
def test_index_and_metadata(store: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (store / name).unlink()
    else:
        (store / name).write_bytes(content)
    with pytest.raises(errors.StoreError) as caught:
        read(store)
    assert str(store) in str(caught.value)
    shards = sorted((store / "shards").rglob("*"))
    with pytest.raises(errors.StoreError):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)
    assert sorted((store / "shards").rglob("*")) == shards
    if name == INDEX_NAME or content is None:
        with pytest.raises(errors.CorruptStoreError):
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)


def test_a_damaged_record_within_the_log_is_refused_by_name_and_byte(store: Path) -> None:
    (segment,) = (store / "log").iterdir()
    line = encode_line({"generation": 99, "operation": "add"})
    segment.write_bytes(b"rubbish\n" + line)
    with pytest.raises(errors.CorruptStoreError, match=rf"{segment.name}.* byte 0"):
        read(store)
    segment.write_bytes(line)
    with pytest.raises(errors.CorruptStoreError, match="generation 99"):
        read(store)


def test_a_torn_last_record_is_cut_off_by_the_next_writer(store: Path) -> None:
    (segment,) = (store / "log").iterdir()
    segment.write_bytes(segment.read_bytes()[:-7])
    assert read(store) == {key: key for key in range(4)}
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
        assert buffer.add_trajectories([witness(40)]) == [4]
    assert read(store) == {**{key: key for key in range(4)}, 4: 40}
    assert verify(store).sound


@pytest.mark.parametrize(
    "operation", [{"operation": "prune"}, {"operation": "evict", "ids": [[3, 1]]}, {"operation": "add"}, {}]
)
def test_records_that_say_nothing_sensible(store: Path, operation: dict[str, Any]) -> None:
    (segment,) = (store / "log").iterdir()
    generation = unseal("snapshot", (store / INDEX_NAME).read_bytes(), "")["generation"] + 1
    segment.write_bytes(encode_line({"generation": generation, **operation}))
    with pytest.raises(errors.CorruptStoreError, match=segment.name):
        read(store)


@pytest.mark.parametrize("ids", [[[4, 1 << 60]], [[4, 4]], [[4, 6]], []])
def test_records_with_more_or_fewer_ids_than_trajectories(store: Path, ids: list[list[int]]) -> None:
    (segment,) = (store / "log").iterdir()
    record = orjson.loads(segment.read_bytes().splitlines()[-1].split(b" ", 1)[1])
    assert record["entries"]["ids"] == [[4, 5]]
    record["entries"]["ids"] = ids
    segment.write_bytes(encode_line(record))
    with pytest.raises(errors.CorruptStoreError, match="2 trajectories"):
        read(store)


@pytest.mark.parametrize("damage", ["cut", "grow", "remove"])
def test_shards_of_another_size_are_refused_by_name(store: Path, damage: str) -> None:
    file = next(p for p in files_of(store / "shards") if p.stat().st_size > 100)
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else file.read_bytes() + b"x")
    with pytest.raises(errors.CorruptStoreError, match=file.name):
        read(store)
    assert not verify(store).sound


def test_a_newer_layout(store: Path) -> None:
    values = orjson.loads((store / METADATA_NAME).read_bytes())
    values.pop("crc32")
    values["layout_version"] = 2
    (store / METADATA_NAME).write_bytes(metadata_json(values))
    for call in (lambda: read(store), lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)):
        with pytest.raises(errors.UnsupportedVersionError, match=r"metadata\.json.*version 2.*upgrade"):
            call()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "shards/../../x", "shards//x", "a\0b", ""])
def test_names_that_leave_the_directory(store: Path, name: str) -> None:
    def rename(value: Any) -> None:
        value["shards"]["families"][0]["file_names"][0] = name

    resealed(store, rename)
    (store.parent / "x").write_bytes(b"precious")
    with pytest.raises(errors.UnsafeContentError):
        read(store)
    with pytest.raises(errors.UnsafeContentError):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)
    assert (store.parent / "x").read_bytes() == b"precious"


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in _leaves(item, (*path, key)))]


def test_any_value_of_the_snapshot_may_be_nonsense(store: Path) -> None:
    original = unseal("snapshot", (store / INDEX_NAME).read_bytes(), "")
    chance = random.Random(8)
    nonsense = [None, -1, 1 << 62, 1.5, "", "x", "../x", [], {}, [[]], True, "AAAA"]
    for place in chance.sample(_leaves(original)[1:], 60):
        value = orjson.loads(orjson.dumps(original))
        target = value
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = chance.choice(nonsense)
        (store / INDEX_NAME).write_bytes(seal("snapshot", orjson.dumps(value)))
        with contextlib.suppress(errors.TrajstoreError, WitnessError):
            read(store)


# -- code -------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_that_would_run_code(tmp_path: Path) -> None:
    """A shard of the right size with a pickle that calls something, in each format that has pickles."""
    fired = tmp_path / "fired"
    for fmt in ("pt", "pkl"):
        store = build(tmp_path / fmt, fmt, clean=True)
        for file in files_of(store / "shards"):
            size = file.stat().st_size
            bomb = pickle.dumps(Bomb(fired))
            if fmt == "pt":
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr("archive/data.pkl", bomb)
                file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
            else:
                file.write_bytes(bomb.ljust(size, b"\0"))
        with contextlib.suppress(errors.TrajstoreError, WitnessError):
            read(store)
        assert not verify(store).sound
        assert not fired.exists()
        if fmt == "pkl":
            with pytest.raises((errors.UnsafeContentError, errors.CorruptStoreError), match="shard_"):
                read(store)


# -- whose directory --------------------------------------------------------------------------------


def test_directories_of_others_are_not_written_to(tmp_path: Path, shared_fixtures: Path) -> None:
    source = next(path for path in sorted((shared_fixtures / "rlinf").iterdir()) if (path / METADATA_NAME).exists())
    path = tmp_path / "rlinf"
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(errors.CorruptStoreError, match="metadata"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
    assert {name: (path / name).read_bytes() for name in before} == before


def test_a_beginning_that_was_interrupted_is_begun_again(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path):
        pass
    (tmp_path / METADATA_NAME).unlink()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        assert buffer.add_trajectories([witness(0)]) == [0]
    assert read(tmp_path) == {0: 0}


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((errors.StoreError, OSError), match="file"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "file")


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        with pytest.raises(errors.StoreLockedError, match=r"process \d+ on .* since"):
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
        buffer.add_trajectories([witness(0)])
    assert read(tmp_path) == {0: 0}
