"""Draw the runs of T13, and print a table of arms for each task.

python -m tools.bench.t13_picture docs/t13/*.jsonl [--picture docs/images/t13.svg] [--against equal-work]
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tools.bench.t13_replay import ARMS, Run, by_arm, read, summary
from trajstore.errors import ConfigurationError, MissingDependencyError


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
        sys.stdout.write(f"## {task}\n\n{summary(runs, options.against)}\n\n")
    if options.picture is not None:
        draw(tasks, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
