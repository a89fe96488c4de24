"""The extension point for experience pools, whose state only packages above the store understand.

A package registers one object under the entry point group ``trajstore.pools``; see :class:`PoolSupport`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from trajstore._core.store.catalog import Catalog


class PoolSupport(Protocol):
    """How operations read pools."""

    def report(self, catalog: Catalog) -> tuple[dict[str, Any], npt.NDArray[np.bool_]] | None:
        """Return figures of a pool's store and a mask of its histories; None if it is not one."""


@cache
def pool_support() -> PoolSupport | None:
    """Return the registered object; None if no installed package registers one."""
    for point in entry_points(group="trajstore.pools"):
        return cast(PoolSupport, point.load())
    return None
