"""Invalid arguments of every command: exit code 2, a message naming the argument, no change on disk."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.stores import write_store
from tests.query.test_query import rollout
from tests.stores import files_of, opened, stored
from trajstore.cli import FAILED, main

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra 'view'")

TO_A_NEW_PATH = (
    *("copy store PATH", "copy run PATH", "repair store PATH", "convert run PATH --to pt"),
    *("view store --bundle PATH", "convert store PATH --to jsonl", "convert store PATH --to parquet"),
    "convert rollouts.jsonl PATH --from jsonl",
)

WRONG = [
    ("", "error:"),
    ("no-such-command", "error:"),
    ("annotate store 0 --where a", "trajstore annotate: error: unrecognized arguments: --where a"),
    ("inspect absent", "absent"),
    ("inspect taken", "taken"),
    ("verify absent", "absent"),
    ("verify taken", "taken"),
    ("inspect there.jsonl", "is a file; give the directory"),
    ("verify there.jsonl", "is a file; give the directory"),
    ("inspect store --trajectory 99", "99"),
    ("inspect store --full", "--trajectory"),
    ("copy store taken", "is not empty"),
    ("copy absent new", "absent"),
    ("repair store taken", "is not empty"),
    ("repair absent new", "absent"),
    ("annotate store 0", ""),
    ("annotate store --set a=1", ""),
    ("annotate store 0 --set a", ""),
    ("annotate store 0 --set a=[1] --file x", ""),
    ("annotate store --file absent", "absent"),
    *((f"annotate store 0 --set 'a={value}'", "") for value in ("nan", "NaN", " -inf", "Infinity", "+INF", "1e400")),
    *((f"annotate store 0 --set a={value}", "") for value in (".5", "5.", "+3", "007", "1_000")),
    ("inspect store --trajectory 9", "no trajectory has the id 9"),
    ("inspect store --trajectory x", "'x', must be an id"),
    ("inspect store --trajectory 3/1", "3/1"),
    ("inspect absent --trajectory 0", "absent"),
    ("convert store there.jsonl --to jsonl", "there.jsonl"),
    ("convert store nowhere/out.jsonl --to jsonl", "nowhere is not a folder; make it"),
    ("prune store --where 'outcome = 1' --where 'outcome = 0' --yes", "argument --where: given twice"),
    ("annotate store 0 --set a=1 --set a=2", "a name twice"),
    ("compact ''", "the path is empty"),
    ("copy store ''", "the path is empty"),
    ("query store 'select from'", "sql: 'select from'"),
    ("query store 'select foo from trajectories'", "there is no column 'foo'"),
    ("query store 'select foo from messages'", "there is no column 'foo'"),
    ("query store 'select foo from message'", "there is trajectories, messages, calls, tokens, steps"),
    ("list store --columns task,task", "--columns: name each fact"),
    ("list store --columns ''", "--columns: name each fact"),
    ("list store --columns foo", "--columns: there is no fact 'foo'"),
    ("list store --limit -1", "limit"),
    ("list store --limit -1", "must be"),
    ("list store --pin none", "none"),
    ("list store --follow --sort task", "--sort: has no place beside --follow"),
    ("view store --bundle out --where ''", "--where is empty"),
    ("rollback store", "error:"),
    ("rollback store --step 7", "no saved point of step 7; there are: 750, 760"),
    ("rollback store --to aside-99", "no snapshot is called 'aside-99'"),
    ("rollback store --to aside-99 --dry-run", "no snapshot is called 'aside-99'"),
    ("rollback absent --step 1", "absent"),
    ("merge store out", "invalid choice: 'merge'"),
    ("convert absent out --to pt", "absent"),
    ("convert store store/inner --to pt", "store/inner: is within store"),
    ("convert store taken --to pt", "taken"),
    ("convert store out --to pt --where 'no such column'", "where: "),
    ("convert store out --to pt --where 'outcome > 9'", "of 5 trajectories, none match where='outcome > 9'"),
    ("convert store out --to pt --pin a", "--pin selects trajectories for files"),
    ("convert store out --to json", ""),
    ("convert store out", "give --to, --from or both"),
    ("convert store out --from jsonl --to chat", "from jsonl to chat takes two steps"),
    ("convert rollouts.jsonl out --from jsonl --where 'outcome > 0'", "--where selects trajectories of a store"),
    ("convert store store/inner --to jsonl", "store/inner is in the source"),
    ("convert absent out --from jsonl", "absent: no such file"),
    ("prune store --where 'nonsense(' --yes", ""),
    ("compact taken", "taken"),
    ("pool export absent files", "absent: no such directory"),
    ("pool seed pool absent", "absent: no such directory"),
    ("pool export store files --same-run", "--same-run: applies to seed only"),
    ("pool export store files --task-prefix=a", "--task-prefix: applies to seed only"),
    ("view store --bundle out --port 8421", "--port has no effect with --bundle"),
    ("view store --bundle out --host 127.0.0.1", "--host has no effect with --bundle"),
    ("view store --where 'outcome > 0'", "--where has no effect without --bundle"),
    ("view store --bundle out --where 'taks = 1'", "there is no column 'taks'"),
    ("view store --port 0 --write", "unrecognized arguments: --write"),
    ("annotate store 0 --set a=1 --who ''", "who: '' is empty"),
    *(
        (words.replace("PATH", path), "names may have 255 and paths 4,095")
        for words in (*TO_A_NEW_PATH, "inspect PATH", "verify PATH", "convert PATH out --from jsonl", "audit PATH")
        for path in ("n" * 256, "é" * 128, "new/" + "n" * 256, "n" * 256 + "/sub", "new/" * 1025)
    ),
    ("pool seed pool " + "n" * 256, "names may have 255"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of rollouts and saved points, a store of blocks, and foreign files."""
    path = tmp_path_factory.mktemp("wrong")
    stored(path / "store", [rollout(f"t{n % 2}", float(n % 3 == 0), n) for n in range(5)])
    with opened(path / "store") as buffer:
        buffer.points.save(750)
        buffer.points.save(760)
    write_store(path / "steps", range(2))
    for rank in range(2):
        write_store(path / "run" / f"rank_{rank}", range(2))
    assert main(["convert", str(path / "store"), str(path / "rollouts.jsonl"), "--to", "jsonl"]) == 0
    (path / "taken").mkdir()
    for mine in ("taken/thesis.tex", "there.jsonl"):
        (path / mine).write_text("years of work")
    return path


def kept_in(place: Path) -> dict[str, bytes]:
    """Return all files except reader leases, which may disappear late."""
    return {name: data for name, data in files_of(place).items() if "/readers/" not in name}


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_words_are_refused_and_change_nothing(
    place: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before = kept_in(place)
    try:
        code = main(shlex.split(words))
        in_one_line = words.startswith(("inspect", "verify", "rollback"))
    except SystemExit as error:  # raised by the parser, which prints its usage, too
        code, in_one_line = error.code, False
    message = capsys.readouterr().err
    assert (code, said in message) == (FAILED, True), message
    assert not in_one_line or (message.startswith("trajstore: ") and message.count("\n") == 1), message
    assert kept_in(place) == before


@pytest.mark.parametrize("words", TO_A_NEW_PATH)
@pytest.mark.parametrize("name", ["n" * 255, "é" * 127 + "n", "n" * 216])
def test_the_longest_names_are_written(place: Path, words: str, name: str, tmp_path: Path) -> None:
    words = words.replace("PATH", str(tmp_path / name))
    source = shlex.split(words)[1]
    assert main(shlex.split(words.replace(f" {source} ", f" {place / source} "))) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
