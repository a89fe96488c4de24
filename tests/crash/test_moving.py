"""Moving and repairing commands, killed or interrupted at any file system call and rerun, compared with a dict."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import opened
from tests.support.witness import check_trajectory, witness
from tools.crash.forked import forking
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.store.facts import NOTE
from trajstore.cli import main
from trajstore.interop import convert
from trajstore.points import points_at

_CALLS = ("open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "ctypes.dlsym")

COMMANDS = {
    "copy": ("copy", "a", "out"),
    "convert": ("convert", "run", "out", "--to", "zarr"),
    "prune": ("prune", "a", "--where", "version_high < 10", "--yes"),
    "compact": ("compact", "a"),
}


def _run(folder: Path, words: tuple[str, ...], kill_at: int, calls: Any, sent: int) -> None:
    """Run a command in small portions, count its file system calls, and send itself a signal at one of them."""
    os.chdir(folder)
    convert._PORTION_ITEMS = 4
    count = itertools.count(1)

    def hook(event: str, _: object) -> None:
        if event in _CALLS:
            calls.value = next(count)
            if calls.value == kill_at:
                os.kill(os.getpid(), sent)

    with (folder.parent / "errors").open("w") as errors, redirect_stdout(errors), redirect_stderr(errors):
        sys.addaudithook(hook)
        code = main(words)
        errors.flush()
        os._exit(code)


def _command(
    folder: Path, words: tuple[str, ...], kill_at: int = 0, sent: signal.Signals = signal.SIGKILL
) -> tuple[int, int]:
    """Return the exit code of a command that gets a signal at a call, and its number of calls."""
    calls = forking().Value("q", 0, lock=False)
    child = forking().Process(target=_run, args=(folder, words, kill_at, calls, sent))
    child.start()
    child.join(120)
    assert child.exitcode is not None, "it did not end"
    if kill_at and sent == signal.SIGINT:
        last = (folder.parent / "errors").read_text().splitlines()[-1:]
        assert child.exitcode in (0, 130) or (child.exitcode == 2 and "out exists already" in last[0]), last
        assert any(line.startswith("trajstore: interrupted") for line in last) == (child.exitcode == 130), last
    return child.exitcode, calls.value


def _interrupt(folder: Path, words: tuple[str, ...], calls: int, draw: random.Random) -> None:
    """Kill or interrupt a command once or twice."""
    for _ in range(draw.randint(1, 2)):
        _command(folder, words, draw.randint(1, calls), draw.choice((signal.SIGKILL, signal.SIGINT)))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of stores with several shards and dead rows."""
    folder = tmp_path_factory.mktemp("stores")
    for number, name in enumerate(("a", "run/rank_0", "run/rank_1")):
        with opened(folder / name) as store:
            for first in (100 * number, 100 * number + 10):
                store.add_trajectories([witness(key) for key in range(first, first + 6)])
                store.flush()
            for first in (0, 7):  # latest values are spread over two shards of rows
                ids = store.trajectory_ids[first:].tolist()
                rows = [
                    torch.full(store.get(trajectory).rewards.shape[:2], 1000.0 * first + trajectory)
                    for trajectory in ids
                ]
                annotate(store, ids, {"rows": rows, "score": [1000.0 * first + trajectory for trajectory in ids]})
            store.evict(store.trajectory_ids[3::7].tolist())
    return folder


def _found(path: Path) -> dict[bytes, tuple[int, float]]:
    """Return each trajectory's key and late value; check that all its rows have this value."""
    with TrajectoryReplayBuffer.open(path) as reader:
        ids = reader.trajectory_ids.tolist()
        keys = [check_trajectory(reader.get(number)) for number in ids]
        rows = [set(reader.get(number).notes["rows"].reshape(-1).tolist()) for number in ids]
        note_values = [float(value) for value in reader._live.contents.index[NOTE + "score"]]
        uuids = [bytes(uuid) for uuid in reader._uuids]
    assert rows == [{value} for value in note_values]
    assert len(set(uuids)) == len(uuids)
    return dict(zip(uuids, zip(keys, note_values, strict=True), strict=True))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_a_command_that_was_killed_completes(stores: Path, tmp_path: Path, name: str, kills: int) -> None:
    words, draw = COMMANDS[name], random.Random(name)
    before = {path: _found(stores / path) for path in ("a", "run")}
    pruned = {uuid: key for uuid, key in before["a"].items() if key[0] >= 10}
    expected = {
        "copy": {"out": before["a"]},
        "convert": {"out": before["run"]},
        "prune": {"a": pruned},
        "compact": {"a": before["a"]},
    }[name]
    shutil.copytree(stores, tmp_path / "whole")
    code, calls = _command(tmp_path / "whole", words)
    assert code == 0
    for number in range(kills):
        folder = tmp_path / str(number)
        shutil.copytree(stores, folder)
        _interrupt(folder, words, calls, draw)
        assert not (folder / "out").exists() or _found(folder / "out") == expected["out"], "what appears is whole"
        assert _found(folder / "a") in (before["a"], expected.get("a"))
        assert _command(folder, words)[0] == 0
        for path, twin in (before | expected).items():
            assert list(_found(folder / path).items()) == list(twin.items()), path
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "form",
    [
        *("to jsonl", "from jsonl"),
        *(
            pytest.param(f"{direction} {form}", marks=pytest.mark.campaign)
            for direction in ("to", "from")
            for form in ("parquet", "verl", "lerobot")
        ),
    ],
)
@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])])
def test_a_conversion_that_was_killed_is_whole_when_it_is_run_again(
    tmp_path: Path, form: str, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are the same as without a signal; a store has each rollout once."""
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    direction, name = form.split()
    with opened(tmp_path / "store") as store:
        said = [{"role": "user", "content": "do"}]
        rollouts = [AgentTrajectory(messages=said, input_ids=torch.arange(at + 1)) for at in range(11)]
        steps = torch.arange(12.0).reshape(12, 1, 1)
        ends = torch.ones(12, 1, 1, dtype=torch.bool)
        seen: dict[str, Any] = {"curr_obs": {"x": steps}, "next_obs": {"x": steps + 1}}
        episodes = Trajectory(actions=steps, rewards=steps, terminations=ends, truncations=~ends, **seen)
        store.add_trajectories([episodes] if name == "lerobot" else rollouts)
    words, draw = ("convert", str(tmp_path / "store"), "out", "--to", name), random.Random(form)
    if direction == "from":
        monkeypatch.setattr(convert, "_PORTION_ITEMS", 4)
        convert.convert_to(tmp_path / "store", tmp_path / "files", name)
        words = ("convert", str(tmp_path / "files"), "out", "--from", name)
    (tmp_path / "whole").mkdir()
    code, calls = _command(tmp_path / "whole", words)
    assert code == 0
    expected = _converted(tmp_path / "whole", direction)
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        _interrupt(folder, words, calls, draw)
        there = (folder / "out").exists()
        assert _command(folder, words)[0] == (2 if there else 0), "it appears once and is never replaced"
        assert _converted(folder, direction) == expected
        shutil.rmtree(folder)


def _converted(folder: Path, direction: str) -> Any:
    """Return the trajectories of a finished conversion; no other files may be there."""
    assert [path.name for path in folder.iterdir()] == ["out"]
    if direction == "from":
        assert points_at(folder / "out").saved == []
        with TrajectoryReplayBuffer.open(folder / "out") as reader:
            return [repr(reader.get(number)) for number in reader.trajectory_ids.tolist()]
    files = [path for path in (folder / "out", *(folder / "out").rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
