"""The comparison of stores detects faults, and finds none in trajstore."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.crash.peers.campaign import run_campaign, summary

FAULTS = ("lost", "read twice", "changed", "groups in part")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="power loss needs a C compiler")


@pytest.mark.parametrize(
    ("store", "power", "faults"),
    [
        ("Late", False, ["lost"]),
        ("Twice", False, ["read twice"]),
        ("Partial", False, ["lost", "changed", "groups in part"]),
        ("Lines", False, []),
        pytest.param("Lines", True, ["lost"], marks=needs_compiler),
        pytest.param("Synced", True, [], marks=needs_compiler),
    ],
)
def test_faults_of_a_store_are_reported(tmp_path: Path, store: str, power: bool, faults: list[str]) -> None:
    result = run_campaign(tmp_path, f"tests.crash.fake_peers:{store}", kills=1, seed=1, power=power, longest=0.02)
    assert [name for name in FAULTS if result.counts[name]] == faults
    assert len(result.problems) == len([name for name in faults if name != "groups in part"])
    assert result.counts["acknowledged"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("store", "moment", "power"),
    [
        ("trajstore", "random", False),
        ("trajstore", "sync", False),
        ("trajstore", "random", True),
        ("trajstore", "sync", True),
    ],
)
def test_trajstore_loses_nothing(tmp_path: Path, store: str, moment: str, power: bool) -> None:
    result = run_campaign(tmp_path, store, kills=4, seed=1, moment=moment, power=power)
    assert result.problems == []
    assert result.counts["kills"] == 4
    assert result.counts["acknowledged"] > 0
    assert "log_probs exact" in summary(result)
