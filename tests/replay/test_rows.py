"""A rollout of several rows is one trajectory in the pool and several rows in a batch."""

from __future__ import annotations

import pytest

from tests.replay.conftest import row
from trainer_hooks.replay.rows import ROWS, pack_rows, rows_of
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory


def test_what_is_no_row_is_told() -> None:
    with pytest.raises(InvalidTrajectoryError, match="none"):
        pack_rows([])
    with pytest.raises(InvalidTrajectoryError, match="lacks input_ids"):
        pack_rows([row(2, 3), AgentTrajectory()])
    lost = AgentTrajectory(metadata={ROWS: [{"tokens": 1, "prompt": 0}]})
    with pytest.raises(InvalidTrajectoryError, match="lacks input_ids"):
        rows_of(lost)
