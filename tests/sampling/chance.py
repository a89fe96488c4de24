"""Goodness of fit of counts to probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def fits(counts: Sequence[int], chances: Sequence[float]) -> bool:
    """Return whether Pearson's chi-square test accepts the counts (p > 1e-4); probability 0 allows none."""
    seen, expected = np.array(counts, np.float64), np.array(chances, np.float64)
    if np.any(seen[expected == 0]):
        return False
    seen, expected = seen[expected > 0], expected[expected > 0] / expected.sum() * seen.sum()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)) > 1e-4)
