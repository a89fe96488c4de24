"""T13 shows every run, and its arms differ in what they are to compare."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from examples.grpo import trainer as trainer_module
from examples.grpo.config import TrainerConfig
from examples.grpo.environments import SortEnvironment, TextTask
from tools.bench import t13_picture, t13_replay
from tools.bench.t13_replay import ARMS, RULES, UNGUIDED, Run, config_of, summary
from trainer_hooks.batch import Batch
from trainer_hooks.plan import MixedTasks
from trajstore.trajectory import AgentTrajectory

DOCS = Path(__file__).parents[2] / "docs"
INTERVAL = re.compile(r" \([\d.]+ to [\d.]+\)")


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
        replayed=None,
        replayed_tokens=None,
        seconds=1.0,
        hidden_size=64,
        layers=2,
        learning_rate=5e-4,
        device="cpu",
    )


def configured(arm: str, seed: int, steps: int, environment: str = "household") -> TrainerConfig:
    return config_of(arm, seed, replace(t13_replay.BASE, environment=environment, steps=steps))


def test_the_tables_and_the_picture_show_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "runs.jsonl", tmp_path / "t13.svg"
    runs = [run_of(arm, seed, solved=arm == "replay") for arm in ("equal-work", "replay") for seed in (0, 1, 2)]
    runs[3:] = [replace(run, fresh_rollouts=run.fresh_rollouts // 2) for run in runs[3:]]
    results.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    t13_picture.main([str(results), "--picture", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == [
        "| `equal-work` | 0 of 3 | 0.25 | 2,000 | 2,000 |  |  |",
        "| `replay` | 3 of 3 | 0.25 | 1,000 | 1,000 | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) |",
    ]
    drawn = picture.read_bytes()
    assert all(f">{words}</text>".encode() in drawn for words in ("household", "equal-work", "replay"))
    t13_picture.main([str(results), "--picture", str(picture)])
    assert picture.read_bytes() == drawn
    for wrong, message in ((2, "two runs with one seed"), (0, "No such file")):
        with pytest.raises(SystemExit):
            t13_picture.main([str(results)] * wrong or [str(tmp_path / "none.jsonl")])
        assert message in capsys.readouterr().err


def test_the_tables_in_the_docs_are_those_of_the_kept_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t13_replay, "RESAMPLES", 1)  # intervals are not compared
    page = (DOCS / "benchmarks.md").read_text()
    tasks = t13_replay.read(sorted((DOCS / "t13").glob("*.jsonl")))
    for task, runs in tasks.items():
        written = page.partition(f"<!-- {task} -->\n\n")[2].partition("\n\n")[0]
        assert INTERVAL.sub("", written) == INTERVAL.sub("", summary(runs, "equal-work"))


def test_arms_differ_in_the_two_mechanisms_alone() -> None:
    on = {
        arm: (configured(arm, 1, 9).guidance.rollout_expratio > 0, configured(arm, 1, 9).replay.enable) for arm in ARMS
    }
    unguided = {arm: (False, arm in RULES or arm == "choice") for arm in UNGUIDED}
    warm = {f"{arm}-warm": mechanisms for arm, mechanisms in unguided.items()}
    assert on == {**unguided, "guidance": (True, False), "both": (True, True), **warm}
    assert configured("neither-warm", 1, 9).guidance.is_on, "it has the template in its warm start"


def test_choice_has_the_tasks_of_replay_and_fresh_rollouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "make_environment", lambda name: SortEnvironment(lengths=(2,)))
    config = replace(configured("choice", 1, 9, "sort"), tasks_per_step=4, warm_start_steps=40, evaluate_every=9)
    from_pool, made = 0, []
    with ARMS["choice"].trainer(config) as trainer:
        choose, step_done = trainer.hook.tasks_chosen, trainer.hook.step_done

        def chosen(*arguments: Any) -> MixedTasks[TextTask]:
            nonlocal from_pool
            mixed = choose(*arguments)
            from_pool += len(mixed.experience)
            made.append([task.task_id for task in (*mixed.experience, *mixed.on_policy) for _ in range(8)])
            return mixed

        def done(batch: Batch, fresh: list[AgentTrajectory], *more: Any, **named: Any) -> dict[str, float]:
            assert [rollout.task_id for rollout in fresh] == made[-1]
            assert len(batch.tensors["response_mask"]) == len(fresh)
            return step_done(batch, fresh, *more, **named)

        monkeypatch.setattr(trainer.hook, "tasks_chosen", chosen)
        monkeypatch.setattr(trainer.hook, "step_done", done)
        trainer.warm_start()
        for _ in range(4):
            trainer.train_step()
    assert len(made) == 4
    assert from_pool > 0
