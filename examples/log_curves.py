"""Log a store's curves by policy version, and its newest rollouts, to wandb or TensorBoard.

    python -m examples.log_curves STORE --wandb PROJECT
    python -m examples.log_curves STORE --tensorboard FOLDER

Links lead to ``trajstore view STORE``, which must run at ``--viewer``. A trainer calls ``to_wandb`` or
``to_tensorboard`` now and then, with its own run or writer.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trajstore import AgentTrajectory, Reader, TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError

VIEWER = "http://127.0.0.1:8421"
COLUMNS = ("rollout", "task", "policy version", "outcome", "turns", "tokens", "answer", "link")


def curves(reader: Reader) -> dict[int, dict[str, float]]:
    """Return the means of the rollouts of each policy version.

    ``outcome``, ``tokens`` and ``turns`` are by the newest version that sampled the rollout, with the number of
    ``rollouts``. ``age`` (versions since a row was sampled) is by the version that was trained, of stores with a
    training ledger. A value that no rollout of a version has is left out. Rollouts without a version are in no curve.
    """
    asked = ("avg(outcome) as outcome", "avg(steps) as tokens", "avg(turns) as turns", "count(*) as rollouts")
    means = reader.query().where("kind = 'agent'").group_by("version_high as version").select(*asked).rows()
    with suppress(StoreNotFoundError):  # there is no ledger
        trained = reader.query("trained").group_by("cast(version + age as bigint) as version")
        means += trained.select("avg(age) as age").rows()
    found: dict[int, dict[str, float]] = {}
    for row in means:
        known = {name: value for name, value in row.items() if name != "version" and value is not None}
        if row["version"] is not None:
            found.setdefault(row["version"], {}).update(known)
    return dict(sorted(found.items()))


def samples(reader: Reader, viewer: str = VIEWER, count: int = 20) -> list[tuple[Any, ...]]:
    """Return the newest ``count`` rollouts, a row of :data:`COLUMNS` each; ``link`` shows it in the viewer."""
    facts = ("trajectory_id", "task", "version_high", "outcome", "turns", "steps")
    newest = reader.query().where("kind = 'agent'").select(*facts).order_by("trajectory_id desc").limit(count)
    rows = []
    for row in newest.rows():
        rollout = reader.get(row["trajectory_id"])
        messages = rollout.messages if isinstance(rollout, AgentTrajectory) else None
        answer = str(messages[-1].get("content")) if messages else None
        rows.append((*row.values(), answer, f"{viewer}/#/trajectory/{row['trajectory_id']}"))
    return rows


def to_wandb(reader: Reader, run: Any, viewer: str = VIEWER) -> None:
    """Log to a run of wandb. The curves' axis is the metric ``policy_version``, not wandb's step."""
    import wandb

    run.define_metric("policy_version")
    run.define_metric("rollouts/*", step_metric="policy_version")
    for version, means in curves(reader).items():
        run.log({"policy_version": version, **{f"rollouts/{name}": value for name, value in means.items()}})
    run.log({"samples": wandb.Table(columns=list(COLUMNS), data=[list(row) for row in samples(reader, viewer)])})


def to_tensorboard(reader: Reader, writer: Any, viewer: str = VIEWER) -> None:
    """Log to a ``SummaryWriter``. The curves' steps are policy versions; the samples are a table of the newest one."""
    found = curves(reader)
    for version, means in found.items():
        for name, value in means.items():
            writer.add_scalar(f"rollouts/{name}", value, version)
    rows = [(*row[:-1], f"[{row[0]}]({row[-1]})") for row in samples(reader, viewer)]
    lines = (" | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    table = "\n".join([" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS), *lines])
    writer.add_text("samples", table, max(found, default=0))
    writer.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Log a store once; return the exit code."""
    parser = ArgumentParser(prog="python -m examples.log_curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", help="path or URL of a store or run directory")
    parser.add_argument("--viewer", default=VIEWER, help="address of `trajstore view` (default: %(default)s)")
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument("--wandb", metavar="PROJECT", help="project of wandb")
    targets.add_argument("--tensorboard", metavar="FOLDER", help="folder of TensorBoard's events")
    options = parser.parse_args(arguments)
    with TrajectoryReplayBuffer.open(options.store) as reader:
        if options.wandb is not None:
            import wandb

            with wandb.init(project=options.wandb) as run:
                to_wandb(reader, run, options.viewer)
        else:
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(options.tensorboard) as writer:
                to_tensorboard(reader, writer, options.viewer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
