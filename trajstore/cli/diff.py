"""``trajstore diff``: in what two trajectories differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from trajstore.cli.command import Command, add_tokenizer
from trajstore.cli.output import Output, format_number
from trajstore.cli.trajectory import LONGEST_TEXT, PARTS, shown_value

_SHOWN = 3  # pairs of messages that differ which are written out

_BEFORE = 80  # characters that are shown before the first that differs


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint or run directory; path or URL")
    parser.add_argument("first", metavar="ID", help="id of a trajectory (3/17: 17 of a run's rank 3)")
    parser.add_argument("second", metavar="ID", help="id of another")
    add_tokenizer(parser)
    parser.add_argument("--json", action="store_true", help="write the report as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore.operations.diffing import diff_trajectories

    report = diff_trajectories(options.path, options.first, options.second, options.tokenizer)
    if options.json:
        out.json(report)
    else:
        _write(report, out)
    return 0


def _write(report: dict[str, Any], out: Output) -> None:
    from trajstore.core.store.run_ids import shown_id

    names = [shown_id(report[side]["trajectory_id"]) for side in ("left", "right")]
    kinds = [{"agent": "rollout", "step": "block"}[report[side]["kind"]] for side in ("left", "right")]
    out.heading(f"{report['path']}: {kinds[0]} {names[0]} and {kinds[1]} {names[1]}{_tasks(report)}")
    if report["left"]["uuid"] == report["right"]["uuid"]:
        out.line("  one and the same trajectory")
    elif report["equal"]:
        out.line("  nothing differs")
    if report["facts"]:
        out.heading("facts that differ")
        rows = [(one["name"], *(_known(one[side]) for side in ("left", "right"))) for one in report["facts"]]
        out.table([("fact", *names), *rows])
    if report["messages"] is not None:
        _write_messages(report["messages"], names, out)
    if report["tokens"] is not None:
        _write_tokens(report["tokens"], names, out)
    elif kinds == ["rollout", "rollout"]:
        out.heading("tokens: not both have some")
    _write_columns(report, names, out)


def _tasks(report: dict[str, Any]) -> str:
    if report["same_task"] is None:
        return ""
    tasks = [report[side]["task"] for side in ("left", "right")]
    return f" of task {tasks[0]}" if report["same_task"] else f", of different tasks: {tasks[0]} and {tasks[1]}"


def _known(value: Any) -> str:
    return "" if value is None else shown_value(value)


# -- messages ------------------------------------------------------------------------------------------


def _write_messages(messages: dict[str, Any], names: list[str], out: Output) -> None:
    out.heading(_counted("messages", messages))
    for pair in messages["changed"][:_SHOWN]:
        _write_pair(pair, names, out)
    left = messages["changed"][_SHOWN:]
    if left:
        out.line(f"  {len(left):,} more that differ; --json shows all")
    later = sum(len(run["left"]) for run in messages["turns"][1:] if run["same"])
    if later:
        out.line(f"  messages that are equal again after the first that differs: {later:,}")


def _counted(what: str, found: dict[str, Any]) -> str:
    counts, same = found["counts"], found["same"]
    if same == counts[0] == counts[1]:
        return f"{what}: all {same:,} are equal"
    return f"{what}: the first {same:,} of {counts[0]:,} and {counts[1]:,} are equal"


def _write_pair(pair: dict[str, Any], names: list[str], out: Output) -> None:
    for field in pair["fields"]:
        for side, name in zip(("left", "right"), names, strict=True):
            if pair[side] is None:
                continue
            value = field[side]
            what = f"  message {pair[side]} of {name}, {field['name']}"
            if value is None:
                out.line(f"{what}: none")
            elif isinstance(value, str) and (len(value) > _BEFORE or "\n" in value):
                first = max(0, field["same"] - _BEFORE)
                out.line(f"{what}, from character {first:,} on:" if first else f"{what}:")
                out.text(value[first:], LONGEST_TEXT)
            else:
                out.line(f"{what}: {shown_value(value)}")


# -- tokens and columns --------------------------------------------------------------------------------


def _write_tokens(tokens: dict[str, Any], names: list[str], out: Output) -> None:
    out.heading(_counted("tokens", tokens))
    if tokens["same"] == max(tokens["counts"]):
        return
    rows = []
    for run in tokens["turns"]:
        for at in range(max(len(run["left"]), len(run["right"]))):
            parts = [run[side][at] if at < len(run[side]) else None for side in ("left", "right")]
            rows.append(("equal" if run["same"] else "differs", *map(_part, parts)))
    out.table([("turn", *names), *rows])
    for at, name in zip(tokens["at"], names, strict=True):
        if at is None:
            out.line(f"  {name} ends before token {tokens['same']:,}")
        elif at["text"] is None:
            out.line(f"  token {at['token']:,} of {name}: id {at['id']} ({PARTS[at['part']]})")
        else:
            out.line(f"  {name} from token {at['token']:,} on ({PARTS[at['part']]}), after {at['before']!r}:")
            out.text(at["text"], LONGEST_TEXT)
    if any(at is not None and at["text"] is None for at in tokens["at"]):
        out.line("  --tokenizer PATH shows them as text")


def _part(part: dict[str, Any] | None) -> str:
    return "" if part is None else f"{PARTS[part['part']]}, {part['first']:,} to {part['last']:,}"


def _write_columns(report: dict[str, Any], names: list[str], out: Output) -> None:
    tokens = report["tokens"]
    where = "" if tokens is None else f", over the {tokens['same']:,} tokens that are equal"
    differing = [one for one in report["columns"] if one["differs"]]
    equal = len(report["columns"]) - len(differing)
    if not report["columns"]:
        return
    if not differing:
        out.heading(f"columns: all {equal:,} are equal{where}")
        return
    out.heading(f"columns that differ{where}")
    rows = [(one["name"], _kind(one["left"]), _kind(one["right"]), *_apart(one)) for one in differing]
    out.table([("column", *names, "values that differ", "first at", "largest difference"), *rows], right=(3, 5))
    if equal:
        out.line(f"  {equal:,} other columns are equal")


def _kind(kind: dict[str, Any] | None) -> str:
    return "absent" if kind is None else f"{kind['dtype']} {kind['shape']}"


def _apart(one: dict[str, Any]) -> tuple[str, str, str]:
    if "differing" not in one:
        return "", "", ""
    if not one["differing"]:
        return "0", "", ""
    largest = "" if one["largest"] is None else format_number(one["largest"])
    far = f"{one['not_finite']:,} not finite" if one["not_finite"] else ""
    return f"{one['differing']:,} of {one['values']:,}", str(one["first"]), ", ".join(filter(None, (largest, far)))


COMMAND = Command(
    name="diff",
    summary="show in what two trajectories differ",
    description=(
        "Show in what two trajectories of a store or run directory differ: facts, late values, the turns of messages "
        "and tokens from the first that differs on, and values of columns. Of rollouts, columns are compared over the "
        "tokens before the first that differs; of blocks, those of one shape."
    ),
    configure=_configure,
    run=_run,
)
