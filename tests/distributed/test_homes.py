"""A node gets the store whose directory it has, whatever Ray calls the node. No Ray cluster is needed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.distributed.test_server import ids_of, parcel_of, server
from trajstore.distributed.starting import one_each, unserved_below
from trajstore.testing.witness import witness


@pytest.mark.parametrize(
    ("found", "taken", "given"),
    [
        ({"a": set(), "b": set()}, [], {"a": 0, "b": 1}),
        ({"a": {1}, "b": {0}}, [], {"a": 1, "b": 0}),  # the machines have other ids than when the stores were made
        ({"a": {0, 1}, "b": {0, 1}}, [], {"a": 0, "b": 1}),  # one disk for all
        ({"a": {0, 1}, "b": {0}}, [], {"a": 1, "b": 0}),
        ({"a": set(), "b": {1}}, [0], {"a": 2, "b": 1}),
        ({"a": set(), "b": {2}}, [], {"a": 0, "b": 2}),
        ({"a": {0}}, [0], {"a": 1}),
    ],
)
def test_a_node_gets_the_store_whose_directory_it_has(
    found: dict[str, set[int]], taken: list[int], given: dict[str, int]
) -> None:
    assert one_each(list(found), found, taken) == given


def test_an_old_disk_beside_its_replacement_is_told(tmp_path: Path) -> None:
    """What another machine began under the number of a lost one does not hide the disk of that one."""
    here = socket.gethostname()
    for rank in range(4):
        one = server(tmp_path, rank)
        assert len(ids_of(one.add(parcel_of([witness(key) for key in range(5)]), 5))) == 5
        store_id = one.describe().store_id
        one.close()
    (tmp_path / "rank_7").mkdir()  # nothing in it
    (tmp_path / "rank_2" / "trajectory_index.json").write_bytes(b"{")
    served = {0: (here, "any"), 1: ("another", "begun-there"), 3: ("another", store_id)}
    (old, damaged) = unserved_below(str(tmp_path), served)
    assert (old[0], old[1], old[3]) == (1, here, "5 trajectories")
    assert damaged[0] == 2
    assert damaged[3].startswith("it cannot be read")
