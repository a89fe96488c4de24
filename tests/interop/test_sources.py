"""Sources of conversions: names taken literally, files that a folder lists, values that Python would cut."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.interop.test_formats import ODD, read_all
from tests.stores import stored
from trajstore import AgentTrajectory, Reward
from trajstore.errors import ConfigurationError
from trajstore.interop.convert import convert_from, convert_to

pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
pa = pytest.importorskip("pyarrow", reason="needs the extra 'convert'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")


def rollout(text: str, outcome: float = 1.0) -> AgentTrajectory:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"answer to {text}"}]
    return AgentTrajectory(messages=messages, reward=Reward(outcome=outcome), task_id=f"t:{text}")


def rows(*texts: str) -> Any:
    return pa.table({"prompt": list(texts), "completion": [f"answer to {text}" for text in texts]})


def prompts_of(path: Path) -> list[str]:
    return [rollout.messages[0]["content"] for rollout in read_all(path) if isinstance(rollout, AgentTrajectory)]


def test_times_keep_their_nanoseconds_and_years_after_9999(tmp_path: Path) -> None:
    counts = pa.array([0, -1, 1_700_000_000_123_456_789], pa.int64())
    times = counts.cast(pa.timestamp("ns"))
    columns = {
        "prompt": ["a"] * 3,
        "completion": ["b"] * 3,
        "there": times.cast(pa.timestamp("ns", "Asia/Kolkata")),
        "took": counts.cast(pa.duration("ns")),
        "day": pa.array([0, 1_001, 86_399_999_999_999], pa.time64("ns")),
        "lists": pa.array([[value] for value in counts.to_pylist()], pa.list_(pa.timestamp("ns"))),
        "parts": pa.array([{"at": value} for value in counts.to_pylist()], pa.struct([("at", pa.timestamp("ns"))])),
        "map": pa.array([[("at", value)] for value in counts.to_pylist()], pa.map_(pa.string(), pa.timestamp("ns"))),
        "far": pa.array([0, 0, 10**18], pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert convert_from(tmp_path / "a.parquet", tmp_path / "out", "trl").problems == {}
    found = [one.metadata for one in read_all(tmp_path / "out") if isinstance(one, AgentTrajectory)]
    expected = ["1970-01-01 00:00:00.000000000", "1969-12-31 23:59:59.999999999", "2023-11-14 22:13:20.123456789"]
    assert [one["lists"] for one in found] == [[time] for time in expected]
    assert [one["parts"] for one in found] == [one["map"] for one in found] == [{"at": time} for time in expected]
    assert found[2]["there"] == "2023-11-15 03:43:20.123456789+05:30"
    assert [one["took"] for one in found] == counts.to_pylist()
    assert [one["day"] for one in found] == [0, 1_001, 86_399_999_999_999]
    assert found[2]["far"] == "+33658-09-27 01:46:40.000000"


@pytest.mark.parametrize("name", ODD)
def test_odd_names_of_files_and_folders_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    for folder in ("lr=1", "ab", "runs", "x0", "x1", name):
        (tmp_path / folder).mkdir()
        for file in ("a", f"{name}"):
            texts = [f"{folder} {file} {number}" for number in range(2)]
            pq.write_table(rows(*texts), tmp_path / folder / f"{file}.parquet")
    convert_from(tmp_path / name, tmp_path / "store", "trl")
    expected = {f"{name} {file} {number}" for file in ("a", name) for number in range(2)}
    assert set(prompts_of(tmp_path / "store")) == expected
    single = tmp_path / name / f"{name}.parquet"
    convert_from(single, tmp_path / "one", "trl")
    assert prompts_of(tmp_path / "one") == [f"{name} {name} {number}" for number in range(2)]
    convert_to(tmp_path / "store", tmp_path / name / "out", "trl")


def test_arrow_files_are_refused_and_hidden_files_skipped(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    pq.write_table(rows("a"), tmp_path / "saved" / "a.parquet")
    (tmp_path / "saved" / "._x.parquet").write_bytes(b"\x00\x05")
    convert_from(tmp_path / "saved", tmp_path / "store", "trl")
    assert prompts_of(tmp_path / "store") == ["a"]
    arrow = tmp_path / "saved" / "data-00000-of-00001.arrow"
    arrow.touch()
    for source in (tmp_path / "saved", arrow):
        with pytest.raises(ConfigurationError, match=r"data-00000-of-00001\.arrow: Arrow files are not read"):
            convert_from(source, tmp_path / "second", "trl")


def test_maps_and_nan_of_parquet_do_not_lose_their_row(tmp_path: Path) -> None:
    table = rows("a", "b").append_column("m", pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())))
    pq.write_table(table.append_column("score", pa.array([float("nan"), 2.0])), tmp_path / "x.parquet")
    done = convert_from(tmp_path / "x.parquet", tmp_path / "store", "trl")
    assert (done.written, done.problems) == (2, {})
    assert [one.metadata for one in read_all(tmp_path / "store")] == [{"m": {"k": 1}}, {"score": 2.0}]  # type: ignore[union-attr]


def verl_row(text: str, index: Any, source: str = "gsm8k") -> dict[str, Any]:
    extra = {"split": "train"} | ({} if index is None else {"index": index})
    return {"data_source": source, "prompt": [{"role": "user", "content": text}], "extra_info": extra}


def test_two_prompts_of_verl_never_share_a_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "in"
    folder.mkdir()
    files = {
        "train": [verl_row("a", 7), verl_row("b", 8), verl_row("b", 8)],
        "test": [verl_row("c", 7), verl_row("d", 9)],
        "float": [verl_row("e", 10.0)],
        "none": [verl_row(text, None) for text in ("f", "g", "g")] + [verl_row("h", None, "")],
    }
    for name, rows_of_file in files.items():
        pl.DataFrame(rows_of_file).write_parquet(folder / f"{name}.parquet")
    convert_from(folder, tmp_path / "store", "verl")
    tasks: dict[str, set[str]] = {}
    for one in read_all(tmp_path / "store"):
        assert isinstance(one, AgentTrajectory)
        tasks.setdefault(one.messages[0]["content"], set()).add(one.task_id)
    names = {text: name for text, (name,) in tasks.items()}  # the same prompt has one task
    assert len(set(names.values())) == len(names) == 8
    assert [names[text] for text in "bde"] == ["gsm8k:8", "gsm8k:9", "gsm8k:10"]
    assert names["a"].startswith("gsm8k:7:")
    assert names["f"].startswith("gsm8k:")
    for said in ("4 rows have no extra_info.index", "1 tasks have several prompts"):
        assert caplog.text.count(said) == 1


def test_a_store_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", [rollout("a")])
    with pytest.raises(ConfigurationError, match="takes episodes; there are only rollouts"):
        convert_to(store, tmp_path / "set", "lerobot")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("form", ["chat", "jsonl", "trl"])
def test_nan_loses_no_row_and_large_integers_are_not_rounded(tmp_path: Path, form: str) -> None:
    """Python's ``json`` writes NaN and integers of any size; the store has no place for more than 64 bits."""
    source = tmp_path / "in"
    metadata = [json.dumps({"seed": seed, "score": float("nan")}) for seed in (2**64 - 1, 2**70 + 1)]
    if form == "trl":
        pq.write_table(rows("NaN?", "NaN?").append_column("metadata", pa.array(metadata)), source)
    else:
        messages = json.dumps([{"role": "user", "content": "NaN?"}, {"role": "assistant", "content": "a"}])
        lines = [f'{{"messages": {messages}, "metadata": {text}}}\n' for text in metadata]
        source.write_text("".join(lines))
    done = convert_from(source, tmp_path / "store", form)
    (one,) = read_all(tmp_path / "store")
    assert isinstance(one, AgentTrajectory)
    assert (one.metadata["seed"], one.metadata.get("score"), one.messages[0]["content"]) == (2**64 - 1, None, "NaN?")
    (reason,) = done.problems.values()
    assert reason.endswith("1180591620717411303425 needs more than 64 bits")


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set" / "meta").mkdir(parents=True)
    (tmp_path / "set" / "meta" / "info.json").write_text("{}")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(PermissionError, match=r"info\.json"):
        convert_from(tmp_path / "set", tmp_path / "store", "lerobot")
