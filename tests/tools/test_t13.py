"""T13 resumes after interruption, shows every run, and compares each arm with the same baseline runs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools.bench import t13_replay
from tools.bench.t13_replay import ARMS, RULES, Run, config_of, main, read_results, table
from trajstore.errors import ConfigurationError


def run_of(arm: str, seed: int, solved: bool = True) -> Run:
    return Run(
        environment="household",
        arm=arm,
        seed=seed,
        steps_at_most=3,
        solved=solved,
        fresh_rollouts=1000 * (seed + 1),
        steps=2,
        best=0.5,
        final=0.25,
        seconds=1.0,
    )


def test_runs_that_were_made_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def measure(arm: str, config: object) -> Run:
        seed = config_of(arm, len(made) % 2, 3).seed
        made.append((arm, seed))
        return run_of(arm, seed)

    monkeypatch.setattr(t13_replay, "measure", measure)
    results = tmp_path / "runs.jsonl"
    results.write_text(json.dumps(asdict(run_of("neither", 0, solved=False))) + '\n{"arm": "tur')
    words = ["--results", str(results), "--steps", "3", "--seeds", "0"]
    main([*words, "--arms", "neither", "turns"])
    assert made == [("turns", 0)]
    assert [run.arm for run in read_results(results, 3)] == ["neither", "turns"]
    with pytest.raises(SystemExit):
        main(["--results", str(results), "--steps", "4"])
    results.write_text(results.read_text() + "{}\n")
    with pytest.raises(ConfigurationError, match=r"runs\.jsonl:3: is no run"):
        read_results(results, 3)


def test_every_run_is_in_the_table() -> None:
    lines = table([run_of("neither", 0, solved=False), run_of("neither", 1), run_of("both", 1)]).splitlines()
    assert lines[0] == "| seed | neither | both |"
    assert lines[2:] == [
        "| 0 | 1,000, not solved (best 50%) | not run |",
        "| 1 | 2,000 | 2,000 |",
        "| median | 1,500 | 2,000 |",
    ]


def test_arms_differ_in_the_two_mechanisms_alone() -> None:
    on = {arm: (config_of(arm, 1, 9).guidance.rollout_expratio > 0, config_of(arm, 1, 9).replay.enable) for arm in ARMS}
    assert on == {
        "neither": (False, False),
        **dict.fromkeys(RULES, (False, True)),
        "guidance": (True, False),
        "both": (True, True),
        "neither-warm": (False, False),
        "replay-warm": (False, True),
    }
    assert config_of("neither-warm", 1, 9).guidance.is_on, "it has the template in its warm start"


@pytest.mark.campaign
def test_every_arm_is_measured_against_the_same_runs_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(t13_replay.BASE, tasks_per_step=4, warm_start_steps=2, evaluation_rollouts=1)
    monkeypatch.setattr(t13_replay, "BASE", small)
    arms = ["neither", "replay", "argmax", "random"]
    t13_replay.main(["--seeds", "0", "1", "--steps", "1", "--arms", *arms])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(record["seed"], record["arm"]) for record in lines[:8]] == [(seed, arm) for seed in (0, 1) for arm in arms]
    assert [record["name"].split("solved, ")[1] for record in lines[8:]] == [f"{arm} over neither" for arm in arms[1:]]
    assert all(record["seeds"] == 2 and record["ratio"] <= 1.0 and record["target"] == 0.4 for record in lines[8:])
