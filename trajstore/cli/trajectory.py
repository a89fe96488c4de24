"""Write the report on one trajectory as text."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from trajstore.cli.output import Output, format_number, format_range, shortened

_LONGEST_VALUE = 100  # characters of a value in a table
_LONGEST_ROW = 12  # numbers shown (rounded) from a list; longer lists show shape and range
_LONGEST_TEXT = 2_000  # characters of a message, or of a run of tokens

TURNS_BY_MESSAGES = "by messages of the assistant"
TURNS_BY_TOKENS = "by runs of the model's tokens"
"""The source of a rollout's turn count: its messages if it has any."""


def write_trajectory(report: dict[str, Any], out: Output) -> None:
    """Write a report of ``trajstore.operations.trajectory_report.inspect_trajectory`` as text."""
    words = {"agent": "rollout", "step": "trajectory"}[report["kind"]]
    out.heading(f"{report['path']}: {words} {report['trajectory_id']}")
    for problem in report["integrity"]["problems"]:
        out.line(f"  problem: {problem}")
    if "token" in report:
        _write_token(report, out)
    elif "values" in report:
        _write_pairs(report, ("uuid", "versions", "shard"), out)
        out.heading(f"sample {report['sample']} (step {report['step']}, environment {report['environment']})")
        out.table([(name, shown_value(value)) for name, value in report["values"].items()])
    elif "tokens_by_column" in report:
        _write_tokens(report["tokens_by_column"], out)
    elif report["kind"] == "agent":
        _write_rollout(report, out)
        _write_notes(report["notes"], out)
    else:
        names = ("samples", "invalid_steps", "steps", "batch", "max_episode_length", "model_weights_id", "versions")
        _write_pairs(report, ("uuid", *names, "shard"), out)
        _write_columns(report, out)
        _write_notes(report["notes"], out)


def _write_notes(notes: list[dict[str, Any]], out: Output) -> None:
    if notes:
        out.heading("late values")
        for note in notes:
            given = "removed" if note["value"] is None else shown_value(note["value"])
            when = datetime.fromtimestamp(note["time"] / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
            out.line(f"  {when}  {note['name']}  {given}  {note['who']}")


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


def _write_rollout(report: dict[str, Any], out: Output) -> None:
    reward, recorded = report["reward"] or {}, report["recorded"]
    rows = [
        ("task", report["task_id"]),
        ("data", report["data_id"]),
        ("rollout", report["rollout_id"]),
        ("query", report["query"]),
        ("outcome", _corrected(reward.get("outcome"), "outcome", recorded)),
        ("success rate", _corrected(reward.get("success_rate"), "success_rate", recorded)),
        ("reward", reward.get("description")),
        *(
            (f"  {name}", _corrected(value, f"reward_{name}", recorded))
            for name, value in reward.get("metadata", {}).items()
        ),
        ("policy version", report["policy_version"]),
        ("weights", report["model_weights_id"]),
        ("terminated", None if report["is_terminated"] is None else "yes" if report["is_terminated"] else "no"),
        ("mean entropy", None if report["entropy"] is None else format_number(report["entropy"])),
        ("tokens", _tokens(report)),
        ("turns of the model", _turns(report)),
        ("tokenizer", report["tokenizer_fingerprint"]),
        ("uuid", report["uuid"]),
        ("shard", report["shard"]),
    ]
    out.pairs([(name, "" if value is None else shown_value(value)) for name, value in rows])
    if report["metadata"]:
        from trajstore.attachments import summarized  # the command line starts without torch

        out.heading("metadata")
        out.table([(name, shown_value(value)) for name, value in summarized(report["metadata"]).items()])
    for number, message in enumerate(report["messages"]):
        fields = message if isinstance(message, dict) else {"content": message}
        author = f" ({fields['author']})" if fields.get("author") else ""
        out.heading(f"message {number}, {fields.get('role', 'no role')}{author}:")
        out.text(_text(fields.get("content", "")), _LONGEST_TEXT)
        more = {name: value for name, value in fields.items() if name not in ("role", "content", "author")}
        out.table([(name, shown_value(value)) for name, value in more.items()])
    _write_parts(report, out)
    _write_columns(report, out)


def _corrected(value: Any, name: str, recorded: dict[str, Any]) -> Any:
    """Return a value of the reward, with the recorded value if a late value replaced it."""
    if name not in recorded:
        return value
    return f"{value} (recorded: {'none' if recorded[name] is None else recorded[name]})"


def _turns(report: dict[str, Any]) -> str | None:
    """Return the number of the model's turns, and its source."""
    if report["turns"] is None:
        return None
    return f"{report['turns']:,}, {TURNS_BY_MESSAGES if report['messages'] else TURNS_BY_TOKENS}"


def _tokens(report: dict[str, Any]) -> str | None:
    if report["tokens"] is None:
        return None
    counts: dict[str, int] = {}
    for part in report["token_parts"]:
        counts[part["part"]] = counts.get(part["part"], 0) + part["tokens"]
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"{report['tokens']:,}: {parts}"


def _write_parts(report: dict[str, Any], out: Output) -> None:
    parts = report["token_parts"]
    if not parts:
        return
    out.heading("tokens")
    if all(part["text"] is None for part in parts):
        rows = [(part["part"], f"{part['first']:,} to {part['last']:,}", f"{part['tokens']:,}") for part in parts]
        out.table([("part", "tokens", "count"), *rows], right=(2,))
        out.line("  --tokenizer PATH shows them as text")
        return
    for part in parts:
        out.line(f"  {part['part']}, tokens {part['first']:,} to {part['last']:,}:")
        out.text(part["text"], _LONGEST_TEXT)


def _write_token(report: dict[str, Any], out: Output) -> None:
    out.heading(f"token {report['token']:,} of {report['tokens']:,} ({report['part']})")
    rows = [(name, shown_value(value)) for name, value in report["values"].items()]
    out.table([*rows, *([] if report["text"] is None else [("text", repr(report["text"]))])])


def _write_columns(report: dict[str, Any], out: Output) -> None:
    rows = [
        (c["name"], c["dtype"], str(c["shape"]), format_range(c["range"]), f"{c['not_finite']:,}")
        for c in report["columns"]
    ]
    if rows:
        out.heading("columns")
        out.table([("name", "dtype", "shape", "range", "not finite"), *rows], right=(4,))


def _write_pairs(report: dict[str, Any], names: tuple[str, ...], out: Output) -> None:
    out.pairs([(name, "" if report[name] is None else str(report[name])) for name in names])


def _text(content: Any) -> str:
    """Return the text of a message; a message of several parts (images, tool calls) as stored."""
    return content if isinstance(content, str) else str(content)


def shown_value(value: Any) -> str:
    """Return a value as text for a table: long texts shortened, many numbers as shape and range."""
    text = str(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    shape, numbers = _array(value)
    if not numbers:
        return shortened(text, _LONGEST_VALUE)
    if len(shape) == 1 and len(numbers) <= _LONGEST_ROW:
        return f"[{', '.join(f'{number:.4g}' for number in numbers)}]"
    finite = [number for number in numbers if math.isfinite(number)]
    parts = [str(shape)]
    if finite:
        parts.append(format_range({"min": min(finite), "max": max(finite)}))
    if len(finite) < len(numbers):
        parts.append(f"{len(numbers) - len(finite):,} not finite")
    return f"{', '.join(parts)} (--json shows all)"


def _array(value: Any) -> tuple[list[int], list[float]]:
    """Return shape and numbers of nested lists that form an array; no numbers if they do not."""
    shape: list[int] = []
    level = [value]
    while level and all(isinstance(item, list) for item in level):
        lengths = {len(item) for item in level}
        if len(lengths) > 1:
            return [], []
        shape += lengths
        level = [part for item in level for part in item]
    return shape, level if all(isinstance(item, int | float) for item in level) else []
