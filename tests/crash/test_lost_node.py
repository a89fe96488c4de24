"""A node is lost with its disk, and its store is made anew of the mirror. See docs/crash-testing.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.crash.node.campaign import run, s3


def test_nothing_on_the_mirror_is_lost_with_the_node(tmp_path: Path) -> None:
    result = run(tmp_path, str(tmp_path / "mirrors"), {}, rounds=3, seed=3)
    assert result.problems == []
    assert result.counts["nodes lost"] == 3
    assert result.counts["compared in all"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_on_a_mirror_in_s3_is_lost_in_a_long_campaign(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3() as (url, options):
        result = run(tmp_path, url, options, rounds=60, seed=4)
    assert result.problems == []
    assert result.counts["nodes lost"] == 60
