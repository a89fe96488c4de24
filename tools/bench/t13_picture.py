"""Draw the runs of T13, and print them as a table of arms and a table of seeds for each task.

python -m tools.bench.t13_picture docs/t13/*.jsonl [--picture docs/images/t13.svg] [--against equal-work]
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tools.bench.t13_replay import ARMS, Run, figures, table
from trajstore.errors import ConfigurationError, MissingDependencyError


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
    ratios = {line["name"].rpartition(", ")[2].partition(" over ")[0]: line for line in figures(runs, against)}
    lines = [
        f"| arm | solved | success at the end | median | mean | median ÷ {against} | mean ÷ {against} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, of_arm in by_arm(runs).items():
        rollouts = [run.fresh_rollouts for run in of_arm]
        cells = [_ratio(ratios.get(arm), name) for name in ("ratio", "ratio_of_means")]
        solved = f"{sum(run.solved for run in of_arm)} of {len(of_arm)}"
        last = [run.final for run in of_arm if run.final is not None]
        end = f"{fmean(last):.2f}" if last else ""
        lines.append(
            f"| `{arm}` | {solved} | {end} | {median(rollouts):,.0f} | {fmean(rollouts):,.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each arm that has any, in the order of ``ARMS``."""
    found = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    return {arm: of_arm for arm, of_arm in found.items() if of_arm}


def _ratio(line: dict[str, Any] | None, name: str) -> str:
    if line is None:
        return ""
    low, high = line[f"{name}_interval"]
    return f"{line[name]:.2f} ({low:.2f} to {high:.2f})"


def draw(tasks: dict[str, list[Run]], path: Path) -> None:
    """Write a picture (SVG): a panel per task, a row per arm, a point per run; the same runs give the same bytes.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "demo") from error
    arms = {task: by_arm(runs) for task, runs in tasks.items()}
    heights = [len(of_task) for of_task in arms.values()]
    figure = Figure(figsize=(7.0, 0.8 * len(tasks) + 0.22 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(tasks), height_ratios=heights, squeeze=False)[:, 0]
    for axes, (task, of_task) in zip(panels, arms.items(), strict=True):
        for place, runs in enumerate(of_task.values()):
            for solved, face in ((True, "C0"), (False, "none")):
                rollouts = [run.fresh_rollouts for run in runs if run.solved is solved]
                axes.scatter(rollouts, [place] * len(rollouts), s=16, facecolors=face, edgecolors="C0", linewidths=0.8)
            middle = median(run.fresh_rollouts for run in runs)
            axes.plot([middle] * 2, [place - 0.35, place + 0.35], color="C1", linewidth=2)
        axes.set_yticks(range(len(of_task)), list(of_task))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(task, loc="left", fontsize="medium")
    panels[-1].set_xlabel("fresh rollouts until solved (hollow: not solved; bar: median)")
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "trajstore"}):  # text as text, names not at random
        figure.savefig(file, format="svg", metadata={"Date": None})
    path.write_bytes(file.getvalue())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the results files that the command line names; draw them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of t13_replay --results")
    parser.add_argument("--picture", type=Path, help="write this SVG file")
    parser.add_argument("--against", choices=ARMS, default="equal-work", help="baseline of the ratios (equal-work)")
    options = parser.parse_args(arguments)
    try:
        tasks = read(options.results)
    except (ConfigurationError, OSError, ValueError, TypeError) as error:
        parser.error(str(error))
    for task, runs in tasks.items():
        sys.stdout.write(f"## {task}\n\n{summary(runs, options.against)}\n\n{table(runs)}\n\n")
    if options.picture is not None:
        draw(tasks, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
