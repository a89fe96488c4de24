"""Exit codes of every command match docs/cli.md, and messages name existing commands."""

from __future__ import annotations

import ast
import errno
import re
import resource
import shutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cli.stores import Run, write_store
from tests.cli.test_pool import write_rollouts
from tests.stores import damage_indexes, stored
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.cli import _BUILT_IN, DAMAGED, FAILED, commands
from trajstore.errors import CorruptStoreError


def shards_of(store: Path) -> list[Path]:
    return sorted((store / "shards").iterdir())


def two_shards(path: Path) -> Path:
    """Write ten trajectories with a saved point after the first five."""
    write_store(path, range(5))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.points.save(1)
    return write_store(path, range(5, 10))


def nothing(store: Path) -> None:
    """Leave a store as it is."""


def of_the_future(store: Path) -> None:
    metadata = store / "metadata.json"
    metadata.write_text(re.sub('"layout_version": [0-9]+', '"layout_version": 99', metadata.read_text()))


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        # of inspect, verify, copy, repair, rollback; tests/cli/test_damaged.py has other damage
        (nothing, (0, 0, 0, 0, 0)),
        # recomputable data is no loss
        (lambda store: (store / "metadata.json").write_bytes(b"{"), (DAMAGED, DAMAGED, DAMAGED, 0, DAMAGED)),
        (damage_indexes, (DAMAGED, DAMAGED, DAMAGED, 0, DAMAGED)),
        (of_the_future, (FAILED, FAILED, FAILED, FAILED, FAILED)),
        (shutil.rmtree, (FAILED, FAILED, FAILED, FAILED, FAILED)),
    ],
)
def test_each_command_says_by_its_exit_code_what_it_found(
    damage: Callable[[Path], Any], codes: tuple[int, ...], run: Run, tmp_path: Path
) -> None:
    store = two_shards(tmp_path / "store")
    damage(store)
    exit_codes = tuple(
        run(*words)[0]
        for words in (
            ("inspect", store),
            ("verify", store),
            ("copy", store, tmp_path / "copy"),
            ("repair", store, tmp_path / "repaired"),
            ("rollback", store, "--step", 1),
        )
    )
    assert exit_codes == codes


@pytest.mark.parametrize(
    "words",
    [
        *("convert STORE OUT --to jsonl", "convert STORE OUT --to parquet", "view STORE --bundle OUT"),
        *("copy STORE OUT", "repair STORE OUT", "convert STORE OUT --to zarr"),
    ],
)
def test_a_full_disk_fails_each_command_that_writes_files_and_leaves_none(
    words: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    rollouts = [AgentTrajectory(input_ids=torch.arange(4000) * 997 + number) for number in range(2)]
    store, out = stored(tmp_path / "store", rollouts), tmp_path / "out"
    monkeypatch.setattr("os.link", mock.Mock(side_effect=OSError(errno.EXDEV, "of another file system")))
    line = [{"STORE": store, "OUT": out}.get(word, word) for word in words.split()]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        error = run.err(*line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    assert "File too large" in error
    assert "was not written" in error, "a StoreWriteError"
    assert str(out) in error
    assert "/.out." not in error, "the destination is named, not a temporary folder"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    run.out(*line)


def test_a_pool_of_which_trajectories_are_damaged(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    words = ("--n-rollout", 4, "--success-threshold", 0.7)
    assert run("pool", "seed", tmp_path / "pool", tmp_path / "rollouts", *words)[0] == 0
    assert run("pool", "export", tmp_path / "pool", tmp_path / "files", *words)[0] == 0
    shards_of(tmp_path / "rollouts")[0].unlink()
    out = run.out("pool", "seed", tmp_path / "other", tmp_path / "rollouts", *words, code=DAMAGED)
    assert "trajectories are damaged and left out" in out
    shards_of(tmp_path / "pool")[0].unlink()
    out = run.out("pool", "export", tmp_path / "pool", tmp_path / "files", *words, code=DAMAGED)
    assert "trajectories are damaged and left out" in out


# ---- commands named in messages ----


def test_a_run_with_a_rank_of_a_newer_layout_is_not_repaired(run: Run, tmp_path: Path) -> None:
    for rank in (0, 1):
        two_shards(tmp_path / "run" / f"rank_{rank}")
    of_the_future(tmp_path / "run" / "rank_1")
    code, _, refusal = run("repair", tmp_path / "run", tmp_path / "new")
    assert (code, "layout version 99" in refusal) == (FAILED, True)


def test_a_damaged_or_absent_metadata_says_what_is_lost_and_how_to_repair(run: Run, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", range(3))
    whole = (store / "metadata.json").read_bytes()
    for damaged in (b"{", b"[]", whole.replace(b'"trajstore"', b'"trajst0re"'), whole.replace(b'"pt"', b'"pk"')):
        (store / "metadata.json").write_bytes(damaged)
        with pytest.raises(CorruptStoreError, match=r"metadata\.json: .*damaged.*and no trajectory.*trajstore repair"):
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)
    code, out, _ = run("repair", store, tmp_path / "repaired")
    assert (code, "3 trajectories" in out) == (0, True)
    (store / "metadata.json").unlink()
    with pytest.raises(CorruptStoreError, match=r"but no metadata\.json: the rest of a store.*trajstore repair"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=store)


def messages(root: Path) -> list[tuple[str, str]]:
    """Return every string in the code except docstrings, with its location."""
    messages_found = []
    for path in [*root.glob("trajstore/**/*.py"), *root.glob("trainer_hooks/**/*.py")]:
        code = path.read_text()
        if "trajstore " not in code and "  pip " not in code:
            continue
        tree = ast.parse(code)
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                messages_found.append((f"{path.relative_to(root)}:{node.lineno}", node.value))
    return messages_found


def test_a_registered_command_that_cannot_be_imported_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoint("broken", "no_such_package.cli:COMMAND", "trajstore.commands")
    monkeypatch.setattr("trajstore.cli.entry_points", lambda group: [broken])
    assert [command.name for command in commands()] == [command.name for command in _BUILT_IN]
    error = capsys.readouterr().err
    assert "the command 'broken' is left out, because no_such_package.cli:COMMAND cannot be imported: Module" in error


def test_every_command_that_a_message_names_exists(project_root: Path) -> None:
    names = {command.name for command in commands()}
    named = 0
    for place, text in messages(project_root):
        for command in re.findall(r"`trajstore ([^`\s]*)", text):
            named += 1
            assert command in names | {"--help", "--version", "COMMAND"}, f"{place}: there is no command {command!r}"
        bare = re.search(rf"(?<!`)trajstore ({'|'.join(names)})\b", re.sub(r"`[^`]*`", "", text))
        assert bare is None or "cli/" in place, f"{place}: `{bare and bare[0]}` stands without backticks"
        assert not re.search(r"\S  (trajstore|pip) ", text), f"{place}: double blanks before a command"
    assert named > 10
