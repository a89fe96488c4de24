"""What a state says of its sampler and its trajectories, and is compared before it is taken up. Pure.

A trajectory's *name* is the first half of its UUID. Ids are given by each store anew, and anew again where stores are
united; names stay with trajectories wherever they are copied. 0 stands for a name that is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.arguments import INT64_MAX, check_instance, whole
from trajstore.core.columns.limits import shown
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError

IntArray = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

OF_WHOM = "sampler"
"""Key of a state under which :func:`described` stands."""


def described(kind: str, fixed: Mapping[str, Any], free: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state says of its sampler.

    Args:
        kind: of sampler.
        fixed: arguments without which the state means something else.
        free: arguments that a resumed run may change.
    """
    return {"kind": kind, "fixed": dict(fixed), "free": dict(free)}


def check_state(state: Any, needed: Sequence[str]) -> None:
    """Refuse what is no state.

    Raises:
        ConfigurationError: it is no dict, or lacks what such states have; names it.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"state: {shown(state)} is a {type(state).__name__}, must be the dict that state_dict returned"
        )
    lacking = [name for name in needed if name not in state]
    if lacking:
        raise ConfigurationError(
            f"state: lacks {', '.join(lacking)}; it has {', '.join(map(shown, state)) or 'nothing'}, so it is the "
            "state of something else; give what state_dict of this kind of object returned"
        )


def check_sampler_state(state: Any, here: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Refuse the state of another sampler; warn of arguments that have changed.

    Args:
        state: to be taken up.
        here: what :func:`described` says of the sampler that is to take it up.
        needed: what its states have.

    Raises:
        ConfigurationError: it is no state, or that of a sampler of another kind, or with other fixed arguments.
    """
    check_state(state, (OF_WHOM,))
    then = state[OF_WHOM]
    fixed, free = mapping_in(then, "fixed"), mapping_in(then, "free")
    check_state(then, ("kind",))
    if not isinstance(then["kind"], str) or then["kind"] != here["kind"]:
        raise ConfigurationError(f"state: is of a sampler {shown(then['kind'])}, this one is {here['kind']!r}")
    check_state(state, needed)
    changed = _differences(fixed, here["fixed"])
    if changed:
        raise ConfigurationError(
            f"state: is of a sampler {here['kind']!r} with {changed}; what it says would mean something else"
        )
    changed = _differences(free, here["free"])
    if changed:
        logger.warning(
            "sampler %s: goes on with other arguments than its state was taken with: %s", here["kind"], changed
        )


def _differences(then: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {shown(then.get(name))} (here {here.get(name)!r})"
        for name in dict.fromkeys([*then, *here])
        if type(then.get(name)) is not type(here.get(name)) or then.get(name) != here.get(name)
    )


def names_of(uuids: npt.NDArray[np.void]) -> IntArray:
    """Return the names of trajectories, given their UUIDs, ``[n]`` of 16 bytes each."""
    return np.ascontiguousarray(uuids).view("<i8").reshape(-1, 2)[:, 0].astype(np.int64)


def check_names(what: str, ids: IntArray, then: IntArray, here: IntArray) -> None:
    """Refuse a state in which an id stands for another trajectory than here.

    Args:
        what: the state is of.
        ids: that the state names, ``[n]``.
        then: their names when it was taken; 0 where unknown.
        here: their names now; 0 where unknown, or where they are not here.

    Raises:
        ConfigurationError: says of how many, and of one which.
    """
    other = np.flatnonzero((then != here) & (then != 0) & (here != 0))
    if len(other):
        first = int(other[0])
        raise ConfigurationError(
            f"state: {what} is of other trajectories: {len(other)} of {len(ids)} ids that it names are others here "
            f"(id {shown_id(int(ids[first]))}: the UUID began with {name_text(int(then[first]))}, here with "
            f"{name_text(int(here[first]))}). It is of another store, or ids were given anew, as happens where the "
            "stores of a run are united; load what the state was taken of, or begin without it"
        )


def tell_gone(what: str, ids: IntArray, here: int) -> None:
    """Warn of a state of which nothing is left: ``here`` trajectories are, and none of ``ids`` among them."""
    if len(ids):
        logger.warning(
            "state: none of the %d trajectories that %s names is here; what it says of them has no effect%s",
            len(ids),
            what,
            "" if here else " (the sampler was told of no trajectories: call buffer.follow(sampler) before)",
        )


def name_text(name: int) -> str:
    """Return a name as the UUID begins."""
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
    """Return a copy of an array or tensor of a state, ``[count]``.

    Args:
        state: that has it.
        name: of its key.
        kind: of its numbers.
        count: how many there are; None = any number.
        least: of each number.
        most: of each number.

    Raises:
        ConfigurationError: it is absent, of another type, shape or length, or a number is out of range or none.
    """
    check_state(state, (name,))
    value = state[name]
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged, on a device, with a gradient
        found = np.zeros((), np.object_)
    if not isinstance(value, torch.Tensor | np.ndarray) or found.ndim != 1 or found.dtype.kind not in _KINDS[kind]:
        raise ConfigurationError(
            f"state: {name}: {shown(value)} is a {type(value).__name__}, must be a tensor of one dimension, of "
            f"{'whole numbers' if kind is np.int64 else 'numbers'}"
        )
    if count is not None and len(found) != count:
        raise ConfigurationError(f"state: {name}: has {len(found)} numbers, must have {count}")
    bad = np.flatnonzero(~((found >= least) & (found <= most)))
    if len(bad):
        raise ConfigurationError(
            f"state: {name}: number {int(bad[0])} is {found[bad[0]]}, must be at least {least:g} and at most {most:g}"
        )
    return found.astype(kind)


_KINDS: Mapping[Any, str] = {np.int64: "iu", np.float64: "iuf"}


def ids_in(state: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
    """Return the ids of trajectories that a state has, and their names.

    Raises:
        ConfigurationError: they are none, or one comes twice.
    """
    ids = array_in(state, "ids", np.int64)
    if len(np.unique(ids)) < len(ids):
        raise ConfigurationError("state: ids: a trajectory comes twice")
    return ids, array_in(state, "names", np.int64, len(ids))


def whole_in(state: Mapping[str, Any], name: str, least: int = 0, most: int = INT64_MAX) -> int:
    """Return a whole number of a state.

    Raises:
        ConfigurationError: it is absent, none, or out of range.
    """
    check_state(state, (name,))
    return whole(f"state: {name}", state[name], least, most)


def mapping_in(state: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    """Return a dict of a state.

    Raises:
        ConfigurationError: it is absent, or none.
    """
    check_state(state, (name,))
    check_instance(f"state: {name}", state[name], Mapping, "a dict")
    found: Mapping[Any, Any] = state[name]
    return found


def tensor_of(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return a copy as a tensor, which ``torch.load`` reads with ``weights_only=True``."""
    return torch.from_numpy(values.copy())
