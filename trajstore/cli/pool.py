"""``trajstore pool``: an experience pool between its store and files, and rollouts into a pool."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from trajstore.cli.command import Command
from trajstore.cli.output import Output


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("export", "import"), help="which way")
    parser.add_argument("store", metavar="STORE", help="the pool's store (exp_manager.experience_replay.store.path)")
    parser.add_argument(
        "files",
        metavar="FILES",
        help="export: folder to write, such as experience_pool/step_120; import: such a folder, ours or AgentEvolver's,"
        " a folder of several (the newest counts), or a store of rollouts",
    )
    parser.add_argument("--replace", action="store_true", help="import: a pool that holds something may be replaced")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    for name, default, text in (
        ("--n-rollout", 8, "rollouts per task (default: %(default)s)"),
        ("--max-trajectories-per-task", 10, "as in the run's configuration (default: %(default)s)"),
    ):
        parser.add_argument(name, default=default, type=int, metavar="N", help=text)
    parser.add_argument(
        "--success-threshold",
        type=float,
        default=1.0,
        metavar="X",
        help="outcome from which on a rollout is a success (default: %(default)s)",
    )


def _run(options: Namespace, out: Output) -> int:
    from trajstore.experience.exchange import export_pool, import_pool
    from trajstore.experience.rules import PoolRules

    rules = PoolRules(
        n_rollout=options.n_rollout,
        max_trajectories_per_task=options.max_trajectories_per_task,
        success_threshold=options.success_threshold,
    )
    if options.action == "export":
        done = export_pool(options.store, options.files, rules)
        where = options.files
    else:
        done = import_pool(options.store, options.files, rules, replace=options.replace)
        where = options.store
    if options.json:
        out.json(
            {
                "source": done.source,
                "trajectories": done.trajectories,
                "tasks": done.tasks,
                "refused": dict(done.refused),
            }
        )
        return 0
    out.line(f"{where}: {done.trajectories:,} trajectories of {done.tasks:,} tasks, from {done.source}")
    for reason, count in done.refused.most_common():
        out.line(f"not taken: {count:,} ({reason})")
    return 0


COMMAND = Command(
    name="pool",
    summary="write an experience pool as files, or fill one",
    description=(
        "Export: write the pool in a store as the files difficulty2task_dict.json, skip_uid_set.json and"
        " task2trajectories.pkl; the run that uses it may go on. Import: fill a pool from such files, or from a store"
        " of rollouts, which enter as they would have during training."
    ),
    configure=_configure,
    run=_run,
)
