"""A node gets the store of its local directory, whatever its Ray node id. Needs no Ray cluster."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.distributed.test_server import ids_of, request_of, server
from tests.stores import damage_indexes
from tests.support.witness import witness
from trajstore.distributed.starting import unserved_below


def test_an_old_disk_beside_its_replacement_is_told(tmp_path: Path) -> None:
    """A new store under a lost node's rank does not hide the lost node's disk."""
    here, ids = socket.gethostname(), []
    for rank in range(5):
        store = server(tmp_path, rank)
        assert len(ids_of(store.add(request_of([witness(key) for key in range(5)]), 5))) == 5
        ids.append(store.describe().store_id)
        store.close()
    (tmp_path / "rank_7").mkdir()  # empty
    damage_indexes(tmp_path / "rank_2")
    served = {0: (here, ids[0]), 1: ("another", "begun-there"), 3: ("another", ids[3]), 4: (here, "of a namesake")}
    (old, damaged, other) = unserved_below(str(tmp_path), served)
    assert (old[0], old[1], old[3]) == (1, here, "5 trajectories")
    assert (other[0], other[2], other[3]) == (4, ids[4], "5 trajectories"), "two machines have the same name"
    assert damaged[0] == 2
    assert damaged[3].startswith("it cannot be read")
