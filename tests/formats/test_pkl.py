"""Pickled shards: the suite for every format, and that no code is run."""

from __future__ import annotations

import pytest

from trajstore.formats.base import TrajectoryFormat
from trajstore.formats.pkl import PklFormat
from trajstore.formats.pt import PtFormat
from trajstore.testing.formats import FormatConformance


class TestPklConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PklFormat()


class TestPtConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PtFormat()
