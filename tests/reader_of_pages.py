"""Follow pages as a reader does.

Pages of one order share a folder. A page's Python blocks are one program; commands of its shell blocks run between
them, ``PATH`` being the folder that the program printed last. Commands on a store that is not there are left out.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from trajstore.cli import main

_FOREVER = {"view", "--follow"}


def follow(blocks: list[tuple[str, str]], page: str, left_out: list[str]) -> None:
    """Run a page's blocks; append the commands that cannot run here to ``left_out``."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    for language, code in blocks:
        if language == "python":
            with redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)
            continue
        folders = [line for line in printed.getvalue().splitlines() if line and Path(line).is_dir()]
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ ").removeprefix(".venv/bin/"), comments=True)
            if words[:1] != ["trajstore"]:
                continue
            arguments = [folders[-1] if folders and word == "PATH" else word for word in words[1:]]
            arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
            if _FOREVER & {*arguments} or not Path(arguments[1]).exists() or "..." in line:
                left_out.append(" ".join(words[1:3]))
            elif main(arguments) != 0:
                raise AssertionError(f"{line}: failed")


def follow_orders(orders: dict[str, dict[str, list[tuple[str, str]]]]) -> dict[str, Any]:
    """Return the tracebacks of failed pages, and the commands left out."""
    failures: dict[str, str] = {}
    left_out: dict[str, list[str]] = {order: [] for order in orders}
    folder = Path.cwd()
    for order, pages in orders.items():
        (folder / order).mkdir()
        os.chdir(folder / order)
        for page, blocks in pages.items():
            try:
                follow(blocks, page, left_out[order])
            except BaseException:
                failures[f"{order}: {page}"] = traceback.format_exc()
    return {"failures": failures, "left_out": left_out}


def read(pages: Path, results: Path) -> None:
    """Follow the pages of a file of JSON; write what comes of it to another."""
    results.write_text(json.dumps(follow_orders(json.loads(pages.read_text()))))
