"""The programs that trajstore works with, and what of them it relies on: ``tests/peers/fields.json``.

``python -m tools.peers`` installs their newest published versions into folders of their own, compares their source with
that file, and exits with 1 if one differs. ``--source NAME=FOLDER`` compares a checkout, of a peer without a package
or of a later commit. ``--page`` writes ``docs/peers.md``. Nothing of the peers is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_VALUE = ast.Assign | ast.AnnAssign
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "peers.md"
PEERS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "peers" / "fields.json").read_text())
"""By name, a key of ``--source`` and ``TRAJSTORE_PEERS``: ``fields`` has all names of a place, ``uses`` some."""


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, _VALUE):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.ClassDef | _FUNCTION) else []


def _keys(node: ast.AST) -> set[Any]:
    if isinstance(node, ast.Call) and "dict" in ast.unparse(node.func):
        return {word.arg for word in node.keywords if word.arg}
    return {key.value for key in node.keys if isinstance(key, ast.Constant)} if isinstance(node, ast.Dict) else set()


def _found(node: ast.AST, kind: str, every: bool) -> set[str]:
    """Return the arguments of a function ``()``, the keys of its largest dict ``[]``, or the names in a node.

    These are the fields of a class, or else (with ``every``, too) its methods; the texts in other nodes.
    """
    if kind == "()":
        return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)} - {"self", "cls"}  # type: ignore[attr-defined]
    if kind == "[]":
        return max(map(_keys, ast.walk(node)), key=len)
    if isinstance(node, ast.ClassDef):
        fields = {name for item in node.body if isinstance(item, _VALUE) for name in _names_of(item)}
        return fields | {item.name for item in node.body if isinstance(item, _FUNCTION) and (every or not fields)}
    return {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}


def names_at(folder: Path, place: str, every: bool = False) -> set[str] | None:
    """Return the names at ``file or folder: Name``, also ``Name()`` and ``Name[]``; None if there is no such place."""
    path, _, name = place.partition(": ")
    kind = name[-2:] if name.endswith(("()", "[]")) else ""
    texts: set[str] = set()
    for file in sorted((folder / path).rglob("*.py")) or [folder / f"{path}.py"]:
        nodes: list[ast.AST] = [ast.parse(file.read_text())] if file.is_file() else []
        for part in name.removesuffix(kind).split(".") if name else []:
            nodes = [inner for node in nodes for inner in ast.walk(node) if part in _names_of(inner)][:1]
        for node in nodes:
            texts |= _found(node, kind, every)
        if name and nodes:
            break
    return texts or None


def differences(peer: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield how the source of a peer differs from its entry, by name: new, lost or renamed ones."""
    sometimes, complete = set(peer.get("sometimes", ())), peer.get("fields", {})
    for place, names in (complete | peer.get("uses", {})).items():
        found = names_at(folder, place, place not in complete)
        if found is None:
            yield f"{place} is not there"
            continue
        changes = [f"new {name}" for name in sorted(found - {*names} - sometimes) if place in complete]
        changes += [f"lost {name}" for name in sorted({*names} - found - sometimes)]
        if changes:
            yield f"{place}: {', '.join(changes)}"


def written(text: str) -> str:
    """Return the page with the table that follows from the peers."""
    lines = ["| peer | tried | compared | unknown fields |", "| --- | --- | --- | --- |"]
    for name, peer in PEERS.items():
        places = [place.partition(": ")[2] for place in peer.get("fields", {}) | peer.get("uses", {})]
        compared = ", ".join(f"`{place}`" for place in places if place)
        lines.append(f"| [{name}]({peer['page']}) | {peer['tried']} | {compared} | {peer['unknown']} |")
    return text.partition("| peer |")[0] + "\n".join(lines) + "\n"


def _newest(package: str, folder: Path) -> str:
    """Install the newest version of a package alone in a folder, and return it."""
    alone = ["install", "-qqq", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *alone, package], check=True)
    return next(folder.glob("*.dist-info")).name.split("-")[1].removesuffix(".dist")


def main(arguments: list[str] | None = None) -> int:
    """Compare the newest published versions, or only ``--source``, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    if given.page:
        PAGE.write_text(written(PAGE.read_text()))
        return 0
    sources, failed = dict(text.split("=", 1) for text in given.source), False
    if wrong := [name for name, folder in sources.items() if name not in PEERS or not Path(folder).is_dir()]:
        parser.error(f"--source {', '.join(wrong)}: no such peer or folder; peers are {', '.join(PEERS)}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in sources or [name for name in PEERS if "package" in PEERS[name]]:
            folder = Path(sources.get(name, f"{scratch}/{name}"))
            version = "source" if sources else _newest(PEERS[name]["package"], folder)
            found = list(differences(PEERS[name], folder))
            failed = failed or bool(found)
            sys.stdout.write(f"{name:<14} {version:<9} {'; '.join(found) or 'as in fields.json'}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
