"""Every benchmark runs at tiny size and prints figures of the documented shape; speed is not checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench import t08_open, t14_memory, t21_view, t25_restart, t31_tokens, t35_run
from tools.bench.__main__ import BENCHMARKS, figures_of, main
from tools.bench.report import Options, SkippedError
from tools.crash.forked import forking

# Not run, as they start servers.
NOT_TRIED = ("t16", "t19", "t20", "t29", "t33")
LONG = ("t15", "t21", "t22", "t23", "gpu_threads")
"""Start a browser, servers, a separate cluster or many processes, train models, or ask many questions."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign) if name in LONG else name
        for name in BENCHMARKS
        if name not in NOT_TRIED
    ],
)
def test_prints_json_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (t08_open, t14_memory, t21_view, t25_restart):  # starting Python and torch takes seconds
        monkeypatch.setattr(module, "in_child", lambda work, *arguments: work(*arguments))
    monkeypatch.setattr(t35_run, "in_child", _in_fork)
    for tokens in ("_FIRST", "_SAMPLED", "_OBSERVED"):
        monkeypatch.setattr(t31_tokens, tokens, 8)
    try:
        figures = list(figures_of(name, Options(tmp_path, repeats=1, scale=1e-6)))
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert figures
    for figure in figures:
        line = json.loads(figure.line())
        assert name.upper().startswith(line["id"].upper()) or name.startswith("gpu_")
        assert line["name"]
        assert line["ok"] is not False or not any(word in line["name"] for word in ("differ", "error"))
        assert isinstance(line["ratio"] if figure.unit == "ratio" else line["value"], float)
        assert line["ok"] is None if line["target"] is None else isinstance(line["ok"], bool)
        assert not set(figure.details) & {"id", "name", "ratio", "value", "unit", "target", "ok"}


def _in_fork(work: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """Call a function in a process whose memory can be measured."""
    with forking().Pool(1) as pool:
        return pool.apply(work, arguments)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["t99"])
    assert "no benchmark t99" in capsys.readouterr().err
