"""Pickled shards: the suite for every format, and that no code is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from trajstore.columns.schema import Schema
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.formats.base import ShardManifest, StoredFile, TrajectoryFormat
from trajstore.formats.pkl import PklFormat
from trajstore.formats.pt import PtFormat
from trajstore.testing.formats import FormatConformance


class TestPklConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PklFormat()


class TestPtConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PtFormat()


class _Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("content", ["hostile", "foreign"])
def test_a_shard_that_is_something_else_is_refused_and_not_run(tmp_path: Path, content: str) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps(_Hostile(marker) if content == "hostile" else {"layout": "something else"})
    manifest = ShardManifest(
        "shard_00000000",
        "pkl",
        Schema("step", ()),
        (StoredFile("shards/shard_00000000.pkl", len(data), 0),),
        (),
        (),
        (),
    )
    with pytest.raises(UnsafeContentError if content == "hostile" else CorruptStoreError, match="shard_00000000"):
        PklFormat().open(lambda _: data, manifest)
    assert not marker.exists()
