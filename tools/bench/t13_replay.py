"""T13: fresh rollouts until the reference task is solved, each arm over a baseline, over seeds.

A run ends at the first evaluation (which is never guided) that reaches ``solved_at``, or at the last step; such a run
counts with all its rollouts. Prints a JSON line for each run, and a table with a row for each arm: ratios of medians
and of means to the baseline, with 90 % percentile bootstrap intervals; seeds are drawn in pairs.

Arms differ in the rows of a step:

* ``neither``: 128 fresh rollouts.
* ``equal-work``: 96 fresh rollouts, 32 of them twice: as many rows and optimizer steps as with replay.
* ``replay``: up to 32 of 128 are histories, four of a task (the default): successes with the lowest entropy under the
  current policy. ``one``: one history of a task, so up to 8 rows.
* ``choice``: as ``equal-work``, with the tasks that ``replay`` would choose.
* ``exgrpo``: as ``replay``, with tasks by difficulty (``normal``) and shaped ratios (gamma 0.1; arXiv 2510.02245).
* ``equal-work-64``: 64 fresh rollouts, each twice.
* ``fifo``: 128 drawn evenly from the newest rollouts, failures included (arXiv 2604.08706).
* ``groups``: fresh rollouts, filled up to 128 with stored groups of unequal outcomes.
* ``guidance``, ``both``: guided rollouts without and with replay.

A guided policy knows the template's words and has read experience in its supervised start, so its first weights differ
from those of an unguided policy with the same seed. Arms that end in ``-warm`` have that start and no guidance.

Each run is a line of the results file, if there is one, as soon as it has ended. Runs that the file holds are not made
again, so an interrupted call is continued by the same call. Two processes need different seeds and different files.

The steps at most bound the ratios: an unsolved run of an arm with 96 rollouts per step counts 19,200 after 200 steps,
which is less than twice the rollouts of a typical *household* run with replay. Use ``--steps 250`` against
``equal-work``; the number changes nothing else in a run. An unsolved run of
*treasure* takes two minutes of processor time with ``--steps 200``.

Processor time of an early step, on a busy core of an AMD EPYC: *household* 0.59 s (``neither``), 0.54 s
(``equal-work``), 0.64 s (``replay``); *sort* with replay 0.13 s; *treasure* 0.48 s (``neither``). The supervised start
takes 14 s, 3 s and 14 s, once for all arms of a seed that have the same template.

    python -m tools.bench.t13_replay [--seeds 0 1 2 3 4] [--environment household] [--arms neither replay]
        [--against neither] [--results runs.jsonl] [--steps 200]
        [--hidden-size 64] [--layers 2] [--learning-rate 0.0005] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from examples.grpo.config import TrainerConfig
from examples.grpo.curves import summarize
from examples.grpo.demo import BASE, replay_config
from examples.grpo.trainer import ReferenceTrainer
from tools.bench.t13_trainers import BufferTrainer, ChoosingTrainer, RepeatingTrainer
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.metrics import PREFIX
from trajstore.errors import ConfigurationError

ENVIRONMENTS = ("household", "sort", "treasure")
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
    "one": {"offpolicy_trajectories_per_task": 1},
    "exgrpo": {"task_sampling": "normal", "off_policy_shaping": 0.1},
}
"""What differs from the usual replay, by the name of the arm."""


@dataclass(frozen=True)
class Arm:
    """What differs from the run without replay.

    Attributes:
        rule: what differs from the usual replay; None without replay.
        guidance: guided rollouts, or the start of a guided policy.
        fresh_tasks: environment -> tasks with fresh rollouts per step, if not those of the base.
        trainer: makes the trainer.
    """

    rule: Mapping[str, Any] | None = None
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    fresh_tasks: Mapping[str, int] = field(default_factory=dict)
    trainer: Callable[[TrainerConfig], ReferenceTrainer] = ReferenceTrainer


class Choice(NamedTuple):
    """Tasks with fresh rollouts per step, and rollouts in the buffer."""

    fresh_tasks: int
    capacity: int


CHOICES: Mapping[tuple[str, str], Choice] = {
    ("fifo", "household"): Choice(12, 384),
    ("fifo", "sort"): Choice(6, 384),
    ("fifo", "treasure"): Choice(12, 384),
    ("groups", "household"): Choice(12, 10_000),
    ("groups", "sort"): Choice(8, 384),
    ("groups", "treasure"): Choice(12, 10_000),
}
"""(Arm, environment) -> of the values tried on seeds 100 to 109 (*household*: 100 to 104), those of the lowest mean.

``fifo`` in *household* solved at most one of these seeds with any values; these solved two of two with 300 steps. Those
of *treasure* are *household*'s, for lack of runs."""


def _buffer(arm: str) -> Arm:
    """Return the arm that draws from a plain buffer of rollouts."""

    def trainer(config: TrainerConfig) -> ReferenceTrainer:
        return BufferTrainer(config, CHOICES[arm, config.environment].capacity, whole_groups=arm == "groups")

    fresh_tasks = {environment: CHOICES[arm, environment].fresh_tasks for environment in ENVIRONMENTS}
    return Arm(fresh_tasks=fresh_tasks, trainer=trainer)


UNGUIDED: Mapping[str, Arm] = {
    "neither": Arm(),
    "equal-work": Arm(fresh_tasks=dict.fromkeys(ENVIRONMENTS, 12), trainer=RepeatingTrainer),
    "equal-work-64": Arm(fresh_tasks=dict.fromkeys(ENVIRONMENTS, 8), trainer=RepeatingTrainer),
    "choice": Arm({}, fresh_tasks=dict.fromkeys(ENVIRONMENTS, 12), trainer=ChoosingTrainer),
    **{name: Arm(rule) for name, rule in RULES.items()},
    "fifo": _buffer("fifo"),
    "groups": _buffer("groups"),
}

ARMS: Mapping[str, Arm] = {
    **UNGUIDED,
    "guidance": Arm(guidance=GUIDANCE),
    "both": Arm({}, GUIDANCE),
    **{f"{name}-warm": replace(arm, guidance=WARM) for name, arm in UNGUIDED.items()},
}


@dataclass(frozen=True)
class Run:
    """One run: rollouts until solved, or all rollouts made if it was not.

    ``replayed`` is the mean share of replayed rows in a step's batch, ``replayed_tokens`` that of their tokens; None
    without replay.
    """

    environment: str
    arm: str
    seed: int
    steps_at_most: int
    solved: bool
    fresh_rollouts: int
    steps: int
    best: float | None
    final: float | None
    replayed: float | None
    replayed_tokens: float | None
    seconds: float
    hidden_size: int
    layers: int
    learning_rate: float
    device: str

    @property
    def task(self) -> str:
        """The environment, and what of model and device differs from the base."""
        return task_of(self.environment, self.hidden_size, self.layers, self.learning_rate, self.device)


def task_of(environment: str, hidden_size: int, layers: int, learning_rate: float, device: str) -> str:
    """Return the name of a task: the environment, and what of model and device differs from the base."""
    base = (BASE.model.hidden_size, BASE.model.layers, BASE.learning_rate, BASE.device)
    if (hidden_size, layers, learning_rate, device) == base:
        return environment
    return f"{environment}, {layers} layers of {hidden_size}, learning rate {learning_rate:g}, {device}"


def config_of(arm: str, seed: int, base: TrainerConfig) -> TrainerConfig:
    """Return the configuration of one arm's run; ``base`` has environment, steps, model, learning rate and device."""
    made = ARMS[arm]
    replayed = replay_config(seed=seed, environment=base.environment)
    return replace(
        base,
        seed=seed,
        tasks_per_step=made.fresh_tasks.get(base.environment, base.tasks_per_step),
        replay=ExperienceReplayConfig() if made.rule is None else replace(replayed, **made.rule),
        guidance=replace(made.guidance, seed=seed),
    )


_STARTS: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
"""Weights after the supervised start, which arms with the same template share: of the current seed alone."""


def start(trainer: ReferenceTrainer) -> None:
    """Run the supervised start, or load the weights of an equal one."""
    config = trainer.config
    template = config.guidance.experience_template if config.guidance.is_on else None
    key = (config.environment, config.seed, config.warm_start_steps, config.model, template)
    if (weights := _STARTS.get(key)) is not None:
        trainer.model.load_state_dict(weights)
        return
    trainer.warm_start()
    if len(_STARTS) == 2:  # with a template and without
        _STARTS.clear()
    _STARTS[key] = {name: value.clone() for name, value in trainer.model.state_dict().items()}


def measure(arm: str, config: TrainerConfig) -> Run:
    """Train until solved."""
    began = time.perf_counter()
    rows, tokens = [], []
    with ARMS[arm].trainer(config) as trainer:
        start(trainer)
        while trainer.step < config.steps and trainer.solved_after is None:
            trainer.train_step()
            figures = trainer.metrics
            rows.append(figures.get(f"{PREFIX}replayed_rows", 0.0) / (config.tasks_per_step * config.n_rollout))
            tokens.append(figures.get(f"{PREFIX}off_policy_share", 0.0))
        summary = summarize(trainer.curve, config.solved_at)
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
        replayed=round(fmean(rows), 4) if config.replay.enable else None,
        replayed_tokens=round(fmean(tokens), 4) if config.replay.enable else None,
        seconds=round(time.perf_counter() - began, 1),
        hidden_size=config.model.hidden_size,
        layers=config.model.layers,
        learning_rate=config.learning_rate,
        device=config.device,
    )


def read(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Return the runs of results files by task.

    Raises:
        ConfigurationError: an arm has two runs with one seed, or the runs of a task have different numbers of steps.
    """
    tasks: dict[str, list[Run]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            run = Run(**json.loads(line))
            tasks.setdefault(run.task, []).append(run)
    for task, runs in tasks.items():
        if len({(run.arm, run.seed) for run in runs}) < len(runs):
            raise ConfigurationError(f"{task}: an arm has two runs with one seed; name each results file once")
        if len({run.steps_at_most for run in runs}) > 1:
            raise ConfigurationError(f"{task}: the runs have different numbers of steps; use files of one call")
    return tasks


def summary(runs: Sequence[Run], against: str) -> str:
    """Return a row for each arm: runs solved, mean of the last success rates, fresh rollouts, ratios and intervals."""
    lines = [
        f"| arm | solved | success at the end | median | mean | median ÷ {against} | mean ÷ {against} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    baseline = {run.seed: run.fresh_rollouts for run in runs if run.arm == against}
    for arm, of_arm in by_arm(runs).items():
        rollouts = [run.fresh_rollouts for run in of_arm]
        pairs = [(run.fresh_rollouts, baseline[run.seed]) for run in of_arm if run.seed in baseline]
        ratios = [_ratio(pairs, middle) if pairs and arm != against else "" for middle in (median, fmean)]
        solved = f"{sum(run.solved for run in of_arm)} of {len(of_arm)}"
        last = [run.final for run in of_arm if run.final is not None]
        end = f"{fmean(last):.2f}" if last else ""
        middles = f"{median(rollouts):,.0f} | {fmean(rollouts):,.0f}"
        lines.append(f"| `{arm}` | {solved} | {end} | {middles} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each arm that has any, in the order of ``ARMS``."""
    found = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    return {arm: of_arm for arm, of_arm in found.items() if of_arm}


def _ratio(pairs: Sequence[tuple[int, int]], middle: Callable[[Sequence[int]], float]) -> str:
    """Return a ratio of medians or means with its 90 % bootstrap interval; seeds are drawn in pairs."""

    def ratio(drawn: Sequence[tuple[int, int]]) -> float:
        return middle([mine for mine, _ in drawn]) / middle([other for _, other in drawn])

    random = Random(0)
    ratios = sorted(ratio(random.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return f"{ratio(pairs):.2f} ({ratios[RESAMPLES // 20]:.2f} to {ratios[-RESAMPLES // 20]:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that the results file lacks, and print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file of JSON lines, one for each run; is added to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--environment", choices=ENVIRONMENTS, default=BASE.environment)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["neither", "replay"])
    parser.add_argument("--against", choices=ARMS, default="neither", help="the baseline of the ratios (neither)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run at the most (200)")
    parser.add_argument("--hidden-size", type=int, default=BASE.model.hidden_size)
    parser.add_argument("--layers", type=int, default=BASE.model.layers)
    parser.add_argument("--learning-rate", type=float, default=BASE.learning_rate)
    parser.add_argument("--device", default=BASE.device)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    base = replace(
        BASE,
        environment=options.environment,
        steps=options.steps,
        learning_rate=options.learning_rate,
        device=options.device,
        model=replace(BASE.model, hidden_size=options.hidden_size, layers=options.layers),
    )
    task = task_of(options.environment, options.hidden_size, options.layers, options.learning_rate, options.device)
    found = read([options.results]) if options.results and options.results.exists() else {}
    runs = found.pop(task, [])
    if found or any(run.steps_at_most != options.steps for run in runs):
        parser.error(f"{options.results} has runs of another task or number of steps: use another file")
    made = {(run.arm, run.seed) for run in runs}
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, seed) in made:
                continue
            runs.append(measure(arm, config_of(arm, seed, base)))
            line = json.dumps(asdict(runs[-1])) + "\n"
            if options.results:
                with options.results.open("a") as file:
                    file.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    sys.stdout.write(f"\n{summary(runs, options.against)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
