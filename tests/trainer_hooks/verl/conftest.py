"""Fixtures of the verl plugin's tests: verl's configuration, its data plane in one Ray, and sessions on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests import rays

try:
    import transfer_queue  # noqa: F401
    import verl  # noqa: F401
except ImportError as error:
    warnings.warn(f"tests of the verl plugin are left out: {error}", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]

Compose = Callable[[Sequence[str]], Any]
"""Takes overrides, returns a configuration."""


@pytest.fixture(scope="session")
def compose_verl() -> Compose:
    """Return a function that composes verl's configuration with overrides, like its command line."""
    from hydra import compose, initialize_config_module

    def composed(overrides: Sequence[str]) -> Any:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))

    return composed


@pytest.fixture(scope="session")
def override_verl(compose_verl: Compose) -> Compose:
    """Like ``compose_verl``, ten times faster: composes once and applies overrides to copies."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    base, parser = compose_verl(()), OverridesParser.create()

    def overridden(overrides: Sequence[str]) -> Any:
        config = deepcopy(base)
        for override in parser.parse_overrides(list(overrides)):
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
        return config

    return overridden


@pytest.fixture
def data_plane() -> Iterator[None]:
    """Keep the data plane of verl that all tests of this process share; empty it after the test."""
    from tests.trainer_hooks.verl.plane import empty_plane, own_plane  # verl need not be installed

    rays.running(own_plane)
    yield
    empty_plane()


@pytest.fixture
def make_session(data_plane: None, tmp_path: Path) -> Iterator[Any]:
    from tests.trainer_hooks.verl.plane import new_session

    made = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(new_session(tmp_path, *args, **options))
        return made[-1]

    yield make
    for session in made:
        session.close()
