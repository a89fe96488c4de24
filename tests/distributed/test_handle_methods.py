"""A handle has every method of a buffer, except those left out for a stated reason."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore._core.buffer.mirroring import MirrorOfBuffer
from trajstore._core.store.late_values import LateValues
from trajstore.distributed import handle
from trajstore.distributed.handle import DistributedReplayBuffer, MirrorsOfHandle

LEFT_OUT = {
    "wait": "receipts wait for their trajectories",
    "mirror.state": "mirror.states has that of each store",
    "open": "connect finds the stores; a run directory is opened by TrajectoryReplayBuffer.open",
    "load_checkpoint": "stores continue with their directories; a handle shows only these",
    "clear_cache": "a handle has no cache",
    "store_id": "each store has its own",
    "save_checkpoint": "a reader of a pin saves it, on the node of each store",
}
"""A buffer's public names that handles lack, with reasons; docs/design/many-machines.md has the same list."""

OTHERWISE = {
    "add_trajectories": "returns a receipt",
    "session": "its add_call returns the id of the call",
    "mirror.wait": "asks other machines, so it has a timeout",
    "refresh": "returns nothing: stores are asked anyway",
    "close": "the stores go on",
}
"""Names of both with differing signature or result."""


BUFFER: dict[str, type[Any]] = {"": TrajectoryReplayBuffer, "mirror.": MirrorOfBuffer}
HANDLE: dict[str, type[Any]] = {"": DistributedReplayBuffer, "mirror.": MirrorsOfHandle}


def public(parts: dict[str, type[Any]]) -> dict[str, Any]:
    """Return the public names of an object and its parts, by path."""
    return {
        part + name: inspect.getattr_static(kind, name)
        for part, kind in parts.items()
        for name in dir(kind)
        if not name.startswith("_")
    }


def test_every_public_name_of_a_buffer_is_decided() -> None:
    assert public(BUFFER).keys() - public(HANDLE).keys() == LEFT_OUT.keys()


@pytest.mark.parametrize("name", sorted((public(BUFFER).keys() & public(HANDLE).keys()) - OTHERWISE.keys()))
def test_both_are_called_the_same_way(name: str) -> None:
    mine, theirs = public(HANDLE)[name], public(BUFFER)[name]
    assert isinstance(mine, property) == isinstance(theirs, property)
    if not isinstance(mine, property):
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters)


def test_the_page_lists_what_is_left_out(project_root: Any) -> None:
    page = (project_root / "docs" / "design" / "many-machines.md").read_text()
    for name, reason in LEFT_OUT.items():
        assert f"| `{name}` | {reason} |" in page


class Slow:
    """A handle of one store, which takes 50 of the 60 seconds to agree to values; its clock."""

    deadline = 60.0
    stores = (0,)

    def __init__(self) -> None:
        self._stores, self._all_ranks, self.refresh = self, lambda: [0], lambda: None
        self.waits: dict[str, float] = {}
        self.now = 0.0

    def call_all(self, arguments: Any, method: str, seconds: float) -> None:
        self.waits[method] = seconds
        self.now += 50.0

    def _with_copies(self, ids: tuple[int, ...]) -> tuple[list[int], list[int]]:
        return [*ids], [*range(len(ids))]

    def _ask_present(self, arguments: Any, method: str) -> None:
        assert not arguments

    def monotonic(self) -> float:
        return self.now


def test_setting_values_waits_no_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(handle, "time", slow)
    values = handle.ValuesOfHandle(slow)  # type: ignore[arg-type]
    values.annotate(LateValues(np.array([1024]), {"score": [1.0]}, "", 0), {})
    assert slow.waits == {"check_values": 60.0, "annotate": 10.0}
