"""A data plane for the tests of this folder, in one Ray, and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")  # stops Ray before other tests start theirs
def _plane() -> Iterator[None]:
    from tests.trainer_hooks.verl.plane.sessions import own_plane  # verl need not be installed

    with own_plane():
        yield


@pytest.fixture(autouse=True)
def _empty_plane(_plane: None) -> Iterator[None]:
    from tests.trainer_hooks.verl.plane.sessions import empty_plane

    yield
    empty_plane()


@pytest.fixture
def make_session(tmp_path: Path) -> Iterator[Any]:
    from tests.trainer_hooks.verl.plane.sessions import new_session

    made = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(new_session(tmp_path, *args, **options))
        return made[-1]

    yield make
    for session in made:
        session.close()
