"""``docs/api/`` has a non-empty entry for every public name."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.api_page import ENTRY, PAGES, find, written
from trainer_hooks.replay.entry import Departure
from trainer_hooks.verl.config import OutcomeRule, RecordingConfig

ENTRIES = [entry for page in PAGES for entry in ENTRY.findall(page.read_text())]
PACKAGES = (
    "trajstore",
    "trajstore.distributed",
    "trajstore.interop.rlinf",
    "trajstore.loader",
    "trajstore.mirror",
    "trajstore.points",
    "trajstore.samplers",
    "trajstore.stores",
    "trainer_hooks.guidance",
    "trainer_hooks.replay",
)


def said(value: Any) -> bool:
    """Return whether an object has a handwritten docstring."""
    text = inspect.getdoc(value) or ""
    made = dataclasses.is_dataclass(value) and isinstance(value, type) and text.startswith(f"{value.__name__}(")
    return bool(text) and not made


def members(value: Any) -> dict[str, Any]:
    """Return the members that the reference shows for an entry."""
    if isinstance(value, ModuleType):
        own = {name: item for name, item in vars(value).items() if getattr(item, "__module__", None) == value.__name__}
    elif isinstance(value, type):
        ours = [cls for cls in value.__mro__ if cls.__module__.startswith(("trajstore", "trainer_hooks"))]
        own = {name: getattr(value, name) for cls in ours for name in vars(cls) if hasattr(value, name)}
        own = {name: item for name, item in own.items() if callable(item) or isinstance(item, property)}
    else:
        return {}
    return {name: item for name, item in own.items() if not name.startswith("_")}


@pytest.mark.parametrize("name", ENTRIES)
def test_no_entry_is_empty(name: str) -> None:
    value = find(name)
    assert said(value), f"{name} has no docstring"
    silent = [member for member, item in members(value).items() if not said(item)]
    assert silent == [], f"{name}: these have no docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(package: str) -> None:
    module = importlib.import_module(package)
    shown = [find(name) for name in ENTRIES]
    absent = [
        name
        for name in module.__all__
        if (inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name)))  # no constants
        and not any(getattr(module, name) is item or getattr(module, name) in members(item).values() for item in shown)
    ]
    assert absent == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_say_what_the_docstrings_say(page: Path) -> None:
    assert page.read_text() == written(page.read_text()), "run  python -m tools.api_page"


def declared(value: type) -> list[str]:
    """Return a dataclass's public fields or an enumeration's members."""
    if issubclass(value, enum.Enum):
        return [item.name for item in value]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [field.name for field in fields if not field.name.startswith("_")]


def shown_classes() -> dict[str, type]:
    """Return the reference's classes, and the classes behind a configuration's options."""
    shown = [RecordingConfig, OutcomeRule, Departure]
    for name in ENTRIES:
        value = find(name)
        shown += [item for item in (value, *members(value).values()) if isinstance(item, type)]
    return {f"{entry.__module__}.{entry.__qualname__}": entry for entry in shown}


BY_ANOTHER = {"trajstore.trajectory.ChunkStepResult", "trajstore.interop.rlinf.trajectory.Trajectory"}
"""Classes with the fields of ``Trajectory``, according to their docstrings."""


def troubles_of(value: type) -> list[str]:
    """Return the fields that ``help()`` explains not at all or twice."""
    text = "\n".join(
        inspect.getdoc(base) or "" for base in value.__mro__ if dataclasses.is_dataclass(base) or base is value
    )
    silent = [field for field in declared(value) if not re.search(rf"^    {field}: |``[^`]*\b{field}\b", text, re.M)]
    (body,) = (item.body for item in ast.parse(inspect.getsource(value)).body if isinstance(item, ast.ClassDef))
    twice = [
        item.target.id if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) else "a member"
        for item, following in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign | ast.Assign) and isinstance(following, ast.Expr)
    ]
    return [
        *(f"{field}: help() shows the class's docstring only; name the field there" for field in silent),
        *(
            f"{field}: a text below a field does not reach help(); move it into the class's docstring"
            for field in twice
        ),
    ]


def test_help_explains_every_field_once() -> None:
    classes = {name: value for name, value in shown_classes().items() if declared(value) and name not in BY_ANOTHER}
    assert len(classes) > 20
    assert {name: problems for name, value in classes.items() if (problems := troubles_of(value))} == {}
