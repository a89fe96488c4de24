"""A handle is used like a buffer: every method of a buffer is one of a handle, or is left out for a reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore.distributed.handle import DistributedReplayBuffer

LEFT_OUT = {
    "add_flattened": "what a store is told by a handle",
    "share_ids": "each store has its share of the ids from the start",
    "committed": "each store has its own watermark; a receipt says what is committed",
    "wait": "receipts wait for what they are of",
    "mirror_state": "mirror_states has that of each store",
    "open": "connect finds the stores; a run directory is opened by TrajectoryReplayBuffer.open",
    "load_checkpoint": "stores go on with their directories; a handle shows these alone",
    "take_back": "what a rollback sets aside has a name of its own in each store",
    "retention": "an option of each store, told by served()",
    "store_id": "each store has its own",
    "trajectory_counter": "stores give out ids, each its own",
    "trajectory_uuids": "a handle is told ids and lengths alone",
    "token_rows": "copies from memory that one process has mapped; open the run's directory for a TokenLoader",
    "numbering": "what a handle asks a reader for, to read by",
    "read_numbered": "the same",
    "clear_cache": "a handle has no cache",
}
"""Public names of a buffer that a handle lacks, and why; docs/design/many-machines.md has the same list."""

OTHERWISE = {
    "add_trajectories": "returns a receipt",
    "wait_mirrored": "asks other machines, so it has a timeout",
    "refresh": "returns nothing: stores are asked anyway",
    "save_checkpoint": "in the layout of trajstore",
    "pin": "returns the generation of each store",
    "close": "the stores go on",
}
"""Names that both have, with another signature or result."""


def public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_public_name_of_a_buffer_is_decided() -> None:
    lacking = public(TrajectoryReplayBuffer) - public(DistributedReplayBuffer)
    assert lacking == LEFT_OUT.keys()


@pytest.mark.parametrize(
    "name", sorted((public(TrajectoryReplayBuffer) & public(DistributedReplayBuffer)) - OTHERWISE.keys())
)
def test_both_are_called_the_same_way(name: str) -> None:
    mine, theirs = (inspect.getattr_static(kind, name) for kind in (DistributedReplayBuffer, TrajectoryReplayBuffer))
    assert isinstance(mine, property) == isinstance(theirs, property)
    if not isinstance(mine, property):
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters)


def test_the_page_lists_what_is_left_out(project_root: Any) -> None:
    page = (project_root / "docs" / "design" / "many-machines.md").read_text()
    for name, reason in LEFT_OUT.items():
        assert f"| `{name}` | {reason} |" in page
