"""Fresh rollouts until the household is solved: guided, with replay, with both, with neither; every seed is shown.

All four arms of a seed have the same configuration but for the two mechanisms. A run ends at the first evaluation
(which is never guided) that reaches ``solved_at``, or at the last step; such a run counts with all its rollouts, which
is then a lower bound.

A guided policy knows the template's words and has read experience in its warm start, so its first weights are not those
of an unguided policy with the same seed. The arms ``neither-warm`` and ``replay-warm`` have the same warm start as the
guided ones and no guidance: they tell what the warm start alone does.

Each run is a line of the results file as soon as it has ended. Runs that the file holds are not made again, so a call
that was interrupted goes on where it was; the file says with which steps its runs were made, and others are refused.

    python -m tools.bench.household --results household.jsonl [--seeds 0 1 2 3 4] [--arms guidance both] [--steps 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tools.bench.t13_replay import until_solved
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.demo import BASE, replay_config
from trajstore.errors import ConfigurationError

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

ARMS: Mapping[str, tuple[GuidanceConfig, bool]] = {
    "neither": (GuidanceConfig(), False),
    "replay": (GuidanceConfig(), True),
    "guidance": (GUIDANCE, False),
    "both": (GUIDANCE, True),
    "neither-warm": (WARM, False),
    "replay-warm": (WARM, True),
}
"""Name of the arm -> (guidance, whether histories are replayed)."""


@dataclass(frozen=True)
class Run:
    """One run: rollouts until solved, or all rollouts made if it was not."""

    arm: str
    seed: int
    steps_at_most: int
    solved: bool
    fresh_rollouts: int
    steps: int
    best: float | None
    final: float | None
    seconds: float


def config_of(arm: str, seed: int, steps: int) -> TrainerConfig:
    """Return the configuration of one arm's run."""
    guidance, replayed = ARMS[arm]
    return replace(
        BASE,
        environment="household",
        seed=seed,
        steps=steps,
        replay=replay_config(seed=seed) if replayed else ExperienceReplayConfig(),
        guidance=replace(guidance, seed=seed),
    )


def measure(arm: str, config: TrainerConfig) -> Run:
    """Train until solved."""
    summary, took = until_solved(config)
    return Run(
        arm=arm,
        seed=config.seed,
        steps_at_most=config.steps,
        solved=summary.solved_after is not None,
        fresh_rollouts=summary.fresh_rollouts,
        steps=summary.steps,
        best=summary.best,
        final=summary.final,
        seconds=round(took, 1),
    )


def read_results(path: Path, steps: int) -> list[Run]:
    """Return the runs of a results file; none if there is no file.

    A last line without its end is of a run that was interrupted while it was written: it is left out, and cut off.

    Raises:
        ConfigurationError: a line is no run, or of a run with another number of steps.
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
        if run.steps_at_most != steps:
            raise ConfigurationError(f"{path}:{number}: a run of {run.steps_at_most} steps at most, not {steps}")
        runs.append(run)
    return runs


def table(runs: Sequence[Run]) -> str:
    """Return all runs as a table for the page of figures: a row per seed, a column per arm."""
    arms = [arm for arm in ARMS if any(run.arm == arm for run in runs)]
    found = {(run.arm, run.seed): run for run in runs}
    lines = ["| seed | " + " | ".join(arms) + " |", "| --- |" + " --- |" * len(arms)]
    for seed in sorted({run.seed for run in runs}):
        cells = [_cell(found.get((arm, seed))) for arm in arms]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    medians = [statistics.median(run.fresh_rollouts for run in runs if run.arm == arm) for arm in arms]
    lines.append("| median | " + " | ".join(f"{median:,.0f}" for median in medians) + " |")
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
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines, one for each run; is added to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run at the most (200)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        runs = read_results(options.results, options.steps)
    except ConfigurationError as error:
        parser.error(str(error))
    for seed in options.seeds:
        for arm in options.arms:
            if any((run.arm, run.seed) == (arm, seed) for run in runs):
                continue
            run = measure(arm, config_of(arm, seed, options.steps))
            runs.append(run)
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            sys.stdout.write(json.dumps(asdict(run)) + "\n")
            sys.stdout.flush()
    sys.stdout.write("\n" + table(runs) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
