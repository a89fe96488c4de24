"""The local directory: the directory conformance suite, and its own guarantees."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, MutableMapping
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.remote.test_remote import around
from tests.support.directory import DirectoryConformance
from tests.support.faults import FaultPlan, failing_disk
from trajstore import Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore.errors import StoreLockedError


class TestLocalDirectory(DirectoryConformance):
    @pytest.fixture
    def behind(self, tmp_path: Path) -> MutableMapping[str, bytes]:
        return around(f"file://{tmp_path}/place")

    @pytest.fixture
    def open_again(self, tmp_path: Path) -> Callable[[], Directory]:
        return lambda: open_directory(tmp_path / "place")


def test_a_failed_append_is_cut_off_even_if_that_fails_at_first(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.append("log/1", b"first\n")
    plan = FaultPlan(1, "torn", lasting=True)  # every call from the write on, including the truncation
    with failing_disk(plan), pytest.raises(OSError, match="log/1"):
        directory.append("log/1", b"second line\n")
    assert (tmp_path / "log" / "1").read_bytes() == b"first\nsecond"
    directory.append("log/1", b"third\n")
    assert (tmp_path / "log" / "1").read_bytes() == b"first\nthird\n"


def test_a_lock_that_could_not_be_described_is_given_back(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.create()
    with failing_disk(FaultPlan(3, "EIO")), pytest.raises(OSError, match=r"writer\.lock"):
        directory.lock_writer()
    with directory.lock_writer(), pytest.raises(StoreLockedError):
        directory.lock_writer()


def test_a_reader_that_is_not_closed_leaves_no_lease_when_its_program_ends(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
        buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 1, 1))])
    program = (
        "import os, sys\n"
        "from trajstore import TrajectoryReplayBuffer\n"
        "reader = TrajectoryReplayBuffer.open(sys.argv[1])\n"
        "child = os.fork()\n"
        "sys.exit() if child == 0 else os.waitpid(child, 0)\n"
        "assert len(os.listdir(f'{sys.argv[1]}/readers')) == 1\n"  # a child does not end its parent's lease
    )
    done = programs.run(tmp_path, program, store)
    assert done.returncode == 0, done.stderr
    assert os.listdir(store / "readers") == []


def test_readers_are_seen_while_they_live(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    directory.lock_writer().release()  # readers are announced only after a first writer
    assert directory.readers() == []
    first, second = directory.announce_reader(), directory.announce_reader()
    assert [(reader.generation, reader.settled) for reader in directory.readers()] == [(0, False)] * 2
    first.settle(7)
    second.settle(5)
    assert sorted((reader.generation, reader.settled) for reader in directory.readers()) == [(5, True), (7, True)]
    second.look()
    assert sorted((reader.generation, reader.settled) for reader in directory.readers()) == [(5, False), (7, True)]
    assert all(f"process {os.getpid()} on " in reader.holder for reader in directory.readers())
    second.release()
    second.release()
    (tmp_path / "readers" / "dead.pin").write_bytes(b"%020d" % 1)
    assert [reader.generation for reader in directory.readers()] == [7]
    assert (tmp_path / "readers" / "dead.pin").exists()
    assert [reader.generation for reader in directory.readers(tidy=True)] == [7]
    assert not (tmp_path / "readers" / "dead.pin").exists()
    first.release()
    assert directory.readers() == []


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
@pytest.mark.parametrize("form", ["pt", "pkl", "zarr"])
def test_files_follow_the_umask_so_that_a_group_can_share_a_store(
    tmp_path: Path, umask: int, mode: int, form: str
) -> None:
    before = os.umask(umask)
    try:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "s", trajectory_format=form) as buffer:
            buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 1, 1))])
            buffer.flush()
            buffer.points.save(1)
            annotate(tmp_path / "s", [0], {"judge": [0.5]}, who="a")
            buffer.save_checkpoint(tmp_path / "checkpoint")
    finally:
        os.umask(before)
    modes = {
        str(file.relative_to(tmp_path)): stat.S_IMODE(file.stat().st_mode)
        for file in tmp_path.rglob("*")
        if file.is_file() and file.parent.name != "readers"
    }
    assert len(modes) > 6
    assert {name: oct(found) for name, found in modes.items() if found != mode} == {}


def test_a_reader_keeps_no_other_user_from_announcing_itself(tmp_path: Path) -> None:
    """The first reader of another user's store may be root or have a strict umask."""
    path = tmp_path / "store"
    directory = LocalDirectory(path)
    directory.lock_writer().release()
    path.chmod(0o775)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    before = os.umask(0o077)
    try:
        lease = directory.announce_reader()
    finally:
        os.umask(before)
    made, (file,) = (path / "readers").stat(), (path / "readers").iterdir()
    assert stat.S_IMODE(made.st_mode) == 0o775
    assert (made.st_uid, made.st_gid) == (path.stat().st_uid, path.stat().st_gid)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    lease.release()


def test_a_directory_that_was_not_created_is_not_made_by_writing(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "absent" / "place")
    with pytest.raises(FileNotFoundError, match="absent/place"):
        directory.publish([EncodedFile("file", [b"1"])])
    with pytest.raises(FileNotFoundError, match="absent/place"):
        directory.append("log/1", b"1")
    assert not directory.exists()
    assert not (tmp_path / "absent").exists()
    directory.create()
    directory.publish([EncodedFile("file", [b"1"])])
    assert (tmp_path / "absent" / "place" / "file").read_bytes() == b"1"


def test_sizes_of_files_whatever_a_name_stands_for(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(30):
        (folder / f"ä{number}").write_bytes(bytes(number))
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("ä7")
    (folder / "circle").symlink_to("circle")
    with open(folder / "large", "wb") as file:
        file.truncate(5 << 32)
    some = [f"shards/ä{number}" for number in range(31)]
    names = [*some, *(f"shards/{name}" for name in ("folder", "link", "circle", "large", "ä3/below", 300 * "z"))]
    expected = [*range(30), -1, -1, 7, -1, 5 << 32, -1, -1]
    assert LocalDirectory(tmp_path).sizes_of(names, "shards").tolist() == expected
