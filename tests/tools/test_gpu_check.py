"""The GPU check on the CPU: its comparisons hold, and its report gives the table of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import gpu_check
from tools.bench.report import Figure


def test_comparisons_hold_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "report.json"
    assert gpu_check.main(["loader", "loss", "--scale", "0.05", "--repeats", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["device"] == "CPU (no CUDA device)"
    compared = {
        figure["name"]: figure["ok"]
        for figure in report["figures"]
        if "differ" in figure["name"] or "error" in figure["name"]
    }
    assert len(compared) == 5
    assert all(compared.values())
    capsys.readouterr()
    assert gpu_check.main(["--table", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(report["figures"])
    assert lines[2].startswith("| T10 | learner waits in next()")


def test_a_section_that_fails_is_named_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(place: object, options: object) -> object:
        raise RuntimeError("no memory")

    def whole(place: object, options: object) -> list[Figure]:
        return [Figure("T12", "graph breaks", 0.0, 0.0)]

    monkeypatch.setitem(gpu_check.SECTIONS, "loader", broken)
    monkeypatch.setitem(gpu_check.SECTIONS, "loss", whole)
    file = tmp_path / "report.json"
    assert gpu_check.main(["loader", "loss", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert "RuntimeError: no memory" in report["failed"]["loader"]
    assert [figure["name"] for figure in report["figures"]] == ["graph breaks"]
    assert "loader failed" in capsys.readouterr().out
