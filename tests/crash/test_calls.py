"""Kills of processes that record agent sessions; a long campaign has the marker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.calls.campaign import run_campaign

LONG = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("kills", "calls"), [(4, 0), pytest.param(200, 1000, marks=LONG)])
def test_no_acknowledged_call_is_lost_or_doubled(tmp_path: Path, kills: int, calls: int) -> None:
    result = run_campaign(tmp_path, kills=kills, seed=5)
    assert result.problems == []
    assert result.counts["acknowledged calls"] > calls
