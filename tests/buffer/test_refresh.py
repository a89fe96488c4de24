"""``refresh()``: what it finds, what it costs, and what stays valid meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import add_each, reader_of, writer_to
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions
from trajstore.buffer.internals import internals_of
from trajstore.store.catalog import Catalog
from trajstore.testing.witness import check_batch, check_trajectory, witness


def test_a_store_that_was_cleared_is_followed(tmp_path: Path) -> None:
    with writer_to(tmp_path) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        source.clear()
        assert reader.refresh()
        assert len(reader) == 0
        add_each(source, [1])
        assert reader.refresh()
        assert check_trajectory(reader.get(1)) == 1
        reader.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_an_empty_store_is_followed(tmp_path: Path, rank: int) -> None:
    with writer_to(tmp_path) as source:
        reader = TrajectoryReplayBuffer(sample_window_size=0)
        reader.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=2)
        source.add_trajectories([witness(key) for key in range(4)])
        source.flush()
        assert reader.refresh()
        assert [check_trajectory(reader.get(2 * rank + at)) for at in range(2)] == [2 * rank, 2 * rank + 1]
        reader.close()


# -- what it costs ----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the directories that are opened from now on, each time that one is."""
    urls: list[str] = []
    original = Catalog.open.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Catalog], directory: object) -> Catalog:
        urls.append(directory.url)  # type: ignore[attr-defined]
        return original(cls, directory)  # type: ignore[no-any-return]

    monkeypatch.setattr(Catalog, "open", classmethod(counted))
    return urls


def test_what_is_new_is_followed_without_opening_the_store_again(tmp_path: Path, opened: list[str]) -> None:
    options = WriterOptions(snapshot_bytes=1 << 12)  # so small that the index is written several times
    with writer_to(tmp_path, writer=options, retention=Retention(max_trajectories=8)) as source:
        add_each(source, range(8))
        reader = reader_of(tmp_path)
        check_batch(reader.sample(8))
        contents = reader._view.contents
        opened.clear()
        for key in range(8, 60):
            add_each(source, [key])
            mapped = reader.get_stats()["mapped_shards"]
            assert reader.refresh()
            assert reader.get_stats()["mapped_shards"] >= mapped - 1, "maps of what is still there stay"
            assert reader.trajectory_ids.tolist() == source.trajectory_ids.tolist()
            check_batch(reader.sample(8))
        assert opened == []
        assert reader._view.contents is contents
        reader.close()


def test_a_follower_that_comes_too_late_for_the_log_loads_again(tmp_path: Path, opened: list[str]) -> None:
    with writer_to(tmp_path, writer=WriterOptions(snapshot_bytes=1 << 12)) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        opened.clear()
        add_each(source, range(1, 60))
        assert reader.refresh()
        assert opened != []
        assert [check_trajectory(reader.get(number)) for number in range(60)] == list(range(60))
        add_each(source, [60])
        opened.clear()
        assert reader.refresh()
        assert opened == []
        assert check_trajectory(reader.get(60)) == 60
        reader.close()


def test_nothing_grows_with_what_has_come_and_gone(tmp_path: Path) -> None:
    with writer_to(tmp_path, retention=Retention(max_trajectories=4), cache_size=2) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        for key in range(1, 90):
            add_each(source, [key])
            assert reader.refresh()
            assert check_trajectory(reader.get(key)) == key
            assert check_trajectory(source.get(max(0, key - 3))) == max(0, key - 3)
        for buffer in (source, reader):
            contents = buffer._view.contents
            assert len(contents.index.ends) <= 64
            assert len(contents.residency.table.first) <= 64
            assert contents.residency.mapped <= 5
            assert len(contents.sources[0].index.ends) <= 64
        reader.close()


def test_ids_of_a_follower_that_adds_go_on_above_those_it_follows(tmp_path: Path) -> None:
    with writer_to(tmp_path) as source:
        add_each(source, [0])
        reader = reader_of(tmp_path)
        add_each(source, [1, 2])
        assert reader.refresh()
        assert internals_of(reader).trajectory_counter == 3
        assert reader.add_trajectories([witness(7)]) == [3]
        reader.close()
