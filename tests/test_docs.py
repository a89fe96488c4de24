"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trajstore.cli import COMMANDS, build_parser
from trajstore.cli.reference import reference

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(path: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(path.read_text()) if kind == language]


def test_command_line_reference_is_current(project_root: Path) -> None:
    assert (project_root / "docs" / "cli.md").read_text() == reference(), (
        "run  python -m trajstore.cli.reference > docs/cli.md"
    )


def test_every_option_of_every_command_is_documented(
    project_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = (project_root / "docs" / "cli.md").read_text()
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            build_parser().parse_args([command.name, "--help"])
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
        section = text.split(f"## trajstore {command.name}\n")[1].split("\n## ")[0]
        assert options, command.name
        assert [option for option in sorted(options) if option not in section] == []


needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl")


PAGES = ["README.md", "docs/tutorial.md", "docs/howto/rlinf.md", "docs/howto/samplers.md", "docs/howto/feeding.md"]


@pytest.mark.parametrize("name", [*PAGES, pytest.param("docs/howto/dataproto.md", marks=needs_verl)])
def test_code_runs(name: str, project_root: Path, tmp_path: Path) -> None:
    code = "\n".join(blocks(project_root / name, "python"))
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_readme_begins_with_demo_and_tests(project_root: Path) -> None:
    demo, tests, *_ = blocks(project_root / "README.md", "sh")
    assert demo.count("\n") == 1, "one line that can be pasted"
    assert "pip install -c constraints.txt -e '.[demo]'" in demo
    assert demo.rstrip().endswith("trajstore demo")
    assert "-m pytest" in tests
    assert tests.rstrip().endswith("-m pytest")


def test_links_lead_somewhere(project_root: Path) -> None:
    pages = [project_root / "README.md", project_root / "CONTRIBUTING.md", *(project_root / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(project_root)}: {target}"
        for page in pages
        for target in _LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
