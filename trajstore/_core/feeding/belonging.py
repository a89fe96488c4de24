"""Identity of a loader's state: its trajectories and batches. Compared before a state is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from trajstore._core.base.types import IntArray
from trajstore._core.feeding.options import Replay
from trajstore._core.sampling.base import Drawn
from trajstore._core.sampling.states import array_in, check_names, check_state, tensor_of
from trajstore.errors import ConfigurationError, listed, trajectories

logger = logging.getLogger(__name__)

_WITNESSES = 1024
"""Number of sampled trajectories per buffer in a state, besides those of batches and samplers."""


def belonging_of(buffer: Replay | None) -> dict[str, Any] | None:
    """Return the identity of a buffer's trajectories: names of an evenly spread sample."""
    if buffer is None:
        return None
    ids = buffer.trajectory_ids
    some = ids[np.linspace(0, len(ids) - 1, min(len(ids), _WITNESSES)).astype(np.int64)] if len(ids) else ids
    return {
        "stores": buffer._store_ids,
        "trajectories": len(ids),
        "ids": tensor_of(some),
        "names": tensor_of(buffer._sampling.names_of(some)),
    }


def check_belonging(what: str, buffer: Replay, then: Any) -> list[str]:
    """Reject the state of other trajectories; return a sentence for each difference.

    Args:
        what: role of the buffer in the loader.
        buffer: buffer to continue with.
        then: result of :func:`belonging_of` in the state.

    Raises:
        ConfigurationError: an id refers to another trajectory here, or neither the sample nor the store is here.
    """
    check_state(then, ("stores", "trajectories", "ids", "names"))
    ids, here = np.asarray(then["ids"], np.int64), len(buffer)
    names = array_in(then, "names", np.int64, len(ids))
    check_names(what, ids, names, buffer._sampling.names_of(ids))
    left = int(np.count_nonzero(np.isin(ids, buffer.trajectory_ids)))
    shown_now = buffer._store_ids
    if names.any() and here and not left and not set(then["stores"]) & set(shown_now):
        raise ConfigurationError(
            f"state: {what} belongs to other trajectories: none of the {len(ids)} in it is here, and it was saved for "
            f"store {listed(then['stores'])}, here is {listed(shown_now) or 'a buffer in memory'}; load "
            "that store, or start without the state"
        )
    gone = len(ids) - left
    if gone or here != int(then["trajectories"]):
        return [
            f"the {what} shows {trajectories(here)}, {then['trajectories']} when it was taken, and {gone} of the"
            f" {len(ids)} that it names are gone: batches continue, but differ from those of an uninterrupted run"
            " (a saved point has the store as it was)"
        ]
    return []


def check_batches(then: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Reject the state of a loader with other batches.

    Raises:
        ConfigurationError: they differ; names the differences.
    """
    differing = [
        f"{name} {value!r} (here {here.get(name)!r})" for name, value in then.items() if here.get(name) != value
    ]
    if differing:
        raise ConfigurationError(
            f"state: was saved by a loader with {', '.join(differing)}; load_state_dict(state, changed=True) loads it "
            "anyway: batches under way keep their draws, later ones follow this loader's options"
        )


def warn_of(sentences: Sequence[str]) -> None:
    """Warn of the differences since a state was saved."""
    for sentence in sentences:
        logger.warning("state of a loader: %s", sentence)


def rows_state(drawn: Drawn | None, buffer: Replay | None) -> dict[str, Any] | None:
    """Return drawn rows as tensors, with their trajectories' names; None if there are none."""
    if drawn is None or buffer is None:
        return None
    named = {name: tensor_of(values) for name, values in drawn.arrays.items()}
    return {"names": tensor_of(buffer._sampling.names_of(drawn.ids))} | named


def rows_of(state: Mapping[str, Any]) -> Drawn:
    """Return the rows of a :func:`rows_state`."""
    known = {field.name for field in fields(Drawn)}
    return Drawn(**{name: values.numpy() for name, values in state.items() if name in known})


def check_rows(state: Any, buffer: Replay, what: str = "a batch under way") -> None:
    """Reject rows of other trajectories.

    Args:
        state: result of :func:`rows_state`.
        buffer: buffer to continue with.
        what: role of the rows.

    Raises:
        ConfigurationError: an id refers to another trajectory here.
    """
    check_state(state, ("ids", "samples", "names"))
    ids: IntArray = np.asarray(state["ids"], np.int64)
    names = array_in(state, "names", np.int64, len(ids))
    check_names(what, ids, names, buffer._sampling.names_of(ids))
