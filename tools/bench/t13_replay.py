"""T13: fresh rollouts until the reference task is solved, with replay over without, median over seeds.

Both arms of a seed begin with the same weights and have the same configuration but for replay. A run ends at the
first evaluation that reaches ``solved_at``, or at the last step; such a run counts with all its rollouts, which
is then a lower bound ("censored"). Prints one JSON line per run and one for the figure, whose interval is a
percentile bootstrap over the seeds (90 %).

    python tools/bench/t13_replay.py [--seeds 0 1 2 3 4] [--environment household] [--steps 200] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random

import torch

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.curves import summarize
from trainer_hooks.reference.demo import BASE, replay_config
from trainer_hooks.reference.trainer import ReferenceTrainer

TARGETS = {"household": 0.4, "sort": 0.7}
RESAMPLES = 10_000


@dataclass(frozen=True)
class Run:
    """One run: rollouts until solved, or all rollouts made if it was not."""

    environment: str
    seed: int
    replay: bool
    solved: bool
    fresh_rollouts: int
    steps: int
    best: float | None
    seconds: float


def measure(config: TrainerConfig) -> Run:
    """Train until solved."""
    began = time.perf_counter()
    with ReferenceTrainer(config) as trainer:
        trainer.warm_start()
        curve = trainer.train(stop_when_solved=True)
    summary = summarize(curve, config.solved_at)
    return Run(
        environment=config.environment,
        seed=config.seed,
        replay=config.replay.enable,
        solved=summary.solved_after is not None,
        fresh_rollouts=summary.fresh_rollouts,
        steps=summary.steps,
        best=summary.best,
        seconds=round(time.perf_counter() - began, 1),
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--environment", choices=TARGETS, default=BASE.environment)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arms: dict[bool, list[Run]] = {False: [], True: []}
    for seed in options.seeds:
        base = replace(BASE, environment=options.environment, steps=options.steps, seed=seed)
        for on, replay in ((False, ExperienceReplayConfig()), (True, replay_config(seed=seed))):
            run = measure(replace(base, replay=replay))
            arms[on].append(run)
            sys.stdout.write(json.dumps({"id": "T13", **asdict(run)}) + "\n")
            sys.stdout.flush()
    rollouts = {on: [run.fresh_rollouts for run in runs] for on, runs in arms.items()}
    low, high = interval(rollouts[True], rollouts[False])
    figure = {
        "id": "T13",
        "name": f"fresh rollouts until {options.environment} is solved, replay on over off",
        "ratio": round(ratio(rollouts[True], rollouts[False]), 3),
        "interval": [round(low, 3), round(high, 3)],
        "seeds": len(options.seeds),
        "censored_on": sum(not run.solved for run in arms[True]),
        "censored_off": sum(not run.solved for run in arms[False]),
        "target": TARGETS[options.environment],
    }
    sys.stdout.write(json.dumps(figure) + "\n")


if __name__ == "__main__":
    main()
