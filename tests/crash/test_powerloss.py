"""Power loss: a short campaign, detection of missing fsyncs, and the disk model. See docs/crash-testing.md."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.stores import add_each, contents_of, opened
from tools.campaigns import Result
from tools.crash.journal import Promises
from tools.powerloss.campaign import check, look_at_pool, look_at_store, run_campaign
from tools.powerloss.filesystem import ROOT, Entries, Node, Op, Pending, Sync, Tree, Write, tree_of
from tools.powerloss.recorder import Recorder
from tools.powerloss.sessions import record_pools, record_store, write_tree
from tools.powerloss.states import Case, build, plan
from trajstore.operations.verify import verify


def test_nothing_is_lost_when_the_power_fails(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, states=24, sessions=(0, 1, 3), seed=3, steps=8)  # of pt, zarr and pkl
    assert result.problems == []
    assert result.counts["states"] == 24
    assert result.counts["trajectories compared"] > 150


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_a_long_campaign(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, states=2000, sessions=range(8), seed=4)
    assert result.problems == []


def _new_segment(ops: Sequence[Op], _: random.Random) -> int:
    """Kill right after a log segment is created."""
    tree, made = Tree(), 0
    for at, op in enumerate(ops):
        tree.apply(op)
        log = tree.find(ROOT, ["store", "log"])
        if isinstance(op, Entries) and any(folder == log and node for folder, _, node in op.changes):
            made = at + 1
    assert made
    return made


def test_a_segment_that_a_killed_writer_left_is_made_durable(tmp_path: Path) -> None:
    ops = record_store(tmp_path / "record", 0, seed=5, steps=12, kill=_new_segment)
    result = Result()
    check(tmp_path / "state", ops, 12, 5, look_at_store, "killed", result)
    assert result.problems == []


def test_a_folder_that_a_killed_writer_left_is_made_durable(tmp_path: Path) -> None:
    """The first writer is killed after creating its shard's folder, which the second reuses."""
    ops: list[Op] = []
    for life in range(2):
        place = tmp_path / f"{life}"
        write_tree(place, tree_of(ops).listing())
        with Recorder(place, ops).recording(), opened(place / "store", trajectory_format="zarr") as buffer:
            add_each(buffer, [3])
            flushed = len(ops)
        if life == 0:
            made = [
                at
                for at, op in enumerate(ops)
                if isinstance(op, Entries) and any(name == "shard_00000000.zarr" for _, name, _ in op.changes)
            ]
            del ops[made[0] + 1 :]
    pending = Pending()
    for op in ops[:flushed]:
        pending.add(op)
    files = build(ops, Case(flushed, 0, frozenset(pending.open), ()))
    write_tree(tmp_path / "left", files)
    assert contents_of(tmp_path / "left" / "store") == [3]


def test_a_pin_that_a_killed_writer_removed_does_not_come_back(tmp_path: Path) -> None:
    """The first writer is killed before the removal is durable; the second relies on it."""
    ops: list[Op] = []
    for life in range(2):
        place = tmp_path / f"{life}"
        write_tree(place, tree_of(ops).listing())
        with Recorder(place, ops).recording(), opened(place / "store") as buffer:
            if life == 0:
                add_each(buffer, [3, 4])
                buffer.points.pin("mine")
                buffer.evict([0])
                buffer.points.remove("mine")
        if life == 0:
            removed = [
                at
                for at, op in enumerate(ops)
                if isinstance(op, Entries) and any(name == "mine.json" and not node for _, name, node in op.changes)
            ]
            del ops[removed[-1] + 1 :]
    pending = Pending()
    for op in ops:
        pending.add(op)
    write_tree(tmp_path / "left", build(ops, Case(len(ops), 0, frozenset(pending.open), ())))
    assert verify(tmp_path / "left" / "store").sound
    assert contents_of(tmp_path / "left" / "store") == [4]


# -- the campaign detects faults ---------------------------------------------------------------------


def _without_syncs(ops: Sequence[Op], pattern: str) -> list[Op]:
    """Skip every fsync of files or folders with a matching path."""
    tree, left = Tree(), []
    for op in ops:
        tree.apply(op)
        if not (isinstance(op, Sync) and any(re.fullmatch(pattern, path) for path in _paths(tree, op.node))):
            left.append(op)
    assert len(left) < len(ops), pattern
    return left


def _paths(tree: Tree, node: Node, folder: Node = ROOT, above: str = "") -> list[str]:
    paths = []
    for name, inner in tree.folders.get(folder, {}).items():
        if inner == node:
            paths.append(above + name)
        if inner.folder:
            paths += _paths(tree, node, inner, f"{above}{name}/")
    return paths


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    """Return a session that is the same however many writes its threads make: the kill draws no random number."""
    folder = tmp_path_factory.mktemp("session")
    return record_store(folder, 0, seed=9, steps=25, kill=lambda ops, _: len(ops) * 2 // 3)


@pytest.mark.parametrize(
    "pattern",
    [
        r"store/shards",
        r"store/shards/.*",
        r"store/log",
        r"store/log/.*",
        r"store/pins",
        r"store/trajectory_index\.json.*",
    ],
)
def test_an_fsync_that_is_left_out_is_seen(tmp_path: Path, session: list[Op], pattern: str) -> None:
    assert _first_problem(tmp_path, _without_syncs(session, pattern), look_at_store)


def test_an_fsync_of_a_checkpoint_that_is_left_out_is_seen(tmp_path: Path) -> None:
    ops = record_store(tmp_path / "record", 0, seed=12, steps=25)  # includes saved points
    for pattern in (r".*checkpoint.*/shards", r".*checkpoint[^/]*/trajectory_index\.json.*"):
        assert _first_problem(tmp_path, _without_syncs(ops, pattern), look_at_store)


def test_an_fsync_of_a_pool_that_is_left_out_is_seen(tmp_path: Path) -> None:
    ops = record_pools(tmp_path / "record")
    for pattern in ("pool", r"pool/.*pkl.*"):
        assert _first_problem(tmp_path, _without_syncs(ops, pattern), look_at_pool)


def _first_problem(
    tmp_path: Path, ops: Sequence[Op], examine: Callable[[Path, Promises, Callable[[str], None]], int]
) -> str | None:
    result = Result()

    class SeenError(Exception):
        pass

    def stop(result: Result) -> None:
        if result.problems:
            raise SeenError

    with pytest.raises(SeenError):
        check(tmp_path / "state", ops, 300, 1, examine, "planted", result, stop)
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    return result.problems[0]


# -- recorder and model ------------------------------------------------------------------------------


def test_calls_relative_to_a_folder_are_recorded(tmp_path: Path) -> None:
    ops: list[Op] = []
    with Recorder(tmp_path, ops).recording():
        root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        os.mkdir("a", dir_fd=root)
        file = os.open("a/x", os.O_WRONLY | os.O_CREAT, dir_fd=root)
        os.write(file, b"12345")
        os.pwrite(file, b"9", 1)
        os.writev(file, [b"6", b"78"])
        os.ftruncate(file, 7)
        os.fsync(file)
        os.close(file)
        os.rename("a/x", "a/y", src_dir_fd=root, dst_dir_fd=root)
        os.link("a/y", "z", src_dir_fd=root, dst_dir_fd=root)
        (tmp_path / "b").mkdir()
        (tmp_path / "b").rmdir()
        shutil.rmtree("a", dir_fd=root)
        os.fsync(root)
        os.close(root)
    assert tree_of(ops).listing() == {"z": b"1934567"}
    assert [op for op in ops if isinstance(op, Sync)][-1] == Sync(ROOT)


def test_what_is_written_past_the_recorder_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not recorded: hidden"), Recorder(tmp_path, []).recording():
        (tmp_path / "hidden").write_bytes(b"1")


def test_what_is_durable_and_what_is_not() -> None:
    file, folder = Node(1, False), Node(2, True)
    ops: list[Op] = [
        Entries(((ROOT, "d", folder),)),
        Entries(((folder, "x.tmp", file),)),
        Write(file, 0, b"abc"),
        Sync(file),
        Entries(((folder, "x.tmp", None), (folder, "x", file))),
        Sync(ROOT),
    ]
    pending = Pending()
    for op in ops:
        pending.add(op)
    assert sorted(pending.open) == [1, 4]
    listings = [build(ops, case) for case in plan(ops, 100, 0) if case.moment == len(ops)]
    assert {frozenset(listing) for listing in listings} == {
        frozenset({"d"}),
        frozenset({"d", "d/x.tmp"}),
        frozenset({"d", "d/x"}),
    }
    assert all(content in (None, b"abc") for listing in listings for content in listing.values())
    pending.add(Sync(folder))
    assert pending.open == {}


def test_writes_may_be_there_in_part() -> None:
    file = Node(1, False)
    ops: list[Op] = [Entries(((ROOT, "x", file),)), Sync(ROOT), Write(file, 0, b"abc"), Write(file, 3, b"def")]
    contents = {build(ops, case)["x"] for case in plan(ops, 100, 0) if case.moment == len(ops)}
    assert contents >= {b"", b"abcdef", b"abc", b"\0\0\0def", bytes(6)}
    assert build(ops, Case(4, 0, frozenset(), ((3, 0, 1),)))["x"] == b"abcd\0\0"
    ops += [Sync(file), Write(file, 1, b"XYZ")]  # which does not extend the file: any part of it
    contents = {build(ops, case)["x"] for seed in range(20) for case in plan(ops, 100, seed) if case.moment == len(ops)}
    assert contents >= {b"abcdef", b"aXYZef", b"aX\0\0ef", b"a\0YZef", b"a\0Y\0ef"}
