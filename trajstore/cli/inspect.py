"""``trajstore inspect``: what is in a directory."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar, format_bytes, format_number, format_range

_LONGEST_VALUE = 100  # characters of a value in the table of one sample

KINDS = {
    "store": "trajectory store",
    "rlinf": "RLinf directory",
    "experience_pool": "experience pool",
    "run": "run directory",
}


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint, run directory or experience pool; path or URL")
    parser.add_argument("--json", action="store_true", help="write the report as JSON")
    parser.add_argument("--trajectory", type=int, metavar="ID", help="show one trajectory")
    parser.add_argument("--sample", type=int, metavar="K", help="show sample K of the trajectory (t * B + b)")
    parser.add_argument(
        "--measure",
        type=int,
        metavar="N",
        help="read rewards and episodes of the newest N trajectories; 0 = all (default: 2000)",
    )


def _run(options: Namespace, out: Output) -> int:
    from trajstore.errors import ConfigurationError
    from trajstore.inspect import MEASURED_AT_MOST, inspect, inspect_trajectory

    if options.sample is not None and options.trajectory is None:
        raise ConfigurationError("--sample needs --trajectory: samples are counted within their trajectory")
    if options.measure is not None and options.measure < 0:
        raise ConfigurationError(f"--measure {options.measure}: must be 0 (all) or more")
    if options.trajectory is not None:
        report = inspect_trajectory(options.path, options.trajectory, options.sample)
    else:
        measure = MEASURED_AT_MOST if options.measure is None else options.measure
        with ProgressBar("reading", sys.stderr) as bar:
            report = inspect(options.path, measure, bar)
    if options.json:
        out.json(report)
    elif options.trajectory is not None:
        _write_trajectory(report, out)
    else:
        write_report(report, out)
    return 0


def write_report(report: dict[str, Any], out: Output) -> None:
    """Write a report of ``trajstore.inspect.inspect`` for people."""
    out.heading(f"{report['path']}: {KINDS[report['kind']]}")
    if report["kind"] == "run":
        out.pairs(_totals(report))
        for part in report["parts"]:
            write_report(part, out)
        return
    out.pairs([*_totals(report), *_content(report)])
    columns = report.get("columns")
    if columns:
        out.heading("columns")
        rows = [(c["name"], c["dtype"], str(c["row_shape"]), format_bytes(c["bytes"])) for c in columns]
        out.table([("name", "dtype", "shape of a row", "bytes"), *rows], right=(3,))
    _write_integrity(report, out)


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    files = f"{format_bytes(report['size_on_disk'])} in {report['files']:,} files"
    if report.get("shards") is not None:
        files += f", {report['shards']:,} of them shards" if report["shards"] != 1 else ", one of them a shard"
    return [
        ("format", report.get("format") or ""),
        ("trajectories", f"{report['trajectories']:,}"),
        ("samples", f"{report['samples']:,}"),
        ("on disk", files),
    ]


def _content(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("generation", format_number(report["generation"]) if "generation" in report else ""),
        ("steps T", format_range(report.get("steps"))),
        ("environments B", format_range(report.get("batch"))),
        ("episode limit", format_range(report.get("max_episode_length"))),
        ("ids", _ids(report.get("ids"))),
    ]
    measured = report.get("measured")
    note = "" if measured is None or measured == report["trajectories"] else f" ({measured:,} trajectories read)"
    rewards, episodes, agents = report.get("rewards"), report.get("episodes"), report.get("agents")
    if rewards is not None:
        rows.append(("rewards", f"{format_range(rewards)}, std {format_number(rewards['std'])}{note}"))
    if episodes is not None:
        rows.append(("episodes ended", f"{episodes['ended']:,}{note}"))
        rows.append(("  length within one trajectory", format_range(episodes["length"])))
        rows.append(("  return within one trajectory", format_range(episodes["return"])))
    if agents is not None:
        rows.append(("tasks", f"{agents['tasks']:,}{note}"))
        rows.append(("outcomes", format_range(agents["outcomes"])))
    policy = report.get("policy")
    if policy is not None and policy["versions"] is not None:
        rows.append(("policy versions", format_range(policy["versions"])))
        rows.append(("  age", format_range(policy["ages"])))
    if "difficulties" in report:
        sizes = ", ".join(f"{key}: {count:,}" for key, count in report["difficulties"].items())
        rows.append(("tasks by successes", sizes))
        rows.append(("solved tasks left out", f"{report['skipped_tasks']:,}"))
    return rows


def _ids(ids: dict[str, Any] | None) -> str:
    if ids is None:
        return ""
    text = f"{ids['first']:,} to {ids['last']:,}"
    return text + (f", {ids['missing']:,} missing" if ids["missing"] else ", none missing")


def _write_integrity(report: dict[str, Any], out: Output) -> None:
    integrity = report.get("integrity")
    if integrity is None:
        return
    problems = integrity["problems"]
    if problems:
        out.heading(f"{len(problems):,} problems")
        for problem in problems:
            out.line(f"  {problem}")
    out.line()
    names = f"{len(problems):,} problems" if problems else "all files there, sizes fit"
    out.line(f"  at a glance: {names} (trajstore verify checks every checksum)")


def _write_trajectory(report: dict[str, Any], out: Output) -> None:
    out.heading(f"{report['path']}: {report['kind']} trajectory {report['trajectory_id']}")
    names = ("uuid", "samples", "steps", "batch", "max_episode_length", "model_weights_id", "versions", "shard")
    out.pairs([(name, "" if report[name] is None else str(report[name])) for name in names])
    if "values" in report:
        out.heading(f"sample {report['sample']} (step {report['step']}, environment {report['environment']})")
        out.table([(name, _shorten(str(value))) for name, value in report["values"].items()])
        return
    out.heading("columns")
    rows = [
        (c["name"], c["dtype"], str(c["shape"]), format_range(c["range"]), f"{c['not_finite']:,}")
        for c in report["columns"]
    ]
    out.table([("name", "dtype", "shape", "range", "not finite"), *rows], right=(4,))
    for message in report.get("messages", ()):
        out.heading(f"{message.get('role', '?')}:")
        out.line(str(message.get("content", "")))


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 4] + " ..."


COMMAND = Command(
    name="inspect",
    summary="show what is in a store, checkpoint, run directory or experience pool",
    description=(
        "Show totals, columns, rewards, episodes, policy versions, missing ids and integrity at a glance. "
        "Reads RLinf's directories and experience pools too. Writes nothing."
    ),
    configure=_configure,
    run=_run,
)
