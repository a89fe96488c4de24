"""Range reads from an object store: sampled rows are fetched without their whole shards."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.stores import filled
from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore._core.files import partial
from trajstore._core.files.partial import BLOCK, JOINED, PartialMap, PartialMaps, Range, fetched
from trajstore.remote.directory import RemoteDirectory
from trajstore.remote.object_store import ObjectStore

CONTENT = np.random.default_rng(0).integers(0, 256, 40 * BLOCK + 17, np.uint8).tobytes()


class Server:
    """Serves ranges of one file and records the requests."""

    def __init__(self) -> None:
        self.asked: list[Range] = []

    def __call__(self, pieces: Sequence[Range]) -> Generator[tuple[int, bytes], None, None]:
        self.asked += pieces
        for place in reversed(range(len(pieces))):
            yield place, CONTENT[pieces[place].start : pieces[place].stop]


@pytest.fixture
def server() -> Server:
    return Server()


def read(one: PartialMap, *pieces: tuple[int, int]) -> list[bytes]:
    """Return bytes ``[start, stop)`` of a file."""
    starts = np.array([start for start, _ in pieces], np.int64)
    stops = np.array([stop for _, stop in pieces], np.int64)
    with fetched([one], lambda: (starts + one.address, stops - starts)):
        return [bytes(one.view[start:stop]) for start, stop in pieces]


def open_files(folder: Path) -> list[int]:
    """Return this process's descriptors of files in a folder."""
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is gone
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                numbers.append(number)
    return numbers


def test_many_files_lie_in_one_and_give_back_what_they_had(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = PartialMaps(server, lambda: tmp_path, 1 << 30)
    files = [maps.map(str(number), len(CONTENT)) for number in range(30)]
    for partial_map in files:
        assert read(partial_map, (0, len(CONTENT))) == [CONTENT]
    assert list(tmp_path.iterdir()) == []
    (held,) = open_files(tmp_path)
    full = os.fstat(held).st_blocks
    del partial_map, files[1:]
    assert os.fstat(held).st_blocks < full / 20
    assert read(files[0], (0, len(CONTENT))) == [CONTENT]
    monkeypatch.setattr(partial, "_OF_ONE_FILE", 100 * BLOCK)
    files += [maps.map(str(number), len(CONTENT)) for number in range(4)]
    assert [read(partial_map, (0, len(CONTENT))) for partial_map in files] == 5 * [[CONTENT]]
    assert len(open_files(tmp_path)) == 3
    del files[0]
    assert len(open_files(tmp_path)) == 2


def test_what_lies_outside_of_the_files_is_passed_over(server: Server, tmp_path: Path) -> None:
    maps = PartialMaps(server, lambda: tmp_path, 1 << 30)
    first, other = maps.map("a", len(CONTENT)), maps.map("b", len(CONTENT))
    low, high = sorted((first, other), key=lambda each: each.address)
    elsewhere = [low.address - 1, low.address + low.nbytes, high.address + high.nbytes, high.address + 5]
    with fetched([first, other], lambda: (np.array(elsewhere), np.array([1, 1, 1, 0]))):
        assert server.asked == []
    with fetched([first, other], lambda: (np.array([*elsewhere, high.address + 5]), np.array([1, 1, 1, 0, BLOCK]))):
        assert server.asked == [Range(high.name, 0, 2 * BLOCK)]
    with fetched([first, other], lambda: (np.array([high.address + 7]), np.array([1]))):
        assert len(server.asked) == 1


def test_the_least_recently_used_files_are_emptied(server: Server, tmp_path: Path) -> None:
    maps = PartialMaps(server, lambda: tmp_path, 25 * BLOCK)
    files = [maps.map(name, len(CONTENT)) for name in "abc"]
    for partial_map in files:
        read(partial_map, (0, 10 * BLOCK))
    assert [int(partial_map.there.sum()) for partial_map in files] == [0, 10, 10]
    for partial_map in files:
        assert read(partial_map, (0, 10 * BLOCK)) == [CONTENT[: 10 * BLOCK]]
    with fetched(files, lambda: (np.array([partial_map.address for partial_map in files]), np.full(3, len(CONTENT)))):
        assert all(partial_map.there.all() for partial_map in files), "blocks being read stay"
        assert all(bytes(partial_map.view) == CONTENT for partial_map in files)
    assert sum(int(partial_map.there.sum()) for partial_map in files) <= 25


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_file_that_needs_nothing_more_is_in_use_all_the_same(server: Server, tmp_path: Path) -> None:
    maps = PartialMaps(server, lambda: tmp_path, 25 * BLOCK)
    first, second = maps.map("a", len(CONTENT)), maps.map("b", len(CONTENT))
    read(first, (0, 10 * BLOCK))
    read(second, (0, 10 * BLOCK))
    read(first, (0, BLOCK))  # already cached
    third = maps.map("c", len(CONTENT))
    read(third, (0, 10 * BLOCK))
    assert first.there.any()
    assert not second.there.any()


def test_a_forked_child_and_its_parent_empty_nothing_of_each_other(server: Server, tmp_path: Path) -> None:
    maps = PartialMaps(server, lambda: tmp_path, 25 * BLOCK)
    first, other = maps.map("a", len(CONTENT)), maps.map("b", len(CONTENT))
    read(first, (0, 20 * BLOCK))
    child = os.fork()
    if child == 0:
        right = read(first, (0, 20 * BLOCK)) == [CONTENT[: 20 * BLOCK]]
        read(other, (0, 20 * BLOCK))  # evicts the first file
        os._exit(0 if right and not first.there.any() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert first.there.sum() == 20
    assert read(first, (0, 20 * BLOCK)) == [CONTENT[: 20 * BLOCK]]


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(server: Server, tmp_path: Path) -> None:
    partial_map = PartialMaps(server, lambda: tmp_path, 1 << 30).map("a", len(CONTENT))
    full = mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full, pytest.raises(OSError, match=r"No space left .* fetched parts of a; .*cache_dir") as error:
        read(partial_map, (0, 10))
    assert error.value.errno == errno.ENOSPC
    assert read(partial_map, (0, 10)) == [CONTENT[:10]]


# -- whole stores -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the size of each fetched range."""
    sizes: list[int] = []
    real = ObjectStore.ranges

    def counting(self: ObjectStore, pieces: Any) -> Any:
        sizes.extend(stop - start for _, start, stop in pieces)
        return real(self, pieces)

    monkeypatch.setattr(ObjectStore, "ranges", counting)
    return sizes


def reader_of(url: str, *, verify_shards: bool = False, **options: Any) -> TrajectoryReplayBuffer:
    kept = {"sample_window_size": 0, "enable_cache": False, "verify_shards": verify_shards}
    reader = TrajectoryReplayBuffer(storage_options={"range_reads": True, **options}, **kept)  # type: ignore[arg-type]
    reader.load_checkpoint(url)
    return reader


@pytest.fixture(params=["pt", "zarr"])
def store(request: pytest.FixtureRequest, memory_url: str) -> str:
    if request.param == "zarr":
        pytest.importorskip("zarr", reason="needs the extra 'zarr'")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, trajectory_format=request.param) as buffer:
        for key in range(6):
            buffer.add_trajectories([witness(key, scale=40)])
            buffer.flush()
    return memory_url


def test_draws_are_those_of_whole_shards(store: str, asked: list[int]) -> None:
    with reader_of(store) as reader:
        whole = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False)
        whole.load_checkpoint(store)
        for _ in range(5):
            ours, theirs = reader.sample(16), whole.sample(16)
            check_batch(ours)
            figures = reader.get_stats()
            assert (figures["fetched_bytes"], figures["fetched_ranges"]) == (sum(asked), len(asked))
            assert 1 <= figures["fetched_batches"] <= len(asked)
            assert all(torch.equal(ours[name], theirs[name]) for name in ("actions", "rewards", "dones"))
        assert sum(asked) > 0
        assert check_trajectory(reader.get(3), 40) == 3
        before = sum(asked)
        assert check_trajectory(reader.get(3), 40) == 3
        assert sum(asked) == before, "fetched blocks stay"
        whole.close()


def test_a_small_cache_gives_the_same_rows(store: str) -> None:
    with reader_of(store, cache_bytes=0) as reader:
        for _ in range(5):
            check_batch(reader.sample(16))


def test_only_what_is_drawn_is_fetched(memory_url: str, asked: list[int]) -> None:
    images = torch.randint(0, 256, (256, 4, 64, 64, 3), dtype=torch.uint8)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
        buffer.add_trajectories([Trajectory(rewards=torch.randn(256, 4, 1), curr_obs={"images": images})])
    with reader_of(memory_url) as reader:
        batch = reader.sample(8)
    assert len(asked) <= 9, "a range for each image, one for all rewards"
    most = batch["curr_obs"]["images"].nbytes + 9 * (JOINED + 2 * BLOCK)
    assert batch["curr_obs"]["images"].nbytes <= sum(asked) < most < images.nbytes / 9


def test_agent_trajectories_are_fetched_alone(memory_url: str, asked: list[int]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
        for number in range(40):
            tokens, messages = torch.arange(number, number + 5000), [{"role": "user", "content": "x"}]
            buffer.add_trajectories([AgentTrajectory(input_ids=tokens, messages=messages)])
    with reader_of(memory_url) as reader:
        for number in (3, 17):
            assert torch.equal(reader.get(number).input_ids, torch.arange(number, number + 5000))
        assert sum(asked) < 0.25 * 40 * 5000 * 8
        drawn = reader.sample_trajectories(4)
        assert all(int(trajectory.input_ids[0]) < 40 for trajectory in drawn)


def test_formats_without_places_are_said(memory_url: str, caplog: pytest.LogCaptureFixture, asked: list[int]) -> None:
    filled(memory_url, range(2), trajectory_format="pkl")
    with caplog.at_level(logging.WARNING), reader_of(memory_url) as reader:
        check_batch(reader.sample(8))
    warnings = [record.getMessage() for record in caplog.records if "range_reads has no effect" in record.getMessage()]
    assert len(warnings) == 1
    assert asked == []


def test_rows_that_cannot_be_fetched_are_an_error_and_nothing_else(store: str) -> None:
    with reader_of(store) as reader:
        with mock.patch.object(ObjectStore, "ranges", side_effect=OSError(errno.EIO, "no answer", "shards/one")):
            for call in (lambda: reader.sample(8), lambda: reader.get(0)):
                with pytest.raises(OSError, match="no answer"):
                    call()
        check_batch(reader.sample(8))


def test_verified_shards_are_fetched_whole(store: str, asked: list[int]) -> None:
    with reader_of(store, verify_shards=True) as reader:
        check_batch(reader.sample(8))
    assert asked == []


def test_a_directory_that_reads_ranges_travels(store: str) -> None:
    import pickle

    directory = pickle.loads(pickle.dumps(RemoteDirectory(store, range_reads=True)))
    assert directory.reads_ranges
    (name, *_) = directory.names("shards")
    assert isinstance(directory.map_rows(name, directory.size(name)), PartialMap)
