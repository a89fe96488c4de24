"""Common columns of trajectories with different columns. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.fields import columns_of
from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.store.log_records import ids_in_words
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import SchemaMismatchError, listed


def agree(
    kinds: Sequence[Sequence[ColumnSpec]],
    names: Sequence[str] | None,
    who: Callable[[Sequence[int]], str],
    where: str = " of this window",
    remedy: str = "name the columns to sample, or narrow the window",
) -> list[list[int]]:
    """Return, for each kind of trajectory, the positions of the wanted columns in its own list, in one order.

    Args:
        kinds: columns of each kind.
        names: of the columns to take, as :func:`~trajstore._core.columns.fields.columns_of` reads them; None takes
            all, which must then be the same.
        who: returns the names of the trajectories of some kinds, for messages.
        where: description of the trajectories, for messages.
        remedy: suggested action, for messages.

    Raises:
        SchemaMismatchError: a column is absent or has another shape in some trajectories; names them.
    """
    places = [{spec.name: place for place, spec in enumerate(kind)} for kind in kinds]
    known = dict.fromkeys(name for kind in places for name in kind)
    taken = list(known if names is None else dict.fromkeys(column for n in names for column in columns_of(n, known)))
    nowhere = [name for name in taken if not any(name in kind for kind in places)]
    if nowhere and kinds:
        raise SchemaMismatchError(
            f"columns: no trajectory has {listed(nowhere)}; there are {listed(sorted(known), 30)} "
            "(texts, and values without a row for each step, come with get() alone)"
        )
    wrong: list[str] = []
    for name in taken:
        lacking = [at for at, kind in enumerate(places) if name not in kind]
        shapes = {
            specs[kind[name]].row_shape: at
            for at, (kind, specs) in reversed(list(enumerate(zip(places, kinds, strict=True))))
            if name in kind
        }
        if lacking:
            wrong.append(f"{name} (absent from {who(lacking)})")
        elif len(shapes) > 1:
            wrong.append(
                f"{name} ({', '.join(f'{list(shape)} in {who([at])}' for shape, at in sorted(shapes.items()))})"
            )
    if wrong:
        raise SchemaMismatchError(f"trajectories{where} differ in {'; '.join(wrong)}; {remedy}")
    return [[kind[name] for name in taken] for kind in places]


def in_words(ids: npt.NDArray[np.int64]) -> str:
    """Return trajectories by id, for a message."""
    several = len(np.unique(ids)) > 1
    return f"trajectories {ids_in_words(ids)}" if several else f"trajectory {shown_id(int(ids[0]))}"
