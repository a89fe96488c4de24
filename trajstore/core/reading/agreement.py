"""Which columns a batch has whose trajectories do not all have the same ones. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trajstore.core.columns.schema import ColumnSpec
from trajstore.errors import SchemaMismatchError, listed


@dataclass(frozen=True, slots=True)
class Agreement:
    """The columns of a batch, and where each kind of trajectory has them.

    Attributes:
        wanted: numbers of the columns as the batch has them.
        found: for each kind of trajectory, the numbers of its own columns in the same order.
    """

    wanted: list[int]
    found: list[list[int]]


def agree(
    kinds: Sequence[Sequence[int]],
    oldest: Sequence[int],
    names: Sequence[str] | None,
    specs: Sequence[ColumnSpec],
    who: Callable[[Sequence[int]], str],
) -> Agreement:
    """Return the columns that a batch takes of trajectories of several kinds.

    Columns of one name and shape agree; their dtype in the batch is that of the oldest trajectory, as in RLinf.

    Args:
        kinds: per kind, the numbers of the columns that can be sampled.
        oldest: those of the window's oldest trajectory; empty if they are not known.
        names: the columns to take; None takes all, which must then be the same.
        specs: columns by number.
        who: names the trajectories of some kinds, for messages.

    Raises:
        SchemaMismatchError: a column is absent somewhere, or has another shape; names the trajectories.
    """
    named = [{specs[number].name: number for number in kind} for kind in kinds]
    first = {specs[number].name: number for number in oldest}
    taken = list(dict.fromkeys(name for kind in named for name in kind)) if names is None else list(names)
    nowhere = [name for name in taken if not any(name in kind for kind in named)]
    if nowhere and named:
        there = sorted({name for kind in named for name in kind})
        raise SchemaMismatchError(f"columns: no trajectory has {listed(nowhere)}; there are {listed(there, 30)}")
    wrong: list[str] = []
    for name in taken:
        lacking = [at for at, kind in enumerate(named) if name not in kind]
        shapes = {specs[kind[name]].row_shape: at for at, kind in reversed(list(enumerate(named))) if name in kind}
        if lacking:
            wrong.append(f"{name} (absent from {who(lacking)})")
        elif len(shapes) > 1:
            wrong.append(
                f"{name} ({', '.join(f'{list(shape)} in {who([at])}' for shape, at in sorted(shapes.items()))})"
            )
    if wrong:
        raise SchemaMismatchError(
            f"trajectories of this window differ in {'; '.join(wrong)}; name the columns to sample, or narrow "
            "the window"
        )
    wanted = []
    for name in taken:
        number = named[0][name]
        like = first.get(name, number)
        wanted.append(like if specs[like].row_shape == specs[number].row_shape else number)
    return Agreement(wanted, [[kind[name] for name in taken] for kind in named])
