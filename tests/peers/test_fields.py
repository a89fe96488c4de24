"""The fields and arguments of other programs that integrations rely on, as installed or in TRAJSTORE_PEERS."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tools.peers import PAGE, PEERS, differences, main, written


def source_of(name: str) -> Path:
    """Return the folder with a peer's source; skip the test if there is none."""
    given = Path(os.environ.get("TRAJSTORE_PEERS", "")) / name
    if "TRAJSTORE_PEERS" in os.environ and given.is_dir():
        return given
    found = importlib.util.find_spec(module) if (module := PEERS[name].get("module")) else None
    if found is None or found.origin is None:
        pytest.skip(f"{name} is neither installed nor in TRAJSTORE_PEERS")
    return Path(found.origin).parent.parent


@pytest.mark.parametrize("name", PEERS)
def test_fields_are_those_that_integrations_know(name: str) -> None:
    assert list(differences(PEERS[name], source_of(name))) == [], f"{name}, tried with {PEERS[name]['tried']}"


SOURCE = """
class Sample:
    tokens: list[int]
    reward: float

    def to_dict(self):
        return dict(tokens=1, extra={"inner": 2})

async def run(self, prompt, /, *rest, seed=0, **options):
    return {"prompt": prompt, "score": 1.0}

NAMES = ("a", "b")
"""


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"fields": {"peer: Sample": ["tokens", "reward"], "peer: NAMES": ["a", "b"]}}, []),
        ({"fields": {"peer: Sample": ["tokens", "rewards"]}}, ["peer: Sample: new reward, lost rewards"]),
        ({"fields": {"peer: Sample": ["tokens"]}, "sometimes": ["reward", "other"]}, []),
        ({"fields": {"peer: Sample.to_dict[]": ["tokens"]}}, ["peer: Sample.to_dict[]: new extra"]),
        ({"fields": {"peer: run()": ["prompt", "rest", "seed"]}}, ["peer: run(): new options"]),
        ({"uses": {"peer: Sample": ["to_dict", "reward", "gone"]}}, ["peer: Sample: lost gone"]),
        ({"uses": {"peer: ": ["score"], "peer: Moved": []}}, ["peer: Moved is not there"]),
    ],
)
@pytest.mark.parametrize("where", ["peer.py", "peer/deep/inner.py"])
def test_new_and_lost_names_are_told(entry: dict[str, Any], expected: list[str], where: str, tmp_path: Path) -> None:
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).write_text(SOURCE)
    assert list(differences(entry, tmp_path)) == expected


def test_the_command_compares_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", f"slime={tmp_path}"]) == 1
    assert "slime/utils/types: Sample is not there" in capsys.readouterr().out
    for wrong in (f"slim={tmp_path}", f"slime={tmp_path / 'absent'}"):
        with pytest.raises(SystemExit):
            main(["--source", wrong])


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run  python -m tools.peers --page"
