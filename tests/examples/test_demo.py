"""The demo's run, summaries and picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples.common import DemoSettings
from examples.grpo import demo
from examples.grpo.config import CurvePoint
from examples.grpo.curves import CurveSummary, draw_curves, summarize


def curve(*rates: float | None) -> list[CurvePoint]:
    return [CurvePoint(number, 10 * number, 0.5, 0.0, rate) for number, rate in enumerate(rates, 1)]


def test_a_summary_says_when_a_curve_was_solved() -> None:
    assert summarize(curve(None, 0.5, 0.95, None, 0.7), 0.9) == CurveSummary(5, 50, 30, 0.7, 0.95)
    assert "solved after 30; success 70% at the end, 95% at best" in str(summarize(curve(None, 0.5, 0.95, 0.7), 0.9))
    assert "not solved" in str(summarize(curve(0.5), 0.9))
    assert summarize([], 0.9) == CurveSummary(0, 0, None, None, None)
    assert "not evaluated" in str(summarize(curve(None), 0.9))


def test_the_picture_is_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'demo'")
    path = tmp_path / "folder" / "curves.svg"
    draw_curves({"one": curve(0.1, None, 0.9), "two": curve(None)}, 0.9, path, "title")
    text = path.read_text()
    assert "<svg" in text
    assert text.rstrip().endswith("</svg>")
    assert ">fresh rollouts<" in text
    assert [entry.name for entry in path.parent.iterdir()] == ["curves.svg"]
    draw_curves({"one": curve(0.1, None, 0.9), "two": curve(None)}, 0.9, path, "title")
    assert path.read_text() == text, "the same curves give the same file"


def test_the_demo_trains_both_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for package in ("matplotlib", "transformers"):
        pytest.importorskip(package, reason="needs the extra 'demo'")
    lines: list[str] = []
    steps: list[tuple[int, int]] = []

    def progress(done: int, total: int, note: str = "") -> None:
        steps.append((done, total))

    settings = DemoSettings(path=tmp_path, updates=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "BASE", replace(demo.BASE, warm_start_steps=2, evaluate_every=2))
        store = demo.run(settings, lines.append, progress)
        assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert (store / "metadata.json").exists()
        assert "<svg" in (tmp_path / demo.CURVES_FILE).read_text()
        starts = [text.split(":")[0] for text in lines]
        assert starts == ["supervised start"] * 3 + ["without replay", "with replay", "both curves"]
        assert lines[2].startswith("supervised start: step 2 of 2, loss ")
        demo.run(DemoSettings(path=tmp_path, updates=3), lines.append, progress)
    assert steps[4:] == [(3, 6), (6, 6)]
    assert any("going on after step 2" in text for text in lines)
