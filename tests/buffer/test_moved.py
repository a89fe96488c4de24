"""What a user finds on a buffer: few names; those that have moved are answered to for one release, with a warning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore.buffer.moved import OF_BUFFERS, OF_HANDLES
from trajstore.distributed.drawing import InternalsOfHandle
from trajstore.distributed.handle import DistributedReplayBuffer, MirrorsOfHandle
from trajstore.distributed.saving import PointsOfHandle

HANDLE: dict[str, type[Any]] = {
    "points": PointsOfHandle,
    "mirror": MirrorsOfHandle,
    "_internals": InternalsOfHandle,
}


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrajectoryReplayBuffer]:
    path: Path = tmp_path_factory.mktemp("store")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as made:
        yield made


def test_a_buffer_has_one_page_of_names() -> None:
    assert len([name for name in dir(TrajectoryReplayBuffer) if not name.startswith("_")]) <= 33


@pytest.mark.parametrize(("old", "path"), OF_BUFFERS.items())
def test_old_names_of_buffers_are_those_of_the_new_ones(buffer: TrajectoryReplayBuffer, old: str, path: str) -> None:
    assert old not in dir(buffer)
    said = path.replace("_internals", "internals_of(buffer)")
    with pytest.warns(FutureWarning, match=rf"^TrajectoryReplayBuffer\.{old} is .*{re.escape(said)} now") as told:
        before = getattr(buffer, old)
    assert told[0].filename == __file__
    now = attrgetter(path)(buffer)
    assert getattr(before, "__func__", str(before)) == getattr(now, "__func__", str(now))


@pytest.mark.parametrize(("old", "path"), OF_HANDLES.items())
def test_old_names_of_handles_are_those_of_the_new_ones(old: str, path: str) -> None:
    assert old not in dir(DistributedReplayBuffer)
    assert DistributedReplayBuffer._MOVED[old] == path
    part, _, name = path.partition(".")
    assert hasattr(HANDLE[part], name)


def test_a_name_that_never_was_is_no_attribute(buffer: TrajectoryReplayBuffer) -> None:
    with pytest.raises(AttributeError, match="'TrajectoryReplayBuffer' object has no attribute 'no_such'"):
        _ = buffer.no_such  # type: ignore[attr-defined]
