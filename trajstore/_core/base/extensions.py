"""Modules above the core that it uses, for remote stores, queries and mirrors; ``trajstore`` registers them."""

from __future__ import annotations

import importlib
from types import ModuleType

_modules: dict[str, str] = {}


def register(name: str, module: str) -> None:
    """Register the module that provides what ``name`` says."""
    _modules[name] = module


def extension(name: str) -> ModuleType:
    """Import and return the module registered under a name."""
    return importlib.import_module(_modules[name])
