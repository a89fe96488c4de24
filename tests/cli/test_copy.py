"""Copies of live stores are complete; of damaged stores, the intact part is copied."""

from __future__ import annotations

import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.stores import Run
from tests.stores import files_of, filled, flip, keys_at, keys_of, opened, refused_to_all, stored, writer_to
from tests.support.copies import copy_live
from tests.support.witness import witness
from trajstore import Retention, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.files.base import Directory
from trajstore.cli import DAMAGED
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreNotFoundError,
    TrajectoryUnavailableError,
    TrajstoreError,
)
from trajstore.ledger import LEDGER_FOLDER, Ledger
from trajstore.operations import copying
from trajstore.operations import verify as verify_module
from trajstore.operations.copying import copy_store
from trajstore.operations.verify import check_store, verify


@pytest.mark.parametrize("trajectory_format", ["pt", "zarr"])
def test_a_copy_of_a_live_store_is_one_moment_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajectory_format: str
) -> None:
    """Retention removes all of it after the copier has read the index."""
    live, copy, write = tmp_path / "live", tmp_path / "copy", copying.write_store
    with writer_to(live, trajectory_format=trajectory_format, retention=Retention(max_trajectories=9)) as buffer:

        def add(first: int) -> None:
            for key in range(first, first + 9):
                buffer.add_trajectories([witness(key)])
                buffer.flush()

        add(0)
        monkeypatch.setattr(copying, "write_store", lambda *given, **more: add(9) or write(*given, **more))
        assert "verified" in run.out("copy", live, copy)
        assert buffer.trajectory_ids.tolist() == [*range(9, 18)]
    assert keys_at(copy) == {number: number for number in range(9)}
    with opened(copy) as again:
        assert again.add_trajectories([witness(0)]) == [9]


def test_what_is_whole_of_a_damaged_store_is_copied(run: Run, tmp_path: Path) -> None:
    store = filled(tmp_path / "store", range(5))
    Ledger(store / LEDGER_FOLDER).close()
    shards = sorted((store / "shards").iterdir())
    shards[1].unlink()
    flip(shards[3])
    (store / "metadata.json").write_bytes(b"{")
    before = files_of(store)
    out = run.out("repair", store, tmp_path / "whole", code=DAMAGED)  # the exit code reports the loss
    assert "lost: 2 trajectories, ids 1, 3" in out
    assert "the training ledger is not copied" in out
    assert "metadata.json" in out
    assert keys_at(tmp_path / "whole") == {0: 0, 2: 2, 4: 4}
    assert verify(tmp_path / "whole").sound
    assert files_of(store) == before
    report = run.json("repair", store, tmp_path / "again", code=DAMAGED)
    assert (report["lost"], report["trajectories"]) == ([1, 3], 3)
    assert "metadata.json" in run.err("copy", store, tmp_path / "copy", code=DAMAGED)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(("form", "lost"), [("pt", "nothing"), ("pt", "index"), ("pt", "metadata"), ("pkl", "both")])
def test_what_is_whole_of_a_damaged_directory_of_rlinf_becomes_a_store(
    run: Run, tmp_path: Path, form: Any, lost: str
) -> None:
    source = tmp_path / "rlinf"
    with TrajectoryReplayBuffer(sample_window_size=0, trajectory_format=form) as buffer:
        buffer.add_trajectories([witness(key) for key in range(4)])
        buffer.save_checkpoint(source, layout="rlinf")
    names = {"index": ["trajectory_index.json"], "metadata": ["metadata.json"], "nothing": []}
    names["both"] = names["index"] + names["metadata"]
    for name in names[lost]:
        os.truncate(source / name, 7)
    code, out, error = run("repair", source, tmp_path / "first")
    assert (code, error) == (0, "")
    assert all(f"{name}: " in out and "worked out again" in out for name in names[lost])
    assert keys_at(tmp_path / "first") == {0: 0, 1: 1, 2: 2, 3: 3}
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(source, strict=False) == 0
        assert keys_of(reader) == {0: 0, 1: 1, 2: 2, 3: 3}

    files = sorted(source.glob("trajectory_[0-9]*"))
    files[1].write_bytes(b"no archive")
    report = verify(source)
    assert [problem.lost for problem in report.problems if problem.file == files[1].name] == [((1, 1),)]
    assert sorted(problem.file for problem in report.problems) == sorted([files[1].name, *names[lost]])
    assert (report.trajectories, any(problem.uncounted for problem in report.problems)) == (3, False)
    code, out, error = run("repair", source, tmp_path / "new")
    assert (code, "lost: trajectory 1" in out, error) == (DAMAGED, True, "")
    assert keys_at(tmp_path / "new") == {0: 0, 2: 2, 3: 3}
    if lost == "nothing":
        with TrajectoryReplayBuffer(sample_window_size=0) as reader:
            assert reader.load_checkpoint(source, strict=False) == 1
            assert keys_of(reader) == {0: 0, 2: 2, 3: 3}
            with pytest.raises(
                CorruptStoreError, match=rf"{files[1].name}.*lost: trajectory 1; strict=False loads the rest"
            ):
                reader.load_checkpoint(source, strict=True)
            assert reader.load_checkpoint(source) == 0  # like RLinf, which reads a file on its first draw
            with pytest.raises(CorruptStoreError, match="`trajstore repair` makes a store of it"):
                reader.get(1)


def test_errors_of_a_damaged_log_or_index_say_what_can_be_done(tmp_path: Path) -> None:
    live = tmp_path / "live"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=live) as buffer:
        for _ in range(5):
            buffer.add_trajectories([witness(0)])  # all with the columns of the first record
            buffer.flush()
        (log,) = (live / "log").iterdir()
        data = bytearray(log.read_bytes())
        for name, at in (("first", 20), ("second", data.index(b"\n") + 30), ("index", None)):
            copy = copy_live(live, tmp_path / name)
            if at is None:
                for file in ("trajectory_index.json", "index_copy.json"):
                    (copy / file).write_text("{}")
            else:
                (copy / "log" / log.name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for name in ("first", "second", "index"):
        remedy = "strict=False loads the intact part, and `trajstore repair`"
        refused_to_all(tmp_path / name, CorruptStoreError, remedy)
        problems = verify(tmp_path / name).problems
        assert not any(problem.lost or problem.uncounted for problem in problems), "the shards have them"
        assert len(keys_at(tmp_path / name, strict=False)) == 5
        assert len(problems) <= 3, "not one for each record that is lost with the first"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_what_a_lost_shard_held_can_be_evicted_and_the_rest_is_sound(tmp_path: Path, damage: str) -> None:
    store = filled(tmp_path / "store", range(5))
    shard = sorted((store / "shards").iterdir())[1]
    if damage == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 100)
    (problem,) = verify(store).problems
    ((low, high),) = problem.lost
    with opened(store) as buffer:
        assert buffer.trajectory_ids.tolist() == [0, 2, 3, 4]
        with pytest.raises(TrajectoryUnavailableError):
            buffer.get(low)
        with pytest.raises(TrajectoryUnavailableError, match="no trajectory has the id 77"):
            buffer.evict([low, 77])
        buffer.evict([*range(low, high + 1), 3])
        with pytest.raises(TrajectoryUnavailableError):
            buffer.evict([low])
    assert verify(store).problems == []
    assert keys_at(store) == {0: 0, 2: 2, 4: 4}


def test_files_that_rlinf_left_of_an_earlier_run_are_named(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "rlinf"
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([witness(key) for key in range(2)])
        buffer.save_checkpoint(source, layout="rlinf")
    file = next(source.glob("trajectory_0_*"))
    shutil.copy(file, source / "trajectory_0_zzz.pt")
    assert verify(source).notes == ["1 trajectory file is not in the index"]
    (source / "trajectory_index.json").unlink()
    messages = {problem.file: problem.message for problem in verify(source).problems}
    assert f"{file.name} has the id 0 too" in messages["trajectory_0_zzz.pt"]
    assert "missing" in messages["trajectory_index.json"]
    assert run("repair", source, tmp_path / "new")[0] == 0
    assert keys_at(tmp_path / "new") == {0: 0, 1: 1}


def test_a_copy_that_was_published_before_its_process_was_killed_is_completed_by_the_same_call(
    run: Run, tmp_path: Path
) -> None:
    ranks = [stored(tmp_path / "run" / f"rank_{rank}", [witness(rank)]) for rank in range(2)]
    annotate(ranks[1], 0, {"tag": "x"})
    copy_store(ranks[0], tmp_path / "copy" / "rank_0")  # of the run, only this rank
    out = run.out("copy", tmp_path / "run", tmp_path / "copy")
    assert out.count("note: an earlier call has written everything already") == 1
    assert run.out("copy", tmp_path / "run", tmp_path / "copy").count("everything already") == 2
    annotate(ranks[1], 0, {"tag": "y"})
    assert "rank_1: is not empty, and holds other trajectories or values" in run.err(
        "copy", tmp_path / "run", tmp_path / "copy"
    )
    assert notes_of(tmp_path / "copy", "1/0")[-1].value == "x"
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    assert "is not empty" in run.err("copy", tmp_path / "run", tmp_path / "copy")


@pytest.mark.parametrize("remote", [False, True])
def test_the_copy_of_a_damaged_run_is_no_run(run: Run, tmp_path: Path, remote: bool) -> None:
    for rank in range(2):
        filled(tmp_path / "run" / f"rank_{rank}", range(3))
    with opened(tmp_path / "run" / "rank_0") as buffer:
        buffer.evict([0])  # the copy numbers its shards anew
    shard = tmp_path / "run" / "rank_0" / "shards" / "shard_00000002.pt"
    flip(shard)
    to = f"memory://{tmp_path}/copy" if remote else str(tmp_path / "copy")
    message = run.err("copy", tmp_path / "run", to, code=DAMAGED)
    assert "run/rank_0: nothing was copied" in message
    assert re.search(r"it is damaged: shards/shard_00000002\.pt: .*checksum does not fit", message)
    for path in (to, f"{to}/rank_0"):
        with pytest.raises(TrajstoreError):
            keys_at(path)
    other = tmp_path / "run" / "rank_1" / "shards" / "shard_00000000.pt"
    flip(other)
    both = run.err("copy", tmp_path / "run", f"{to}2", code=DAMAGED)
    assert re.search("rank_0: nothing .*shard_00000002.*; .*rank_1: nothing .*shard_00000000", both)
    for file in (shard, other):
        flip(file)
    out = run.out("copy", tmp_path / "run", to)
    assert "rank_0: 2 trajectories" in out
    assert out.count("everything already") == 1, "rank_1 was sound"
    assert len(keys_at(to)) == 5


@pytest.mark.parametrize("words", ["copy", "repair", "convert --to zarr"])
@pytest.mark.parametrize("remote", [False, True])
def test_nothing_appears_before_it_is_verified(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, remote: bool
) -> None:
    store = filled(tmp_path / "store", range(2))
    to = f"memory://{tmp_path}/copy" if remote else str(tmp_path / "copy")
    seen = []

    def check(directory: Directory, *arguments: Any) -> None:
        seen.append(directory.url)
        check_store(directory, *arguments)
        with pytest.raises(TrajstoreError):
            keys_at(directory.url if remote and directory.url != str(store) else to)

    monkeypatch.setattr(verify_module, "check_store", check)
    command, *options = words.split()
    run.out(command, store, to, *options)
    assert len(set(seen) - {str(store)}) == 1


@pytest.mark.parametrize("names", [("rank_0", "rank_1"), ("a", "b"), ("own/rank_0", "own/rank_1")])
def test_a_copy_of_stores_that_was_killed_says_so_and_is_completed_by_the_same_call(
    run: Run, tmp_path: Path, names: tuple[str, str]
) -> None:
    source, copy = tmp_path / "run", tmp_path / "copy"
    for name in names:
        filled(source / name, range(2))
    child = os.fork()
    if not child:
        copy_store(source, copy, partial(kill_at, copy / names[1]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for command in ("inspect", "verify", "list", "copy"):
        target = [tmp_path / "again"] if command == "copy" else []
        assert "an unfinished copy of the folder that copying.json names" in run.err(command, copy, *target)
    with pytest.raises(StoreNotFoundError, match=r"unfinished copy .* copy it here again to complete it"):
        keys_at(copy)
    for name in names:
        with pytest.raises(ConfigurationError, match=r"part of an unfinished copy \(.*copying.json.* copy there again"):
            opened(copy / name)
    assert f"{names[0]}: 2 trajectories" in run.out("copy", source, copy)
    assert {name.rsplit("/", 1)[-1] for name in files_of(copy)} & {"copying.json", "writer.lock"} == set()
    assert run.out("copy", source, copy).count("everything already") == 2


@pytest.mark.parametrize("words", ["copy store", "copy run", "repair store", "convert store --to pt"])
def test_of_two_copies_to_one_target_the_second_is_refused_before_it_writes(
    run: Run, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("store", "run/rank_0", "run/rank_1"):
        filled(tmp_path / name, range(2))
    monkeypatch.chdir(tmp_path)
    command, source, *options = words.split()
    said: list[str] = []
    check = verify_module.check_store

    def there() -> dict[str, bytes]:
        return {name: data for name, data in files_of(tmp_path).items() if "/readers/" not in name}

    def check_once(directory: Directory, *arguments: Any) -> None:
        if not said and directory.url != "store":
            said.append("")
            before = there()
            said.append(run.err(command, source, "out", *options))
            assert there() == before
        check(directory, *arguments)

    monkeypatch.setattr(verify_module, "check_store", check_once)
    run.out(command, source, "out", *options)
    assert f"out is being written by process {os.getpid()}" in said[1]
    assert "wait for it, or name another target" in said[1]
    assert len(keys_at(tmp_path / "out")) == (4 if source == "run" else 2)
    assert not list(tmp_path.glob(".*"))


def test_a_mount_point_is_refused_before_anything_is_copied(
    run: Run, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "disk"
    target.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    assert "a mount point cannot be replaced; choose a folder in it" in run.err("copy", store, target)
    assert list(target.iterdir()) == []


def kill_at(path: Path, *_: int) -> None:
    """End the process by SIGKILL once a path exists."""
    if path.exists():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_store_without_trajectories_is_copied_to_an_object_store(tmp_path: Path, memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.evict(buffer.add_trajectories([witness(0)]))
    assert copy_store(tmp_path, memory_url).trajectories == 0
    with TrajectoryReplayBuffer.open(memory_url) as reader:
        assert len(reader) == 0
