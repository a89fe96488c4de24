"""T13: fresh rollouts until the reference task is solved, with replay over without, median over seeds.

Both arms of a seed begin with the same weights and have the same configuration but for replay. A run ends at the
first evaluation that reaches ``solved_at``, or at the last step; such a run counts with all its rollouts, which
is then a lower bound ("censored"). Prints one JSON line per run and one for the figure, whose interval is a
percentile bootstrap over the seeds (90 %).

``--select`` names rules by which a task's histories are chosen, each measured against the same runs without replay: by
entropy under the current policy, the lowest (``argmin``, the default) or the highest first (``argmax``); by the lowest
when it was sampled (``saved``); the least used first (``turns``); or all alike (``random``).

    python tools/bench/t13_replay.py [--seeds 0 1 2 3 4] [--environment household] [--steps 200] [--threads 1]
        [--select argmin saved argmax turns random]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import torch

from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.curves import CurveSummary, summarize
from trainer_hooks.reference.demo import BASE, replay_config
from trainer_hooks.reference.trainer import ReferenceTrainer

TARGETS = {"household": 0.4, "sort": 0.7}
DEFAULT = "argmin"
RULES: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "saved": {"use_current_policy_entropy": False},
    "argmax": {"exp_select_mode": "argmax"},
    "turns": {"in_turns": True},
    "random": {"exp_select_mode": "random"},
}
"""What chooses among the histories of a task, by the name of the rule."""
RESAMPLES = 10_000


@dataclass(frozen=True)
class Run:
    """One run: rollouts until solved, or all rollouts made if it was not."""

    environment: str
    seed: int
    replay: bool
    select: str | None
    """Rule of the replay; ``None`` without."""
    solved: bool
    fresh_rollouts: int
    steps: int
    best: float | None
    seconds: float


def until_solved(config: TrainerConfig) -> tuple[CurveSummary, float]:
    """Train until solved; return what the curve comes to, and the seconds that it took."""
    began = time.perf_counter()
    with ReferenceTrainer(config) as trainer:
        trainer.warm_start()
        curve = trainer.train(stop_when_solved=True)
    return summarize(curve, config.solved_at), time.perf_counter() - began


def measure(config: TrainerConfig, select: str | None = None) -> Run:
    """Train until solved; without replay, or with histories that a rule chooses."""
    if select is not None:
        replay = replay_config(seed=config.seed, environment=config.environment)
        config = replace(config, replay=replace(replay, **RULES[select]))
    summary, took = until_solved(config)
    return Run(
        environment=config.environment,
        seed=config.seed,
        replay=select is not None,
        select=select,
        solved=summary.solved_after is not None,
        fresh_rollouts=summary.fresh_rollouts,
        steps=summary.steps,
        best=summary.best,
        seconds=round(took, 1),
    )


def ratio(with_replay: Sequence[int], without: Sequence[int]) -> float:
    """Return the ratio of the two medians."""
    return statistics.median(with_replay) / statistics.median(without)


def interval(with_replay: Sequence[int], without: Sequence[int]) -> tuple[float, float]:
    """Return the 90 % bootstrap interval of the ratio; seeds are drawn in pairs."""
    random = Random(0)
    count = len(without)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = [random.randrange(count) for _ in range(count)]
        ratios.append(ratio([with_replay[seed] for seed in drawn], [without[seed] for seed in drawn]))
    ratios.sort()
    return ratios[RESAMPLES // 20], ratios[-RESAMPLES // 20]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--environment", choices=TARGETS, default=BASE.environment)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--select", nargs="+", choices=RULES, default=[DEFAULT])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    arms: dict[str | None, list[Run]] = {select: [] for select in (None, *options.select)}
    for seed in options.seeds:
        base = replace(BASE, environment=options.environment, steps=options.steps, seed=seed)
        for select, runs in arms.items():
            run = measure(base, select)
            runs.append(run)
            sys.stdout.write(json.dumps({"id": "T13", **asdict(run)}) + "\n")
            sys.stdout.flush()
    without = arms.pop(None)
    for select, runs in arms.items():
        line = figure(options.environment, str(select), runs, without)
        sys.stdout.write(json.dumps(line) + "\n")


def figure(environment: str, rule: str, runs: Sequence[Run], without: Sequence[Run]) -> dict[str, Any]:
    """Return what the runs of one rule say, beside those without replay."""
    rollouts = [run.fresh_rollouts for run in runs], [run.fresh_rollouts for run in without]
    low, high = interval(*rollouts)
    return {
        "id": "T13",
        "name": f"fresh rollouts until {environment} is solved, replay on ({rule}) over off",
        "ratio": round(ratio(*rollouts), 3),
        "interval": [round(low, 3), round(high, 3)],
        "seeds": len(runs),
        "censored_on": sum(not run.solved for run in runs),
        "censored_off": sum(not run.solved for run in without),
        "target": TARGETS[environment],
    }


if __name__ == "__main__":
    main()
