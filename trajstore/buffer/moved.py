"""Members of buffers and handles that have moved: which, and how their old names still work for one release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

_POINTS = {name: f"points.{name}" for name in ("pin", "unpin", "rollback", "take_back")}
_POINTS |= {"save_point": "points.save", "saved_points": "points.saved"}
_COMMITTED = {"committed": "points.committed"}
_MIRROR = {"mirror_state": "mirror.state", "wait_mirrored": "mirror.wait"}
_ASKED = ("closed", "extents", "generator", "grows", "names_of", "readable", "share", "store_ids")
_ASKED_OF_BUFFERS = (
    *("add_flattened", "retention", "share_ids", "store_id"),
    *("token_rows", "trajectory_counter", "trajectory_uuids"),
)

OF_BUFFERS: Mapping[str, str] = MappingProxyType(
    {**_POINTS, **_COMMITTED, **_MIRROR, **{name: f"_internals.{name}" for name in (*_ASKED, *_ASKED_OF_BUFFERS)}}
)
"""Where the members of a buffer are by now, by their old names."""

OF_HANDLES: Mapping[str, str] = MappingProxyType(
    {
        **{name: path for name, path in _POINTS.items() if name != "take_back"},
        "mirror_states": "mirror.states",
        "wait_mirrored": "mirror.wait",
        **{name: f"_internals.{name}" for name in _ASKED},
    }
)
"""The same of a handle of stores."""


class Moved:
    """Answers to old names, with a warning that tells the new one; ``dir()`` and type checkers know the new ones only.

    Attributes:
        _MOVED: path from the object, by old name.
    """

    _MOVED: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            path = self._MOVED.get(name)
            if path is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            now = path.replace("_internals", "trajstore.buffer.internals.internals_of(buffer)")
            warnings.warn(
                f"{type(self).__name__}.{name} is {now} now; the old name goes with the next release",
                FutureWarning,
                stacklevel=2,
            )
            return attrgetter(path)(self)
