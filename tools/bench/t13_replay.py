"""T13: fresh rollouts until the reference task is solved, with replay over without, median over seeds.

All arms of a seed have the same configuration but for what their names say. A run ends at the first evaluation (which
is never guided) that reaches ``solved_at``, or at the last step; such a run counts with all its rollouts, which is then
a lower bound ("censored"). Prints a JSON line for each run, one for each arm beside ``neither``, whose interval is a
percentile bootstrap over the seeds (90 %), and a table of all runs.

The arms of replay differ in how a task's histories are chosen: by entropy under the current policy, the lowest
(``replay``, the default) or the highest first (``argmax``); by the lowest when it was sampled (``saved``); the least
used first (``turns``); or all alike (``random``). The others have guidance, or guidance and replay (``both``). A guided
policy knows the template's words and has read experience in its warm start, so its first weights are not those of an
unguided policy with the same seed: ``neither-warm`` and ``replay-warm`` have the same warm start as the guided ones and
no guidance, and tell what the warm start alone does.

Each run is a line of the results file, if there is one, as soon as it has ended. Runs that the file holds are not made
again, so a call that was interrupted goes on where it was; runs of another task or number of steps are refused.

    python -m tools.bench.t13_replay [--seeds 0 1 2 3 4] [--environment household] [--arms neither replay]
        [--results runs.jsonl] [--steps 200] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.curves import summarize
from trainer_hooks.reference.demo import BASE, replay_config
from trainer_hooks.reference.trainer import ReferenceTrainer
from trajstore.errors import ConfigurationError

TARGETS = {"household": 0.4, "sort": 0.7}
RESAMPLES = 10_000

GUIDANCE = GuidanceConfig(
    enable_summarizer=True,
    enable_context_generator=True,
    updated_freq=1,
    retrieve_top_k=1,
    rollout_expratio=0.5,
    experience_template="hint {} now ",
)
"""Half of each task's rollouts read the shortest success of the most related task; none is trained on it."""

WARM = replace(GUIDANCE, enable_summarizer=False, updated_freq=0, rollout_expratio=0.0)
"""The same template in vocabulary and warm start; no rollout is guided."""

RULES: Mapping[str, Mapping[str, Any]] = {
    "replay": {},
    "saved": {"use_current_policy_entropy": False},
    "argmax": {"exp_select_mode": "argmax"},
    "turns": {"in_turns": True},
    "random": {"exp_select_mode": "random"},
}
"""What chooses among the histories of a task, by the name of the arm."""

ARMS: Mapping[str, tuple[GuidanceConfig, Mapping[str, Any] | None]] = {
    "neither": (GuidanceConfig(), None),
    **{name: (GuidanceConfig(), rule) for name, rule in RULES.items()},
    "guidance": (GUIDANCE, None),
    "both": (GUIDANCE, {}),
    "neither-warm": (WARM, None),
    "replay-warm": (WARM, {}),
}
"""Name of the arm -> guidance, and what differs from the usual replay; None without replay."""


@dataclass(frozen=True)
class Run:
    """One run: rollouts until solved, or all rollouts made if it was not."""

    environment: str
    arm: str
    seed: int
    steps_at_most: int
    solved: bool
    fresh_rollouts: int
    steps: int
    best: float | None
    final: float | None
    seconds: float


def config_of(arm: str, seed: int, steps: int, environment: str = BASE.environment) -> TrainerConfig:
    """Return the configuration of one arm's run."""
    guidance, rule = ARMS[arm]
    replayed = replay_config(seed=seed, environment=environment)
    return replace(
        BASE,
        environment=environment,
        seed=seed,
        steps=steps,
        replay=ExperienceReplayConfig() if rule is None else replace(replayed, **rule),
        guidance=replace(guidance, seed=seed),
    )


def measure(arm: str, config: TrainerConfig) -> Run:
    """Train until solved."""
    began = time.perf_counter()
    with ReferenceTrainer(config) as trainer:
        trainer.warm_start()
        summary = summarize(trainer.train(stop_when_solved=True), config.solved_at)
    return Run(
        environment=config.environment,
        arm=arm,
        seed=config.seed,
        steps_at_most=config.steps,
        solved=summary.solved_after is not None,
        fresh_rollouts=summary.fresh_rollouts,
        steps=summary.steps,
        best=summary.best,
        final=summary.final,
        seconds=round(time.perf_counter() - began, 1),
    )


def read_results(path: Path, steps: int, environment: str = BASE.environment) -> list[Run]:
    """Return the runs of a results file; none if there is no file.

    A last line without its end is of a run that was interrupted while it was written: it is left out, and cut off.

    Raises:
        ConfigurationError: a line is no run, or of a run with another task or number of steps.
    """
    if not path.exists():
        return []
    text = path.read_text()
    if cut := text.rpartition("\n")[2]:
        path.write_text(text[: -len(cut)])
    runs = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            run = Run(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{path}:{number}: is no run of this benchmark: {error}") from error
        if (run.steps_at_most, run.environment) != (steps, environment):
            made = f"a run of {run.environment} of {run.steps_at_most} steps at most"
            raise ConfigurationError(f"{path}:{number}: {made}, not {environment} of {steps}")
        runs.append(run)
    return runs


def interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the 90 % bootstrap interval of the ratio of the medians; seeds are drawn in pairs."""
    random = Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = random.choices(pairs, k=len(pairs))
        ratios.append(median(mine for mine, _ in drawn) / median(other for _, other in drawn))
    ratios.sort()
    return ratios[RESAMPLES // 20], ratios[-RESAMPLES // 20]


def figures(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield what the runs of each arm say, beside those of the same seeds without replay and guidance."""
    without = {run.seed: run for run in runs if run.arm == "neither"}
    for arm in ARMS:
        pairs = [(run, without[run.seed]) for run in runs if run.arm == arm and run.seed in without]
        if arm == "neither" or not pairs:
            continue
        rollouts = [(mine.fresh_rollouts, other.fresh_rollouts) for mine, other in pairs]
        low, high = interval(rollouts)
        yield {
            "id": "T13",
            "name": f"fresh rollouts until {pairs[0][0].environment} is solved, {arm} over neither",
            "ratio": round(median(mine for mine, _ in rollouts) / median(other for _, other in rollouts), 3),
            "interval": [round(low, 3), round(high, 3)],
            "seeds": len(pairs),
            "censored": sum(not mine.solved for mine, _ in pairs),
            "censored_neither": sum(not other.solved for _, other in pairs),
            "target": TARGETS[pairs[0][0].environment] if arm in RULES else None,
        }


def table(runs: Sequence[Run]) -> str:
    """Return all runs as a table for the page of figures: a row per seed, a column per arm."""
    arms = [arm for arm in ARMS if any(run.arm == arm for run in runs)]
    found = {(run.arm, run.seed): run for run in runs}
    lines = ["| seed | " + " | ".join(arms) + " |", "| --- |" + " --- |" * len(arms)]
    for seed in sorted({run.seed for run in runs}):
        cells = [_cell(found.get((arm, seed))) for arm in arms]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    medians = [median(run.fresh_rollouts for run in runs if run.arm == arm) for arm in arms]
    lines.append("| median | " + " | ".join(f"{one:,.0f}" for one in medians) + " |")
    return "\n".join(lines)


def _cell(run: Run | None) -> str:
    if run is None:
        return "not run"
    if run.solved:
        return f"{run.fresh_rollouts:,}"
    best = "never evaluated" if run.best is None else f"best {run.best:.0%}"
    return f"{run.fresh_rollouts:,}, not solved ({best})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that the results file lacks, and print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file of JSON lines, one for each run; is added to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--environment", choices=TARGETS, default=BASE.environment)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["neither", "replay"])
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run at the most (200)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        runs = read_results(options.results, options.steps, options.environment) if options.results else []
    except ConfigurationError as error:
        parser.error(str(error))
    made = {(run.arm, run.seed) for run in runs}
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, seed) in made:
                continue
            runs.append(measure(arm, config_of(arm, seed, options.steps, options.environment)))
            line = json.dumps(asdict(runs[-1])) + "\n"
            if options.results:
                with options.results.open("a") as file:
                    file.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    sys.stdout.write("".join(json.dumps(line) + "\n" for line in figures(runs)) + "\n" + table(runs) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
