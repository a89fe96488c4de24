"""Ctrl-C at random moments; the long campaign is slow. See docs/crash-testing.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.campaign import run_campaign


def test_nothing_is_lost_and_nothing_hangs_when_the_writer_is_interrupted(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=12, seed=7, interrupt=True)
    assert result.problems == []
    assert result.kills == 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_hangs_in_a_long_campaign(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=300, seed=8, interrupt=True)
    assert result.problems == []
    assert result.promised > 1000
