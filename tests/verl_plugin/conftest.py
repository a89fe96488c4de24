"""One Ray session and one set of assets for all tests of the verl plugin."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from .assets import Assets, make_assets
from .harness import VerlSession, make_config
from .runs import Train, Training
from .witness import WITNESS_FOLDER, WITNESS_MODULE, Witness

NEEDED = ("verl", "ray", "transfer_queue", "hydra", "transformers")


def _find_obstacle() -> str | None:
    """Return why verl's trainer cannot run here, without importing it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: install trajstore[verl]"
    version = Version(importlib.metadata.version("verl"))
    if not Version("0.9.1") <= version < Version("0.10"):
        return f"needs verl>=0.9.1,<0.10, not {version}"
    return None


@pytest.fixture(scope="session")
def verl_assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """Model, data and reward."""
    if obstacle := _find_obstacle():
        pytest.skip(obstacle)
    return make_assets(tmp_path_factory.mktemp("verl_assets"))


@pytest.fixture(scope="session")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    """Records the loss's inputs in all processes of a run."""
    folder = tmp_path_factory.mktemp("witness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WITNESS_FOLDER, str(folder))  # Ray's workers inherit it, so it is set before Ray starts
        yield Witness(folder)


@pytest.fixture(scope="session")
def verl_session(witness: Witness) -> Iterator[VerlSession]:
    """Ray with our CPU platform."""
    if obstacle := _find_obstacle():
        pytest.skip(obstacle)
    session = VerlSession.start(modules=(WITNESS_MODULE,))
    yield session
    session.close()


@pytest.fixture(scope="session")
def train(verl_session: VerlSession, verl_assets: Assets, witness: Witness) -> Train:
    """Return a function that trains."""

    def run(folder: Path, *overrides: str) -> Training:
        witness.take()
        metrics = verl_session.run(make_config(verl_assets, folder, overrides)).metrics
        steps = [record for record in metrics if "training/global_step" in record]
        return Training(steps, [record for record in metrics if record not in steps], witness.take(), folder)

    return run
