"""The documentation matches the program."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests import programs
from tests.pages import all_blocks, blocks, section
from tools.cli_page import reference

_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def test_command_line_reference_is_current(project_root: Path) -> None:
    assert (project_root / "docs" / "cli.md").read_text() == reference(), "run  python -m tools.cli_page > docs/cli.md"


KEEPING = ("Limit disk space", "Copies, checkpoints, pins", "Convert, prune, compact", "Recover from a lost node")

ORDERS = {
    "api": (
        *("README.md", "docs/start/api.md", "docs/howto/viewing.md", "docs/howto/annotating.md"),
        *("docs/howto/reading.md#Read", "docs/howto/reading.md#Query", "docs/howto/converting.md"),
    ),
    "robots": (
        *("README.md", "docs/start/robots.md", "docs/tutorial.md"),
        *(f"docs/howto/{name}.md" for name in ("samplers", "feeding", "resume")),
    ),
    "operations": (
        *("README.md", "docs/start/operations.md", *(f"docs/howto/keeping.md#{name}" for name in KEEPING)),
        *("docs/howto/damage.md", "docs/howto/object-store.md"),
    ),
    "other": (
        "docs/start/agents.md#Your own loop",
        "docs/howto/agents.md#A program from end to end",
        "docs/howto/ranks.md#Several ranks",
        "docs/howto/sessions.md#Sessions",
        "docs/howto/trainers.md#AgentEvolver",
        *(f"docs/howto/{name}.md" for name in ("curve-broke", "guided", "gymnasium", "rlinf")),
    ),
}
"""Pages, or sections after ``#``, in the orders in which those who run API agents, robots and stores read them."""

NOT_RUN = {
    "api": {"view PATH", "view runs/letters", "view runs/7", "query runs/7", "list runs/letters", "list runs/7"},
    "robots": {"view PATH", "query RUN", "audit RUN"},
    "operations": {
        *("view PATH", "list store", "inspect PATH", "verify PATH", "repair DAMAGED"),
        "restore s3://my-bucket/replay",
    },
    "other": {f"{command} runs/7" for command in ("inspect", "query", "audit", "replay-step")},
}
"""Commands that show the viewer, wait for new trajectories, need a network, or are about a run of the reader's own."""


def text_of(root: Path, name: str) -> str:
    """Return a page, or its section after ``#``."""
    page, _, heading = name.partition("#")
    text = (root / page).read_text()
    return section(text, heading) if heading else text


READER = """
import os, sys
from pathlib import Path
folder, root = sys.argv[1:]
os.environ.clear()
os.environ.update({"PYTHONPATH": root, "PATH": "", "TMPDIR": folder, "OMP_NUM_THREADS": "1"})
os.chdir(folder)
from tests.reader_of_pages import read
read(Path("pages.json"), Path("results.json").resolve())
"""


def test_pages_run_in_the_orders_of_their_readers(project_root: Path, tmp_path: Path) -> None:
    pages = {
        order: {name: all_blocks(text_of(project_root, name), ("python", "sh", "console")) for name in names}
        for order, names in ORDERS.items()
    }
    (tmp_path / "pages.json").write_text(json.dumps(pages))
    done = programs.run(tmp_path, READER, tmp_path, project_root)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}, "\n".join(f"{page}:\n{trace}" for page, trace in results["failures"].items())
    assert {order: {*commands} for order, commands in results["left_out"].items()} == NOT_RUN


def test_every_page_with_code_is_run_or_said_not_to_be(project_root: Path) -> None:
    elsewhere = {
        "docs/start/agents.md#Another trainer",  # tests/integrations/test_trl_trains.py
        "docs/howto/agents.md#Start from demonstrations",  # tests/replay/test_demonstrations.py
        "docs/howto/ranks.md#Many nodes with Ray",  # tests/distributed/test_page.py
        "docs/howto/sessions.md#Gateways and agent loops",  # tests/integrations/test_gateways.py
        "docs/howto/trainers.md#TRL",  # tests/integrations/test_trl.py
        "docs/howto/trainers.md#SkyRL",  # tests/integrations/test_skyrl.py
        "docs/howto/trainers.md#TorchRL",  # tests/integrations/test_torchrl.py
        "docs/howto/trainers.md#Trainers that pass a DataProto",  # tests/trainer_hooks/test_dataproto.py
        "docs/howto/trainers.md#AReaL, OpenRLHF, NeMo-RL, RLinf, and logging",  # tests/integrations/test_episodes.py
        "docs/howto/verl.md",  # continues a run of verl
        "docs/format.md",  # tests/test_format_page.py
    }
    known = {*elsewhere}.union(*ORDERS.values())
    divided = {name.partition("#")[0] for name in known if "#" in name}
    unknown = []
    for page in [project_root / "README.md", *(project_root / "docs").rglob("*.md")]:
        name, text = str(page.relative_to(project_root)), page.read_text()
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE) if name in divided else []
        for part in [f"{name}#{heading}" for heading in headings] or [name]:
            if part not in known and blocks(text_of(project_root, part), "python"):
                unknown.append(part)
    assert unknown == []


def test_readme_begins_with_demo_and_tests(project_root: Path) -> None:
    demo, tests, *_ = blocks((project_root / "README.md").read_text(), "sh")
    assert demo.count("\n") == 1, "one line that can be pasted"
    assert "pip install -c constraints.txt -e '.[demo]'" in demo
    assert demo.rstrip().endswith("python -m examples.demo")
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


def test_no_heading_begins_with_a_digit(project_root: Path) -> None:
    """The theme's script selects headings by anchor and stops at an invalid selector."""
    pages = (project_root / "docs").rglob("*.md")
    assert [page for page in pages if re.search(r"^##+ \d", page.read_text(), re.MULTILINE)] == []


def test_the_first_page_leads_to_every_page_of_the_site(project_root: Path) -> None:
    pages = re.findall(r": (\S+\.md)$", (project_root / ".ci" / "mkdocs.yml").read_text(), re.MULTILINE)
    linked = {"index.md", *_LINK.findall((project_root / "docs" / "index.md").read_text())}
    assert 40 < len(pages) <= 50
    assert [page for page in pages if page not in linked] == []


def test_every_promise_names_a_test_that_is_there(project_root: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", text_of(project_root, "docs/promises.md#Promises and limits"))
    assert len(named) > 20
    assert [name for name in named if not (project_root / name).exists()] == []


def test_messages_count_trajectories_with_the_helper(project_root: Path) -> None:
    counting = [
        f"{path.name}: {found}"
        for folder in ("trajstore", "trainer_hooks")
        for path in (project_root / folder).rglob("*.py")
        for found in re.findall(r"\{[^{}]+\} trajector(?:y|ies).*", path.read_text())
    ]
    assert counting == [], "use errors.counted: 1 takes the singular"


def test_the_house_names_every_package(project_root: Path) -> None:
    house, _, _ = (project_root / "docs" / "design" / "house.md").read_text().partition("## To add")
    named = {name.rstrip("/") for name in re.findall(r"^\| `([\w/]+)` \|", house, re.MULTILINE)}
    packages = {
        str(path.parent.relative_to(project_root))
        for root in ("trajstore", "trainer_hooks", "examples")
        for path in (project_root / root).rglob("__init__.py")
    }
    assert packages - named == {"trajstore/_core/formats/pickles"}
    assert named - packages == set()
    assert len([name for name in packages if name.count("/") == 1 and name.startswith("trajstore")]) <= 12
