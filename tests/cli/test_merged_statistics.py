"""Reports on several parts together are those on all values at once, whatever the values are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trajstore.inspection.statistics import merge_rewards


def report(values: np.ndarray) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "mean": float(values.mean()),
        "max": float(values.max()),
        "std": float(values.std()),
        "count": len(values),
    }


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_several_parts_make_the_whole(scale: float) -> None:
    chance = np.random.default_rng(0)
    parts = [scale * (chance.normal(size=size) + size) for size in (3, 1, 40)]
    merged = merge_rewards([report(part) for part in parts])
    assert merged is not None
    scaled = report(np.concatenate(parts) / scale)  # numpy's own squares have no room either
    for name in ("min", "mean", "max", "std"):
        assert merged[name] / scale == pytest.approx(scaled[name], rel=1e-12)


def test_rewards_without_bounds_are_told_as_such() -> None:
    merged = merge_rewards([{"min": -1e308, "mean": -1e308, "max": 1.0, "std": 1e308, "count": 2}] * 2)
    assert merged is not None
    assert merged["mean"] == -1e308
    assert math.isfinite(merged["std"])
