"""``trajstore inspect``: report on a directory."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from trajstore.cli.command import REMOVE, Command, add_ranks, add_tokenizer
from trajstore.cli.output import Output, format_number
from trajstore.cli.report import cell, write, write_table, write_trajectory
from trajstore.errors import ConfigurationError, counted, listed

KINDS = {
    "store": "trajectory store",
    "rlinf": "RLinf directory",
    "run": "run directory",
    "unreadable": "cannot be read",
}

_UNLESS_ZERO = ("earlier_states", "open_sessions", "invalid_steps", "response_tokens_known")

_BELOW = {
    "aside": "`trajstore rollback PATH --to NAME` goes there again",
    "kept_on_disk": f"files of evicted trajectories. Once all the names of a row are removed ({REMOVE}), and readers "
    "refresh, close or end, a writer or `trajstore compact` frees them",
}

_LABELS = {"tokens": "tokens_per_rollout", "response_tokens": "response_tokens_per_rollout"}

_FEW_IDS = 1_000_000_000
"""Below this number, the ids left are shown."""


def _id(text: str) -> int:
    """Parse a trajectory id as displayed."""
    from trajstore._core.store.run_ids import id_from

    try:
        return id_from("ID", text)
    except ConfigurationError as error:
        raise ArgumentTypeError(str(error)) from error


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint or run directory; path or URL")
    parser.add_argument("--json", action="store_true", help="write the report as JSON")
    parser.add_argument(
        "--trajectory",
        type=_id,
        metavar="ID",
        help="show one trajectory (3/17: 17 of a run's rank 3); for a rollout, its messages",
    )
    parser.add_argument("--full", action="store_true", help="with --trajectory, show all of long texts and values")
    add_tokenizer(parser)
    parser.add_argument(
        "--max-age",
        type=float,
        metavar="SECONDS",
        help="a last addition that is older is a problem (exit code 1), as when the writer is gone or stands still",
    )
    add_ranks(parser)


def _run(options: Namespace, out: Output) -> int:
    from trajstore.operations.inspect import inspect
    from trajstore.operations.trajectory_report import inspect_trajectory

    detail = [name for name in ("tokenizer", "full") if vars(options)[name] not in (None, False)]
    if detail and options.trajectory is None:
        raise ConfigurationError(f"--{detail[0]} needs --trajectory: it is about one trajectory")
    if options.max_age is not None and not options.max_age >= 0:
        raise ConfigurationError(f"--max-age {options.max_age}: must be 0 or more seconds")
    for name, value in (("--max-age", options.max_age), ("--ranks", options.ranks)):
        if value is not None and options.trajectory is not None:
            raise ConfigurationError(f"{name} is about a store or run: without --trajectory")
    if options.trajectory is not None:
        report = inspect_trajectory(options.path, options.trajectory, options.tokenizer)
    else:
        report = inspect(options.path, ranks=options.ranks)
        report["integrity"]["problems"] += _too_old(report, options.max_age)
    if options.json:
        out.json(report)
    elif options.trajectory is not None:
        write_trajectory(report, out, options.full)
    else:
        write_report(report, out)
    return int(bool(report["integrity"]["problems"]))


def _too_old(report: dict[str, Any], max_age: float | None) -> list[str]:
    """Return a problem for each store without an addition in the last ``max_age`` seconds."""
    stores = [part for part in _leaves(report) if part["kind"] == "store"]
    ages = {store["path"]: (store["last_addition"] or {}).get("age") for store in stores}
    states = {store["path"]: (store["writer"] or {"state": "absent"})["state"] for store in stores}
    writers = {"absent": ", no writer is open", "gone": ", its writer is gone", "stopped": ", its writer is stopped"}
    writers["running"] = ", its writer is running: it cannot write, or is given nothing"
    return [
        f"{path}: {'no trajectory' if age is None else f'the last addition was {_duration(age)} ago'}"
        f"{writers.get(states[path], '')} (--max-age)"
        for path, age in ages.items()
        if max_age is not None and (age is None or age > max_age)
    ]


def write_report(report: dict[str, Any], out: Output) -> None:
    """Write a report of ``trajstore.operations.inspect.inspect`` as text.

    Args:
        report: a report of any kind.
        out: the output.
    """
    from trajstore.operations.late_values import waiting_in_words

    out.heading(f"{report['path']}: {_kind(report)}")
    _write_integrity(report, out)
    out.line()
    without = {"path", "kind", "parts", "integrity"} | {name for name in _UNLESS_ZERO if not report.get(name)}
    shown = {_LABELS.get(name, name): value for name, value in report.items() if name not in without}
    shown["trajectories"] = _present(report)
    if report.get("ids_left", 0) >= _FEW_IDS:
        del shown["ids_left"]
    if "writer" in report:
        shown["writer"] = _writer(report["writer"])
    if last := report.get("last_addition"):
        shown["last_addition"] = f"{cell('at', last['at'])} UTC, {_duration(last['age'])} ago"
    if (mirror := report.get("mirror")) is not None and mirror["generation"] is None:
        shown["mirror"] = {**mirror, "generation": "never copied"}
    if not report.get("compressed", {}).get("shards"):
        shown.pop("compressed", None)
    if waiting := report.get("waiting"):
        shown["waiting"] = waiting_in_words(waiting) if waiting["files"] else None
        shown["refused_values"] = waiting["refused"]
    if report.get("readers"):  # the oldest generations keep the most data on disk
        readers = sorted(report["readers"], key=lambda reader: reader["generation"])
        shown["readers"] = [f"{lease['holder']}, generation {format_number(lease['generation'])}" for lease in readers]
    write(shown, out, below=_BELOW)
    if report["kind"] == "run":
        out.heading("parts")
        write_table([_line(part, report["path"]) for part in _leaves(report)], out)
        out.line("  `trajstore inspect PATH/PART` shows one of them in full")


def _present(report: dict[str, Any]) -> int | str:
    """Return the number of trajectories; of RLinf's directories, also how many of them have a file."""
    absent, count = (report.get("ids") or {}).get("without_file", 0), report["trajectories"]
    return f"{format_number(count - absent)} of {format_number(count)}" if absent else int(count)


def _writer(writer: dict[str, Any] | None) -> str:
    if writer is None:
        return "none"
    since = "" if writer["since"] is None else f" since {cell('at', writer['since'])} UTC"
    states = {
        "stopped": f", stopped: `kill -CONT {writer['pid']}` continues it",
        "gone": ", gone without closing; the next writer continues",
    }
    return f"process {writer['pid']} on {writer['host']}{since}{states.get(writer['state'], '')}"


def _duration(seconds: float) -> str:
    """Return a duration in its largest whole unit."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _kind(report: dict[str, Any]) -> str:
    """Return the kind of directory; a folder without ``rank_*`` is not a run directory."""
    if report["kind"] == "run" and not report["stores"]:
        names = listed(part["path"].rstrip("/").rpartition("/")[2] for part in report["parts"])
        kinds = dict.fromkeys(_kind(part) for part in report["parts"])
        return f"folder with {names} ({', '.join(kinds)})"
    pool = report.get("pool")
    if pool is None:
        return KINDS[report["kind"]]
    return "rollouts with an experience pool" if pool["recorded"] else "experience pool"


def _leaves(report: dict[str, Any]) -> list[dict[str, Any]]:
    if report["kind"] != "run":
        return [report]
    return [leaf for part in report["parts"] for leaf in _leaves(part)]


def _line(part: dict[str, Any], above: str) -> dict[str, Any]:
    """Return the figures of a part of a run that are shown in its line."""
    readable = part["kind"] != "unreadable"
    return {
        "part": part["path"].removeprefix(above).lstrip("/") or "(here)",
        "trajectories": part["trajectories"] if readable else "?",
        "samples": part["samples"] if readable else "?",
        "size_on_disk": part["size_on_disk"],
        "outcomes": ((part.get("agents") or {}).get("outcomes") or {}).get("mean"),
        "versions": (part.get("policy") or {}).get("versions"),
        "writer": (part.get("writer") or {}).get("state"),
        "aside": len(part.get("aside", ())) or None,
        "problems": len(part["integrity"]["problems"]) or None,
    }


def _write_integrity(report: dict[str, Any], out: Output) -> None:
    problems = report["integrity"]["problems"]
    there = "all files there" if isinstance(_present(report), int) else f"{_present(report)} with a file"
    names = counted(len(problems), "problem") if problems else f"{there}, sizes fit"
    out.line(f"  at a glance: {names} (`trajstore verify` checks every checksum)")
    out.problems([f"  {problem}" for problem in problems], "  ")


COMMAND = Command(
    name="inspect",
    summary="show what is in a store, checkpoint or run directory",
    description=(
        "Show integrity at a glance, the writer and whether it runs, the last addition, totals, columns, "
        "policy versions, absent ids and readers. "
        "'Size on disk' counts all files, 'live bytes' the columns of the trajectories shown; shards also have "
        "headers and evicted or pinned rows, 'kept on disk' what pins and readers keep. "
        "For a folder, all stores below it are counted. "
        "Reads RLinf's directories too. A writer may be running. Writes nothing but a reader's lease "
        "while a writer has the store open. Exit code 1: problems are listed, a mirror's error among them."
    ),
    configure=_configure,
    run=_run,
)
