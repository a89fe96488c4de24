"""``trajstore inspect``: report on a directory."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from trajstore.cli.command import Command, add_tokenizer
from trajstore.cli.output import Output, ProgressBar, format_bytes, format_number, format_range
from trajstore.cli.trajectory import TURNS_BY_MESSAGES, TURNS_BY_TOKENS, write_trajectory
from trajstore.errors import counted, listed, trajectories

KINDS = {
    "store": "trajectory store",
    "rlinf": "RLinf directory",
    "experience_pool": "experience pool",
    "run": "run directory",
    "unreadable": "cannot be read",
}


MOST_READERS = 5
MOST_REFUSED = 10
"""Maximum number of readers in the text report."""


def _id(text: str) -> int:
    """Parse a trajectory id as displayed."""
    from trajstore._core.store.run_ids import id_from
    from trajstore.errors import ConfigurationError

    try:
        return id_from("ID", text)
    except ConfigurationError as error:
        raise ArgumentTypeError(str(error)) from error


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint, run directory or experience pool; path or URL")
    parser.add_argument("--json", action="store_true", help="write the report as JSON")
    parser.add_argument("--each", action="store_true", help="show every rank of a run as fully as a single store")
    parser.add_argument(
        "--trajectory",
        type=_id,
        metavar="ID",
        help="show one trajectory (3/17: 17 of a run's rank 3); for a rollout, its messages",
    )
    parser.add_argument(
        "--sample", type=int, metavar="K", help="show sample K of the trajectory (t * B + b), or token K of a rollout"
    )
    parser.add_argument(
        "--tokens", action="store_true", help="with --trajectory, show every token of a rollout with its values"
    )
    add_tokenizer(parser)
    parser.add_argument(
        "--measure",
        type=int,
        metavar="N",
        help="read rewards and episodes of the newest N trajectories; 0 = all (default: 2000)",
    )


def _run(options: Namespace, out: Output) -> int:
    from trajstore.errors import ConfigurationError
    from trajstore.operations.inspect import MEASURED_AT_MOST, inspect
    from trajstore.operations.trajectory_report import inspect_trajectory

    if options.sample is not None and options.trajectory is None:
        raise ConfigurationError("--sample needs --trajectory: samples are counted within their trajectory")
    if options.tokenizer is not None and options.trajectory is None:
        raise ConfigurationError("--tokenizer needs --trajectory: it shows the tokens of one rollout")
    if options.tokens and (options.trajectory is None or options.sample is not None):
        raise ConfigurationError("--tokens needs --trajectory, and no --sample: it shows all tokens of one rollout")
    if options.each and (options.trajectory is not None or options.json):
        raise ConfigurationError("--each writes every rank of a run as text: without --trajectory, and without --json")
    if options.measure is not None and options.measure < 0:
        raise ConfigurationError(f"--measure {options.measure}: must be 0 (all) or more")
    if options.trajectory is not None:
        report = inspect_trajectory(
            options.path, options.trajectory, options.sample, options.tokenizer, tokens=options.tokens
        )
    else:
        measure = MEASURED_AT_MOST if options.measure is None else options.measure
        with ProgressBar("reading", sys.stderr) as bar:
            report = inspect(options.path, measure, bar)
    if options.json:
        out.json(report)
    elif options.trajectory is not None:
        write_trajectory(report, out)
    else:
        write_report(report, out, each=options.each)
    return int(bool(report.get("integrity", {}).get("problems")))


def write_report(report: dict[str, Any], out: Output, *, each: bool = False) -> None:
    """Write a report of ``trajstore.operations.inspect.inspect`` as text.

    Args:
        report: a report of any kind.
        out: the output.
        each: write the parts of a run in full instead of one line each.
    """
    out.heading(f"{report['path']}: {_kind(report)}")
    out.pairs([*_totals(report), *_content(report)])
    columns = report.get("columns")
    if columns:
        out.heading("columns")
        rows = [(c["name"], c["dtype"], str(c["row_shape"]), format_bytes(c["bytes"])) for c in columns]
        out.table([("name", "dtype", "shape of a row", "bytes"), *rows], right=(3,))
    _write_points(report, out)
    if report["kind"] == "run" and not each:
        _write_parts(report, out)
    _write_integrity(report, out)
    if report["kind"] == "run" and each:
        for part in report["parts"]:
            write_report(part, out, each=True)


def _kind(report: dict[str, Any]) -> str:
    """Return the kind of directory; a folder without ``rank_*`` is not a run directory."""
    if report["kind"] == "run" and not report["stores"]:
        names = listed(part["path"].rstrip("/").rpartition("/")[2] for part in report["parts"])
        kinds = dict.fromkeys(_kind(part) for part in report["parts"])
        return f"folder with {names} ({', '.join(kinds)})"
    return KINDS["experience_pool" if report.get("pool") else report["kind"]]


def _write_points(report: dict[str, Any], out: Output) -> None:
    """Write the saved points of a store, and the heads set aside by rollbacks."""
    if points := report.get("saved_points"):
        out.heading("saved points")
        rows = [
            (f"{p['step']:,}", f"{p['trajectories']:,}", f"{p['generation']:,}", format_bytes(p["state_bytes"]))
            for p in points
        ]
        out.table([("step", "trajectories", "generation", "state"), *rows], right=(0, 1, 2, 3))
    if points := report.get("run_points"):
        out.heading("saved points of the run")
        rows = [(f"{p['step']:,}", f"{p['trajectories']:,}", f"{p['ranks']:,}", _whole(p["lacking"])) for p in points]
        out.table([("step", "trajectories", "ranks", "complete"), *rows], right=(0, 1, 2))
    if asides := report.get("aside"):
        out.heading("states that were left")
        lines = [("name", "left for", "trajectories", "bytes", "saved points")]
        for a in asides:
            count, nbytes = f"{a['trajectories']:,}", format_bytes(a["bytes"])
            lines.append((a["name"], a["left_for"], count, nbytes, ", ".join(a["points"])))
        out.table(lines, right=(2, 3))
        out.line("  `trajstore rollback PATH --to NAME` goes there again")


def _whole(lacking: list[int]) -> str:
    names = ", ".join(f"rank_{rank}" for rank in lacking)
    return f"no, {names} lack{'s' if len(lacking) == 1 else ''} it" if lacking else "yes"


def _write_parts(report: dict[str, Any], out: Output) -> None:
    """Write one line per store of a run."""
    out.heading("parts")
    rows = [("part", "trajectories", "samples", "on disk", "rewards or outcomes", "versions", "problems")]
    for part in _leaves(report):
        agents = part.get("agents")
        values = part.get("rewards") or (None if agents is None else agents["outcomes"])
        versions = (part.get("policy") or {}).get("versions")
        problems = len(part.get("integrity", {}).get("problems", ()))
        readable = part["kind"] != "unreadable"
        rows.append(
            (
                part["path"].removeprefix(report["path"]).lstrip("/") or "(here)",
                f"{part['trajectories']:,}" if readable else "?",
                f"{part['samples']:,}" if readable else "?",
                format_bytes(part["size_on_disk"]),
                "" if values is None else f"mean {format_number(values['mean'])}",
                "" if versions is None else format_range(versions),
                f"{problems:,}" if problems else "",
            )
        )
    out.table(rows, right=(1, 2, 3, 6))
    aside = [name for (name, *_), part in zip(rows[1:], _leaves(report), strict=True) if part.get("aside")]
    if aside:
        out.line(f"  rollbacks have set trajectories aside in {', '.join(aside)}")
    out.line("  `trajstore inspect PATH/PART` shows one of them in full, `trajstore inspect --each PATH` every one")


def _leaves(report: dict[str, Any]) -> list[dict[str, Any]]:
    if report["kind"] != "run":
        return [report]
    return [leaf for part in report["parts"] for leaf in _leaves(part)]


_STORES = {
    ("store", "shared"): "one store, shared by all ranks that load it",
    ("store", "per_rank"): "a store of one rank",
    ("run", "per_rank"): "a store for each",
}


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    files = f"{format_bytes(report['size_on_disk'])} in {counted(report['files'], 'file')}"
    if report.get("shards") is not None:
        files += f", {report['shards']:,} of them shards" if report["shards"] != 1 else ", one of them a shard"
    agents = report.get("pool") or (report.get("tokens") is not None and report.get("steps") is None)
    label = "rollouts" if agents else "trajectories"
    return [
        ("format", report.get("format") or ""),
        ("ranks", "" if report.get("pool") else _ranks(report)),
        *(_pool(report["pool"]) if report.get("pool") else [(label, f"{report['trajectories']:,}")]),
        ("samples", "" if agents else f"{report['samples']:,}"),
        ("  invalid steps", f"{report['invalid_steps']:,}" if report.get("invalid_steps") else ""),
        ("on disk", files),
        ("  in memory", _live(report)),
        ("  compressed", _compressed(report)),
        ("opened as one", _opened(report)),
        ("earlier states", f"{report['earlier_states']:,}, not counted" if report.get("earlier_states") else ""),
    ]


def _pool(pool: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a store's pool and the number of its other trajectories."""
    shown = f", {pool['demonstrations']:,} of them demonstrations" if pool["demonstrations"] else ""
    return [
        ("trajectories", f"{pool['trajectories']:,} of {counted(pool['tasks'], 'task')}{shown}"),
        ("  not of the pool", f"{pool['others']:,}" if pool["others"] else ""),
        *_difficulties(pool),
    ]


def _difficulties(pool: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = ", ".join(f"{key}: {count:,}" for key, count in pool["difficulties"].items())
    named = "tasks by difficulty (estimated successes of n_rollout)"
    return [(named, sizes), ("solved tasks left out", f"{pool['skipped_tasks']:,}")]


def _ranks(report: dict[str, Any]) -> str:
    text = _STORES.get((report["kind"], report.get("stores") or ""), "")
    return f"{report['ranks']:,}, {text}" if report.get("ranks") else text


def _opened(report: dict[str, Any]) -> str:
    """Return the trajectories shown by opening a run, if other folders have stores too; else an empty text."""
    if not report.get("beside"):
        return ""
    return f"{trajectories(report['opened'])} of rank_*; the others are in {', '.join(report['beside'])}"


def _live(report: dict[str, Any]) -> str:
    """Return the bytes of the columns in memory, and of the shards, which also have headers and evicted rows."""
    if "live_bytes" not in report:
        return ""
    live, shards = report["live_bytes"], report["shard_bytes"]
    return f"{format_bytes(live)}, in shards {format_bytes(shards)}"


def _compressed(report: dict[str, Any]) -> str:
    """Return how many shards are compressed, and both sizes."""
    found = report.get("compressed") or {"shards": 0}
    if not found["shards"]:
        return ""
    sizes = format_bytes(found["bytes"]), format_bytes(found["uncompressed"])
    return f"{counted(found['shards'], 'shard')}, {sizes[0]} instead of {sizes[1]}"


def _mirror(mirror: dict[str, Any] | None) -> str:
    """Return the mirror's contents and its last error."""
    if mirror is None:
        return ""
    newest = f"has all up to id {mirror['newest_id']:,}" if mirror["newest_id"] >= 0 else "has nothing yet"
    behind = f", {trajectories(mirror['behind'], 'is', 'are')} not there" if mirror["behind"] else ""
    error = f"; the last attempt failed: {mirror['error']}" if mirror["error"] else ""
    return f"{mirror['url']} {newest}{behind}{error}"


def _readers(readers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the open readers, oldest generations first, which keep the most data on disk."""
    oldest = sorted(readers, key=lambda reader: reader["generation"])
    texts = [f"{lease['holder']}, generation {format_number(lease['generation'])}" for lease in oldest[:MOST_READERS]]
    if len(oldest) > MOST_READERS:
        texts.append(f"{len(oldest) - MOST_READERS:,} more; --json has all")
    return [("" if at else "readers", text) for at, text in enumerate(texts)]


def _waiting(waiting: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the late values that are waiting or refused."""
    from trajstore.operations.late_values import waiting_in_words

    if waiting is None:
        return []
    refused = waiting["refused"]
    texts = refused if len(refused) <= MOST_REFUSED else [*refused[:MOST_REFUSED], "and more; --json has all"]
    rows = [("values that wait", waiting_in_words(waiting))] if waiting["files"] else []
    return rows + [("" if at else "refused values", text) for at, text in enumerate(texts)]


def _content(report: dict[str, Any]) -> list[tuple[str, str]]:
    measured = report.get("measured")
    held = (report.get("pool") or report)["trajectories"]
    note = "" if measured is None or measured == held else f" ({measured:,} of {held:,} read)"
    rows = [
        ("generation", format_number(report["generation"]) if "generation" in report else ""),
        ("steps T", format_range(report.get("steps"))),
        ("environments B", format_range(report.get("batch"))),
        ("episode limit", format_range(report.get("max_episode_length"))),
        ("ids", _ids(report.get("ids"))),
        ("pins", ", ".join(report.get("pins", ()))),
        ("mirror", _mirror(report.get("mirror"))),
        *_readers(report.get("readers") or []),
        *_waiting(report.get("waiting")),
        *_agents(report, note),
        ("experiences", f"{report['experiences']:,}{note}" if report.get("experiences") else ""),
    ]
    rewards = report.get("rewards")
    if rewards is not None:
        rows.append(("rewards", f"{format_range(rewards)}, std {format_number(rewards['std'])}{note}"))
    rows += _episodes(report.get("episodes"), note)
    policy = report.get("policy")
    if policy is not None and policy["versions"] is not None:
        rows.append(("policy versions", format_range(policy["versions"])))
        rows.append(("  age", format_range(policy["ages"])))
    if "difficulties" in report:
        rows += _difficulties(report)
    return rows


def _agents(report: dict[str, Any], note: str) -> list[tuple[str, str]]:
    agents = report.get("agents")
    rows = [
        ("tokens of a rollout", format_range(report.get("tokens"))),
        ("  of its response", _responses(report)),
    ]
    if agents is None:
        return rows
    if "replayable" in report:
        refused = ", ".join(f"{count:,} {reason}" for reason, count in sorted(report["refused"].items()))
        rows.insert(0, ("replayable", f"{report['replayable']:,}" + (f" (not: {refused})" if refused else "")))
    if agents["turns"] is not None:
        rows.append(("  turns of the model", f"{format_range(agents['turns'])}, {_counted(agents)}{note}"))
    if agents["tasks"] is not None and not report.get("pool"):
        nameless = (
            f"; {counted(agents['without_task'], 'rollout', 'names', 'name')} none" if agents["without_task"] else ""
        )
        rows.append(("tasks", f"{agents['tasks']:,}{nameless}{note}"))
    unknown = agents["without_outcome"]
    outcomes = [format_range(agents["outcomes"]), f"{counted(unknown, 'rollout')} without one" if unknown else ""]
    rows.append(("outcomes", "; ".join(part for part in outcomes if part) + note))
    rows.append(("with messages", f"{agents['with_messages']:,} of {agents['rollouts']:,}{note}"))
    return rows


def _counted(agents: dict[str, Any]) -> str:
    """Return the source of the turn counts, messages or tokens; a rollout's may differ."""
    if not agents["with_messages"]:
        return TURNS_BY_TOKENS
    return TURNS_BY_MESSAGES + (" where there are any" if agents["with_messages"] < agents["rollouts"] else "")


def _responses(report: dict[str, Any]) -> str:
    """Return the lengths of responses, and the number of rollouts if not all are known."""
    known, held = report.get("response_tokens_known"), (report.get("pool") or report)["trajectories"]
    text = format_range(report.get("response_tokens"))
    return text + (f" (of {counted(known, 'rollout')})" if text and known is not None and known < held else "")


def _episodes(episodes: dict[str, Any] | None, note: str) -> list[tuple[str, str]]:
    if episodes is None:
        return []
    before = episodes["begun_before"]
    ended = f"{episodes['ended']:,}{note}" + (
        f", {before:,} of them begun before what was read, not counted below" if before else ""
    )
    joined = episodes["spanning"]
    # Without observations, an episode from an earlier trajectory counts from the start of this one.
    where = " within one trajectory" if joined is None else ""
    return [
        ("episodes ended", ended),
        (f"  length{where}", format_range(episodes["length"])),
        (f"  return{where}", format_range(episodes["return"])),
        ("  over several trajectories", f"{joined:,}" if joined else ""),
    ]


def _ids(ids: dict[str, Any] | None) -> str:
    if ids is None:
        return ""
    text = f"{ids['first']:,} to {ids['last']:,}"
    without = f"; {ids['without_file']:,} of them have no file" if ids.get("without_file") else ""
    return text + (f", {ids['absent']:,} evicted or never given" if ids["absent"] else ", none absent") + without


def _problems(count: int) -> str:
    return counted(count, "problem")


def _write_integrity(report: dict[str, Any], out: Output) -> None:
    integrity = report.get("integrity")
    if integrity is None:
        return
    problems = integrity["problems"]
    if problems:
        out.heading(_problems(len(problems)))
        out.problems([f"  {problem}" for problem in problems], "  ")
    out.line()
    names = _problems(len(problems)) if problems else "all files there, sizes fit"
    out.line(f"  at a glance: {names} (`trajstore verify` checks every checksum)")


COMMAND = Command(
    name="inspect",
    summary="show what is in a store, checkpoint, run directory or experience pool",
    description=(
        "Show totals, columns, rewards, episodes, policy versions, absent ids, readers and integrity at a glance. "
        "'On disk' counts all files, 'in memory' the columns of the trajectories that are shown; shards also have "
        "headers and evicted or pinned rows. For a folder, all stores below it are counted. "
        "Reads RLinf's directories and experience pools too. A writer may be running. Writes nothing but a reader's "
        "lease "
        "while a writer has the store open. Exit code 1: problems are listed."
    ),
    configure=_configure,
    run=_run,
)
