"""Write reports, which are JSON values, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from trajstore.cli.output import Output, format_bytes, format_number, format_range, shortened

_LONGEST_VALUE = 100  # characters of a value in a table
_MOST_TEXTS = 10  # texts shown from a list
_MOST_ROWS = 50  # rows shown of a table


def write(
    report: Mapping[str, Any], out: Output, without: Collection[str] = (), below: Mapping[str, str] | None = None
) -> None:
    """Write a report: values and ranges by name, then a table for each list of objects; unknown values are left out.

    Args:
        report: JSON values; a nested object's values have its name before their own.
        out: the output.
        without: names to leave out.
        below: by name of a table, a line to write below it.
    """
    known = {name: value for name, value in report.items() if name not in without}
    tables = {name: value for name, value in known.items() if _is_table(value)}
    out.pairs([row for name, value in known.items() if name not in tables for row in _rows(_words(name), name, value)])
    for name, rows in tables.items():
        out.heading(_words(name))
        write_table(rows, out)
        if below is not None and name in below:
            out.line(f"  {below[name]}")


def write_table(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Write objects as rows, with the names of their known values above; further rows are counted."""
    names = [*dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)]
    numbers = [at for at, name in enumerate(names) if all(_is_number(row.get(name)) for row in rows)]
    cells = [[cell(name, row.get(name)) for name in names] for row in rows[:_MOST_ROWS]]
    out.table([[_words(name) for name in names], *cells], right=numbers)
    if len(rows) > _MOST_ROWS:
        out.line(f"  and {len(rows) - _MOST_ROWS:,} more; --json has all")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _rows(label: str, name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and not {"min", "max"} <= value.keys():
        for inner, item in value.items():
            yield from _rows(f"{label} {_words(inner)}", inner, item)
    elif isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        left = len(value) - _MOST_TEXTS
        texts = [*value[:_MOST_TEXTS], *([f"and {left:,} more; --json has all"] if left > 0 else [])]
        yield from ((label if not at else " " * len(label), text) for at, text in enumerate(texts))
    else:
        yield label, cell(name, value)


_TIMES: Mapping[str, Callable[[Any], datetime]] = {
    "time": lambda value: datetime.fromtimestamp(value / 1e6, UTC),
    "at": lambda value: datetime.fromtimestamp(value, UTC),
}
"""Moments by the names that they have in reports."""


def cell(name: str, value: Any) -> str:
    """Return a report's value of this name as text: long texts shortened."""
    if value is None or (isinstance(value, Mapping | Sequence) and not value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name in _TIMES:
            return _TIMES[name](value).strftime("%Y-%m-%d %H:%M:%S")
        return format_bytes(value) if name.endswith(("bytes", "size_on_disk", "uncompressed")) else format_number(value)
    if isinstance(value, Mapping) and {"min", "max"} <= value.keys():
        others = [f", {key} {format_number(value[key])}" for key in value if key not in ("min", "mean", "max")]
        return format_range(dict(value)) + "".join(others)
    if name == "gaps":
        return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in value)
    if name == "lacking":
        return ", ".join(f"rank_{rank}" for rank in value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return ", ".join(map(str, value))
    return shortened(str(value), _LONGEST_VALUE)


def write_trajectory(report: dict[str, Any], out: Output, full: bool = False) -> None:
    """Write a report of ``trajstore.operations.trajectory_report.inspect_trajectory`` as text.

    Args:
        report: the report.
        out: the output.
        full: write all of long texts and values.
    """
    words = {"agent": "rollout", "step": "trajectory"}[report["kind"]]
    out.heading(f"{report['path']}: {words} {report['trajectory_id']}")
    for problem in report["integrity"]["problems"]:
        out.line(f"  problem: {problem}")
    own = ("path", "kind", "trajectory_id", "integrity", "messages", "metadata", "token_parts", "session")
    write(report, out, (*own, "columns", "notes"))
    if session := report.get("session"):
        out.heading(f"session {session['id']}, path {session['path']} of {session['paths']}")
        shown = ("id", "number", "start", "stop", "version", "trained", "retried", "finish")
        write_table([{name: call[name] for name in shown} for call in session["calls"]], out)
        for gap in session["incomplete"]:
            out.line(f"  incomplete: {gap['id']}" + (f", {gap['reason']}" if gap["reason"] else ""))
    if report.get("metadata"):
        from trajstore.attachments import summarized  # the command line starts without torch

        more = {name: value for name, value in report["metadata"].items() if name != "session" or not report["session"]}
        _write_values("metadata", summarized(more), out, full)
    messages = report.get("messages", ())
    from trajstore.query.documents import calls_by_id, name_of

    calls = calls_by_id(message for message in messages if isinstance(message, dict))
    names = {key: name_of(call) for key, call in calls.items()}
    for number, message in enumerate(messages):
        _write_message(number, message, names, out, full)
    parts = report.get("token_parts", ())
    if parts and parts[0]["text"] is None:
        out.heading("tokens")
        write_table([{name: value for name, value in part.items() if name != "text"} for part in parts], out)
        out.line("  --tokenizer PATH shows them as text")
    elif parts:
        out.heading("tokens")
        for part in parts:
            out.line(f"  {part['part']}, tokens {part['first']:,} to {part['last']:,}:")
            out.text(part["text"], full)
    columns = []
    for column in report.get("columns", ()):  # what fits into 80 characters; --json has all
        span = {name: value for name, value in (column["range"] or {}).items() if name != "mean"}
        columns.append({**column, "bytes": None, "range": span or None, "not_finite": column["not_finite"] or None})
    write({"columns": columns, "late_values": report["notes"] * ("columns" in report)}, out)


def _write_values(title: str, values: dict[str, Any], out: Output, full: bool = False) -> None:
    if values and title:
        out.heading(title)
    wide = max(map(len, values), default=0)
    rows = []
    for name, value in values.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
        if full and len(text) + wide > (out.width or 100) - 4:
            out.line(f"  {name}")
            out.text(text, full)
        else:
            longest = _LONGEST_VALUE if out.width is None else max(20, out.width - wide - 35)  # the others are counted
            rows.append((name, shortened(str(value), longest)))
    out.table(rows)


def _write_message(number: int, message: Any, names: dict[str, str], out: Output, full: bool) -> None:
    """Write a message: its texts, calls as calls, images by size; ``names`` has the tools by the ids of calls."""
    fields = dict(message) if isinstance(message, dict) else {"content": message}
    author = f" ({fields.pop('author')})" if fields.get("author") else ""
    tool = names.get(fields["tool_call_id"]) if isinstance(fields.get("tool_call_id"), str) else None
    if tool is not None:
        del fields["tool_call_id"]
    out.heading(f"message {number}, {fields.pop('role', 'no role')}{author}{f', result of {tool}' if tool else ''}:")
    content = fields.pop("content", None)
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        out.text(_said(part, names), full)
    for call in _listed(fields, "tool_calls"):
        out.text(_called(call), full)
    if isinstance(fields.get("tool_calls"), list):
        del fields["tool_calls"]
    for name in [name for name, value in fields.items() if isinstance(value, str) and "\n" in value]:
        out.line(f"  {name}:")
        out.text(fields.pop(name), full)
    _write_values("", {name: value for name, value in fields.items() if value is not None}, out, full)


def _listed(message: Any, name: str) -> list[Any]:
    value = message.get(name) if isinstance(message, dict) else None
    return value if isinstance(value, list) else []


def _said(part: Any, names: Mapping[str, str]) -> str:
    """Return the text of a part of a content; of an image, its type and size; of a result, what it contains."""
    from trajstore.query.documents import image_in

    if (image := image_in(part)) is not None:
        return f"[{image[0]}, {format_bytes(len(image[1].rstrip('=')) * 3 // 4)}]"
    if not isinstance(part, dict):
        return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") == "tool_use":
        return _called(part)
    if part.get("type") == "tool_result":
        content, tool = part.get("content"), part.get("tool_use_id")
        parts = content if isinstance(content, list) else [] if content is None else [content]
        told = ["result of " + names.get(tool, tool) if isinstance(tool, str) else "result"]
        told += [
            f"({name}={value!r})" for name, value in part.items() if name not in ("type", "content", "tool_use_id")
        ]
        return "\n".join([" ".join(told) + ":", *(_said(inner, names) for inner in parts)])
    return json.dumps(part, ensure_ascii=False)


def _called(call: Any) -> str:
    """Return a tool call as code, ``bash(cmd="ls")``, and its further fields; the id is that of its result."""
    from trajstore.query.documents import name_of

    if not isinstance(call, dict):
        return str(call)
    function = call.get("function")
    more = call | (function if isinstance(function, dict) else {})
    given = next((more.pop(name) for name in ("arguments", "input", "args") if more.get(name) is not None), None)
    with suppress(ValueError):  # shown as the model wrote it
        given = json.loads(given) if isinstance(given, str) else given
    if isinstance(given, dict):
        given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    known = ("function", "name", "id", "type", "index", "tool_call_id")
    others = {name: value for name, value in more.items() if name not in known and value is not None}
    return f"{name_of(call)}({'' if given is None else given})" + (
        f" {json.dumps(others, ensure_ascii=False)}" if others else ""
    )
