"""Checks of a sampler's state against sampler and trajectories, before it is loaded. Pure.

A trajectory's *name* is the first half of its UUID. Ids are assigned by each store, and again when stores are merged;
names stay with trajectories across copies. 0 means an unknown name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import INT64_MAX, check_instance, whole
from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import shown
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, listed, trajectories

logger = logging.getLogger(__name__)

OF_WHOM = "sampler"
"""Key of :func:`described` in a state."""


def described(kind: str, fixed: Mapping[str, Any], free: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state's description of its sampler.

    Args:
        kind: kind of the sampler.
        fixed: arguments that must match for the state to apply.
        free: arguments that a resumed run may change.
    """
    return {"kind": kind, "fixed": dict(fixed), "free": dict(free)}


def check_state(state: Any, needed: Sequence[str], *, only: bool = False) -> None:
    """Raise if a value is not a state.

    Args:
        state: the value.
        needed: required keys.
        only: refuse other keys.

    Raises:
        ConfigurationError: it is not a dict, or lacks required keys; names it.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"state: {shown(state)} is a {type(state).__name__}, must be the dict that state_dict returned"
        )
    lacking = [name for name in needed if name not in state]
    if lacking:
        raise ConfigurationError(
            f"state: lacks {', '.join(lacking)}; it has {', '.join(map(shown, state)) or 'nothing'}, so it is "
            "another object's; pass a state from state_dict() of this kind of object"
        )
    if only and (others := [name for name in state if name not in needed]):
        raise ConfigurationError(f"state: unknown keys {listed(map(shown, others))}; pass what state_dict() returned")


def check_sampler_state(state: Any, here: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Reject the state of another sampler; warn of changed arguments.

    Args:
        state: state to load.
        here: result of :func:`described` for the sampler that loads it.
        needed: required keys of its states.

    Raises:
        ConfigurationError: it is not a state, or is of another kind of sampler or other fixed arguments.
    """
    check_state(state, (OF_WHOM,))
    then = state[OF_WHOM]
    fixed, free = mapping_in(then, "fixed"), mapping_in(then, "free")
    check_state(then, ("kind",))
    if not isinstance(then["kind"], str) or then["kind"] != here["kind"]:
        raise ConfigurationError(f"state: was saved by a sampler {shown(then['kind'])}, this one is {here['kind']!r}")
    check_state(state, needed)
    changed = _differences(fixed, here["fixed"])
    if changed:
        raise ConfigurationError(
            f"state: was saved by a sampler {here['kind']!r} with {changed}, so it does not apply here; construct "
            "the sampler with the same arguments"
        )
    changed = _differences(free, here["free"])
    if changed:
        logger.warning("sampler %s: its arguments differ from those of the loaded state: %s", here["kind"], changed)


def _differences(then: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {shown(then.get(name))} (here {here.get(name)!r})"
        for name in dict.fromkeys([*then, *here])
        if type(then.get(name)) is not type(here.get(name)) or then.get(name) != here.get(name)
    )


def names_of(uuids: npt.NDArray[np.void]) -> IntArray:
    """Return the names of trajectories from their UUIDs, ``[n]`` of 16 bytes each."""
    return np.ascontiguousarray(uuids).view("<i8").reshape(-1, 2)[:, 0].astype(np.int64)


def check_names(what: str, ids: IntArray, then: IntArray, here: IntArray) -> None:
    """Reject a state whose ids refer to other trajectories here.

    Args:
        what: description of the state.
        ids: ids in the state, ``[n]``.
        then: their names in the state; 0 if unknown.
        here: their current names; 0 if unknown or absent.

    Raises:
        ConfigurationError: ids refer to other trajectories; gives their number and an example.
    """
    other = np.flatnonzero((then != here) & (then != 0) & (here != 0))
    if len(other):
        first = int(other[0])
        raise ConfigurationError(
            f"state: {what} belongs to other trajectories: {len(other)} of {len(ids)} ids are others here "
            f"(id {shown_id(int(ids[first]))}: the UUID began with {name_text(int(then[first]))}, here with "
            f"{name_text(int(here[first]))}). It is of another store, or ids were reassigned, as when the stores "
            "of a run are merged; load the store of the state, or start without it"
        )


def tell_gone(what: str, ids: IntArray, here: int) -> None:
    """Warn if none of the state's ``ids`` are among the ``here`` present trajectories."""
    if len(ids):
        logger.warning(
            "state: %s has entries of %s, none of which is here; they have no effect%s",
            what,
            trajectories(len(ids)),
            "" if here else _FOLLOW,
        )


_FOLLOW = " (the sampler has no trajectories: call sampler.follow(buffer) first, with the where= and ids= of its draws)"


def name_text(name: int) -> str:
    """Return a name formatted as the beginning of its UUID."""
    text = int(name & ((1 << 64) - 1)).to_bytes(8, "little").hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:]}"


def array_in(
    state: Mapping[str, Any],
    name: str,
    kind: type[np.int64] | type[np.float64],
    count: int | None = None,
    *,
    least: float = -INT64_MAX - 1,
    most: float = INT64_MAX,
) -> npt.NDArray[Any]:
    """Validate and copy an array or tensor of a state, ``[count]``.

    Args:
        state: state with the array.
        name: key of the array.
        kind: kind of the numbers.
        count: required length; None = any.
        least: minimum of each number.
        most: maximum of each number.

    Raises:
        ConfigurationError: it is absent, of another type, shape or length, or a number is out of range or NaN.
    """
    check_state(state, (name,))
    value = state[name]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged, on a device, with a gradient
        array = np.zeros((), np.object_)
    if not isinstance(value, torch.Tensor | np.ndarray) or array.ndim != 1 or array.dtype.kind not in _KINDS[kind]:
        raise ConfigurationError(
            f"state: {name}: {shown(value)} is a {type(value).__name__}, must be a tensor of one dimension, of "
            f"{'whole numbers' if kind is np.int64 else 'numbers'}"
        )
    if count is not None and len(array) != count:
        raise ConfigurationError(f"state: {name}: has {len(array)} numbers, must have {count}")
    bad = np.flatnonzero(~((array >= least) & (array <= most)))
    if len(bad):
        raise ConfigurationError(
            f"state: {name}: number {int(bad[0])} is {array[bad[0]]}, must be at least {least:g} and at most {most:g}"
        )
    return array.astype(kind)


_KINDS: Mapping[Any, str] = {np.int64: "iu", np.float64: "iuf"}


def ids_in(state: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
    """Return a state's trajectory ids and names.

    Raises:
        ConfigurationError: they are invalid, or an id is duplicated.
    """
    ids = array_in(state, "ids", np.int64)
    if len(np.unique(ids)) < len(ids):
        raise ConfigurationError("state: ids: a trajectory is listed twice")
    return ids, array_in(state, "names", np.int64, len(ids))


def whole_in(state: Mapping[str, Any], name: str, least: int = 0, most: int = INT64_MAX) -> int:
    """Return an integer of a state.

    Raises:
        ConfigurationError: it is absent, not an integer, or out of range.
    """
    check_state(state, (name,))
    return whole(f"state: {name}", state[name], least, most)


def mapping_in(state: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    """Return a dict of a state.

    Raises:
        ConfigurationError: it is absent, or not a dict.
    """
    check_state(state, (name,))
    check_instance(f"state: {name}", state[name], Mapping, "a dict")
    mapping: Mapping[Any, Any] = state[name]
    return mapping


def tensor_of(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return a copy as a tensor, readable by ``torch.load`` with ``weights_only=True``."""
    return torch.from_numpy(values.copy())
