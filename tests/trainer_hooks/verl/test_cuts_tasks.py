"""Cuts beside checkpoints, and the mapping from data rows to tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.verl.cuts import (
    CUT_FILE,
    MODEL_FOLDER,
    Cut,
    checkpoint_folder,
    cuts_below,
    find_cut,
    read_cut,
    restorable_cuts,
    write_cut,
)
from trainer_hooks.verl.tasks import TaskTable, rollout_counts
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreWriteError

CUT = Cut(
    step=7,
    run="run-a",
    pool={"version": 1, "tasks": {"sums:3": [1, 2]}, "entropy": 0.25},
    expected={"uid-1": [{"input_ids": [1, 2]}, {}], "uid-2": []},
)


def write(root: Path, *steps: int) -> None:
    for step in steps:
        write_cut(checkpoint_folder(root, step), dataclasses.replace(CUT, step=step))


# ---- cuts: there and back ----


@pytest.mark.parametrize("cut", [CUT, Cut(0, "", None, {})], ids=["full", "empty"])
def test_a_cut_comes_back(cut: Cut, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "global_step_7"
    write_cut(folder, cut)
    assert read_cut(folder) == cut
    assert os.listdir(folder) == [CUT_FILE]


def test_a_folder_without_a_cut(tmp_path: Path) -> None:
    assert read_cut(tmp_path) is None
    assert read_cut(tmp_path / "absent") is None
    assert find_cut(tmp_path / "absent" / "global_step_3", 3) is None


DOCUMENT = {"version": 1} | dataclasses.asdict(CUT)
DAMAGED = {
    "empty": b"",
    "cut off": orjson.dumps(DOCUMENT)[:-10],
    "no text": b"\xff\xfe\x00",
    "another thing": b"[]",
    "nothing": b"null",
    "a newer version": orjson.dumps(DOCUMENT | {"version": 2}),
    "no step": orjson.dumps({name: value for name, value in DOCUMENT.items() if name != "step"}),
    "no version": orjson.dumps({name: value for name, value in DOCUMENT.items() if name != "version"}),
    "a step that is none": orjson.dumps(DOCUMENT | {"step": "seven"}),
    "a pool that is none": orjson.dumps(DOCUMENT | {"pool": 5}),
    "expected histories that are none": orjson.dumps(DOCUMENT | {"expected": 5}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_told_by_the_name_of_the_file(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, 6)
    folder = checkpoint_folder(tmp_path, 7)
    folder.mkdir()
    (folder / CUT_FILE).write_bytes(content)
    for read in (lambda: read_cut(folder), lambda: find_cut(folder, 7), lambda: list(cuts_below(tmp_path))):
        with pytest.raises(CorruptStoreError, match=rf"global_step_7.{CUT_FILE}: not the cut of a checkpoint"):
            read()


# ---- cuts: selection ----


def test_cuts_below_are_in_the_order_of_steps(tmp_path: Path) -> None:
    write(tmp_path, 10, 9, 100)
    checkpoint_folder(tmp_path, 5).mkdir()  # a checkpoint older than the pool
    (tmp_path / "global_step_last").mkdir()
    write_cut(tmp_path / "global_step_8_copy", CUT)
    assert [(path.name, cut.step) for path, cut in cuts_below(tmp_path)] == [
        ("global_step_9", 9),
        ("global_step_10", 10),
        ("global_step_100", 100),
    ]
    assert list(cuts_below(tmp_path / "absent")) == []


@pytest.mark.parametrize(("step", "expected"), [(9, 9), (10, 10), (12, 10), (8, None), (99, 10), (100, 100)])
def test_the_cut_of_a_step_is_its_own_or_the_newest_before(step: int, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 100)
    cut = find_cut(checkpoint_folder(tmp_path, step), step)
    assert (None if cut is None else cut.step) == expected


def test_a_checkpoint_s_own_cut_counts_wherever_the_checkpoint_lies(tmp_path: Path) -> None:
    write(tmp_path, 3)
    moved = tmp_path / "kept" / "best"
    write_cut(moved, CUT)
    assert find_cut(moved, 7) == CUT


def test_checkpoints_without_a_model_cannot_be_restored(tmp_path: Path) -> None:
    write(tmp_path, 3, 6, 9)
    for step in (6, 9):
        (checkpoint_folder(tmp_path, step) / MODEL_FOLDER).mkdir()
    assert [cut.step for cut in restorable_cuts(tmp_path)] == [6, 9]


# ---- cuts: crashes ----


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str, **folders: int) -> None:
        raise OSError(28, "No space left on device")

    write_cut(tmp_path, CUT)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StoreWriteError, match=rf"{CUT_FILE}.*No space left"):
        write_cut(tmp_path, dataclasses.replace(CUT, run="next"))
    assert (os.listdir(tmp_path), read_cut(tmp_path)) == ([CUT_FILE], CUT)


# ---- tasks ----

MakeDataset = Callable[[Sequence[dict[str, Any]]], RLHFDataset]


@pytest.fixture
def make_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDataset:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = OmegaConf.create({"cache_dir": str(tmp_path / "copies"), "filter_overlong_prompts": False})

    def make(rows: Sequence[dict[str, Any]]) -> RLHFDataset:
        pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "tasks.parquet")
        return RLHFDataset(str(tmp_path / "tasks.parquet"), make_tokenizer(), config)

    return make


def task(text: str, index: int | None, source: str = "sums") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": index, "split": "train"},
    }


def prompt_of(table: TaskTable, name: str) -> str:
    content = table.row(name)["raw_prompt"][0]["content"]
    assert isinstance(content, str)
    return content


def test_tasks_are_found_by_source_and_index(make_dataset: MakeDataset) -> None:
    rows = [task("one", 11), task("two", 5), task("three", 11, "words"), task("four", 0)]
    table = TaskTable(make_dataset(rows))
    assert len(table) == 4
    names = {"sums:11": "one", "sums:5": "two", "words:11": "three", "sums:0": "four"}
    assert {name: prompt_of(table, name) for name in names} == names
    row = table.row("words:11")
    assert (row["index"], row["data_source"]) == (11, "words")
    assert "sums:1" not in table
    assert "words:5" not in table
    assert "sums:11" in table


@pytest.mark.parametrize("index", [7, None])
def test_two_prompts_that_are_one_task_are_refused(index: int | None, make_dataset: MakeDataset) -> None:
    rows = [task("one", 1), task("two", index), task("three", index)]
    with pytest.raises(ConfigurationError, match=rf"rows 1 and 2 are both task 'sums:{index}'.*extra_info\.index"):
        TaskTable(make_dataset(rows))


@pytest.mark.parametrize("extra", [{"split": "train"}, None])
def test_without_any_index_there_may_be_one_prompt(extra: dict[str, Any] | None, make_dataset: MakeDataset) -> None:
    def row(text: str) -> dict[str, Any]:
        made = task(text, None) | {"extra_info": extra}
        return {name: value for name, value in made.items() if value is not None}

    with pytest.raises(ConfigurationError, match=r"rows 0 and 1 are both task 'sums:0'.*extra_info\.index"):
        TaskTable(make_dataset([row("one"), row("two")]))
    assert prompt_of(TaskTable(make_dataset([row("one"), row("one")])), "sums:0") == "one"


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
def test_media_are_refused(column: str, make_dataset: MakeDataset) -> None:
    with pytest.raises(ConfigurationError, match=rf"column {column}.*experience_replay\.enable=false"):
        TaskTable(make_dataset([task("one", 1) | {column: ["a.png"]}]))


class PlainDataset:
    """A user-defined dataset without a table."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self._rows[position]


def test_a_dataset_without_a_table() -> None:
    rows = [
        {"data_source": "sums", "index": index, "raw_prompt": [{"content": text}]}
        for index, text in (("a", "one"), ("b", "two"), ("a", "one"))
    ]
    table = TaskTable(PlainDataset(rows))
    assert len(table) == 2
    assert table.row("sums:b") is rows[1]
    rows[2]["raw_prompt"] = [{"content": "another"}]
    with pytest.raises(ConfigurationError, match="rows 0 and 2 are both task 'sums:a'"):
        TaskTable(PlainDataset(rows))


@pytest.mark.parametrize("said", [[4, None], [4, 0], [4, -1], [4, 2.5], [4, "four"], [4, "4"], [float("inf")]])
def test_numbers_of_rollouts_that_are_none_are_named(said: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"column __rollout_n__: .*at least 1"):
        rollout_counts(said)


def test_numbers_of_rollouts_may_be_floats_as_a_column_with_gaps_once_had_them() -> None:
    assert rollout_counts([4, 2.0]) == [4, 2]
