"""``docs/api.md`` has every public name, and no entry of it is empty."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from types import ModuleType
from typing import Any

import pytest

from tools.api_page import PAGE, find, written
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance_config import GuidanceConfig
from trajstore.experience import PoolRules

ENTRIES = re.findall(r"^::: ([\w.]+)$", PAGE.read_text(), re.MULTILINE)
PACKAGES = tuple(
    f"trajstore{name}" for name in ("", ".distributed", ".experience", ".feeding", ".guidance", ".rlinf", ".sampling")
)


def said(value: Any) -> bool:
    """Return whether something has a docstring that a person wrote."""
    text = inspect.getdoc(value) or ""
    made = dataclasses.is_dataclass(value) and isinstance(value, type) and text.startswith(f"{value.__name__}(")
    return bool(text) and not made


def members(value: Any) -> dict[str, Any]:
    """Return what the reference shows below an entry."""
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
        and not any(getattr(module, name) is one or getattr(module, name) in members(one).values() for one in shown)
    ]
    assert absent == []


def test_the_tables_say_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run  python -m tools.api_page"


@pytest.mark.parametrize("config", [ExperienceReplayConfig, GuidanceConfig, PoolRules])
def test_every_option_says_what_it_is(config: type) -> None:
    (body,) = (item.body for item in ast.parse(inspect.getsource(config)).body if isinstance(item, ast.ClassDef))
    silent = [
        item.target.id
        for item, following in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not isinstance(following, ast.Expr)
    ]
    assert silent == [], "the built reference shows an option by the text below it"
