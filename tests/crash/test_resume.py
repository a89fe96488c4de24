"""A few kills around the checkpoints of a loop; a hundred are behind the slow marker. See docs/crash-testing.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.resume.campaign import MOMENTS, run_campaign


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=6, seed=2)
    assert result.problems == []
    assert result.counts["kills"] == 6
    assert result.counts["steps compared"] > 0


@pytest.mark.slow
def test_a_run_resumed_a_hundred_times_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=100, seed=0)
    assert result.problems == []
    assert all(result.counts[f"killed {moment}"] for moment in MOMENTS)
    assert result.counts["killed between point and model"] >= 50
