"""Whether two ledgers have trained the same, whatever the order of rows in a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.ledger import LedgerContents, TrainedStep

_EXACT = ("token_digest", "mask_digest", "row", "tokens", "version", "replayed")
_FLOATS = ("advantage", "log_prob", "ratio", "weight", "probability")


def first_unlike(one: LedgerContents, other: LedgerContents, tolerance: float = 1e-5) -> int | None:
    """Return the first step that differs, or that only one ledger has; None if there is none.

    Ids are not compared: each store numbers its own trajectories. Floats are equal within the tolerance.
    """
    for number in sorted(one.steps.keys() | other.steps.keys()):
        steps = one.steps.get(number), other.steps.get(number)
        if steps[0] is None or steps[1] is None or not _alike(steps[0], steps[1], tolerance):
            return number
    return None


def _alike(one: TrainedStep, other: TrainedStep, tolerance: float) -> bool:
    (header, exact, floats), (its_header, its_exact, its_floats) = _parts_of(one), _parts_of(other)
    if header != its_header or exact != its_exact:
        return False
    return bool(np.allclose(floats, its_floats, tolerance, tolerance, equal_nan=True))


def _parts_of(step: TrainedStep) -> tuple[object, list[tuple[object, ...]], np.ndarray[Any, Any]]:
    """Return a step's header, and its rows by task, tokens and mask (in order without digests): exact, and floats."""
    tasks = [step.tasks[group] if step.tasks else "" for group in step.rows["group"]]
    exact = [*zip(tasks, *(step.rows[name].tolist() for name in _EXACT), strict=True)]
    order = [*range(len(exact))]
    if "token_digest" not in step.unknown:
        order.sort(key=lambda row: (*exact[row], round(float(step.rows["advantage"][row]), 2)))
    floats = [*(step.rows[name][order] for name in _FLOATS), [*step.loss.values()]]
    header = (step.policy_before, step.policy_after, step.data, step.seeds, step.options, step.unknown, [*step.loss])
    return header, [exact[row] for row in order], np.concatenate(floats)
