"""The simulator's model of the disk, and the recorder of its operations."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tools.powerloss.filesystem import ROOT, Entries, Node, Op, Pending, Sync, Write, tree_of
from tools.powerloss.recorder import Recorder
from tools.powerloss.states import Case, build, cases_after


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
    listings = [build(ops, case) for case in cases_after(ops, random.Random(0))]
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
    contents = {build(ops, case)["x"] for case in cases_after(ops, random.Random(0))}
    assert contents >= {b"", b"abcdef", b"abc", b"\0\0\0def", bytes(6)}
    assert build(ops, Case(4, frozenset(), ((3, 0, 1),)))["x"] == b"abcd\0\0"
    ops += [Sync(file), Write(file, 1, b"XYZ")]  # which does not extend the file: any part of it
    contents = {build(ops, case)["x"] for seed in range(20) for case in cases_after(ops, random.Random(seed))}
    assert contents >= {b"abcdef", b"aXYZef", b"aX\0\0ef", b"a\0YZef", b"a\0Y\0ef"}
