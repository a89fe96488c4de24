"""Fixtures: a store, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stores import Run, write_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of five trajectories with versions 10 to 14."""
    return write_store(tmp_path / "store", range(10, 15))


@pytest.fixture
def shard(store: Path) -> Path:
    """Return the store's newest shard file."""
    return sorted((store / "shards").iterdir())[-1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a runner of command lines."""
    return Run(capsys)


@pytest.fixture
def of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a tokenizer (token 7 is ``<7\\x1b>``) in every folder without ``absent`` in its name."""

    class Tokenizer:
        @staticmethod
        def from_pretrained(name: str, **_: object) -> Tokenizer:
            if "absent" in name:
                raise OSError("no such folder")
            return Tokenizer()

        @staticmethod
        def decode(ids: list[int], **_: object) -> str:
            return "".join(f"<{number}\x1b>" for number in ids)

    monkeypatch.setattr(pytest.importorskip("transformers"), "AutoTokenizer", Tokenizer)
