"""Mirrors that one store after another writes: whose the place becomes, and what those before it can still do there."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.mirroring.stores import add, is_sound, keys_at, level, make
from trajstore import Mirror
from trajstore.files.opening import open_directory
from trajstore.mirroring.options import LEDGER_NAME
from trajstore.mirroring.replica import Replica
from trajstore.mirroring.restoring import restore
from trajstore.store.log_records import segment_name
from trajstore.testing.waiting import wait_until


@pytest.fixture(params=["local", "remote"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "local" else f"memory://bucket-{uuid.uuid4()}/mirror"


def lost_before_it_published(path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave on the mirror what a node leaves that is lost in its first copy."""

    def lost(*given: Any) -> None:
        raise OSError(5, "the node is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "publish_whole", lost)
        with make(path, None) as buffer:
            for key in range(5):
                add(buffer, [key])
        with make(path, Mirror(mirror, close_timeout=0.0)) as buffer:
            wait_until(lambda: "node is gone" in str(buffer.mirror_state))


def test_a_place_where_nothing_was_published_becomes_the_next_stores(
    tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost_before_it_published(tmp_path / "lost", mirror, monkeypatch)
    assert open_directory(mirror).names("shards")
    with make(tmp_path / "next", mirror) as buffer:
        add(buffer, [7, 8])
        level(buffer)
        wait_until(lambda: len(open_directory(mirror).names("shards")) == 1)
    assert "was begun as the mirror of the store" in caplog.text
    assert f"{tmp_path / 'lost'}" in caplog.text
    assert keys_at(mirror) == {0: 7, 1: 8}
    is_sound(mirror)
    with make(tmp_path / "lost", Mirror(mirror, close_timeout=0.0)) as buffer:
        wait_until(lambda: "is another store" in str(buffer.mirror_state))
    assert keys_at(mirror) == {0: 7, 1: 8}


def test_what_else_lies_there_is_not_taken_over(tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_before_it_published(tmp_path / "lost", mirror, monkeypatch)
    directory = open_directory(mirror)
    directory.remove([LEDGER_NAME])
    with make(tmp_path / "next", Mirror(mirror, close_timeout=0.0)) as buffer:
        add(buffer, [7])
        wait_until(lambda: "is no mirror of this store" in str(buffer.mirror_state))


def test_the_places_of_all_earlier_writers_stay_taken(tmp_path: Path) -> None:
    mirror = f"memory://bucket-{uuid.uuid4()}/mirror"
    directory = open_directory(mirror)
    places = []
    for number in range(4):
        path = tmp_path / str(number)
        if number:
            restore(mirror, path)
        with make(path, mirror) as buffer:
            for key in range(3):
                add(buffer, [10 * number + key])
                level(buffer)
            places.append(segment_name(buffer._backing.mirror.state.generation + 1))  # type: ignore[union-attr]
    for place in places[:-1]:
        with pytest.raises(FileExistsError):
            directory.append(place, b"what was under way when the node was frozen")
    assert sorted(keys_at(mirror).values()) == [10 * number + key for number in range(4) for key in range(3)]
    is_sound(mirror)
