"""Write the report on one trajectory as text."""

from __future__ import annotations

from typing import Any

from trajstore.cli.output import Output
from trajstore.cli.report import shown_value, write, write_table

_LONGEST_TEXT = 2_000  # characters of a message, or of a run of tokens


def write_trajectory(report: dict[str, Any], out: Output) -> None:
    """Write a report of ``trajstore.operations.trajectory_report.inspect_trajectory`` as text."""
    words = {"agent": "rollout", "step": "trajectory"}[report["kind"]]
    out.heading(f"{report['path']}: {words} {report['trajectory_id']}")
    for problem in report["integrity"]["problems"]:
        out.line(f"  problem: {problem}")
    if "tokens_by_column" in report:
        _write_tokens(report["tokens_by_column"], out)
        return
    own = ("path", "kind", "trajectory_id", "integrity", "messages", "metadata", "token_parts", "values", "session")
    write(report, out, (*own, "columns", "notes"))
    if session := report.get("session"):
        out.heading(f"session {session['id']}, path {session['path']} of {session['paths']}")
        shown = ("id", "number", "start", "stop", "version", "trained", "retried", "finish")
        write_table([{name: call[name] for name in shown} for call in session["calls"]], out)
        for gap in session["incomplete"]:
            out.line(f"  incomplete: {gap['id']}" + (f", {gap['reason']}" if gap["reason"] else ""))
    _write_values("values", report.get("values", {}), out)
    if report.get("metadata"):
        from trajstore.attachments import summarized  # the command line starts without torch

        more = {name: value for name, value in report["metadata"].items() if name != "session" or not report["session"]}
        _write_values("metadata", summarized(more), out)
    for number, message in enumerate(report.get("messages", ())):
        _write_message(number, message, out)
    parts = report.get("token_parts", ())
    if parts and parts[0]["text"] is None:
        out.heading("tokens")
        write_table([{name: value for name, value in part.items() if name != "text"} for part in parts], out)
        out.line("  --tokenizer PATH shows them as text")
    elif parts:
        out.heading("tokens")
        for part in parts:
            out.line(f"  {part['part']}, tokens {part['first']:,} to {part['last']:,}:")
            out.text(part["text"], _LONGEST_TEXT)
    write({"columns": report.get("columns"), "late_values": report["notes"] * ("columns" in report)}, out)


def _write_values(title: str, values: dict[str, Any], out: Output) -> None:
    if values:
        out.heading(title)
        out.table([(name, shown_value(value)) for name, value in values.items()])


def _write_message(number: int, message: Any, out: Output) -> None:
    fields = message if isinstance(message, dict) else {"content": message}
    author = f" ({fields['author']})" if fields.get("author") else ""
    out.heading(f"message {number}, {fields.get('role', 'no role')}{author}:")
    out.text(str(fields.get("content", "")), _LONGEST_TEXT)  # one of several parts (images, tool calls) as stored
    more = {name: value for name, value in fields.items() if name not in ("role", "content", "author")}
    out.table([(name, shown_value(value)) for name, value in more.items()])


def _write_tokens(columns: dict[str, list[Any]], out: Output) -> None:
    numbers = [at for at, name in enumerate(("token", *columns)) if name not in ("part", "text")]
    rows = [
        [str(at), *("" if value is None else repr(value) if name == "text" else _cell(value) for name, value in cells)]
        for at, values in enumerate(zip(*columns.values(), strict=True))
        for cells in [list(zip(columns, values, strict=True))]
    ]
    out.table([["token", *columns], *rows], right=numbers)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
