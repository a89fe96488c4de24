"""Faults that the simulator found, each as a small test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import add_each, opened
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import IncompleteCheckpointError


def test_a_refresh_shows_the_commits_of_a_writer_that_closes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, read = opened(tmp_path / "store"), LocalDirectory.read
    add_each(writer, [1])
    writer.flush()

    def close_after(self: LocalDirectory, name: str, offset: int = 0) -> bytes:
        data = read(self, name, offset)
        if name == "metadata.json":
            monkeypatch.undo()
            writer.close()  # puts the log into the index
        return data

    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        add_each(writer, [2])
        writer.flush()
        monkeypatch.setattr(LocalDirectory, "read", close_after)
        reader.refresh()
        assert len(reader) == 2


def test_ranks_that_begin_at_this_moment_are_no_damage(tmp_path: Path) -> None:
    """Rank 0 has no folder yet, and rank 1 has all files but the last one of a new store."""
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "rank_1").close()
    (tmp_path / "rank_1" / "metadata.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"rank_0 is absent.*rank_1: no trajectory store here"):
        TrajectoryReplayBuffer.open(tmp_path)
