"""A short campaign of writers that are frozen and lose their store; the long one is behind the slow marker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.frozen.campaign import run_campaign

pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
pytest.importorskip("moto.server", reason="needs moto[server]")


@pytest.mark.parametrize("freezes", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_a_frozen_writer_overwrites_nothing(tmp_path: Path, freezes: int) -> None:
    result = run_campaign(tmp_path, freezes, seed=7)
    assert result.problems == []
    assert result.counts["writers frozen"] == freezes
    assert result.counts["trajectories compared"] > freezes
